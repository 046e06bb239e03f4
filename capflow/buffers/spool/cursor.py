"""The cursor: how far a spool was acknowledged, on the disk."""

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
    """How far a spool was acknowledged and synced.

    acked: every record up to here is done with.
    synced: every record up to here was durable.
    writes: the number of this write.
    """

    acked: int = 0
    synced: int = 0
    writes: int = 0


def read_cursor(files: Files, path: Path) -> Cursor | None:
    """Return what a cursor says; None when it says nothing: all of it is damaged, or there is none."""
    try:
        fd = files.open(path)
    except FileNotFoundError:
        return None
    try:
        found = [_parse(files.read(fd, _COPY_BYTES, slot + at)) for slot in _SLOTS for at in (0, _COPY_BYTES)]
    finally:
        files.close(fd)
    return max((cursor for cursor in found if cursor is not None), key=lambda cursor: cursor.writes, default=None)


def _parse(data: bytes) -> Cursor | None:
    if len(data) != _COPY_BYTES or _CHECK.unpack_from(data, _COPY.size)[0] != xxhash.xxh3_64_intdigest(data[:-8]):
        return None
    magic, writes, acked, synced = _COPY.unpack_from(data)
    return Cursor(acked, synced, writes) if magic == _MAGIC else None


class CursorFile:
    """A spool's cursor, to be written; from `open` to `close`. One thread at a time."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._fd = -1
        # Of the last one that is durable, its number.
        self._writes = 0

    def open(self, cursor: Cursor) -> None:
        """Have the cursor durable in both slots. Raises OSError."""
        self._fd = self._files.change(self._path)
        self._writes = cursor.writes
        for _ in _SLOTS:
            self.write(cursor)
        self._files.fsync_dir(self._path.parent)

    def write(self, cursor: Cursor) -> None:
        """Have the cursor durable. Raises OSError; the one before it holds then."""
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
