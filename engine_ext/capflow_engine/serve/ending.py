"""The end of an API server: running requests get time to end, then they are aborted; new requests are refused.

Invariant: every admitted request is answered before the server ends, within `running_s` and `limits.ANSWERS_S` seconds.
After that the engine ends and sends the rows that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from capflow import limits
from capflow_engine.compat import engine as compat
from capflow_engine.compat.launch import before_kill
from capflow_engine.llm.results import Askers
from capflow_engine.serve.refusals import refused

logger = logging.getLogger("vllm.capflow")

REFUSAL = "the server is shutting down; send the request to another one, or again when this one is back"

_HEALTH = ("/health", "/ping")
_READING = ("GET", "HEAD", "OPTIONS")
_LOOK_S = 0.05


class Ending:
    """How one API server ends.

    running_s: how long running requests may take.
    begun: whether the end has begun, so that new requests are refused.
    before: called when the command asks for the end, before the main thread gets its signal; None for nothing.
    """

    def __init__(self, running_s: float = limits.SHUTDOWN_S_DEFAULT) -> None:
        self.running_s = running_s
        self.begun = False
        self.before: Callable[[], None] | None = None
        # Requests and calls that are being answered.
        self._answering = 0
        # Set from the first signal on.
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request from its first byte to the last of its answer."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    def take_signals(self, server: Any, engine: Any, asker: Askers) -> None:
        """End on the first SIGINT or SIGTERM. The command that started the server handles a second one.

        server: uvicorn's; its signal handlers are replaced.
        engine: vLLM's client of the engine.
        asker: asks the hubs for results.
        """
        loop = asyncio.get_running_loop()
        server.config.timeout_graceful_shutdown = server.config.timeout_graceful_shutdown or round(limits.GIVE_UP_S)

        def begin() -> None:
            if self._task is None:
                self.begun = True
                self._task = loop.create_task(self._end(server, engine, asker))

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, begin)

    async def _end(self, server: Any, engine: Any, asker: Askers) -> None:
        began = time.monotonic()
        running = max(self._answering, len(compat.running_requests(engine)))
        logger.info(
            "shutting down: %d requests run and have %g s to end; new requests are refused; a second signal ends now",
            running,
            self.running_s,
        )
        try:
            await self._answered(engine, self.running_s)
            left = compat.running_requests(engine)
            if left:
                await engine.abort(left, internal=True)
            asker.hurry(limits.ANSWERS_S)
            await self._answered(engine, limits.ANSWERS_S + limits.GIVE_UP_S)
            await before_kill(engine, "flush_capture")
            await compat.stop_outputs(engine)
            stop = functools.partial(engine.shutdown, timeout=limits.ENGINE_END_S_MAX)
            await asyncio.get_running_loop().run_in_executor(None, stop)
            logger.info("shut down after %.1f s: %d requests were aborted", time.monotonic() - began, len(left))
        finally:
            server.should_exit = True

    async def _answered(self, engine: Any, within_s: float) -> None:
        """Wait until no request runs or is being answered, for at most `within_s` seconds."""
        deadline = time.monotonic() + within_s
        # vLLM has no event for the end of a request.
        while time.monotonic() < deadline:
            if not (self._answering or compat.running_requests(engine)):
                return
            await asyncio.sleep(_LOOK_S)


class Door:
    """ASGI middleware: admits and counts requests. Once the server ends, it refuses all that do not only read."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 503."""
        front = getattr(scope["app"].state, "capflow", None) if scope["type"] == "http" else None
        if front is None:
            await self.app(scope, receive, send)
            return
        ending: Ending = front.ending
        reads = scope["method"] in _READING
        path = scope.get("path", "").removeprefix(scope.get("root_path", "")).rstrip("/")
        if ending.begun and (not reads or path in _HEALTH):
            answer = refused(REFUSAL, HTTPStatus.SERVICE_UNAVAILABLE)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        with contextlib.nullcontext() if reads else ending.answering():
            await self.app(scope, receive, send)
