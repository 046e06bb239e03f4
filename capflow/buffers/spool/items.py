"""The items of a segment: writing an item, and finding the whole items of a file that may be damaged."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import xxhash

from capflow.buffers.spool.files import Files

MAGIC = b"\xc5\xf1R\x01"
RECORD, MARK = 1, 2

_HEADER = struct.Struct("<4sIIIQQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECK.size

_WINDOW_BYTES = 4096  # one read, from header to header
_SEARCH_BYTES = 1 << 20  # one read, in search of a header


class Header(NamedTuple):
    """An item's header."""

    kind: int
    head_bytes: int
    body_bytes: int
    id: int
    head_xxh3: int
    body_xxh3: int

    @property
    def nbytes(self) -> int:
        """The length of the item with its header."""
        return HEADER_BYTES + self.head_bytes + self.body_bytes


class Item(NamedTuple):
    """A header and its offset. `end` may lie beyond the end of the file."""

    offset: int
    header: Header

    @property
    def end(self) -> int:
        """The offset of the next item."""
        return self.offset + self.header.nbytes


class DamagedBytes(NamedTuple):
    """A range of bytes that belongs to no item."""

    offset: int
    end: int


def pack(kind: int, id: int, head: bytes, body: Any, salt: int) -> bytes:
    """Return the header of an item.

    body: an object with the buffer protocol.
    """
    digest = xxhash.xxh3_64_intdigest
    header = _HEADER.pack(MAGIC, kind, len(head), len(body), id, digest(head), digest(body))
    return header + _CHECK.pack(digest(header, seed=salt))


def parse(data: bytes, salt: int) -> Header | None:
    """Return the header in 48 bytes; None if they are not a header of this segment."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return None
    if _CHECK.unpack_from(data, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEADER.size], seed=salt):
        return None
    header = Header(*_HEADER.unpack_from(data)[1:])
    return header if header.kind in (RECORD, MARK) else None


def scan(files: Files, fd: int, size: int, salt: int, offset: int = 0) -> Iterator[Item | DamagedBytes]:
    """Yield the items and damaged ranges of a segment from an offset to its end, in order.

    Each byte is read once or twice.
    """
    window, begin = b"", 0
    while offset < size:
        if not begin <= offset <= begin + len(window) - HEADER_BYTES:
            window, begin = files.read(fd, min(_WINDOW_BYTES, size - offset), offset), offset
        header = parse(window[offset - begin : offset - begin + HEADER_BYTES], salt)
        if header is not None:
            item = Item(offset, header)
            yield item
            offset = item.end
            continue
        end = _search(files, fd, size, salt, offset + 1)
        yield DamagedBytes(offset, end)
        offset = end


def _search(files: Files, fd: int, size: int, salt: int, offset: int) -> int:
    """Return the offset of the next item; `size` if there is none."""
    while (place := files.next_data(fd, offset)) is not None and place < size:
        offset = place
        data = files.read(fd, min(_SEARCH_BYTES, size - offset), offset)
        if len(data) < HEADER_BYTES:
            break
        place = data.find(MAGIC)
        while place >= 0 and place + HEADER_BYTES <= len(data):
            if parse(data[place : place + HEADER_BYTES], salt) is not None:
                return offset + place
            place = data.find(MAGIC, place + 1)
        offset += len(data) - HEADER_BYTES + 1
    return size


def read_head(files: Files, fd: int, item: Item) -> bytes | None:
    """Return a record's head; None if its hash differs."""
    head = files.read(fd, item.header.head_bytes, item.offset + HEADER_BYTES)
    whole = len(head) == item.header.head_bytes and xxhash.xxh3_64_intdigest(head) == item.header.head_xxh3
    return head if whole else None


def read(files: Files, fd: int, item: Item) -> tuple[bytes | None, bytes | None]:
    """Return a record's head and body; None for each whose hash differs."""
    header = item.header
    data = files.read(fd, header.head_bytes + header.body_bytes, item.offset + HEADER_BYTES)
    head, body = data[: header.head_bytes], data[header.head_bytes :]
    whole = len(head) == header.head_bytes and xxhash.xxh3_64_intdigest(head) == header.head_xxh3
    whole_body = len(body) == header.body_bytes and xxhash.xxh3_64_intdigest(body) == header.body_xxh3
    return head if whole else None, body if whole_body else None
