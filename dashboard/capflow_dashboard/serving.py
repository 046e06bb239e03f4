"""The page's process: reads the channel from the consumer, keeps the board, and serves the page.

It is a process of its own, so that it takes no time, no memory and no file descriptors from the hub. It ends when the
channel does: the hub, however it ends, cannot leave it behind.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capflow.capture.frame import Frame
from capflow.errors import CapflowError, UsageError, explain
from capflow.lenses.file import LensFile
from capflow.probes.kinds import load_probes
from capflow.probes.labels import read_labels
from capflow.probes.probe import Scorer
from capflow.steering.action import Action
from capflow.system import descriptors
from capflow_dashboard import limits
from capflow_dashboard.again.address import CompletionServer
from capflow_dashboard.again.desk import AgainDesk
from capflow_dashboard.board.board import Board
from capflow_dashboard.channel import (
    ActionAnswered,
    ActionWanted,
    Channel,
    Counted,
    EngineLeft,
    EngineMet,
    EventTaken,
    FromPages,
    HealthWanted,
    HubAlive,
    Listening,
    LogWanted,
    PageSetup,
    RequestOver,
    RowsTaken,
    StartFailed,
    ToPages,
)
from capflow_dashboard.lens.desk import LensDesk
from capflow_dashboard.lens.rows import KeptRows
from capflow_dashboard.pages import PageFiles
from capflow_dashboard.server import PageServer
from capflow_dashboard.steering import SteeringDesk, load_vectors
from capflow_dashboard.views.alerts.book import AlertBook
from capflow_dashboard.views.alerts.rules import read_rules
from capflow_dashboard.views.stored import StoredRows


class BoardWriter:
    """Writes what comes through the channel to a board, and keeps the newest rows.

    probes: the probes whose scores are shown.
    desk: hears of the answers to actions.
    """

    def __init__(self, board: Board, rows: KeptRows, probes: Sequence[Scorer], desk: SteeringDesk) -> None:
        self.board = board
        self.desk = desk
        self._rows = rows
        self._probes = probes

    def take(self, message: ToPages | FromPages, rows: Any = b"") -> list[str]:
        """Handle a message; return an error for each probe that does not fit a new engine's model."""
        match message:
            case EngineMet(engine, model, sites):
                return self.board.greet(engine, model, sites, self._probes)
            case EngineLeft(engine):
                self.board.forget(engine)
            case RowsTaken(header):
                frame = Frame(header, rows)
                self._rows.add(frame)
                self.board.take(frame)
                self.board.hear(0.0, None)
            case RequestOver(done):
                self.board.finish(done)
            case EventTaken(answered):
                self.board.note(answered)
                self.desk.note(answered)
            case ActionAnswered(answered):
                self.desk.note(answered)
            case HubAlive(silent_s, status):
                self.board.hear(silent_s, status)
                if status is not None:
                    self.desk.check_frozen(status)
        return []


def desk_of(setup: PageSetup, board: Board, send: Callable[[Action], None]) -> SteeringDesk:
    """Return the desk that a setup describes. Raises UsageError for a vector file that cannot be used."""
    return SteeringDesk(
        load_vectors(setup.vectors, "consumers.dashboard.vectors"),
        setup.modules,
        allowed=setup.allow_steering,
        send=send,
        find=board.find,
        running=board.running,
    )


def again_of(
    setup: PageSetup, board: Board, steering: SteeringDesk, on_run: Callable[[str, dict[str, Any]], None]
) -> AgainDesk:
    """Return the desk of runs that a setup describes. Raises UsageError for an address of no server."""
    server = None
    if setup.completions:
        server = CompletionServer.parse(setup.completions, setup.completions_key, where="consumers.dashboard.server")
    return AgainDesk(board, steering, server, on_run)


def lens_of(path: str) -> LensFile:
    """Return a lens file. Raises UsageError for a file that cannot be used."""
    try:
        return LensFile(path)
    except UsageError as e:
        raise UsageError(f"consumers.dashboard.lens: {e}") from e


def labels_of(path: str) -> dict[str, bool]:
    """Return whether each request has the positive label. Raises UsageError for a file that cannot be used."""
    where = "consumers.dashboard.labels"
    try:
        size = Path(path).stat().st_size
    except OSError as e:
        raise UsageError(explain(where, got=f"{path}: {e.strerror}", expected="a file of labels")) from e
    if size > limits.LABELS_BYTES_MAX:
        raise UsageError(explain(where, got=f"{path}, {size} bytes", expected=f"{limits.LABELS_BYTES_MAX} or fewer"))
    return read_labels(Path(path), None, where=where)


def serve(channel: Channel) -> None:
    """Serve the page that the first message of a channel describes, until the channel ends."""
    try:
        setup, _ = channel.receive()
    except EOFError:
        return
    assert isinstance(setup, PageSetup)
    board = Board(setup.requests_max, setup.tokens_max)
    board.source = setup.kind, setup.name
    rows = KeptRows()
    try:
        board.alerts = AlertBook(read_rules(setup.alerts, "consumers.dashboard.alerts"))
        if setup.labels:
            board.labels = labels_of(setup.labels)
        lens = lens_of(setup.lens) if setup.lens else None
        desk = desk_of(setup, board, lambda action: _tell(channel, ActionWanted(action)))
        again = again_of(setup, board, desk, lambda text, event: _tell(channel, LogWanted(text, event, logging.INFO)))
    except CapflowError as e:
        _tell(channel, StartFailed(str(e), isinstance(e, UsageError)))
        return
    server = PageServer(
        setup.host,
        setup.port,
        board,
        PageFiles(setup.token, steers=desk.allowed),
        desk,
        LensDesk(board, rows, lens, other_weights=setup.other_weights),
        again,
        StoredRows(board, setup.data),
        on_count=lambda name: _tell(channel, Counted(name)),
        on_log=lambda text, event, level: _tell(channel, LogWanted(text, event, level)),
        on_health=lambda wanted: _tell(channel, HealthWanted(wanted)),
    )
    try:
        writer = BoardWriter(board, rows, load_probes(setup.probes, "consumers.dashboard.probes"), desk)
        server.start()
    except CapflowError as e:
        _tell(channel, StartFailed(str(e), isinstance(e, UsageError)))
        return
    _tell(channel, Listening(server.port))
    with contextlib.suppress(EOFError):
        while True:
            for problem in writer.take(*channel.receive()):
                _tell(channel, LogWanted(problem, {"event": "probe_unfit"}, logging.ERROR))
    server.stop()


def _tell(channel: Channel, message: FromPages) -> None:
    # The hub is gone, which ends `receive`.
    with contextlib.suppress(OSError):
        channel.send(message)


def main() -> None:
    """Serve the channel whose file descriptor is the argument."""
    # Ctrl-C is for the hub, which ends the channel after its last message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptors.raise_limit()
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
