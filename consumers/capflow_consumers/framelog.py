"""A log of the frames that a request's rows came in, to recognise repeated frames."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from capflow.capture.frame import FrameHeader, Rank
from capflow.capture.intervals import Intervals

Worker = tuple[str, Rank]
"""One boot of one worker: the boot and the rank."""


class FrameLog:
    """The numbers of the noted frames, by worker."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: defaultdict[Worker, Intervals] = defaultdict(Intervals)

    def add(self, header: FrameHeader) -> None:
        """Note a frame."""
        self.note((header.boot, header.rank), header.seq, header.seq)

    def note(self, worker: Worker, first: int, last: int) -> None:
        """Note the frames `first ..= last` of a worker."""
        self._frames[worker].add(first, last)

    def take(self, worker: Worker, seq: int) -> bool:
        """Note a frame; return whether it is new."""
        frames = self._frames[worker]
        if frames.append(seq, seq):
            return True
        new = seq not in frames
        frames.add(seq, seq)
        return new

    def update(self, other: FrameLog) -> None:
        """Note the frames of another log."""
        for worker, first, last in other.runs():
            self.note(worker, first, last)

    def has(self, header: FrameHeader) -> bool:
        """Return whether a frame was noted."""
        frames = self._frames.get((header.boot, header.rank)) if self._frames else None
        return frames is not None and header.seq in frames

    def last(self, worker: Worker) -> int:
        """Return the highest number of a worker's noted frames; -1 if there are none."""
        frames = self._frames.get(worker) if self._frames else None
        return -1 if frames is None else frames.last

    def reaches(self, header: FrameHeader) -> bool:
        """Return whether this frame or a later one of the same worker was noted."""
        return any(header.seq <= last for worker, _, last in self.runs() if worker == (header.boot, header.rank))

    def knows_otherwise(self, header: FrameHeader) -> bool:
        """Return whether frames of the worker's rank were noted, but none of this boot."""
        if (header.boot, header.rank) in self._frames:
            return False
        return any(rank == header.rank for _, rank in self._frames)

    def runs(self) -> Iterator[tuple[Worker, int, int]]:
        """Yield the noted frames as `(worker, first, last)`, each run without a gap."""
        for worker, frames in self._frames.items():
            for first, last in frames:
                yield worker, first, last

    def __bool__(self) -> bool:
        return bool(self._frames)
