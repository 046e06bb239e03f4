"""Refusals of calls: a status, a message, and the field in the trailing metadata `field`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import grpc
from fastapi import HTTPException
from pydantic import ValidationError

from capflow.errors import UsageError, explain
from capflow_engine.serve.refusals import path_of
from capflow_engine.steering.store import UnknownModuleError

_CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNPROCESSABLE_ENTITY: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.NOT_IMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
_MESSAGE_LENGTH_MAX = 2000
"""Clients accept 8 KiB of metadata. A message travels there, and may grow by escapes."""


class RefusedError(Exception):
    """An error that a route would answer.

    code: HTTP's status.
    field: the path of the wrong field.
    """

    def __init__(self, code: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


@contextlib.asynccontextmanager
async def refusing(context: Any) -> AsyncIterator[None]:
    """End a call with the status of the error that the block raises."""
    try:
        yield
    except UnknownModuleError as e:
        wrong = RefusedError(HTTPStatus.NOT_FOUND, str(e), path_of(e))
    except UsageError as e:
        wrong = RefusedError(HTTPStatus.BAD_REQUEST, str(e), path_of(e))
    except ValidationError as e:
        first = e.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        wrong = RefusedError(HTTPStatus.BAD_REQUEST, explain(path or "request", got=first["msg"]), path)
    except HTTPException as e:
        wrong = RefusedError(e.status_code, str(e.detail))
    except RefusedError as e:
        wrong = e
    else:
        return
    code = _CODES.get(HTTPStatus(wrong.code), grpc.StatusCode.INTERNAL)
    field = (("field", wrong.field),) if wrong.field and wrong.field.isascii() else ()
    await context.abort(code, str(wrong)[:_MESSAGE_LENGTH_MAX], field)
