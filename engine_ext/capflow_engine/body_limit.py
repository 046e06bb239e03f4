"""The limit on the bodies of requests that may bring vectors: a larger one is 413 before it has been read.

A body whose length is announced is refused by that; any other as soon as more than the limit has come. What the client still sends
is read and dropped, within bounds, before its connection is closed: most clients read no answer before they have sent everything, and a
connection that is closed while data waits is reset, its answer lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capflow import limits
from capflow.errors import explain
from capflow_engine.refusals import refused

GUARDED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/steering")
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
        if await refuse_announced(bytes_max, scope, receive, send):
            return
        came, drained = 0, draining(receive, send)

        async def counted() -> Message:
            nonlocal came
            message: dict[str, Any] = dict(await receive())
            came += len(message.get("body", b""))
            if came > bytes_max:
                wrong = too_large(f"more than {bytes_max:,} bytes", bytes_max)
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, wrong)
            return message

        async def answer(message: Message) -> None:
            await (drained if came > bytes_max else send)(message)

        await self.app(scope, counted, answer)


def announced_bytes(scope: Scope) -> int:
    """Return how many bytes the body of a request says to have; 0 where it does not say."""
    announced = dict(scope["headers"]).get(b"content-length", b"")
    return int(announced) if announced.isdigit() else 0


async def refuse_announced(bytes_max: int, scope: Scope, receive: Receive, send: Send) -> bool:
    """Answer a body that says to be too large, and drop it; return whether it does.

    A client that asks first whether to send its body (`Expect: 100-continue`) sends none, and is not waited for.
    """
    announced = announced_bytes(scope)
    if announced <= bytes_max:
        return False
    asks = dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue"
    await refuse(f"{announced:,} bytes", bytes_max, scope, receive, send, drops=not asks)
    return True


async def refuse(got: str, bytes_max: int, scope: Scope, receive: Receive, send: Send, *, drops: bool = True) -> None:
    """Answer a body that is too large, and drop the rest of it."""
    answer = refused(too_large(got, bytes_max), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    await answer(scope, receive, draining(receive, send, drops=drops))


def draining(receive: Receive, send: Send, *, drops: bool = True) -> Send:
    """Return what sends an answer whole, then drops the rest of the request's body if `drops`, and closes the connection."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        if message["type"] != "http.response.body" or message.get("more_body") or not drops:
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.BODY_DRAIN_S_MAX):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return sent


async def _drop(receive: Receive) -> None:
    """Read the rest of a body, `limits.BODY_DRAIN_BYTES_MAX` at most."""
    came = 0
    while came < limits.BODY_DRAIN_BYTES_MAX:
        message = await receive()
        came += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def too_large(got: str, bytes_max: int) -> str:
    """Return what a client is told whose body is too large."""
    do = "send vectors packed, register them as a module, or start the server with a larger --steering-body-bytes-max"
    return explain("body", got=got, expected=f"at most {bytes_max:,} bytes", do=do)
