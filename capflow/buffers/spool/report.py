"""The report of `capflow spool`, and emptying and removing a spool. A report never changes a spool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from capflow.buffers.spool import items
from capflow.buffers.spool.cursor import CursorFile
from capflow.buffers.spool.files import Files
from capflow.buffers.spool.spare import SPARE
from capflow.buffers.spool.survey import (
    BESIDE,
    CURSOR,
    ENDLESS,
    LOCK,
    Remains,
    Segment,
    check,
    opened,
    stops,
    survey,
    unreadable,
)
from capflow.errors import CapflowError, explain

_LOOKS_MAX = 5  # tries, if the writer removes segments meanwhile

Gaps = list[list[int]]
"""Ranges of records, `[first, last]` each, in order."""


class _Look(NamedTuple):
    """One reading of a spool: the remains, a row for each segment, and the records that no segment holds."""

    remains: Remains
    rows: list[dict[str, Any]]
    lost: Gaps


def inspect(directory: Path, *, verify: bool = False) -> dict[str, Any]:
    """Return the report of a spool as plain JSON values.

    `lost` has the durable, unacknowledged records that cannot be read; without `verify` only those without a header.
    Raises UsageError if the directory is not a spool, CapflowError if it cannot be read.

    verify: read every record that is not acknowledged.
    """
    files = Files()
    check(directory)
    try:
        used = in_use(directory)
        look = _look(files, directory, verify=verify)
        lost = look.lost
        if lost and (used or in_use(directory)):  # a change by the writer may look like a loss, but not twice
            lost = _both(lost, _look(files, directory, verify=verify).lost)
    except OSError as e:
        raise unreadable(directory, e) from e
    remains, rows = look.remains, look.rows
    return {
        "directory": str(directory),
        "in_use": used,
        "acknowledged": remains.cursor.acked,
        "last": remains.last,
        "records": remains.last - remains.cursor.acked,
        "bytes": sum(row["bytes"] for row in rows) + remains.bad_bytes,
        "void_bytes": remains.cut[2] if remains.cut is not None else 0,
        "lost": lost,
        "set_aside": [path.name for path in remains.bad],
        "segments": [{key: value for key, value in row.items() if key != "ranges"} for row in rows],
    }


def _look(files: Files, directory: Path, *, verify: bool) -> _Look:
    """Read a spool once. Raises OSError."""
    for left in reversed(range(_LOOKS_MAX)):
        try:
            remains = survey(files, directory)
        except FileNotFoundError:  # the writer has just removed a segment
            if not left:
                raise
        else:
            break
    rows, acked = [], remains.cursor.acked
    for segment, stop in zip(remains.segments, stops(remains.segments), strict=True):
        stop = min(stop, remains.last + 1) if stop == ENDLESS else stop  # noqa: PLW2901
        with contextlib.suppress(FileNotFoundError):  # the writer has just removed it
            rows.append(_segment(files, segment, stop, acked, verify=verify))
    return _Look(remains, rows, _gaps(rows, acked, remains.last))


def _segment(files: Files, segment: Segment, stop: int, acked: int, *, verify: bool) -> dict[str, Any]:
    """Return a segment's row; its `ranges` are the whole records that are not acknowledged."""
    ranges: list[list[int]] = []
    damaged = 0
    with opened(files, segment.path) as fd:
        for item in items.scan(files, fd, segment.size, segment.salt):
            if isinstance(item, items.DamagedBytes):
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


def _gaps(rows: list[dict[str, Any]], acked: int, last: int) -> Gaps:
    """Return the ranges of records that no segment holds."""
    gaps: Gaps = []
    expected = acked + 1
    for first, until in sorted(span for row in rows for span in row["ranges"]):
        if first > expected:
            gaps.append([expected, first - 1])
        expected = max(expected, until + 1)
    if expected <= last:
        gaps.append([expected, last])
    return gaps


def _both(one: Gaps, other: Gaps) -> Gaps:
    """Return the intersection of two lists of ranges."""
    cuts = ([max(a, c), min(b, d)] for a, b in one for c, d in other)
    return [[first, last] for first, last in cuts if first <= last]


def in_use(directory: Path) -> bool:
    """Return whether a process writes the spool now. It does not keep a process from starting to."""
    try:
        return Files().locked(directory / LOCK)
    except OSError:
        return False  # a spool that this process may not read


def purge(directory: Path) -> int:
    """Remove the segments and the cursor of a spool; return the number of bytes removed.

    Raises CapflowError if a process writes the spool.
    """
    check(directory)
    try:
        with _held(directory) as mine:
            if not mine:
                raise CapflowError(explain(f"spool {directory} is in use", do="stop the process that writes it"))
            remains = survey(Files(), directory)
            paths = [
                *(segment.path for segment in remains.segments),
                *remains.bad,
                directory / SPARE,
                directory / CURSOR,
            ]
            total = 0
            for path in paths:  # the cursor last: without it the remaining records would be read again
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
                    path.unlink()
            return total
    except OSError as e:
        where, got = f"spool {directory} cannot be emptied", e.strerror or str(e)
        expected, do = "a directory that this user may write", "change its mode and try again"
        raise CapflowError(explain(where, got=got, expected=expected, do=do)) from e


def remove(directory: Path, needless: Callable[[], bool]) -> bool:
    """Remove a spool with its directory, unless a process writes it or it is needed; return whether it was removed.

    A kill before the end leaves a spool without records. A spool with a damaged segment that was set aside, or with
    files that no spool makes, stays. Raises OSError and CapflowError.

    needless: returns whether the spool is not needed; called while no process can write it.
    """
    check(directory)
    with _held(directory) as mine:
        files = Files()
        remains = survey(files, directory) if mine else None
        if remains is None or _others(directory, remains) or not needless():
            return False
        cursor = CursorFile(files, directory / CURSOR)
        cursor.open(remains.cursor._replace(acked=remains.last, synced=remains.last))
        cursor.close()
        for segment in remains.segments:  # before the cursor: without it they would be read again
            files.unlink(segment.path)
        files.remove(directory, BESIDE)
    return True


def _others(directory: Path, remains: Remains) -> set[Path]:
    """Return the files in a spool's directory that are neither segments nor the spool's own files."""
    return (
        {*directory.iterdir()} - {segment.path for segment in remains.segments} - {directory / name for name in BESIDE}
    )


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Hold the spool's lock; yield False if another process holds it."""
    fd = Files().lock(directory / LOCK)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)
