"""Sets of whole numbers, kept as runs without gaps: the frames of a store, or the positions of a request."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Intervals:
    """A growing set of whole numbers.

    Invariant: the runs are in order, do not overlap and do not touch. Adding numbers in order costs the same however
    large the set is.
    """

    __slots__ = ("_firsts", "_lasts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> None:
        """Add the numbers `first ..= last`; nothing if `last` is below `first`."""
        if last < first or self.append(first, last):
            return
        firsts, lasts = self._firsts, self._lasts
        # The runs `begin .. end` overlap or touch the new one.
        begin = bisect_left(lasts, first - 1)
        end = bisect_right(firsts, last + 1)
        if begin < end:
            first, last = min(first, firsts[begin]), max(last, lasts[end - 1])
        firsts[begin:end], lasts[begin:end] = [first], [last]

    def append(self, first: int, last: int) -> bool:
        """Add the numbers `first ..= last`, one or more, if they are above all others; return whether they are."""
        lasts = self._lasts
        if not lasts or first > lasts[-1] + 1:
            self._firsts.append(first)
            lasts.append(last)
            return True
        if first == lasts[-1] + 1:
            lasts[-1] = last
            return True
        return False

    @property
    def last(self) -> int:
        """The highest number; -1 in an empty set."""
        return self._lasts[-1] if self._lasts else -1

    def missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the runs `(first, last)` of `first ..= last` that are not in the set."""
        index = bisect_left(self._lasts, first)
        while first <= last:
            if index == len(self._firsts) or self._firsts[index] > last:
                yield first, last
                return
            if self._firsts[index] > first:
                yield first, self._firsts[index] - 1
            first = self._lasts[index] + 1
            index += 1

    def __contains__(self, number: int) -> bool:
        index = bisect_left(self._lasts, number)
        return index < len(self._firsts) and self._firsts[index] <= number

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the runs `(first, last)`, both ends included."""
        return zip(tuple(self._firsts), tuple(self._lasts), strict=True)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __repr__(self) -> str:
        return f"Intervals({list(self)})"
