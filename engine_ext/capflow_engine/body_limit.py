"""The limit on the bodies of requests that may bring vectors: a larger one is 413 before it has been read.

A body whose length is announced is refused by that; any other as soon as more than the limit has come.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capflow.errors import explain
from capflow_engine.refusals import refused

GUARDED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/steering")
"""The routes that read such a body themselves; what else is read of others, `StrayFields` reads, and bounds."""


class BodyLimit:
    """ASGI middleware; `app.state.capflow` says how many bytes a body may have."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its body counted."""
        front = getattr(scope["app"].state, "capflow", None) if scope["type"] == "http" else None
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if front is None or not path.startswith(GUARDED):
            await self.app(scope, receive, send)
            return
        bytes_max: int = front.body_bytes_max
        announced = announced_bytes(scope)
        if announced > bytes_max:
            await refused_as_too_large(f"{announced:,} bytes", bytes_max)(scope, receive, send)
            return
        came = 0

        async def counted() -> Message:
            nonlocal came
            message: dict[str, Any] = dict(await receive())
            came += len(message.get("body", b""))
            if came > bytes_max:
                wrong = too_large(f"more than {bytes_max:,} bytes", bytes_max)
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, wrong)
            return message

        await self.app(scope, counted, send)


def announced_bytes(scope: Scope) -> int:
    """Return how many bytes the body of a request says to have; 0 where it does not say."""
    announced = dict(scope["headers"]).get(b"content-length", b"")
    return int(announced) if announced.isdigit() else 0


def refused_as_too_large(got: str, bytes_max: int) -> ASGIApp:
    """Return the answer to a body that is too large."""
    return refused(too_large(got, bytes_max), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def too_large(got: str, bytes_max: int) -> str:
    """Return what a client is told whose body is too large."""
    do = "send vectors packed, register them as a module, or start the server with a larger --steering-body-bytes-max"
    return explain("body", got=got, expected=f"at most {bytes_max:,} bytes", do=do)
