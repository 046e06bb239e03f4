"""Thrift's compact protocol, as far as Parquet's metadata needs it: encoding only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TRUE, FALSE, BYTE, I32, I64, BINARY, LIST, STRUCT = 1, 2, 3, 5, 6, 8, 9, 12

Field = tuple[int, int, Any]
"""A field's number, its type and its value.

None leaves the field out. A list's value is `(type, items)`. A struct's value is encoded.
"""


def varint(number: int) -> bytes:
    """Encode an unsigned number in seven bits a byte, the lowest first."""
    if number <= 0x7F:
        return _BYTES[number]
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def struct(*fields: Field, head: bytes = b"", before: int = 0) -> bytes:
    """Encode a struct; fields come in the order of their numbers.

    head: the fields up to number `before`, already encoded.
    """
    out = bytearray(head)
    for number, kind, value in fields:
        if value is not None:
            assert 0 < number - before <= 15
            wire = kind if kind != TRUE or value else FALSE
            out.append((number - before) << 4 | wire)
            if kind != TRUE:
                out += _value(kind, value)
            before = number
    out.append(0)
    return bytes(out)


def _value(kind: int, value: Any) -> bytes:
    if kind in {I32, I64}:
        return varint(value << 1 if value >= 0 else (-value << 1) - 1)
    if kind == BYTE:
        return bytes([value])
    if kind == BINARY:
        return varint(len(value)) + bytes(value)
    if kind == LIST:
        return _list(*value)
    assert kind == STRUCT
    return bytes(value)


def _list(kind: int, items: Sequence[Any]) -> bytes:
    size = len(items)
    head = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + varint(size)
    return head + b"".join(_value(kind, item) for item in items)


_BYTES = [bytes([number]) for number in range(0x80)]
