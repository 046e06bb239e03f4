"""The server: one thread with one event loop, which serves the page and keeps open pages up to date.

Nothing is queued for a page. Each has its own task, which asks the board what is new for it, sends that, and does not
ask again before the page's socket has taken it: a slow page gets fewer and larger updates, a dead one none, and neither
costs more memory than one update. The consumer's thread never waits for any of this.

The process is the hub's, and so are its descriptors. At most `limits.VISITORS_MAX` connections are open that are no pages: another one
cuts the oldest of them off, so that a page which is opened during a flood gets in.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from capflow.errors import CapflowError, RemoteProtocolError, UsageError, explain
from capflow_dashboard import limits, wire
from capflow_dashboard.board import Board, Seen
from capflow_dashboard.pages import PageFiles

logger = logging.getLogger("capflow.consumer.dashboard")

_quiet = logging.getLogger("capflow.consumer.dashboard.websockets")
_quiet.setLevel(logging.CRITICAL + 1)  # what clients get wrong is counted, not logged


class PageServer:
    """Serves a board, from `start` to `stop`. `port` is the one it listens on, once started.

    on_count is called, on the server's thread, with the name of a counter.
    """

    def __init__(self, host: str, port: int, board: Board, pages: PageFiles, on_count: Callable[[str], None]) -> None:
        self.host = host
        self.port = port
        # Of open pages; the server's thread's, as all below.
        self.connections: set[ServerConnection] = set()
        # Connections that are no pages, oldest first.
        self.visitors: dict[ServerConnection, None] = {}
        self._board = board
        self._pages = pages
        self._on_count = on_count
        # Set by the thread when it listens, or cannot.
        self._ready = threading.Event()
        # Why it does not listen; set by the thread before `_ready`.
        self._error: Exception | None = None
        # Set by the thread before `_ready`.
        self._loop: asyncio.AbstractEventLoop | None = None
        # The same; set by `stop`.
        self._stop: asyncio.Event | None = None
        # Whether a failure was logged.
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="capflow-dashboard", daemon=True)

    def start(self) -> None:
        """Listen; raises UsageError when the port is taken, CapflowError when it cannot be had."""
        self._thread.start()
        self._ready.wait()
        if isinstance(self._error, OSError):
            raise port_error(self.host, self.port, self._error)
        if self._error is not None:
            raise CapflowError(explain("the dashboard cannot be served", got=repr(self._error))) from self._error

    def stop(self) -> None:
        """Tell the pages that it is over, and end."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(limits.OPEN_S_MAX)

    # The server's thread.

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._fail)
        try:
            server = await self._listen()
        except Exception as e:  # noqa: BLE001  told to whoever waits in `start`
            self._error = e
            self._ready.set()
            return
        self.port = next(iter(server.sockets)).getsockname()[1]
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            server.close(code=CloseCode.GOING_AWAY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), limits.OPEN_S_MAX / 2)

    async def _listen(self) -> Server:
        return await serve(
            self._page,
            self.host,
            self.port,
            process_request=self._answer,
            compression=None,
            max_size=limits.MESSAGE_BYTES_MAX,
            max_queue=4,
            write_limit=limits.WRITE_BUFFER_BYTES,
            open_timeout=limits.OPEN_S_MAX,
            ping_interval=limits.PING_S,
            ping_timeout=limits.STALL_S_MAX,
            close_timeout=limits.OPEN_S_MAX / 5,
            logger=_quiet,
            server_header=None,
            create_connection=cast("type[ServerConnection]", functools.partial(_Connection, self)),
            backlog=limits.BACKLOG,
        )

    def enter(self, connection: ServerConnection) -> None:
        """Take a new connection, which may have to take another one's place. Called by the connection."""
        if len(self.visitors) >= limits.VISITORS_MAX:
            oldest = next(iter(self.visitors))
            del self.visitors[oldest]
            oldest.transport.abort()
            self._on_count("visitors_cut")
        self.visitors[connection] = None

    def leave(self, connection: ServerConnection) -> None:
        """Forget a connection that is over. Called by the connection."""
        self.visitors.pop(connection, None)

    def _fail(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count what goes wrong in the event loop, such as a connection for which there is no descriptor; log the first one."""
        self._on_count("failures")
        if not self._failed:
            self._failed = True
            event = {"event": "dashboard_failed", "reason": str(context.get("exception"))}
            text = "the dashboard failed at a connection; more failures are counted only: %s: %s"
            logger.error(text, context.get("message"), context.get("exception"), extra=event)

    def _answer(self, _: ServerConnection, request: Request) -> Response | None:
        response = self._pages.answer(request)
        if response is not None and response.status_code >= 400:
            self._on_count("requests_refused")
        return response

    async def _page(self, connection: ServerConnection) -> None:
        if len(self.connections) >= limits.CLIENTS_MAX:
            self._on_count("pages_refused")
            await connection.close(CloseCode.TRY_AGAIN_LATER, f"{limits.CLIENTS_MAX} pages are open already")
            return
        seen = Seen()
        listening: asyncio.Task[Any] | None = None
        self.connections.add(connection)
        self.leave(connection)
        try:
            listening = asyncio.create_task(self._hear(connection, seen))
            await self._tell(connection, seen)
        except ConnectionClosed:
            pass
        except TimeoutError:
            self._on_count("pages_stalled")
            connection.transport.abort()
        finally:
            self.connections.discard(connection)
            self._board.leave(seen)
            if listening is not None:
                listening.cancel()

    async def _tell(self, connection: ServerConnection, seen: Seen) -> None:
        """Send what is new, for as long as the page is there."""
        while True:
            news = self._board.news(seen)
            if news is not None:
                async with asyncio.timeout(limits.STALL_S_MAX):
                    await connection.send(wire.encode(*news))
            await asyncio.sleep(1 / limits.UPDATES_PER_S_MAX)
            if connection.close_code is not None:
                return

    async def _hear(self, connection: ServerConnection, seen: Seen) -> None:
        """Take what the page says, until it is gone or says what it may not."""
        try:
            async for message in connection:
                self._board.look(seen, wire.decode(message).select)
        except RemoteProtocolError as e:
            self._on_count("requests_refused")
            await connection.close(CloseCode.POLICY_VIOLATION, str(e)[:100])
        except ConnectionClosed:
            pass


class _Connection(ServerConnection):
    """A connection that its server counts."""

    def __init__(self, pages: PageServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pages = pages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._pages.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pages.leave(self)
        super().connection_lost(exc)


def port_error(host: str, port: int, error: OSError) -> UsageError:
    """Return what to raise when a port cannot be had."""
    if error.errno == errno.EADDRINUSE:
        do = "close what listens there, or use port=0 for any free one"
        return UsageError(explain("consumers.dashboard.port", got=f"{port}, in use", expected="a free port", do=do))
    got = f"{host}:{port}, {error.strerror or error}"
    return UsageError(explain("consumers.dashboard.port", got=got, expected="a port that may be listened on"))
