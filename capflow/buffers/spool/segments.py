"""The segments that a writer has: what is written goes into the newest, and what is done with is removed, oldest first.

Nothing here locks; the spool calls `sync` and `free` from its thread, everything else under its lock.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from capflow import limits
from capflow.buffers.spool import items
from capflow.buffers.spool.files import Files
from capflow.buffers.spool.survey import BAD, ENDLESS, Remains, Segment, stops


class Unsynced(NamedTuple):
    """What a sync has to do: these segments, and their directory."""

    segments: list[Segment]
    directory: bool


class Segments:
    """The segments of a directory, by serial.

    bytes_max: of all of them.
    segment_bytes: when to begin another one.
    """

    def __init__(self, files: Files, directory: Path, bytes_max: int, segment_bytes: int) -> None:
        self.directory = directory
        self.bytes_max = bytes_max
        self.segment_bytes = segment_bytes
        # Their length, with what was set aside.
        self.nbytes = 0
        # How many were set aside.
        self.bad = 0
        # A segment was made, and its name is not synced.
        self.directory_dirty = False
        self._files = files
        self._all: list[Segment] = []
        # Of the newest.
        self._serial = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, segment: object) -> bool:
        return segment in self._all

    @property
    def active_bytes(self) -> int:
        """The length of the segment that is written to."""
        return self._all[-1].size

    def take(self, remains: Remains) -> None:
        """Take over what an earlier writer left."""
        self._all = list(remains.segments)
        self._serial = max((segment.serial for segment in self._all), default=0)
        self.nbytes = sum(segment.size for segment in self._all) + remains.bad_bytes
        self.bad = len(remains.bad)

    def begin(self, first: int) -> None:
        """Begin a segment of records from `first` on; what others hold from there on is void."""
        self._serial += 1
        salt = int.from_bytes(os.urandom(8), "little")
        path = self.directory / f"{self._serial:08d}-{first:016d}-{salt:016x}.spool"
        self._all.append(Segment(path, self._serial, first, salt, fd=self._files.create(path)))
        self.directory_dirty = True

    def write(self, number: int, head: bytes, body: Any) -> None:
        """Write a record, into a new segment when the newest is long enough. Raises OSError, having taken nothing."""
        active = self._all[-1]
        if active.size and active.size + items.HEADER_BYTES + len(head) + len(body) > self.segment_bytes:
            self.begin(number)
            active = self._all[-1]
        self._put(active, items.RECORD, number, head, body)
        active.dirty = True

    def mark(self, number: int) -> None:
        """Note that every record up to here is durable; the note itself need not be."""
        if self.nbytes + items.HEADER_BYTES > self.bytes_max:
            return
        with contextlib.suppress(OSError):
            self._put(self._all[-1], items.MARK, number, b"", b"")

    def _put(self, segment: Segment, kind: int, number: int, head: bytes, body: Any) -> None:
        assert segment.fd is not None
        parts = [items.pack(kind, number, head, body, segment.salt), head, body]
        self._files.write(segment.fd, parts, segment.size)  # what a failed write left is written over
        added = sum(map(len, parts))
        segment.size += added
        self.nbytes += added

    def unsynced(self) -> Unsynced:
        """Return what is to be synced; the next call returns what has come by then."""
        dirty = Unsynced([segment for segment in self._all if segment.dirty], self.directory_dirty)
        for segment in dirty.segments:
            segment.dirty = False
        self.directory_dirty = False
        return dirty

    def sync(self, unsynced: Unsynced) -> None:
        """Have it on the disk. Raises OSError; then nothing of it is known to be."""
        if unsynced.directory:
            self._files.fsync_dir(self.directory)
        for segment in unsynced.segments:
            assert segment.fd is not None
            self._files.fdatasync(segment.fd)

    def check(self) -> None:
        """Raise OSError when the segment that is written to has no name any more."""
        if self._all and (fd := self._all[-1].fd) is not None:
            self._files.check(fd)

    def seal(self, *, every: bool = False) -> None:
        """Write no more to any segment but the newest; and there neither, if every."""
        for segment in self._all if every else self._all[:-1]:
            if segment.fd is not None and (every or not segment.dirty):
                with contextlib.suppress(OSError):
                    self._files.close(segment.fd)
                segment.fd, segment.dirty = None, False

    def give_up(self, first: int) -> None:
        """Write to none of the segments any more: a sync failed. Of those that hold nothing below `first` one is kept.

        That one goes when a newer one is durable: until then it makes void what older segments hold from its first record on.
        """
        self.seal(every=True)
        useless = sorted((s for s in self._all if s.first >= first), key=lambda s: (s.first, s.serial))
        for segment in useless[1:]:
            with contextlib.suppress(OSError):  # it is void all the same once the next segment begins
                self._files.unlink(segment.path)
            self._forget(segment)

    def at(self, number: int) -> tuple[Segment, int, int] | None:
        """Return the segment that holds a record, its length and the number below which its records count; None if none does."""
        for segment, stop in reversed(self.ranges()):
            if segment.first <= number:
                return segment, segment.size, stop
        return None

    def ranges(self) -> list[tuple[Segment, int]]:
        """Return each segment with the number below which its records count."""
        return list(zip(self._all, stops(self._all), strict=True))

    def first(self) -> int:
        """Return the lowest number that any segment may hold."""
        return min((segment.first for segment in self._all), default=ENDLESS)

    def done(self, done: int) -> list[Segment]:
        """Return the segments, but for the newest, that hold nothing that counts above `done`."""
        if self.directory_dirty:
            return []  # until what makes them void is durable
        return [segment for segment, stop in self.ranges()[:-1] if max(done + 1, segment.first) >= stop]

    def free(self, segment: Segment) -> bool:
        """Remove a segment's file, or set it aside if it is damaged and there is room; return whether its bytes are free."""
        aside = segment.damaged and self.bad < limits.SEGMENTS_BAD_MAX and self.nbytes <= self.bytes_max // 2
        with contextlib.suppress(FileNotFoundError):  # someone took it away
            if aside:
                self._files.rename(segment.path, segment.path.with_name(segment.path.name + BAD))
            else:
                self._files.unlink(segment.path)
        return not aside

    def freed(self, segment: Segment, *, bytes_free: bool) -> None:
        """Note that `free` was done."""
        if not bytes_free:
            self.bad += 1
            self.nbytes += segment.size
        self._forget(segment)

    def remove(self) -> None:
        """Remove every segment's file, once all are sealed. Raises OSError."""
        for segment in self._all:
            self._files.unlink(segment.path)

    def _forget(self, segment: Segment) -> None:
        if segment.fd is not None:
            with contextlib.suppress(OSError):
                self._files.close(segment.fd)
            segment.fd = None
        self._all.remove(segment)
        self.nbytes -= segment.size
