"""What `capflow spool` says of a spool, and how it empties one; a spool that is written meanwhile is only read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capflow.errors import CapflowError, UsageError, explain
from capflow.spool import items
from capflow.spool.files import Files
from capflow.spool.survey import CURSOR, ENDLESS, LOCK, Segment, opened, stops, survey


def inspect(directory: Path, *, verify: bool = False) -> dict[str, Any]:
    """Return what a spool holds, as plain JSON values; verify: read every record that is not done with.

    `lost` counts the records that were durable, are not done with and cannot be read; without verify, those only whose headers are gone.
    Raises UsageError when the directory is no spool, CapflowError when it cannot be read.
    """
    files = Files()
    _check(directory)
    try:
        remains = survey(files, directory)
        rows = []
        for segment, stop in zip(remains.segments, stops(remains.segments), strict=True):
            stop = min(stop, remains.last + 1) if stop == ENDLESS else stop  # noqa: PLW2901
            with contextlib.suppress(FileNotFoundError):  # its writer has just removed it
                rows.append(_segment(files, segment, stop, remains.cursor.acked, verify=verify))
    except OSError as e:
        raise CapflowError(explain(f"spool {directory} cannot be read", got=e.strerror or str(e))) from e
    left = remains.last - remains.cursor.acked
    found = sum(row["records"] for row in rows)
    return {
        "directory": str(directory),
        "in_use": in_use(directory),
        "acknowledged": remains.cursor.acked,
        "last": remains.last,
        "records": left,
        "bytes": sum(row["bytes"] for row in rows) + remains.bad_bytes,
        "void_bytes": remains.cut[2] if remains.cut is not None else 0,
        "lost": [] if in_use(directory) and found < left else _gaps(rows, remains.cursor.acked, remains.last),
        "set_aside": [path.name for path in remains.bad],
        "segments": [{key: value for key, value in row.items() if key != "ranges"} for row in rows],
    }


def _segment(files: Files, segment: Segment, stop: int, acked: int, *, verify: bool) -> dict[str, Any]:
    """Return a segment's row; ranges: the records that were found and are not done with."""
    ranges: list[list[int]] = []
    damaged = 0
    with opened(files, segment.path) as fd:
        for item in items.scan(files, fd, segment.size, segment.salt):
            if isinstance(item, items.Damage):
                damaged += item.end - item.offset
                continue
            number = item.header.id
            if item.header.kind != items.RECORD or not acked < number < stop:
                continue
            if item.end > segment.size or (verify and None in items.read(files, fd, item)):
                damaged += min(item.end, segment.size) - item.offset
            elif ranges and ranges[-1][1] == number - 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
    return {
        "name": segment.path.name,
        "first": segment.first,
        "records": sum(last - first + 1 for first, last in ranges),
        "bytes": segment.size,
        "damaged_bytes": damaged,
        "ranges": ranges,
    }


def _gaps(rows: list[dict[str, Any]], acked: int, last: int) -> list[list[int]]:
    """Return the ranges of records that no segment holds."""
    gaps, expected = [], acked + 1
    for first, until in sorted(span for row in rows for span in row["ranges"]):
        if first > expected:
            gaps.append([expected, first - 1])
        expected = max(expected, until + 1)
    if expected <= last:
        gaps.append([expected, last])
    return gaps


def in_use(directory: Path) -> bool:
    """Return whether a process writes the spool."""
    try:
        with _held(directory) as mine:
            return not mine
    except OSError:
        return False  # a spool that this process may not write


def purge(directory: Path) -> int:
    """Remove everything that a spool holds, and nothing else; return how many bytes that was.

    Raises CapflowError when a process writes it.
    """
    _check(directory)
    try:
        with _held(directory) as mine:
            if not mine:
                raise CapflowError(explain(f"spool {directory} is in use", do="stop the process that writes it"))
            remains = survey(Files(), directory)
            paths = [*(segment.path for segment in remains.segments), *remains.bad, directory / CURSOR]
            total = 0
            for path in paths:  # the cursor last: without it, what is left would be read again
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
                    path.unlink()
            return total
    except OSError as e:
        raise CapflowError(explain(f"spool {directory} cannot be emptied", got=e.strerror or str(e))) from e


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Hold the spool's lock, if there is one to hold; yield whether nobody else does."""
    fd = Files().lock(directory / LOCK)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _check(directory: Path) -> None:
    if not (directory / LOCK).is_file():
        what = "a directory without a spool" if directory.is_dir() else "no directory"
        raise UsageError(explain(f"spool {directory}", got=what, expected="the directory of a spool"))
