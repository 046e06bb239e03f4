"""The byte queue: items of known size between two threads, bounded by the sum of their sizes.

Each item has a source. The owner of the queue decides by its `WhenFull` policy which method it calls on a full queue:
`offer` refuses, `put` waits, `displace` discards.

Invariants:

* Items of one source leave in the order in which they came. Sources take turns, one item each: an item waits for at
  most one item of each other source, and for the earlier items of its own.
* The sum of the sizes is at most `bytes_max`, unless one item alone is larger or items were added with `force`.
* The part of a source is `bytes_max` divided by the number of sources with sized items. `displace` discards no item of
  a source that has at most its part, and refuses no item that leaves its source with at most its part.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteQueue(Generic[T]):
    """A first-in first-out queue of items with sizes, for any number of threads.

    bytes_max: the bound of the sum of the sizes. A larger item is admitted if the queue is empty.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        # Each item with its size and source, by number.
        self._items: dict[int, tuple[T, int, str]] = {}
        # The sources that have items; the next turn is the first's.
        self._turns: OrderedDict[str, None] = OrderedDict()
        # For each source the numbers of its items with a size, and of its items of size 0; oldest first.
        self._sized: dict[str, OrderedDict[int, None]] = {}
        self._notes: dict[str, deque[int]] = {}
        # The sum of the sizes of each source in `_sized`.
        self._held: dict[str, int] = {}
        # The sum of the sizes in `_items`.
        self._bytes = 0
        # Set once, by `close`.
        self._closed = False
        # Guards every field.
        self._lock = threading.RLock()
        # Notified when an item came while a thread waits for one, and when one left while a thread waits for room.
        self._changed = threading.Condition(self._lock)
        # The numbers of threads that wait for room and for items.
        self._putting = self._getting = 0
        # Counters since the start; written under the lock, read without it.
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
        """Whether the queue is closed."""
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

    def displace(
        self,
        item: T,
        nbytes: int,
        source: str,
        lose: Callable[[T], object],
        *,
        newest: bool = False,
        wake: bool = True,
    ) -> bool:
        """Add the item and discard others to make room; return whether it was added.

        If the item leaves its source with at most its part, items of sources with more than their part are discarded.
        Otherwise the oldest items of its own source are discarded, and the item is refused if that is not enough. Items
        of size 0 are never discarded.

        lose: called with each discarded item before `get` returns another one.
        newest: discard the newest items of a source instead of the oldest; of its own source that is the item itself.
        wake: as for `force`.
        """
        with self._lock:
            if self._closed:
                self.refused += 1
                return False
            if self._bytes + nbytes > self.bytes_max and self._held and not self._clear(nbytes, source, lose, newest):
                self.refused += 1
                return False
            self._add(item, nbytes, source, wake=wake)
            return True

    def _clear(self, nbytes: int, source: str, lose: Callable[[T], object], newest: bool) -> bool:
        """Make room for an item without taking the part of another source; return whether there is room."""
        held = self._held
        part = self.bytes_max // (len(held) + (source not in held))
        own = held.get(source, 0)
        if nbytes > part and (self._bytes - own + nbytes > self.bytes_max and own < self._bytes):
            return False
        while source in held and held[source] + nbytes > part and self._bytes + nbytes > self.bytes_max:
            if newest:
                return False
            self._throw_out(source, lose, newest)
        if self._bytes + nbytes > self.bytes_max and held:
            for other in sorted(held, key=held.__getitem__, reverse=True):
                while held.get(other, 0) > part and self._bytes + nbytes > self.bytes_max:
                    self._throw_out(other, lose, newest)
        return True

    def _throw_out(self, source: str, lose: Callable[[T], object], newest: bool) -> None:
        numbers = self._sized[source]
        lose(self._take(next(reversed(numbers) if newest else iter(numbers))))
        self.refused += 1

    def force(self, item: T, nbytes: int = 0, source: str = "", *, wake: bool = True) -> None:
        """Add the item even if the queue is full: for items that the owner bounds in another way.

        A closed queue discards it.

        wake: whether to wake a thread that waits for items. If not, the caller calls `wake` soon.
        """
        with self._lock:
            if not self._closed:
                self._add(item, nbytes, source, wake=wake)

    def wake(self) -> None:
        """Wake the threads that wait for items, if there are any."""
        if self._getting:
            with self._lock:
                self._changed.notify_all()

    def remove(self, match: Callable[[T], bool]) -> T | None:
        """Remove and return the oldest item that matches; None if none does. It tests every earlier item."""
        with self._lock:
            for number, (item, _, _) in self._items.items():
                if match(item):
                    self._changed.notify_all()
                    return self._take(number)
            return None

    def get(self, timeout_s: float | None = None) -> T | None:
        """Remove and return the oldest item of the source whose turn it is.

        None if no item came in time, or if the queue is closed and empty. A closed queue still returns its items.
        """
        with self._lock:
            if not self._items and timeout_s != 0:
                self._getting += 1
                try:
                    self._changed.wait_for(lambda: self._items or self._closed, timeout_s)
                finally:
                    self._getting -= 1
            if not self._items:
                return None
            source = next(iter(self._turns))
            self._turns.move_to_end(source)
            if self._putting:
                self._changed.notify_all()
            return self._take(self._first(source))

    def close(self) -> None:
        """Close the queue, and wake every thread that waits."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return not self._closed and (not self._items or self._bytes + nbytes <= self.bytes_max)

    def _first(self, source: str) -> int:
        """Return the number of the oldest item of a source."""
        if source not in self._notes:
            return next(iter(self._sized[source]))
        note = self._notes[source][0]
        return min(note, next(iter(self._sized[source]))) if source in self._sized else note

    def _take(self, number: int) -> T:
        item, nbytes, source = self._items.pop(number)
        if not nbytes:
            notes = self._notes[source]
            if len(notes) > 1:
                notes.remove(number)
                return item
            del self._notes[source]
        else:
            self._bytes -= nbytes
            left = self._held[source] - nbytes
            if left:
                self._held[source] = left
                del self._sized[source][number]
                return item
            del self._held[source], self._sized[source]
        if source not in self._held and source not in self._notes:
            del self._turns[source]
        return item

    def _add(self, item: T, nbytes: int, source: str = "", *, wake: bool = True) -> None:
        number = self.accepted
        self._items[number] = item, nbytes, source
        self._turns.setdefault(source)
        if not nbytes:
            self._notes.setdefault(source, deque()).append(number)
        elif source in self._held:
            self._held[source] += nbytes
            self._sized[source][number] = None
        else:
            self._held[source] = nbytes
            self._sized[source] = OrderedDict.fromkeys((number,))
        self._bytes += nbytes
        self.accepted += 1
        self.bytes_peak = max(self.bytes_peak, self._bytes)
        if wake and self._getting:
            self._changed.notify_all()
