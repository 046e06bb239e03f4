"""Reads the state of a spool's directory, however its last writer ended. Nothing here changes a file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from capflow.buffers.spool import items
from capflow.buffers.spool.cursor import Cursor, read_cursor
from capflow.buffers.spool.files import Files
from capflow.buffers.spool.spare import SPARE
from capflow.errors import CapflowError, UsageError, explain

LOCK, CURSOR, BAD = "lock", "cursor", ".bad"
BESIDE = (SPARE, CURSOR, LOCK)
"""The files beside the segments, in the order of removal: without the lock another process may take the directory."""

ENDLESS = 1 << 63
_SEGMENT = re.compile(r"(\d{8,18})-(\d{16,18})-([0-9a-f]{16})\.spool")


@dataclass(eq=False)
class Segment:
    """One segment.

    serial: its number among the segments of the spool.
    first: the lowest record number that it may hold.
    fd: the descriptor for writing; None if it is sealed.
    dirty: whether it has unsynced bytes.
    """

    path: Path
    serial: int
    first: int
    salt: int
    size: int = 0
    fd: int | None = None
    dirty: bool = False
    # Whether the reader lost a record in it.
    damaged: bool = False


class Remains(NamedTuple):
    """The state of a spool.

    last: the highest record number that counts.
    cut: the segment that a crash cut, the offset of the cut, and the number of void bytes from there on, in later
        segments too; None if nothing was cut.
    bad: the damaged segments that were set aside.
    bad_bytes: their length.
    """

    segments: list[Segment]
    cursor: Cursor
    last: int
    cut: tuple[Segment, int, int] | None
    bad: list[Path]
    bad_bytes: int


@contextlib.contextmanager
def opened(files: Files, path: Path) -> Iterator[int]:
    """Open a file for reading, and close it at the end."""
    fd = files.open(path)
    try:
        yield fd
    finally:
        files.close(fd)


def check(directory: Path) -> None:
    """Raise UsageError if a directory is not a spool."""
    if not (directory / LOCK).is_file():
        got = "a directory without a spool" if directory.is_dir() else "no directory"
        do = "name the directory that holds its segments and `lock`"
        raise UsageError(explain(f"spool {directory}", got=got, expected="the directory of a spool", do=do))


def unreadable(directory: Path, e: OSError) -> CapflowError:
    """Return the error for a spool that cannot be read."""
    where, got = f"spool {directory} cannot be read", e.strerror or str(e)
    return CapflowError(explain(where, got=got, expected="a readable disk", do="repair it and try again"))


def heads(files: Files, fd: int, segment: Segment, acked: int, stop: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and head of each record above `acked` and below `stop`; None for a damaged head.

    Raises OSError.
    """
    for item in items.scan(files, fd, segment.size, segment.salt):
        if isinstance(item, items.Item) and item.header.kind == items.RECORD and acked < item.header.id < stop:
            yield item.header.id, items.read_head(files, fd, item)


def stops(segments: Sequence[Segment]) -> list[int]:
    """Return for each segment the number below which its records count."""
    end, below = ENDLESS, []
    for segment in reversed(segments):
        below.append(end)
        end = min(end, segment.first)
    return below[::-1]


def survey(files: Files, directory: Path) -> Remains:
    """Return the state of a spool. Raises OSError.

    It reads the headers of the segments from the newest one with a mark on, and the records that may not be durable.
    """
    segments, bad, bad_bytes = _list(files, directory)
    before = min((segment.first for segment in segments), default=1) - 1
    cursor = read_cursor(files, directory / CURSOR) or Cursor(acked=before)
    cursor = cursor._replace(synced=max(cursor.synced, _marked(files, segments)))
    last = max(cursor.acked, cursor.synced, before)
    cut: tuple[Segment, int, int] | None = None
    for segment, stop in zip(segments, stops(segments), strict=True):
        if cut is not None:
            cut = (*cut[:2], cut[2] + segment.size)
        elif stop > last + 1:
            last, end = _whole(files, segment, stop, last)
            if end < segment.size if stop == ENDLESS else last + 1 < stop:
                cut = (segment, end, segment.size - end)
    return Remains(segments, cursor, last, cut, bad, bad_bytes)


def _list(files: Files, directory: Path) -> tuple[list[Segment], list[Path], int]:
    """Return the segments by serial, the damaged segments that were set aside, and the length of these."""
    segments, bad, bad_bytes = [], [], 0
    for name in sorted(files.names(directory)):
        match = _SEGMENT.fullmatch(name.removesuffix(BAD))
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError), opened(files, directory / name) as fd:  # the writer may remove it
            size = files.size(fd)
            if name.endswith(BAD):
                bad.append(directory / name)
                bad_bytes += size
            else:
                segments.append(Segment(directory / name, int(match[1]), int(match[2]), int(match[3], 16), size))
    return sorted(segments, key=lambda segment: segment.serial), bad, bad_bytes


def _marked(files: Files, segments: Sequence[Segment]) -> int:
    """Return the highest number of a mark. Marks rise, so the newest segment with a mark decides."""
    for segment in reversed(segments):
        with opened(files, segment.path) as fd:
            scanned = items.scan(files, fd, segment.size, segment.salt)
            marks = [i.header.id for i in scanned if isinstance(i, items.Item) and i.header.kind == items.MARK]
        if marks:
            return max(marks)
    return 0


def _whole(files: Files, segment: Segment, stop: int, last: int) -> tuple[int, int]:
    """Return the last record after `last` up to which all are whole, and the offset of the next item."""
    end = 0
    with opened(files, segment.path) as fd:
        for item in items.scan(files, fd, segment.size, segment.salt):
            if isinstance(item, items.DamagedBytes):
                continue
            if item.header.kind == items.RECORD and item.header.id > last:
                if item.header.id != last + 1 or item.header.id >= stop or None in items.read(files, fd, item):
                    break
                last += 1
            if item.end <= segment.size:
                end = item.end
    return last, end
