"""Refusals: errors as OpenAI's clients know them."""

from __future__ import annotations

import re
from http import HTTPStatus

from fastapi.responses import JSONResponse

from capflow.errors import UsageError
from capflow_engine.compat.protocol import ErrorInfo, ErrorResponse
from capflow_engine.steering.store import UnknownModuleError

_PATH = re.compile(r"[\w.-]+")
_TYPES = {HTTPStatus.BAD_REQUEST: "BadRequestError", HTTPStatus.NOT_FOUND: "NotFoundError"}


def refused(error: UsageError | str, code: HTTPStatus | None = None) -> JSONResponse:
    """Return an error as a response.

    code: by default 404 for a module that nobody registered, else 400.
    """
    if code is None:
        code = HTTPStatus.NOT_FOUND if isinstance(error, UnknownModuleError) else HTTPStatus.BAD_REQUEST
    kind = _TYPES.get(code, code.phrase.replace(" ", ""))
    param = None if code >= HTTPStatus.INTERNAL_SERVER_ERROR else path_of(error)
    message = str(error).encode(errors="backslashreplace").decode()  # it may show a half of a surrogate pair
    info = ErrorInfo(message=message, type=kind, param=param, code=code.value)
    return JSONResponse(ErrorResponse(error=info).model_dump(), code.value)


def path_of(error: UsageError | str) -> str | None:
    """Return the path of the field that an error is about: its message begins with it."""
    path = _PATH.match(str(error))
    return path[0].rstrip(".") if path is not None else None
