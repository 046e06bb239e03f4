"""The segments of a writer: records go into the newest one, and acknowledged segments are removed, oldest first.

Nothing here locks: the spool calls `sync` and `free` from its thread, and everything else under its lock.
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
    """The segments to sync, and whether to sync their directory."""

    segments: list[Segment]
    directory: bool


class Segments:
    """The segments of a directory, by serial.

    bytes_max: the bound of all segments together.
    segment_bytes: the length at which a new segment begins.
    """

    def __init__(self, files: Files, directory: Path, bytes_max: int, segment_bytes: int) -> None:
        self.directory = directory
        self.bytes_max = bytes_max
        self.segment_bytes = segment_bytes
        # The length of all segments, with the damaged ones that were set aside.
        self.nbytes = 0
        # How many damaged segments were set aside.
        self.bad = 0
        # Whether the name of a new segment is not synced.
        self.directory_dirty = False
        self._files = files
        self._all: list[Segment] = []
        # The serial of the newest segment.
        self._serial = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, segment: object) -> bool:
        return segment in self._all

    @property
    def active_bytes(self) -> int:
        """The length of the newest segment."""
        return self._all[-1].size

    def take(self, remains: Remains) -> None:
        """Take over the segments of an earlier writer."""
        self._all = list(remains.segments)
        self._serial = max((segment.serial for segment in self._all), default=0)
        self.nbytes = sum(segment.size for segment in self._all) + remains.bad_bytes
        self.bad = len(remains.bad)

    def begin(self, first: int) -> None:
        """Begin a segment of records from `first` on; later records of other segments become void."""
        self._serial += 1
        salt = int.from_bytes(os.urandom(8), "little")
        path = self.directory / f"{self._serial:08d}-{first:016d}-{salt:016x}.spool"
        self._all.append(Segment(path, self._serial, first, salt, fd=self._files.create(path)))
        self.directory_dirty = True

    def write(self, number: int, head: bytes, body: Any) -> None:
        """Write a record, into a new segment if the newest is full. Raises OSError; then the record is not taken."""
        active = self._all[-1]
        if active.size and active.size + items.HEADER_BYTES + len(head) + len(body) > self.segment_bytes:
            self.begin(number)
            active = self._all[-1]
        self._put(active, items.RECORD, number, head, body)
        active.dirty = True

    def mark(self, number: int) -> None:
        """Write a mark that every record up to `number` is durable. The mark itself may be lost."""
        if self.nbytes + items.HEADER_BYTES > self.bytes_max:
            return
        with contextlib.suppress(OSError):
            self._put(self._all[-1], items.MARK, number, b"", b"")

    def _put(self, segment: Segment, kind: int, number: int, head: bytes, body: Any) -> None:
        assert segment.fd is not None
        parts = [items.pack(kind, number, head, body, segment.salt), head, body]
        self._files.write(segment.fd, parts, segment.size)  # overwrites the rest of a failed write
        added = sum(map(len, parts))
        segment.size += added
        self.nbytes += added

    def unsynced(self) -> Unsynced:
        """Return the segments to sync, and count them as synced."""
        dirty = Unsynced([segment for segment in self._all if segment.dirty], self.directory_dirty)
        for segment in dirty.segments:
            segment.dirty = False
        self.directory_dirty = False
        return dirty

    def sync(self, unsynced: Unsynced) -> None:
        """Sync segments and directory. Raises OSError; then none of them counts as durable."""
        if unsynced.directory:
            self._files.fsync_dir(self.directory)
        for segment in unsynced.segments:
            assert segment.fd is not None
            self._files.fdatasync(segment.fd)

    def check(self) -> None:
        """Raise OSError if the newest segment was removed from its directory."""
        if self._all and (fd := self._all[-1].fd) is not None:
            self._files.check(fd)

    def seal(self, *, every: bool = False) -> None:
        """Close all segments but the newest for writing; with `every` the newest too."""
        for segment in self._all if every else self._all[:-1]:
            if segment.fd is not None and (every or not segment.dirty):
                with contextlib.suppress(OSError):
                    self._files.close(segment.fd)
                segment.fd, segment.dirty = None, False

    def give_up(self, first: int) -> None:
        """Close all segments for writing after a failed sync; remove those without a record below `first`, except one.

        That one makes void the later records of older segments. It is removed when a newer segment is durable.
        """
        self.seal(every=True)
        useless = sorted((s for s in self._all if s.first >= first), key=lambda s: (s.first, s.serial))
        for segment in useless[1:]:
            with contextlib.suppress(OSError):  # the next segment makes it void in any case
                self._files.unlink(segment.path)
            self._forget(segment)

    def at(self, number: int) -> tuple[Segment, int, int] | None:
        """Return the segment of a record, its length, and the number below which its records count; or None."""
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
        """Return the segments, except the newest, whose records all are at most `done` or void."""
        if self.directory_dirty:
            return []  # the segment that makes them void is not durable yet
        return [segment for segment, stop in self.ranges()[:-1] if max(done + 1, segment.first) >= stop]

    def free(self, segment: Segment) -> bool:
        """Remove a segment's file, or rename a damaged one if there is room; return whether its bytes are free."""
        aside = segment.damaged and self.bad < limits.SEGMENTS_BAD_MAX and self.nbytes <= self.bytes_max // 2
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if aside:
                self._files.rename(segment.path, segment.path.with_name(segment.path.name + BAD))
            else:
                self._files.unlink(segment.path)
        return not aside

    def freed(self, segment: Segment, *, bytes_free: bool) -> None:
        """Forget a segment after `free`."""
        if not bytes_free:
            self.bad += 1
            self.nbytes += segment.size
        self._forget(segment)

    def remove(self) -> None:
        """Remove the files of all segments, which must be sealed. Raises OSError."""
        for segment in self._all:
            self._files.unlink(segment.path)

    def _forget(self, segment: Segment) -> None:
        if segment.fd is not None:
            with contextlib.suppress(OSError):
                self._files.close(segment.fd)
            segment.fd = None
        self._all.remove(segment)
        self.nbytes -= segment.size
