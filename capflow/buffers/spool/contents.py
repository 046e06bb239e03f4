"""The contents of a spool, read from the first record to the last without a lock or a change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from capflow.buffers.spool import items
from capflow.buffers.spool.files import Files
from capflow.buffers.spool.reader import Lost, Record
from capflow.buffers.spool.survey import check, opened, stops, survey, unreadable
from capflow.buffers.spool.survey import heads as heads_of


def records(directory: Path) -> Iterator[Record | Lost]:
    """Yield the records that are not acknowledged, in order, and `Lost` for those that cannot be read.

    A process may write the spool meanwhile; its new records are not read.
    Raises UsageError if the directory is not a spool, CapflowError if it cannot be read.
    """
    check(directory)
    files = Files()
    try:
        remains = survey(files, directory)
        expected = remains.cursor.acked + 1
        for segment, stop in zip(remains.segments, stops(remains.segments), strict=True):
            with opened(files, segment.path) as fd:
                for item in items.scan(files, fd, segment.size, segment.salt):
                    if isinstance(item, items.DamagedBytes) or item.header.kind != items.RECORD:
                        continue
                    number = item.header.id
                    if not expected <= number < min(stop, remains.last + 1):
                        continue
                    if number > expected:
                        yield Lost(expected, number - 1, "damaged")
                    head, body = items.read(files, fd, item)
                    if head is None or body is None:
                        yield Lost(number, number, "damaged", head)
                    else:
                        yield Record(number, head, body)
                    expected = number + 1
    except OSError as e:
        raise unreadable(directory, e) from e
    if expected <= remains.last:
        yield Lost(expected, remains.last, "damaged")


def heads(directory: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and head of each record that is not acknowledged, in order.

    Damaged records next to each other are one entry: the number of the last one, and None.
    Raises the errors of `records`.
    """
    check(directory)
    files = Files()
    try:
        remains = survey(files, directory)
        expected = remains.cursor.acked + 1
        for segment, stop in zip(remains.segments, stops(remains.segments), strict=True):
            with opened(files, segment.path) as fd:
                pairs = heads_of(files, fd, segment, remains.cursor.acked, min(stop, remains.last + 1))
                for number, head in pairs:
                    if number > expected:
                        yield number - 1, None
                    yield number, head
                    expected = number + 1
    except OSError as e:
        raise unreadable(directory, e) from e
    if expected <= remains.last:
        yield remains.last, None
