"""What the duckdb consumer knows of a request from its first row to its result."""

from __future__ import annotations

from capflow_consumers.framelog import FrameLog


class ScoredRequest:
    """One request from its first row to its result.

    known: positions below it have their tokens recorded. frames: those with rows of it. stored: those of them whose rows were in the file when it
    was opened; status: what the file says came of the request, None when it was not over.
    """

    __slots__ = (
        "capture",
        "engine",
        "error",
        "frames",
        "id",
        "known",
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
        self.frames = FrameLog()
        self.stored = FrameLog()
        self.status: str | None = None
        self.id = request_id
        self.started_ns = started_ns
        self.known = 0
        self.rows = 0
        self.tokens = 0
        self.scores = 0
        self.error: str | None = None
