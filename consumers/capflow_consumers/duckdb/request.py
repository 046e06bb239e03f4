"""The state of one request in the duckdb consumer."""

from __future__ import annotations

from capflow.capture.frame import FrameHeader
from capflow.capture.intervals import Intervals
from capflow_consumers.framelog import FrameLog, Worker


class ScoredRequest:
    """One request from its first row to its result.

    capture: its number in the file.
    incarnation: differs between requests of the same id; empty until a frame or the end of the request says it.
    positions: positions whose tokens are in the file or pending.
    stored: frames whose rows are in the file.
    pending: frames whose rows wait for the next transaction.
    rows: rows seen, at all sites.
    tokens: tokens seen.
    scores: scores computed.
    status: its `capture_status` in the file; None while the file has none.
    error: why pending frames were dropped; whether the file has them is unknown.
    """

    __slots__ = (
        "capture",
        "engine",
        "error",
        "id",
        "incarnation",
        "pending",
        "positions",
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
        self.incarnation = ""
        self.started_ns = started_ns
        self.positions = Intervals()
        self.rows = 0
        self.tokens = 0
        self.scores = 0

    def take(self, worker: Worker, header: FrameHeader) -> bool:
        """Mark a frame as pending; return False when its rows are already in the file or pending.

        A finished request takes no further frames.
        """
        if self.status is not None or (self.stored and self.stored.has(header)):
            return False
        return self.pending.take(worker, header.seq)

    def commit(self) -> None:
        """Mark the pending frames as stored."""
        self.stored.update(self.pending)
        self.pending = FrameLog()
