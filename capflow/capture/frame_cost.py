"""The cost of reading a frame's header, counted before it is read: each span and each token becomes an object.

A span has a row of its own at each site of its block, so a frame cannot have more spans than its payload has rows.

Invariant: the objects of a header take at most `limits.STATE_PER_BYTE_MAX` bytes of memory for each byte of the header.
Usual headers take 4 to 13 bytes for each.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from capflow import limits
from capflow.errors import RemoteProtocolError, explain

# The size of one number in the smallest dtype.
_NUMBER_BYTES = 2
# A header up to this size costs little to read, whatever it holds.
_SMALL_BYTES = 256 * limits.KIB


class _Request(msgspec.Struct):
    token_ids: msgspec.Raw
    texts: msgspec.Raw = msgspec.Raw(b"\x90")


class _Header(msgspec.Struct, tag="frame"):
    hidden_size: int
    requests: Annotated[tuple[_Request, ...], msgspec.Meta(max_length=limits.REQUESTS_PER_FRAME_MAX)]
    # The sites, rows and spans of each.
    blocks: Annotated[
        tuple[tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw], ...], msgspec.Meta(max_length=limits.SITES_MAX)
    ]
    shapes: Any = msgspec.UNSET


_decoder = msgspec.msgpack.Decoder(_Header)


def is_large(header: bytes | memoryview) -> bool:
    """Return whether reading a header may take long."""
    return len(header) > _SMALL_BYTES


def decoded_bytes(header: bytes | memoryview) -> int:
    """Return the largest amount of memory that the objects of a header can take."""
    return limits.STATE_PER_BYTE_MAX * len(header)


def check_cost(header: bytes | memoryview, payload_bytes: int) -> None:
    """Raise RemoteProtocolError if a large header has more spans, tokens or texts than its payload allows.

    Raises msgspec.MsgspecError if a large header is not one. Small headers are not checked.
    """
    if not is_large(header):
        return
    read = _decoder.decode(header)
    counts = {
        "spans": (sum(_length(spans) for _, _, spans in read.blocks), limits.SPANS_PER_FRAME_MAX),
        "tokens": (sum(_length(request.token_ids) for request in read.requests), limits.TOKENS_PER_FRAME_MAX),
        "texts": (sum(_length(request.texts) for request in read.requests), limits.TOKENS_PER_FRAME_MAX),
    }
    # Each span has one row at least.
    rows = sum(_length(sites) * _length(spans) for sites, _, spans in read.blocks)
    width = read.hidden_size if read.shapes is msgspec.UNSET else 1
    counts["rows of spans"] = rows, payload_bytes // (_NUMBER_BYTES * max(1, width))
    for name, (count, most) in counts.items():
        if count > most:
            raise RemoteProtocolError(explain(f"frame {name}", got=count, expected=f"at most {most}"))


def _length(array: msgspec.Raw) -> int:
    """Return the number of elements that an encoded msgpack array claims.

    Another type has 0 here; it is refused when it is read.
    """
    head = bytes(memoryview(array)[:5])
    if head[:1] == b"\xdc":
        return int(struct.unpack(">H", head[1:3])[0])
    if head[:1] == b"\xdd":
        return int(struct.unpack(">I", head[1:5])[0])
    return head[0] & 15 if head[0] & 0xF0 == 0x90 else 0
