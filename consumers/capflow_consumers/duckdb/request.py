"""The state of one request in the duckdb consumer.

While a request decodes, each frame of its worker brings its next positions. Such frames make a *run*. A frame of a run
changes two numbers of the request; `settle` notes at once all that the run brought.
"""

from __future__ import annotations

from typing import NamedTuple

from capflow.capture.frame import FrameHeader
from capflow.capture.intervals import Intervals
from capflow_consumers.framelog import FrameLog, Worker


class Feed:
    """Frames of one worker, each position of which has as many rows and scores as in the others.

    worker: whose frames they are.
    rows: rows of a position.
    scores: scores of a position.
    running: by id, the requests with a run of these frames.
    """

    def __init__(self, worker: Worker, rows: int, scores: int) -> None:
        self.worker = worker
        self.rows = rows
        self.scores = scores
        self.running: dict[str, ScoredRequest] = {}


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
    seq: the last frame of the run.
    end: the position after the last one of the run.

    `positions`, `pending`, `rows`, `tokens` and `scores` are right after `settle`.
    Invariant: while the request is in `running` of a feed, the frame `seq + 1` of that feed's worker and the positions
    from `end` on are new.
    """

    __slots__ = (
        "_feed",
        "_first",
        "_first_seq",
        "capture",
        "end",
        "engine",
        "error",
        "id",
        "incarnation",
        "pending",
        "positions",
        "rows",
        "scores",
        "seq",
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
        # The feed of the run, and the run's first frame and position; a settled run is empty.
        self._feed: Feed | None = None
        self._first_seq = self._first = 0
        self.seq, self.end = -1, 0

    def begin(self, feed: Feed, seq: int, start: int, end: int) -> bool:
        """Begin a run with a frame that has positions `start .. end`; return False, without effect, if it is not new.

        It must be above all frames of the worker and all positions that the request has.
        """
        self.leave()
        seen = max(self.pending.last(feed.worker), self.stored.last(feed.worker))
        if self.status is not None or seq <= seen or start <= self.positions.last:
            return False
        self._feed, self._first_seq, self._first, self.seq, self.end = feed, seq, start, seq, end
        feed.running[self.id] = self
        return True

    def settle(self) -> None:
        """Note what the run brought since the last call."""
        count = self.end - self._first
        if self._feed is None or self.seq < self._first_seq:
            return
        self.pending.note(self._feed.worker, self._first_seq, self.seq)
        self.positions.add(self._first, self.end - 1)
        self.tokens += count
        self.rows += count * self._feed.rows
        self.scores += count * self._feed.scores
        self._first_seq, self._first = self.seq + 1, self.end

    def leave(self) -> None:
        """End the run."""
        self.settle()
        if self._feed is not None:
            self._feed.running.pop(self.id, None)
            self._feed = None

    def take(self, worker: Worker, header: FrameHeader) -> bool:
        """Mark a frame as pending; return False when its rows are already in the file or pending.

        A finished request takes no further frames.
        """
        self.leave()
        if self.status is not None or (self.stored and self.stored.has(header)):
            return False
        return self.pending.take(worker, header.seq)

    def commit(self) -> None:
        """Mark the pending frames as stored."""
        self.settle()
        self.stored.update(self.pending)
        self.pending = FrameLog()


class Stretches(NamedTuple):
    """Rows of several requests, one after another: each has `lengths` rows, at positions from `starts` on."""

    owners: list[ScoredRequest]
    starts: list[int]
    lengths: list[int]
