"""The frames that a request's rows came in, for knowing one that comes again."""

from __future__ import annotations

from collections.abc import Iterator

from capflow.capture.frame import FrameHeader, Rank
from capflow.capture.intervals import Intervals

Worker = tuple[str, Rank]
"""One boot of one worker: its boot and rank."""


class FrameLog:
    """The numbers of the frames that were noted, by worker, and of no others."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        self._frames: dict[Worker, Intervals] = {}

    def add(self, header: FrameHeader) -> None:
        """Note a frame."""
        self.note((header.boot, header.rank), header.seq, header.seq)

    def note(self, worker: Worker, first: int, last: int) -> None:
        """Note the frames `first ..= last` of a worker."""
        frames = self._frames.get(worker)
        if frames is None:
            frames = self._frames[worker] = Intervals()
        frames.add(first, last)

    def take(self, worker: Worker, seq: int) -> bool:
        """Note a frame; return whether it was not noted before."""
        frames = self._frames.get(worker)
        if frames is None:
            frames = self._frames[worker] = Intervals()
        if frames.append(seq, seq):
            return True
        new = seq not in frames
        frames.add(seq, seq)
        return new

    def update(self, other: FrameLog) -> None:
        """Note what another log has."""
        for worker, first, last in other.runs():
            self.note(worker, first, last)

    def has(self, header: FrameHeader) -> bool:
        """Return whether a frame was noted."""
        frames = self._frames.get((header.boot, header.rank)) if self._frames else None
        return frames is not None and header.seq in frames

    def reaches(self, header: FrameHeader) -> bool:
        """Return whether a frame was noted that its worker sent with or after this one."""
        return any(header.seq <= last for worker, _, last in self.runs() if worker == (header.boot, header.rank))

    def knows_otherwise(self, header: FrameHeader) -> bool:
        """Return whether frames were noted of the worker's place, and none of this boot of it."""
        if (header.boot, header.rank) in self._frames:
            return False
        return any(rank == header.rank for _, rank in self._frames)

    def runs(self) -> Iterator[tuple[Worker, int, int]]:
        """Yield the frames noted as `(worker, first, last)`, each run without a gap."""
        for worker, frames in self._frames.items():
            for first, last in frames:
                yield worker, first, last

    def __bool__(self) -> bool:
        return bool(self._frames)
