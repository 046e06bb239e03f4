"""What the duckdb consumer knows of a request from its first row to its result."""

from __future__ import annotations

from capflow.capture.frame import FrameHeader
from capflow.capture.intervals import Intervals
from capflow_consumers.framelog import FrameLog, Worker


class ScoredRequest:
    """One request from its first row to its result.

    known: positions whose tokens are in the file or pending. stored: frames whose rows are in the file; pending: frames whose rows wait
    for the next transaction. error: why frames that were pending are not known to be in the file. status: the request's `capture_status` in the file, None while it is not there.
    """

    __slots__ = (
        "capture",
        "engine",
        "error",
        "id",
        "known",
        "pending",
        "rows",
        "scores",
        "started_ns",
        "status",
        "stored",
        "tokens",
    )

    def __init__(self, capture: int, engine: str, request_id: str, started_ns: int) -> None:
        self.capture = capture
        self.engine = engine
        self.stored = FrameLog()
        self.pending = FrameLog()
        self.status: str | None = None
        self.error: str | None = None
        self.id = request_id
        self.started_ns = started_ns
        self.known = Intervals()
        self.rows = 0
        self.tokens = 0
        self.scores = 0

    def take(self, worker: Worker, header: FrameHeader) -> bool:
        """Note a frame as pending; return False when its rows are in the file or pending. A request that is over takes nothing more."""
        if self.status is not None or (self.stored and self.stored.has(header)):
            return False
        return self.pending.take(worker, header.seq)

    def commit(self) -> None:
        """Note that what was pending is in the file."""
        self.stored.update(self.pending)
        self.pending = FrameLog()
