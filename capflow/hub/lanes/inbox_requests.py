"""The requests that wait in an inbox on disk: how many are split between inboxes, and how many are incomplete.

It only reads, also while a hub writes. A request is split when inboxes of one consumer, `NAME` and `NAME.2`, hold
records of it: the next hub joins them. A request is incomplete when some of its frames were forgotten while it ran, or
when it ended and fewer rows are here than its worker sent.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from capflow.buffers.spool import heads
from capflow.capture.frame import FrameHeader, rows_of
from capflow.errors import CapflowError
from capflow.hub.lanes.inbox import INBOXES_MAX, Checkpoint, RequestDoneMark, Unkept, read_head

_INBOX = re.compile(r"(.+-[0-9a-f]{16})(?:\.\d+)?")
_NAMED_MAX = 20
# How often a spool is read when segments are removed meanwhile.
_READS_MAX = 5

_Key = tuple[str, str]  # engine and request


@dataclass
class _Part:
    """What one pipeline stage sent of a request.

    sent: rows, as the end says; None before the end.
    """

    rows: int = 0
    sent: int | None = None
    # The number of its last record.
    last: int = 0


_Parts = dict[tuple[str, int], _Part]  # by incarnation and pipeline stage


@dataclass
class _Requests:
    """What one inbox holds of the requests that its consumer is not done with."""

    parts: defaultdict[_Key, _Parts] = field(default_factory=lambda: defaultdict(dict))
    # Rows in frames that were removed from the inbox.
    forgotten: dict[_Key, int] = field(default_factory=dict)

    @property
    def keys(self) -> set[_Key]:
        """The requests."""
        return self.parts.keys() | self.forgotten.keys()

    def add(self, number: int, header: FrameHeader) -> None:
        """Count a frame."""
        rows = rows_of(header)
        for request in header.requests:
            part = self._part(header, request.id, request.incarnation)
            part.rows, part.last = part.rows + rows[request.id], number
        for end in header.finished:
            part = self._part(header, end.id, end.incarnation)
            part.sent, part.last = end.rows, number

    def _part(self, header: FrameHeader, request: str, incarnation: str) -> _Part:
        return self.parts[header.engine, request].setdefault((incarnation, header.rank.pp), _Part())

    def done(self, key: _Key, through: int) -> None:
        """Leave out a request that the consumer is done with, up to a record."""
        self.forgotten.pop(key, None)
        if left := {place: part for place, part in self.parts[key].items() if part.last > through}:
            self.parts[key] = left
        else:
            del self.parts[key]

    def checkpoint(self, unkept: list[Unkept]) -> None:
        """Take what a checkpoint says of the frames before it."""
        self.forgotten = {(each.engine, each.request.id): sum(each.rows.values()) for each in unkept}


def requests_in(place: Path) -> dict[str, Any] | None:
    """Return how many requests wait in an inbox, and which are split or incomplete, as plain JSON values.

    It is None for a spool that is no inbox. Raises CapflowError when the inbox cannot be read.
    """
    match = _INBOX.fullmatch(place.absolute().name)
    if match is None:
        return None
    mine, beside = _read(place), {}
    for number in range(1, INBOXES_MAX + 1):
        other = place.absolute().with_name(match[1] if number == 1 else f"{match[1]}.{number}")
        if other != place.absolute() and other.is_dir():
            with contextlib.suppress(CapflowError):  # it is being removed
                beside[other.name] = _read(other)
    split, incomplete, unnamed, named = 0, 0, 0, []
    for key in sorted(mine.keys):
        also = [name for name, other in beside.items() if key in other.keys]
        row = _row(key, [mine, *(beside[name] for name in also)])
        split += bool(also)
        incomplete += row["incomplete"]
        if also or row["incomplete"]:
            named.append({**row, "also_in": also})
        if len(named) > _NAMED_MAX:
            named.pop()
            unnamed += 1
    return {
        "waiting": len(mine.keys),
        "split": split,
        "incomplete": incomplete,
        "named": named,
        "unnamed": unnamed,
    }


def _row(key: _Key, inboxes: list[_Requests]) -> dict[str, Any]:
    """Return what the inboxes hold of a request together."""
    parts: defaultdict[tuple[str, int], _Part] = defaultdict(_Part)
    for inbox in inboxes:
        for place, part in inbox.parts.get(key, {}).items():
            parts[place].rows += part.rows
            parts[place].sent = part.sent if part.sent is not None else parts[place].sent
    forgotten = sum(inbox.forgotten.get(key, 0) for inbox in inboxes)
    missing = sum(max(0, part.sent - part.rows) for part in parts.values() if part.sent is not None)
    return {
        "engine": key[0],
        "request": key[1],
        "rows": sum(part.rows for part in parts.values()),
        "rows_missing": max(missing, forgotten),
        "incomplete": bool(missing or forgotten),
    }


def _read(place: Path) -> _Requests:
    """Return the requests of an inbox. Raises CapflowError."""
    for left in reversed(range(_READS_MAX)):
        try:
            return _read_once(place)
        except CapflowError:
            if not left:
                raise
    raise AssertionError


def _read_once(place: Path) -> _Requests:
    requests = _Requests()
    for number, head in heads(place):
        with contextlib.suppress(msgspec.MsgspecError, KeyError):  # of another version
            match None if head is None else read_head(head):
                case FrameHeader() as header:
                    requests.add(number, header)
                case RequestDoneMark(engine, request, through):
                    requests.done((engine, request), through or number)
                case Checkpoint() as checkpoint:
                    requests.checkpoint(checkpoint.unkept)
                    for each in checkpoint.done:
                        requests.done((each.engine, each.request), each.through)
    return requests
