"""A recording: a hub's frames on disk in the order of arrival, with their engines, events and ends of requests.

A recording is a spool in which nothing is ever acknowledged (`capflow.buffers.spool` defines its files: segments of
records with checksums). The head of a record begins with its kind, one byte:

| byte | the rest of the head, msgpack | body |
|---|---|---|
| `E` | `RecordedEngine`: an engine connected, with this model | |
| `F` | a frame's header, sealed | its payload |
| `A` | `Answered`: an event of steering that no recorded frame has, such as the outcome of an action | |
| `D` | `RequestDone`: a request is over; every frame that names it lies before | |

Records lie in the order in which one consumer got them.

Invariant: a frame of one boot of one worker is recorded once, and so is an event. Recordings of earlier versions have
no events but those of their frames. An incomplete record is never returned; readers get a `Lost` for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.spool import FullError, Lost, Spool, records
from capflow.capture.frame import Frame, FrameHeader, WorkerBoot
from capflow.capture.intervals import Intervals
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.errors import CapflowError, RetryError, UsageError, explain
from capflow.steering.action import Answered
from capflow.steering.events import events_of


class RecordedEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine and its model, from this record on."""

    name: str
    model: ModelInfo


Entry = RecordedEngine | Frame | Answered | RequestDone | Lost
"""An entry of a recording."""

# The time that the disk may take for the end of a request before a retry.
_SYNC_S = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[bytes, Any] = {
    b"E": msgspec.msgpack.Decoder(RecordedEngine),
    b"F": msgspec.msgpack.Decoder(FrameHeader),
    b"A": msgspec.msgpack.Decoder(Answered),
    b"D": msgspec.msgpack.Decoder(RequestDone),
}


class Recorder:
    """Writes a recording, from `open` to `close`; one thread at a time. It continues an existing recording.

    Methods raise CapflowError if the disk refuses a record; `done` and `close` also if somebody removed
    the recording. They raise RetryError, with nothing written, if the disk may take it later. After `close` it may be
    opened again.

    path: the directory.
    bytes_max: the largest size of all files together.
    """

    def __init__(self, path: Path, bytes_max: int = limits.SPOOL_BYTES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._spool = self._new_spool()
        # The last end and the id of its record, until that is on the disk.
        self._ended: tuple[RequestDone, int] | None = None
        # The numbers of the recorded frames.
        self._frames: defaultdict[WorkerBoot, Intervals] = defaultdict(Intervals)
        # The engine and id of each request that ended before `open`; its end may come again.
        self._done: set[tuple[str, str]] = set()
        # The ids of the newest recorded events, in frames or alone.
        self._events: dict[str, None] = {}

    def _new_spool(self) -> Spool:
        segment_bytes = min(limits.SEGMENT_BYTES_MAX, self._bytes_max)
        return Spool(self.path, bytes_max=self._bytes_max, segment_bytes=segment_bytes)

    def open(self) -> None:
        """Take the directory; make it if it is missing.

        Raises CapflowError if another process writes it, or it cannot be read.
        """
        self._spool, self._ended = self._new_spool(), None
        self._frames.clear()
        self._done.clear()
        self._events.clear()
        self._spool.open()
        try:
            self._recall()
        except BaseException:
            self._spool.close()
            raise

    def _recall(self) -> None:
        """Read which frames, events and ends are recorded."""
        for _, head in self._spool.heads():
            match _decode(head):
                case FrameHeader() as header:
                    self._frame(header)
                case Answered() as answered:
                    self._note(answered)
                case RequestDone(engine, request):
                    self._done.add((engine, request))

    def engine(self, name: str, model: ModelInfo) -> None:
        """Record that an engine connected."""
        self._append(b"E" + _encoder.encode(RecordedEngine(name, model)))

    def frame(self, frame: Frame) -> bool:
        """Record a whole frame; return False if it is recorded already. Its payload must not change any more."""
        if frame.header.seq in self._frames[frame.header.source]:
            return False
        header, payload = frame.encode()
        self._append(b"F" + header, payload)
        self._frame(frame.header)
        return True

    def event(self, answered: Answered) -> None:
        """Record an event of steering, unless a recorded frame has it or it is recorded already."""
        if answered.id not in self._events:
            self._append(b"A" + _encoder.encode(answered))
            self._note(answered)

    def done(self, done: RequestDone, *, sync: bool) -> None:
        """Record that a request is over, once.

        sync: return only when all records so far are on the disk, and raise if they do not get there.
        """
        key = done.engine, done.request
        if key in self._done:
            self._done.remove(key)
            return
        if self._ended is None or self._ended[0] != done:
            self._ended = done, self._append(b"D" + _encoder.encode(done))
        if sync and not self._spool.wait_synced(self._ended[1], _SYNC_S):
            raise RetryError(explain(f"recording {self.path}", got="no answer from the disk"))
        self._spool.check()
        self._ended = None

    def _append(self, head: bytes, body: Any = b"") -> int:
        """Append a record; return its number.

        Raises RetryError if the disk takes nothing now, CapflowError if the recording is full.
        """
        try:
            return self._spool.append(head, body)
        except FullError as e:
            if e.reason == "spool_full":
                raise
            raise RetryError(str(e)) from e

    def _note(self, answered: Answered) -> None:
        self._events[answered.id] = None
        keep_newest(self._events, limits.ACTIONS_KNOWN_MAX)

    def _frame(self, header: FrameHeader) -> None:
        for answered in events_of(header):
            self._note(answered)
        self._frames[header.source].add(header.seq, header.seq)
        self._done.difference_update([(header.engine, part.id) for part in header.requests])

    def close(self) -> None:
        """Release the directory. Raises CapflowError if some records are not on the disk."""
        try:
            self._spool.check()
        finally:
            whole = self._spool.close()
        if not whole:
            raise CapflowError(explain(f"recording {self.path}", got="a disk that did not take the last records"))

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def is_recording(path: Path) -> bool:
    """Return whether a directory holds a recording, and not another kind of spool."""
    try:
        first = next(iter(records(path)), None)
    except UsageError:
        return False
    return first is not None and (isinstance(first, Lost) or first.head[:1] in _decoders)


def read(path: Path) -> Iterator[Entry]:
    """Yield the entries of a recording in order; damaged ones as `Lost`. Another process may write it meanwhile.

    Raises UsageError if the directory is not a recording, CapflowError if it cannot be read.
    """
    for record in records(path):
        if isinstance(record, Lost):
            yield record
            continue
        try:
            entry = _decode(record.head)
        except (msgspec.MsgspecError, KeyError):
            do = "read it with the capflow that wrote it, if it is a recording"
            got = f"record {record.id}"
            raise UsageError(explain(str(path), got=got, expected="a record of a recording", do=do)) from None
        if isinstance(entry, FrameHeader):
            yield Frame(entry, memoryview(record.body).cast("B"), header_bytes=len(record.head) - 1)
        else:
            yield entry


def _decode(head: bytes) -> RecordedEngine | FrameHeader | Answered | RequestDone:
    entry: RecordedEngine | FrameHeader | Answered | RequestDone = _decoders[head[:1]].decode(head[1:])
    return entry
