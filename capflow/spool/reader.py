"""The reader: finds records in segments by their numbers, in rising order, and says exactly which are lost."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from capflow.spool import items
from capflow.spool.files import Files
from capflow.spool.survey import Segment


class Record(NamedTuple):
    """A record as it was appended. id: its number."""

    id: int
    head: bytes
    body: bytes | memoryview


class Lost(NamedTuple):
    """Records that were appended and cannot be read. head: of the only one, where just its body is damaged."""

    first: int
    last: int
    reason: str
    head: bytes | None = None

    @property
    def id(self) -> int:
        """The number of the last of them."""
        return self.last


class Reader:
    """A place in the segments; it may be moved to any segment, and reads forward from there. One thread at a time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._segment: Segment | None = None  # whose descriptor is open, until another one is read or `close`
        self._fd = -1
        self._offset = 0  # every item before it holds records below the one that is read next

    def seek(self, segment: Segment, offset: int) -> None:
        """Go to an item of a segment."""
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

    def get(self, id: int, segment: Segment, size: int, stop: int) -> Record | Lost:
        """Return a record of a segment, or which are lost from it on, all of them below `stop`.

        size: how much of the segment is written.
        """
        try:
            found = self._get(id, segment, size, stop)
        except OSError as e:
            self.close()
            found = Lost(id, stop - 1, f"unreadable: {e.strerror}")
        if isinstance(found, Lost):
            segment.damaged = True
        return found

    def _get(self, id: int, segment: Segment, size: int, stop: int) -> Record | Lost:
        if segment is not self._segment:
            self.seek(segment, 0)
        for item in items.scan(self._files, self._fd, size, segment.salt, self._offset):
            if isinstance(item, items.Damage) or item.header.kind != items.RECORD:
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
