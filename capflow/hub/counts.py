"""What a hub counts, and the picture of it that is shown while it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.capture.losses import MEANT


@dataclass
class EngineCounts:
    """What came from one engine."""

    rows: int = 0
    bytes: int = 0


@dataclass
class Counts:
    """What the hub counts from its start to its end; written by its thread, read by anyone."""

    frames: int = 0
    rows: int = 0
    bytes: int = 0
    tokens: int = 0
    # By engine, also of those that left; of the newest `limits.SESSIONS_MAX`.
    received: dict[str, EngineCounts] = field(default_factory=dict)
    duplicates: int = 0
    # Events of requests' steering, and those that had no room in their worker.
    events: int = 0
    events_lost: int = 0
    protocol_errors: int = 0
    # Messages of peers that broke the protocol too often, or that had no session and sent too many at once.
    ignored: int = 0
    sessions_lost: int = 0
    # Peers, by reason.
    refused: Counter[str] = field(default_factory=Counter)
    # When the last frame was taken, on the monotonic clock.
    frame_at: float | None = None

    def count(self, engine: str, rows: int, nbytes: int) -> None:
        """Count the rows and bytes of a frame of an engine."""
        self.frames += 1
        self.rows += rows
        self.bytes += nbytes
        received = self.received.get(engine)
        if received is None:
            received = self.received[engine] = EngineCounts()
            keep_newest(self.received, limits.SESSIONS_MAX)
        received.rows += rows
        received.bytes += nbytes


def age_s(at: float | None, now: float) -> float | None:
    """Return how many seconds ago something was, for showing; None when it never was."""
    return None if at is None else round(max(0.0, now - at), 3)


class Snapshot(msgspec.Struct, frozen=True):
    """The hub at one moment, for showing how things go; rows and bytes are as received."""

    requests_done: int
    requests_open: int
    requests_failed: int
    tokens: int
    frames: int
    rows: int
    bytes: int
    queued_bytes: int
    dropped_rows: dict[str, int]
    sessions: int
    engines: int
    refused: int
    errors: int
    spilled: int

    @property
    def rows_lost(self) -> int:
        """How many rows were lost that a consumer was to have; a row that two consumers lost counts twice."""
        return sum(self.dropped_rows.values()) - self.rows_skipped

    @property
    def rows_skipped(self) -> int:
        """How many rows live consumers passed over, as their policy or their tap says: no loss."""
        return sum(rows for reason, rows in self.dropped_rows.items() if reason in MEANT)
