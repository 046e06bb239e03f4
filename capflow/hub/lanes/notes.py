"""The notes in a consumer's queue: what it is told besides rows. Each has a weight, and all that wait are bounded.

The end of a request, an engine that connected and the answer to an action have no rows, so no bound on rows holds them:
beside a consumer that hangs they would be kept for as long as the hub runs. A note that has no room is not told, and
counted by kind.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Literal, get_args

import msgspec

from capflow import limits

Kind = Literal["end", "session", "action"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NOTE_BYTES = (
    2 * limits.KIB
)  # what a note holds besides what it says: its request with its counts, its place in the queue
_DECODED = 8  # bytes in memory for one that is encoded

_encoder = msgspec.msgpack.Encoder()


def weight(note: Any) -> int:
    """Return about how many bytes of memory a note takes that says this."""
    return _NOTE_BYTES + _DECODED * len(_encoder.encode(note))


class Notes:
    """The bytes of one consumer's notes that wait, at most `limits.NOTES_BYTES_MAX`; for any thread."""

    def __init__(self) -> None:
        # Of those that wait; guarded by `_lock`, read by anyone.
        self.nbytes = 0
        # The same, at most.
        self.bytes_peak = 0
        # Not told; by the hub's thread.
        self.lost: Counter[Kind] = Counter()
        self._lock = threading.Lock()

    def admit(self, nbytes: int) -> bool:
        """Count a note that is to wait, if there is room for it; return whether there is. One alone always has room."""
        with self._lock:
            if self.nbytes and self.nbytes + nbytes > limits.NOTES_BYTES_MAX:
                return False
            self.nbytes += nbytes
            self.bytes_peak = max(self.bytes_peak, self.nbytes)
            return True

    def taken(self, nbytes: int) -> None:
        """Note that one waits no more."""
        with self._lock:
            self.nbytes -= nbytes

    def status(self) -> dict[str, Any]:
        """Return the counters."""
        return {"bytes": self.nbytes, "bytes_max": limits.NOTES_BYTES_MAX, "lost": dict(self.lost)}
