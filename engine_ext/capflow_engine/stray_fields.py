"""Where capflow's fields have no effect: a request that has one there is 400 before anything runs.

vLLM has more routes than capflow gives its fields to, and most of them take no notice of a field that they do not know.
A body that is looked into is held until its route reads it; one that has more than the limit is 413, as on the other routes.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capflow.errors import UsageError, explain
from capflow.limits import BODY_BYTES_DEFAULT
from capflow_engine.body_limit import refuse, refuse_announced
from capflow_engine.fields import XARGS, meant_for_capflow
from capflow_engine.options import KEY
from capflow_engine.refusals import refused

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/chat/completions/batch",
)
"""Those that take the fields."""

XARGS_ROUTES = ("/invocations",)
"""Others of vLLM's that hand `vllm_xargs` on to the engine, where the front steers by it."""


_FORM_NAME = re.compile(rb'(?i)form-data;[^\r\n]*?\bname="?([^";\r\n]+)')


class StrayFields:
    """ASGI middleware, in the place of a route that would take no notice."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on unless its body says what nobody would do."""
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
            bytes_max = max(bytes_max, BODY_BYTES_DEFAULT)  # a form brings no vectors, but files
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
            wrong = UsageError(explain(stray, got=f"a request of {path}, where it would do nothing", do=do))
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
    """Return the first field of a body that is meant for capflow and would do nothing; None where there is none."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # which the route itself refuses
        return None
    if not isinstance(fields, dict):
        return None
    xargs = fields.get("vllm_xargs")
    hidden = isinstance(xargs, dict) and KEY in xargs and path not in XARGS_ROUTES
    return meant_for_capflow([name for name, said in fields.items() if said is not None]) or (XARGS if hidden else None)
