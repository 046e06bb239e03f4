"""What `capflow spool` says of a spool, and how it empties one; a spool that is written meanwhile is only read."""

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

_LOOKS_MAX = 5  # at a spool whose segments are removed while it is looked at

Gaps = list[list[int]]
"""Ranges of records, the first and the last of each, in order."""


class _Look(NamedTuple):
    """What one look at a spool found: what there is, a row for each segment, and which records none of these holds."""

    remains: Remains
    rows: list[dict[str, Any]]
    lost: Gaps


def inspect(directory: Path, *, verify: bool = False) -> dict[str, Any]:
    """Return what a spool holds, as plain JSON values.

    verify: read every record that is not done with.

    `lost` counts the records that were durable, are not done with and cannot be read; without verify, those only whose headers are gone.
    Raises UsageError when the directory is no spool, CapflowError when it cannot be read.
    """
    files = Files()
    check(directory)
    try:
        used = in_use(directory)
        look = _look(files, directory, verify=verify)
        lost = look.lost
        if lost and (used or in_use(directory)):  # what its writer did meanwhile looks like a loss, once
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
    """Return what a spool holds now. Raises OSError."""
    for left in reversed(range(_LOOKS_MAX)):
        try:
            remains = survey(files, directory)
        except FileNotFoundError:  # its writer has just removed a segment
            if not left:
                raise
        else:
            break
    rows, acked = [], remains.cursor.acked
    for segment, stop in zip(remains.segments, stops(remains.segments), strict=True):
        stop = min(stop, remains.last + 1) if stop == ENDLESS else stop  # noqa: PLW2901
        with contextlib.suppress(FileNotFoundError):  # likewise
            rows.append(_segment(files, segment, stop, acked, verify=verify))
    return _Look(remains, rows, _gaps(rows, acked, remains.last))


def _segment(files: Files, segment: Segment, stop: int, acked: int, *, verify: bool) -> dict[str, Any]:
    """Return a segment's row; ranges: the records that were found and are not done with."""
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
    """Return what is in both."""
    cuts = ([max(a, c), min(b, d)] for a, b in one for c, d in other)
    return [[first, last] for first, last in cuts if first <= last]


def in_use(directory: Path) -> bool:
    """Return whether a process writes the spool; one that begins to meanwhile is not kept from it."""
    try:
        return Files().locked(directory / LOCK)
    except OSError:
        return False  # a spool that this process may not read


def purge(directory: Path) -> int:
    """Remove everything that a spool holds, and nothing else; return how many bytes that was.

    Raises CapflowError when a process writes it.
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
            for path in paths:  # the cursor last: without it, what is left would be read again
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
                    path.unlink()
            return total
    except OSError as e:
        what, got = f"spool {directory} cannot be emptied", e.strerror or str(e)
        expected, do = "a directory that this user may write", "see to that, and try again"
        raise CapflowError(explain(what, got=got, expected=expected, do=do)) from e


def remove(directory: Path, needless: Callable[[], bool]) -> bool:
    """Remove a spool with its directory, unless a process writes it or it is needed; return whether it is gone.

    needless: whether nothing in it is needed; called while no process can write it. A kill before the end leaves a
        spool without records. One that holds a segment which was set aside, or anything that no spool makes, stays.
        Raises OSError and CapflowError.
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
        for segment in remains.segments:  # before the cursor, without which they would be read again
            files.unlink(segment.path)
        files.remove(directory, BESIDE)
    return True


def _others(directory: Path, remains: Remains) -> set[Path]:
    """Return what lies in a spool's directory beside the segments that count and the spool's own files."""
    return (
        {*directory.iterdir()} - {segment.path for segment in remains.segments} - {directory / name for name in BESIDE}
    )


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Hold the spool's lock, if there is one to hold; yield whether nobody else does."""
    fd = Files().lock(directory / LOCK)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)
