"""The messages between the server and a page.

The server sends binary messages. A message is the length of its head in bytes (uint32), the head (JSON, padded with
spaces to a multiple of 4 bytes), and numbers (float32, which hold NaN and infinity). All are little-endian. The head
has these keys; a key without news is left out:

| key | meaning |
|---|---|
| engines | the engines on the board: name, model, number of sites, problems |
| counts | requests open, done and not kept; rows dropped by reason; totals |
| rates | tokens, rows and bytes in each second up to `last` |
| requests | summaries of requests that are new or changed, each with its `key` |
| gone | keys of requests that were dropped from the board |
| detail | tokens of the selected request: columns `first .. first+count`, at positions `base + column` |

The numbers are the values of `detail`, `[series, count]`. With `fresh`, `detail` replaces the tokens that the page has
and lists the series. The page sends the text `{"select": KEY}`: the request that it shows, 0 for none.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from capflow.errors import RemoteProtocolError, explain
from capflow_dashboard.series import Values


class Select(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page's message that it shows another request.

    select: the request's key; 0 for none.
    """

    select: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Select)


def encode(head: dict[str, Any], values: Values | None = None) -> bytes:
    """Return a message to a page.

    values: float32 `[series, count]`.
    """
    text = _encoder.encode(head)
    text += b" " * (-len(text) % 4)
    numbers = b"" if values is None else values.astype("<f4", copy=False).tobytes()
    return struct.pack("<I", len(text)) + text + numbers


def decode(message: str | bytes) -> Select:
    """Return a page's message. Raises RemoteProtocolError when it is invalid."""
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise RemoteProtocolError(explain("message of a page", got=str(e), expected='{"select": KEY}')) from e
