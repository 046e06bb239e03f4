"""The cursor of a spool on disk: how far the records are acknowledged and synced."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from capflow.buffers.spool.files import Files

_COPY = struct.Struct("<8sQQQ")
_CHECK = struct.Struct("<Q")
_MAGIC = b"CFCURS01"
_COPY_BYTES = _COPY.size + _CHECK.size
_SLOTS = (0, 4096)


class Cursor(NamedTuple):
    """How far the records of a spool are acknowledged and synced.

    acked: every record up to this number is acknowledged.
    synced: every record up to this number was durable.
    writes: the number of this write.
    """

    acked: int = 0
    synced: int = 0
    writes: int = 0


def read_cursor(files: Files, path: Path) -> Cursor | None:
    """Return the stored cursor; None if the file is missing or every copy is damaged."""
    try:
        fd = files.open(path)
    except FileNotFoundError:
        return None
    try:
        copies = [_parse(files.read(fd, _COPY_BYTES, slot + at)) for slot in _SLOTS for at in (0, _COPY_BYTES)]
    finally:
        files.close(fd)
    return max((cursor for cursor in copies if cursor is not None), key=lambda cursor: cursor.writes, default=None)


def _parse(data: bytes) -> Cursor | None:
    if len(data) != _COPY_BYTES or _CHECK.unpack_from(data, _COPY.size)[0] != xxhash.xxh3_64_intdigest(data[:-8]):
        return None
    magic, writes, acked, synced = _COPY.unpack_from(data)
    return Cursor(acked, synced, writes) if magic == _MAGIC else None


class CursorFile:
    """Writes a spool's cursor between `open` and `close`. One thread at a time."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._fd = -1
        # The number of the last durable write.
        self._writes = 0

    def open(self, cursor: Cursor) -> None:
        """Write the cursor durably to both slots. Raises OSError."""
        self._fd = self._files.change(self._path)
        self._writes = cursor.writes
        for _ in _SLOTS:
            self.write(cursor)
        self._files.fsync_dir(self._path.parent)

    def write(self, cursor: Cursor) -> None:
        """Write the cursor durably to one slot. Raises OSError; then the earlier cursor counts."""
        number = self._writes + 1
        data = _COPY.pack(_MAGIC, number, cursor.acked, cursor.synced)
        data += _CHECK.pack(xxhash.xxh3_64_intdigest(data))
        self._files.write(self._fd, [data, data], _SLOTS[number % len(_SLOTS)])
        self._files.fdatasync(self._fd)
        self._writes = number

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._files.close(self._fd)
            self._fd = -1
