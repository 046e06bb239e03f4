"""Which frames of which workers a request's rows came in, for knowing one that comes again."""

from __future__ import annotations

from capflow.frame import FrameHeader, Rank


class FrameLog:
    """The first and the last frame with rows of one request, by boot and rank of the worker."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, Rank], tuple[int, int]] = {}

    def add(self, header: FrameHeader) -> None:
        """Note a frame."""
        worker = (header.boot, header.rank)
        self.note(worker, header.seq, header.seq)

    def note(self, worker: tuple[str, Rank], first: int, last: int) -> None:
        """Note that the frames of a worker from a first to a last one are in."""
        had = self.frames.get(worker)
        if had is None:
            self.frames[worker] = (first, last)
        elif first < had[0] or last > had[1]:
            self.frames[worker] = (min(had[0], first), max(had[1], last))

    def has(self, header: FrameHeader) -> bool:
        """Return whether a frame was noted, or lies between two that were."""
        had = self.frames.get((header.boot, header.rank)) if self.frames else None
        return had is not None and had[0] <= header.seq <= had[1]
