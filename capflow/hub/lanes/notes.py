"""The notes in a consumer's queue: events without rows. Each has a weight, and the weight of all that wait is bounded.

The end of a request, an engine that connected and the answer to an action have no rows, so a bound on rows does not
bound them: if a consumer hangs, they would pile up for as long as the hub runs. A note that has no room is left out and
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

# The memory of a note besides its text: its request with its counts, and its place in the queue.
_NOTE_BYTES = 2 * limits.KIB
# How many bytes of memory one encoded byte takes.
_DECODED = 8

_encoder = msgspec.msgpack.Encoder()


def weight(note: Any) -> int:
    """Return about how many bytes of memory a note takes."""
    return _NOTE_BYTES + _DECODED * len(_encoder.encode(note))


class Notes:
    """The bytes of one consumer's notes that wait, at most `limits.NOTES_BYTES_MAX`; for any thread."""

    def __init__(self) -> None:
        # The bytes of the notes that wait. Guarded by `_lock`; any thread may read it.
        self.nbytes = 0
        # The largest value of `nbytes` so far.
        self.bytes_peak = 0
        # The number of notes that found no room, by kind. Written by the hub's thread.
        self.lost: Counter[Kind] = Counter()
        self._lock = threading.Lock()

    def admit(self, nbytes: int) -> bool:
        """Count a note if there is room for it to wait; return whether there is. A single note always has room."""
        with self._lock:
            if self.nbytes and self.nbytes + nbytes > limits.NOTES_BYTES_MAX:
                return False
            self.nbytes += nbytes
            self.bytes_peak = max(self.bytes_peak, self.nbytes)
            return True

    def taken(self, nbytes: int) -> None:
        """Count a note that does not wait any more."""
        with self._lock:
            self.nbytes -= nbytes

    def status(self) -> dict[str, Any]:
        """Return the counters."""
        return {"bytes": self.nbytes, "bytes_max": limits.NOTES_BYTES_MAX, "lost": dict(self.lost)}
