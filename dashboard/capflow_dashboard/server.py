"""The server: one thread with one event loop, which serves the page and updates open pages.

Nothing is queued for a page. Each page has a task of its own, which asks the board for changes, sends them, and asks
again once the page has drawn them. A slow page gets fewer and larger updates, a dead page none; neither uses more
memory than one update. The thread that writes the board never waits for the server.

At most `limits.VISITORS_MAX` connections that are not open pages are kept: a further one closes the oldest of them, so
that a page can be opened during a flood of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import math
import threading
import uuid
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

import capflow
from capflow.errors import CapflowError, RemoteProtocolError, UsageError, explain
from capflow_dashboard import limits, wire
from capflow_dashboard.again.desk import AgainDesk, PageRuns
from capflow_dashboard.board.board import Board, PageState
from capflow_dashboard.board.series import Values
from capflow_dashboard.lens.desk import LensDesk
from capflow_dashboard.pages import API_PATH, PageFiles, head_of, no_such_export
from capflow_dashboard.steering import PageRights, SteeringDesk
from capflow_dashboard.views.alerts.book import AlertsSeen
from capflow_dashboard.views.exports import ExportFile, export_of, formats
from capflow_dashboard.views.stored import StoredRows

_quiet = logging.getLogger("capflow.consumer.dashboard.websockets")
# Errors of clients are counted, not logged.
_quiet.setLevel(logging.CRITICAL + 1)


class PageServer:
    """Serves a board from `start` to `stop`.

    port: 0 for any free port; the port in use once started.
    on_count: called on the server's thread with the name of a counter.
    on_log: called on the server's thread with the text, the fields and the level of what to log.
    on_health: called on the server's thread when pages begin or cease to show the hub's counters.
    """

    def __init__(
        self,
        host: str,
        port: int,
        board: Board,
        pages: PageFiles,
        desk: SteeringDesk,
        lens: LensDesk,
        again: AgainDesk,
        stored: StoredRows,
        *,
        on_count: Callable[[str], None],
        on_log: Callable[[str, dict[str, Any], int], None],
        on_health: Callable[[bool], None],
    ) -> None:
        self.host = host
        self.port = port
        # Connections of open pages. This and the fields below are used on the server's thread.
        self.connections: dict[ServerConnection, PageState] = {}
        # Connections that are not open pages, oldest first.
        self.visitors: dict[ServerConnection, None] = {}
        self._board = board
        self._pages = pages
        self._desk = desk
        self._lens = lens
        self._again = again
        self._stored = stored
        self._on_count = on_count
        self._on_log = on_log
        self._on_health = on_health
        # Whether a page shows the hub's counters.
        self._health = False
        # Set by the thread once it listens or has failed, after `_error`, `_loop` and `_stop`.
        self._ready = threading.Event()
        # Why it does not listen.
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set when the server is to end.
        self._stop: asyncio.Event | None = None
        self._exports = asyncio.Semaphore(limits.EXPORTS_MAX)
        # Whether a failure was logged.
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="capflow-dashboard", daemon=True)

    def start(self) -> None:
        """Start to listen. Raises UsageError when the port cannot be used, CapflowError for any other failure."""
        self._thread.start()
        self._ready.wait()
        if isinstance(self._error, OSError):
            raise port_error(self.host, self.port, self._error)
        if self._error is not None:
            raise CapflowError(explain("the dashboard cannot be served", got=repr(self._error))) from self._error

    def stop(self) -> None:
        """Close the pages' connections and end."""
        if self._loop is not None and self._stop is not None:
            # The loop may be closed already.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(limits.OPEN_S_MAX)

    # The rest runs on the server's thread.

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._fail)
        try:
            server = await self._listen()
        # `start` raises it.
        except Exception as e:  # noqa: BLE001
            self._error = e
            self._ready.set()
            return
        self.port = next(iter(server.sockets)).getsockname()[1]
        self._ready.set()
        leases = asyncio.create_task(self._renew_leases())
        alerts = asyncio.create_task(self._watch_alerts())
        try:
            await self._stop.wait()
        finally:
            leases.cancel()
            alerts.cancel()
            server.close(code=CloseCode.GOING_AWAY)
            await self._lens.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), limits.OPEN_S_MAX / 2)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(limits.LEASES_S)
            self._desk.tick()

    async def _watch_alerts(self) -> None:
        """Evaluate the rules, also while no page is open; log and count what fires."""
        book = self._board.alerts
        while book.rules:
            await asyncio.sleep(limits.ALERTS_S)
            for change in book.evaluate(self._board.heartbeat()["silent_s"]):
                fires = change.state == "firing"
                self._on_log(change.text, change.event(), logging.WARNING if fires else logging.INFO)
                if fires:
                    self._on_count(f"alert_{change.rule.name}")
            for name in book.firing:
                self._on_count(f"alert_{name}_seconds")

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
            # `enter` limits how long a connection may take otherwise.
            open_timeout=limits.EXPORT_S_MAX,
            ping_interval=limits.PING_S,
            ping_timeout=limits.STALL_S_MAX,
            close_timeout=limits.OPEN_S_MAX / 5,
            logger=_quiet,
            server_header=None,
            create_connection=cast("type[ServerConnection]", functools.partial(_Connection, self)),
            backlog=limits.BACKLOG,
        )

    def enter(self, connection: ServerConnection) -> None:
        """Add a new connection; close the oldest visitor if there are too many. Called by the connection."""
        if len(self.visitors) >= limits.VISITORS_MAX:
            oldest = next(iter(self.visitors))
            del self.visitors[oldest]
            oldest.transport.abort()
            self._on_count("visitors_cut")
        self.visitors[connection] = None

    def leave(self, connection: ServerConnection) -> None:
        """Remove a visitor: its connection was closed, or is an open page now."""
        cast("_Connection", connection).has_time()
        self.visitors.pop(connection, None)

    def _fail(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count failures in the event loop, such as a connection without a file descriptor left; log the first."""
        self._on_count("failures")
        if not self._failed:
            self._failed = True
            event = {"event": "dashboard_failed", "reason": str(context.get("exception"))}
            text = "the dashboard failed at a connection; further failures are only counted"
            self._on_log(f"{text}: {context.get('message')}: {context.get('exception')}", event, logging.ERROR)

    async def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        response = self._pages.answer(request)
        path = urlsplit(request.path).path
        if response is None and path.startswith(API_PATH):
            async with self._exports:
                export = await asyncio.to_thread(export_of, self._board, path)
                if export is None:
                    response = no_such_export()
                else:
                    await self._send_export(connection, export)
        if response is not None and response.status_code >= 400:
            self._on_count("requests_refused")
        return response

    async def _send_export(self, connection: ServerConnection, export: ExportFile) -> None:
        """Send a file and close the connection; it is cut off after `limits.EXPORT_S_MAX`."""
        cast("_Connection", connection).has_time()
        transport = connection.transport
        transport.write(head_of(export.name, export.kind))
        while not transport.is_closing() and (part := await asyncio.to_thread(next, export.parts, b"")):
            transport.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await connection.drain()
        transport.write(b"0\r\n\r\n")
        transport.close()
        await connection.wait_closed()

    async def _page(self, connection: ServerConnection) -> None:
        if len(self.connections) >= limits.CLIENTS_MAX:
            self._on_count("pages_refused")
            await connection.close(CloseCode.TRY_AGAIN_LATER, f"{limits.CLIENTS_MAX} pages are open already")
            return
        page = PageState()
        drawn = _Page(self._desk.enter(uuid.uuid4().hex), PageRuns(self._again))
        self.connections[connection] = page
        self.leave(connection)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(connection, page, drawn))
                tasks.create_task(self._beat(connection))
                tasks.create_task(self._answer_asks(connection, drawn.lenses))
                tasks.create_task(self._answer_stored(connection, page, drawn.stores))
                tasks.create_task(_send_runs(connection, drawn.runs))
                tasks.create_task(self._update(connection, page, drawn))
        except* ConnectionClosed:
            pass
        except* TimeoutError:
            self._on_count("pages_stalled")
            connection.transport.abort()
        finally:
            del self.connections[connection]
            drawn.runs.leave()
            self._board.leave(page)
            self._tell_health()

    async def _update(self, connection: ServerConnection, page: PageState, drawn: _Page) -> None:
        """Send changes until the page is closed. Raises TimeoutError when the page does not read them."""
        hello = {
            "version": wire.VERSION,
            "capflow": capflow.__version__,
            "rights": ["watch", "steer"] if self._desk.allowed else ["watch"],
            "steering": self._desk.describe(),
            "lens": True,
            "lens_title": self._lens.title,
            "stored": self._stored.known,
            "again": self._again.describe(),
            "source": dict(zip(("kind", "name"), self._board.source, strict=True)),
            "requests_max": self._board.requests_max,
            "tokens_max": self._board.tokens_max,
            "exports": formats(),
            "alerts": [rule.fields() for rule in self._board.alerts.rules],
        }
        await _send(connection, wire.encode({"hello": hello, "heartbeat": self._board.heartbeat()}))
        for seq in itertools.count(1):
            head, values = await self._news(page, drawn)
            await _send(connection, wire.encode({"seq": seq, **head}, values))
            await asyncio.sleep(1 / limits.UPDATES_PER_S_MAX)
            await drawn.wait(seq)

    async def _news(self, page: PageState, drawn: _Page) -> tuple[dict[str, Any], Values | None]:
        """Wait for changes and return them; the board is asked at most `limits.UPDATES_PER_S_MAX` times a second."""
        while True:
            head, values = self._board.news(page) or ({}, None)
            head |= self._desk.news(drawn.rights)
            head |= self._board.alerts.news(drawn.alerts)
            if head:
                return head, values
            await asyncio.sleep(1 / limits.UPDATES_PER_S_MAX)

    async def _beat(self, connection: ServerConnection) -> None:
        """Send a heartbeat each second and at a change of state. Raises TimeoutError when the page does not read."""
        state, sent_at = "", -math.inf
        while True:
            now, beat = asyncio.get_running_loop().time(), self._board.heartbeat()
            if beat["state"] != state or now - sent_at >= limits.HEARTBEAT_S:
                state, sent_at = beat["state"], now
                await _send(connection, wire.encode({"heartbeat": beat}))
            await asyncio.sleep(limits.STATE_S)

    async def _answer_asks(self, connection: ServerConnection, asks: _Asks) -> None:
        """Answer the page's asks for lenses, the newest first, `limits.LENSES_PER_S_MAX` times a second."""
        while True:
            ask = await asks.next()
            await _send(connection, wire.encode({"lens": await self._lens.answer(ask)}))
            await asyncio.sleep(1 / limits.LENSES_PER_S_MAX)

    async def _answer_stored(self, connection: ServerConnection, page: PageState, asks: _Asks) -> None:
        """Answer where rows are stored, the newest ask first, `limits.STORED_PER_S_MAX` times a second."""
        while True:
            ask = await asks.next()
            page.stores = True
            self._tell_health()
            await _send(connection, wire.encode({"stored": await self._stored.answer(ask)}))
            await asyncio.sleep(1 / limits.STORED_PER_S_MAX)

    async def _receive(self, connection: ServerConnection, page: PageState, drawn: _Page) -> None:
        """Handle the page's messages until it is closed or sends an invalid one; raise ConnectionClosed then."""
        try:
            while True:
                message = wire.decode(await connection.recv())
                if message.seen is not None:
                    drawn.note(message.seen)
                elif message.act is not None:
                    self._desk.take(drawn.rights, message.act)
                elif message.alive is not None:
                    if drawn.rights.name != message.alive:
                        drawn.rights = self._desk.enter(message.alive)
                    self._desk.renew(drawn.rights)
                elif message.lens is not None:
                    drawn.lenses.put(message.lens)
                elif message.stored is not None:
                    drawn.stores.put(message.stored)
                elif message.again is not None:
                    drawn.runs.take(drawn.rights, message.again)
                elif (shown := message.subscribe) is not None:
                    self._board.look(
                        page,
                        shown.request,
                        shown.window,
                        shown.probe,
                        health=shown.health,
                        other=shown.other,
                        population=shown.population,
                    )
                    drawn.alerts.watching = shown.alerts
                    self._tell_health()
        except RemoteProtocolError as e:
            self._on_count("requests_refused")
            await connection.close(CloseCode.POLICY_VIOLATION, str(e)[:100])
            raise ConnectionClosedError(None, None) from e

    def _tell_health(self) -> None:
        """Say when pages begin or cease to need the hub's counters."""
        wanted = any(page.health or page.stores for page in self.connections.values())
        if wanted != self._health:
            self._health = wanted
            self._on_health(wanted)


class _Page:
    """The last update that a page has drawn, its part in steering, the alerts that it has, its asks and its runs.

    rights: its part; another one once it has told its name.
    lenses, stores: its asks for lenses, and for where rows are stored.
    """

    def __init__(self, rights: PageRights, runs: PageRuns) -> None:
        self.rights = rights
        self.runs = runs
        self.alerts = AlertsSeen()
        self.lenses, self.stores = _Asks(), _Asks()
        self._seq = 0
        # Set when the page has drawn another update.
        self._changed = asyncio.Event()

    def note(self, seq: int) -> None:
        self._seq = max(self._seq, seq)
        self._changed.set()

    async def wait(self, seq: int) -> None:
        """Wait until the page has drawn an update, but at most `limits.UNSEEN_S`: a hidden page draws nothing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.UNSEEN_S):
                while self._seq < seq:
                    self._changed.clear()
                    await self._changed.wait()


class _Asks:
    """The newest ask of a page, of one kind, that is not worked on yet."""

    def __init__(self) -> None:
        self._newest: wire.TokenAsk | None = None
        # Set while there is one.
        self._came = asyncio.Event()

    def put(self, ask: wire.TokenAsk) -> None:
        """Replace the ask that waits."""
        self._newest = ask
        self._came.set()

    async def next(self) -> wire.TokenAsk:
        """Wait for an ask and take it."""
        await self._came.wait()
        self._came.clear()
        assert self._newest is not None
        return self._newest


async def _send_runs(connection: ServerConnection, runs: PageRuns) -> None:
    """Send the news of the page's runs, `limits.UPDATES_PER_S_MAX` times a second."""
    while True:
        await _send(connection, wire.encode({"again": await runs.news()}))
        await asyncio.sleep(1 / limits.UPDATES_PER_S_MAX)


async def _send(connection: ServerConnection, message: bytes) -> None:
    """Send a message. Raises TimeoutError when the page does not read it, ConnectionClosed when it is closed."""
    async with asyncio.timeout(limits.STALL_S_MAX):
        await connection.send(message)


class _Connection(ServerConnection):
    """A connection that the server lists as a visitor."""

    def __init__(self, pages: PageServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pages = pages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._limit = self.loop.call_later(limits.OPEN_S_MAX, self.transport.abort)
        self._pages.enter(self)

    def has_time(self) -> None:
        """Remove the limit of the time of a visitor: it reads an export, or is an open page now."""
        self._limit.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pages.leave(self)
        super().connection_lost(exc)


def port_error(host: str, port: int, error: OSError) -> UsageError:
    """Return the error to raise when a port cannot be used."""
    if error.errno == errno.EADDRINUSE:
        do = "end the program that uses it, or use port=0 for any free port"
        return UsageError(explain("consumers.dashboard.port", got=f"{port}, in use", expected="a free port", do=do))
    got = f"{host}:{port}, {error.strerror or error}"
    return UsageError(explain("consumers.dashboard.port", got=got, expected="a port that this user may listen on"))
