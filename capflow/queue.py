"""The byte queue: items of known size between two threads, bounded by the sum of their sizes.

Each item is of a source. Invariants: items of one source leave in the order in which they came, and sources take turns, an item each, so
that an item waits for at most one of each other source and for those before it of its own; the sum of the sizes is at most
`bytes_max`, unless one item alone is larger, or items were put in with `force`. A queue does not choose what to do
when it is full: `offer` refuses, `put` waits, `displace` throws out, and an `Overload` says which of them its owner is to call.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Overload(enum.StrEnum):
    """What happens when a queue is full."""

    BLOCK = "block"
    """The sender waits. Nothing is lost; memory is bounded; what is upstream becomes as slow as what is downstream."""

    DROP = "drop"
    """The sender never waits. The newest rows are lost, counted, and named in the request's result."""

    SKIP = "skip"
    """The sender never waits. The oldest rows go to make room for the newest: lost, counted, named in the request's result."""

    SPILL = "spill"
    """What has no room goes to a spool on disk, and comes from there in order. A full spool blocks or drops."""


class ByteQueue(Generic[T]):
    """A first-in first-out queue of items with sizes, for any number of threads.

    bytes_max: the bound on the sum of the sizes. An item larger than that is admitted when the queue is empty.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        # Items with sizes and sources, by number; emptied by `get`.
        self._items: OrderedDict[int, tuple[T, int, str]] = OrderedDict()
        self._lines: OrderedDict[str, deque[int]] = OrderedDict()  # the numbers of each source that has items, by turn
        # The numbers of those that have a size, so that `displace` looks at no other.
        self._sized: OrderedDict[int, None] = OrderedDict()
        self._bytes = 0  # sum of the sizes in `_items`
        self._closed = False  # set once, by `close`
        self._lock = threading.RLock()  # guards every field here
        self._changed = threading.Condition(
            self._lock
        )  # notified when an item came, and when one left that is waited for
        self._putting = 0  # threads that wait for room
        # Counters, from the queue's start to its end; written under the lock, read by anyone.
        self.accepted = 0
        self.refused = 0
        self.bytes_peak = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def nbytes(self) -> int:
        """The sum of the sizes of the items in the queue."""
        return self._bytes

    @property
    def closed(self) -> bool:
        """Whether the queue takes nothing any more."""
        return self._closed

    def offer(self, item: T, nbytes: int, source: str = "") -> bool:
        """Add the item if there is room; return whether it was added."""
        with self._lock:
            if not self._fits(nbytes):
                self.refused += 1
                return False
            self._add(item, nbytes, source)
            return True

    def put(self, item: T, nbytes: int, timeout_s: float | None = None) -> bool:
        """Add the item, waiting for room for at most `timeout_s`; return whether it was added."""
        with self._lock:
            self._putting += 1
            try:
                self._changed.wait_for(lambda: self._closed or self._fits(nbytes), timeout_s)
            finally:
                self._putting -= 1
            if not self._fits(nbytes):
                self.refused += 1
                return False
            self._add(item, nbytes)
            return True

    def displace(self, item: T, nbytes: int, source: str = "") -> list[T]:
        """Add the item; return those that went to make room: the oldest, as many as it takes, items of size 0 never."""
        gone: list[T] = []
        with self._lock:
            if self._closed:
                return [item]
            while self._sized and self._bytes + nbytes > self.bytes_max:
                gone.append(self._take(next(iter(self._sized))))
            self._add(item, nbytes, source)
        self.refused += len(gone)
        return gone

    def force(self, item: T, nbytes: int = 0, source: str = "") -> None:
        """Add the item, full or not: for what its owner bounds in another way. Nothing is added to a closed queue."""
        with self._lock:
            if not self._closed:
                self._add(item, nbytes, source)

    def remove(self, match: Callable[[T], bool]) -> T | None:
        """Remove and return the oldest item that matches; None when none does. Looks at every item before it."""
        with self._lock:
            for number, (item, _, _) in self._items.items():
                if match(item):
                    self._changed.notify_all()
                    return self._take(number)
            return None

    def get(self, timeout_s: float | None = None) -> T | None:
        """Remove and return the oldest item of the source whose turn it is; None when none came in time, or ever will.

        A closed queue gives what is left in it.
        """
        with self._lock:
            if not self._items and timeout_s != 0:
                self._changed.wait_for(lambda: self._items or self._closed, timeout_s)
            if not self._items:
                return None
            source, line = next(iter(self._lines.items()))
            if len(line) > 1:
                self._lines.move_to_end(source)
            if self._putting:
                self._changed.notify_all()
            return self._take(line[0])

    def close(self) -> None:
        """Take nothing any more, and wake everyone who waits."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return not self._closed and (not self._items or self._bytes + nbytes <= self.bytes_max)

    def _take(self, number: int) -> T:
        """Remove and return an item: the first of its source, or one of those near it that `displace` and `remove` name."""
        item, nbytes, source = self._items.pop(number)
        line = self._lines[source]
        if len(line) == 1:
            del self._lines[source]
        else:
            line.remove(number)
        if nbytes:
            del self._sized[number]
            self._bytes -= nbytes
        return item

    def _add(self, item: T, nbytes: int, source: str = "") -> None:
        self._items[self.accepted] = item, nbytes, source
        line = self._lines.get(source)
        if line is None:
            line = self._lines[source] = deque()
        line.append(self.accepted)
        if nbytes:
            self._sized[self.accepted] = None
            self._bytes += nbytes
        self.accepted += 1
        self.bytes_peak = max(self.bytes_peak, self._bytes)
        self._changed.notify_all()
