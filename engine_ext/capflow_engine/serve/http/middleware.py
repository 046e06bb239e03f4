"""The middleware of `capflow serve`: refuses capflow's fields where they have no effect, and bodies that are too large.

Some of vLLM's routes do not take capflow's fields, and most of those ignore unknown fields. A request with such a field
there gets 400 before anything runs. A body over the limit gets 413 before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.limits import BODY_BYTES_DEFAULT
from capflow_engine.request.options import KEY
from capflow_engine.serve.fields import XARGS, meant_for_capflow
from capflow_engine.serve.refusals import refused

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/chat/completions/batch",
)
"""The routes that take the fields."""

XARGS_ROUTES = ("/invocations",)
"""Other routes of vLLM that hand `vllm_xargs` on to the engine; `capflow_engine.serve.generate` reads it there."""


_FORM_NAME = re.compile(rb'(?i)form-data;[^\r\n]*?\bname="?([^";\r\n]+)')


class StrayFields:
    """ASGI middleware: refuses capflow's fields on routes that would ignore them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on unless its body has fields without effect."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", "")).rstrip("/")
        if scope["type"] != "http" or scope["method"] != "POST" or path in ROUTES or path.startswith("/v1/steering"):
            await self.app(scope, receive, send)
            return
        kind = dict(scope["headers"]).get(b"content-type", b"").lower()
        if b"json" not in kind and b"multipart/form-data" not in kind:
            await self.app(scope, receive, send)
            return
        front = getattr(scope["app"].state, "capflow", None)
        bytes_max = BODY_BYTES_DEFAULT if front is None else front.body_bytes_max
        if b"json" not in kind:
            bytes_max = max(bytes_max, BODY_BYTES_DEFAULT)  # a form brings files, not vectors
        if await refuse_announced(bytes_max, scope, receive, send):
            return
        came = 0
        messages: list[Message] = []
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body")):
            messages.append(await receive())
            came += len(messages[-1].get("body", b""))
            if came > bytes_max:
                await refuse(f"more than {bytes_max:,} bytes", bytes_max, scope, receive, send)
                return
        body = b"".join(message.get("body", b"") for message in messages)
        stray = _stray(body, path) if b"json" in kind else meant_for_capflow(_form_names(body))
        if stray is not None:
            do = "send it to " + " or ".join(ROUTES)
            wrong = UsageError(explain(stray, got=f"a request of {path}, where it has no effect", do=do))
            await refused(wrong, HTTPStatus.BAD_REQUEST)(scope, receive, send)
            return
        rest = iter(messages)

        async def again() -> Message:
            return next(rest, None) or await receive()

        await self.app(scope, again, send)


def _form_names(body: bytes) -> list[str]:
    """Return the names of the fields of a multipart form."""
    return [name.decode("utf-8", "replace") for name in _FORM_NAME.findall(body)]


def _stray(body: bytes, path: str) -> str | None:
    """Return the first field of a body that is meant for capflow and has no effect; None if there is none."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the route itself refuses it
        return None
    if not isinstance(fields, dict):
        return None
    xargs = fields.get("vllm_xargs")
    hidden = isinstance(xargs, dict) and KEY in xargs and path not in XARGS_ROUTES
    return meant_for_capflow([name for name, value in fields.items() if value is not None]) or (
        XARGS if hidden else None
    )


GUARDED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/steering")
"""The routes that read their bodies themselves. `StrayFields` reads the bodies of other routes, and bounds them."""


class BodyLimit:
    """ASGI middleware: bounds bodies. `app.state.capflow` has the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its body."""
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
    """Return how many bytes a request announces for its body; 0 if it announces nothing."""
    announced = dict(scope["headers"]).get(b"content-length", b"")
    return int(announced) if announced.isdigit() else 0


async def refuse_announced(bytes_max: int, scope: Scope, receive: Receive, send: Send) -> bool:
    """Refuse a body that is announced as too large, and drop it. Returns whether it is.

    A client that asks before it sends its body (`Expect: 100-continue`) sends none.
    """
    announced = announced_bytes(scope)
    if announced <= bytes_max:
        return False
    asks = dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue"
    await refuse(f"{announced:,} bytes", bytes_max, scope, receive, send, drops=not asks)
    return True


async def refuse(got: str, bytes_max: int, scope: Scope, receive: Receive, send: Send, *, drops: bool = True) -> None:
    """Refuse a body that is too large, and drop the rest of it."""
    answer = refused(too_large(got, bytes_max), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    await answer(scope, receive, draining(receive, send, drops=drops))


def draining(receive: Receive, send: Send, *, drops: bool = True) -> Send:
    """Return a `send` that sends an answer and closes the connection.

    drops: whether it first reads and drops the rest of the request's body.
    """

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
    """Return the message for a body that is too large."""
    do = "send vectors packed, register them as a module, or start the server with a larger --steering-body-bytes-max"
    return explain("body", got=got, expected=f"at most {bytes_max:,} bytes", do=do)
