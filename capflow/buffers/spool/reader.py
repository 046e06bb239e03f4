"""The reader: finds records in segments by number, in rising order, and reports exactly which are lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container
from typing import NamedTuple

from capflow.buffers.spool import items
from capflow.buffers.spool.files import Files
from capflow.buffers.spool.survey import CURSOR, Segment

_RETRY_S_MIN, _RETRY_S_MAX = 0.05, 1.0  # the pause after a failed read; it doubles each time


class Record(NamedTuple):
    """A record as it was appended.

    id: the number of the record.
    """

    id: int
    head: bytes
    body: bytes | memoryview


class Lost(NamedTuple):
    """Appended records that cannot be read.

    head: the head of a single record whose body alone is damaged.
    """

    first: int
    last: int
    reason: str
    head: bytes | None = None

    @property
    def id(self) -> int:
        """The number of the last lost record."""
        return self.last


class Reader:
    """A position in the segments from which records are read forward. One thread at a time.

    `failure` is the error of the last read, None if it worked. The read may be repeated from `again_at` on, by the
    monotonic clock.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        # The segment whose descriptor is open.
        self._segment: Segment | None = None
        self._fd = -1
        # All records before this offset are below the next one to read.
        self._offset = 0
        # The pause after the last failure.
        self._pause_s = 0.0
        self.failure: OSError | None = None
        self.failures = 0
        self.again_at = 0.0

    def seek(self, segment: Segment, offset: int) -> None:
        """Move to an item of a segment."""
        if segment is self._segment:
            self._offset = offset
            return
        self.close()
        self._fd = self._files.open(segment.path)
        self._segment, self._offset = segment, offset

    def close(self) -> None:
        """Close the segment."""
        if self._segment is not None:
            self._segment = None
            with contextlib.suppress(OSError):
                self._files.close(self._fd)

    def let_go(self, there: Container[Segment]) -> None:
        """Close the segment if it is not in `there` any more."""
        if self._segment is not None and self._segment not in there:
            self.close()

    def get(self, id: int, segment: Segment, size: int, stop: int) -> Record | Lost:
        """Return a record of a segment, or the lost records from it on, all below `stop`.

        Raises OSError if the disk cannot be read; a later read may succeed.

        size: the written length of the segment.
        """
        try:
            result = self._get(id, segment, size, stop)
        except OSError as e:
            self.close()
            if not self._is_gone(segment):
                self._failed(e)
                raise
            result = Lost(id, stop - 1, "missing")
        self.failure, self._pause_s = None, 0.0
        if isinstance(result, Lost):
            segment.damaged = True
        return result

    def _failed(self, e: OSError) -> None:
        self.failure = e
        self.failures += 1
        self._pause_s = min(2 * self._pause_s or _RETRY_S_MIN, _RETRY_S_MAX)
        self.again_at = time.monotonic() + self._pause_s

    def _is_gone(self, segment: Segment) -> bool:
        """Return whether the spool exists and the segment was removed from it."""
        try:
            names = self._files.names(segment.path.parent)
        except OSError:
            return False
        return CURSOR in names and segment.path.name not in names

    def _get(self, id: int, segment: Segment, size: int, stop: int) -> Record | Lost:
        if segment is not self._segment:
            self.seek(segment, 0)
        for item in items.scan(self._files, self._fd, size, segment.salt, self._offset):
            if isinstance(item, items.DamagedBytes) or item.header.kind != items.RECORD:
                continue
            if item.header.id >= stop:
                break
            self._offset = item.offset
            if item.header.id > id:
                return Lost(id, item.header.id - 1, "damaged")
            if item.header.id == id:
                self._offset = item.end
                head, body = items.read(self._files, self._fd, item)
                if head is None or body is None:
                    return Lost(id, id, "damaged", head)
                return Record(id, head, body)
        return Lost(id, stop - 1, "damaged")
