"""Places: a set of positions of one request, resolved with the length of its prompt.

The engine captures these positions and the hub counts them. Both call the same functions, so the number of promised
rows is the number of captured rows. No operation costs more for a longer request: a set consists of stretches without
gaps and of strides, and only the part in the given window is read.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

FOREVER = 1 << 62
"""A position after all others."""


class Places:
    """The positions of one request.

    starts, stops: the ends of stretches without gaps, in order; stretches do not touch.
    strides: `range(a, b, step)`; they may overlap the stretches and each other.
    """

    __slots__ = ("starts", "stops", "strides")

    def __init__(self, stretches: Iterable[tuple[int, int]] = (), strides: Iterable[range] = ()) -> None:
        self.starts = array("q")
        self.stops = array("q")
        for start, stop in sorted(stretches):
            if start >= stop:
                continue
            if self.stops and start <= self.stops[-1]:
                self.stops[-1] = max(self.stops[-1], stop)
            else:
                self.starts.append(start)
                self.stops.append(stop)
        self.strides = tuple(dict.fromkeys(stride for stride in strides if stride))

    @classmethod
    def union(cls, parts: Iterable[Places]) -> Places:
        """Return the positions that are in any of the parts."""
        parts = list(parts)
        stretches = (pair for part in parts for pair in zip(part.starts, part.stops, strict=True))
        return cls(stretches, (stride for part in parts for stride in part.strides))

    def __contains__(self, position: int) -> bool:
        return self.stretch(position)[0]

    def stretch(self, position: int) -> tuple[bool, int]:
        """Return whether a position is in the set, and an end up to which all positions give the same answer."""
        index = bisect_right(self.stops, position)
        if index == len(self.starts):
            stop = FOREVER
        elif self.starts[index] <= position:
            return True, self.stops[index]
        else:
            stop = self.starts[index]
        for stride in self.strides:
            start = stride.start
            following = start if position <= start else position + (start - position) % stride.step
            if following < stride.stop:
                if following == position:
                    return True, position + 1
                stop = min(stop, following)
        return False, stop

    def first(self) -> int:
        """Return the first position of the set, `FOREVER` if it is empty."""
        inside, stop = self.stretch(0)
        return 0 if inside else stop

    def runs(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Return the part of the set in `[start, stop)` as runs `(first, end)`, in order and as long as possible."""
        if self.strides:
            return self._enumerated(start, stop)
        return [(first, end) for first, end in self._clipped(start, stop) if first < end]

    def count(self, start: int, stop: int) -> int:
        """Return the number of positions of the set in `[start, stop)`."""
        if len(self.strides) > 1:
            return sum(end - first for first, end in self.runs(start, stop))
        clipped = list(self._clipped(start, stop))
        total = sum(end - first for first, end in clipped)
        for stride in self.strides:
            total += len(_clip(stride, start, stop))
            total -= sum(len(_clip(stride, first, end)) for first, end in clipped)
        return total

    def until(self, rows: int) -> Places:
        """Return the first `rows` positions of a set with at most one stride."""
        assert len(self.strides) <= 1
        low, high = 0, FOREVER
        for stride in self.strides:
            high = stride.start + rows * stride.step
        if not self.strides:
            low, high = self._behind(rows), 0
        while low < high:
            middle = (low + high) // 2
            if self.count(0, middle) < rows:
                low = middle + 1
            else:
                high = middle
        return Places(self._clipped(0, low), [_clip(stride, 0, low) for stride in self.strides])

    def _behind(self, rows: int) -> int:
        """Return the position after the first `rows` positions of a set without strides."""
        for start, stop in zip(self.starts, self.stops, strict=True):
            if stop - start >= rows:
                return start + rows
            rows -= stop - start
        return FOREVER

    def _clipped(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for index in range(bisect_right(self.stops, start), len(self.starts)):
            if self.starts[index] >= stop:
                return
            yield max(self.starts[index], start), min(self.stops[index], stop)

    def _enumerated(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        parts = [np.arange(*span, dtype=np.int64) for span in self._clipped(start, stop)]
        for stride in self.strides:
            part = _clip(stride, start, stop)
            parts.append(np.arange(part.start, max(part.start, part.stop), part.step, dtype=np.int64))
        positions = np.unique(np.concatenate(parts))
        if not len(positions):
            return []
        gaps = np.flatnonzero(np.diff(positions) != 1)
        firsts = positions[np.concatenate([[0], gaps + 1])].tolist()
        lasts = positions[np.concatenate([gaps, [-1]])].tolist()
        return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _clip(stride: range, start: int, stop: int) -> range:
    """Return the part of a stride that is in `[start, stop)`."""
    skipped = max(0, -(-(start - stride.start) // stride.step))
    return range(stride.start + skipped * stride.step, min(stride.stop, stop), stride.step)
