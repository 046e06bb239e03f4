"""The events of a stream over HTTP, as bytes come (WHATWG HTML, *server-sent events*). No I/O.

Only `data` is read; other fields and comments are passed over.
"""

from __future__ import annotations

import re

from capflow.errors import RemoteProtocolError, explain
from capflow_dashboard import limits

_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventReader:
    """Reads events of at most `limits.AGAIN_EVENT_BYTES_MAX`."""

    def __init__(self) -> None:
        # The line that is not whole yet.
        self._line = bytearray()
        # The lines of data of the event that is not whole yet, and their length.
        self._data: list[bytes] = []
        self._length = 0
        # Whether the last byte was a carriage return: a line feed behind it belongs to it.
        self._returned = False
        self._begun = False

    def feed(self, data: bytes) -> list[str]:
        """Take bytes; return the data of each event that is whole now.

        Raises RemoteProtocolError for an event that is too long and for one that is no UTF-8.
        """
        if not data:
            return []
        if self._returned and data[0] == 0x0A:
            data = data[1:]
            self._returned = False
            if not data:
                return []
        self._returned = data[-1] == 0x0D
        first, *rest = _LINE_END.split(data)
        self._line += first
        events = []
        for part in rest:
            event = self._end_line(bytes(self._line))
            if event is not None:
                events.append(event)
            self._line = bytearray(part)
        self._check(len(self._line))
        return events

    def _end_line(self, line: bytes) -> str | None:
        """Take a whole line; return the data of the event that it ends."""
        if not self._begun:
            line, self._begun = line.removeprefix(b"\xef\xbb\xbf"), True
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                value = value.removeprefix(b" ")
                self._check(len(value))
                self._data.append(value)
                self._length += len(value) + 1
            return None
        if not self._data:
            return None
        data, self._data, self._length = b"\n".join(self._data), [], 0
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            raise RemoteProtocolError(explain("the server's stream", got=str(e), expected="UTF-8")) from e

    def _check(self, more: int) -> None:
        longest = limits.AGAIN_EVENT_BYTES_MAX
        if self._length + more > longest:
            expected = f"events of at most {longest} bytes"
            raise RemoteProtocolError(explain("the server's stream", got="a longer event", expected=expected))
