"""What goes between the server and a page.

To the page: binary messages. A message is the length of its head in bytes (uint32), the head, JSON padded with spaces
to a multiple of 4, and then numbers: float32, which carry NaN and infinity as they are. All are little-endian. The head's
keys, each left out when there is nothing new:

| key | meaning |
|---|---|
| engines | the engines that were seen: name, model, problems |
| counts | requests open, done and not kept; rows dropped by reason; totals |
| rates | tokens, rows and bytes in each second up to `last` |
| requests | summaries of requests that are new or changed, each with its `key` |
| gone | keys of requests that are kept no more |
| detail | tokens of the selected request: columns `first .. first+count`, at positions `base + column` |

The numbers are those of `detail`, `[series, count]`. With `fresh`, `detail` replaces what the page has and names the series.
From the page: the text `{"select": KEY}`, which says what request it shows, 0 for none.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from capflow.errors import RemoteProtocolError, explain
from capflow_dashboard.series import Values


class Select(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page shows another request now."""

    select: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Select)


def encode(head: dict[str, Any], values: Values | None = None) -> bytes:
    """Return the message."""
    text = _encoder.encode(head)
    text += b" " * (-len(text) % 4)
    numbers = b"" if values is None else values.astype("<f4", copy=False).tobytes()
    return struct.pack("<I", len(text)) + text + numbers


def decode(message: str | bytes) -> Select:
    """Return what a page says; raises RemoteProtocolError when it is not that."""
    try:
        return _decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise RemoteProtocolError(explain("message of a page", got=str(e), expected='{"select": KEY}')) from e
