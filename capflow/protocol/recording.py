"""A recording: a hub's frames, as they came, on disk, with the engines they came from and the ends of their requests.

A recording is a spool (`capflow.buffers.spool` is the format of its files: segments of records with checksums) of which nothing is ever acknowledged.
A record's head begins with what it is, one byte:

| byte | the rest of the head, msgpack | body |
|---|---|---|
| `E` | `RecordedEngine`: an engine connected, with this model | |
| `F` | a frame's header, sealed | its payload |
| `D` | `RequestDone`: a request is over, and every frame that names it lies before | |

Records lie in the order in which one consumer was told of them. What always holds: a frame of one boot of one worker is there once;
a record that is not whole is never read, and who reads is told which are missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from capflow import limits
from capflow.buffers.spool import FullError, Lost, Spool, records
from capflow.capture.frame import Frame, FrameHeader, WorkerBoot
from capflow.capture.intervals import Intervals
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.errors import CapflowError, RetryError, UsageError, explain


class RecordedEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine, and what it runs from here on."""

    name: str
    model: ModelInfo


Said = RecordedEngine | Frame | RequestDone | Lost
"""What a recording says, one after another."""

_SYNC_S = 5.0  # how long the disk may take for the end of a request before it is tried again

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[bytes, Any] = {
    b"E": msgspec.msgpack.Decoder(RecordedEngine),
    b"F": msgspec.msgpack.Decoder(FrameHeader),
    b"D": msgspec.msgpack.Decoder(RequestDone),
}


class Recorder:
    """Writes a recording, from `open` to `close`; one thread at a time. One that is there is gone on with.

    bytes_max bounds the files together. Methods raise CapflowError when the disk does not take what is to be written; `done` and `close`
    also when somebody removed the recording; RetryError, having written nothing, when it may take that later. After `close` it may be opened again.
    """

    def __init__(self, path: Path, bytes_max: int = limits.SPOOL_BYTES_MAX) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._spool = self._new_spool()
        # The last end, and its record, until that is on the disk.
        self._ended: tuple[RequestDone, int] | None = None
        # Those that are there.
        self._frames: defaultdict[WorkerBoot, Intervals] = defaultdict(Intervals)
        # Engine and request: ends from before it was opened, which may be told again.
        self._done: set[tuple[str, str]] = set()

    def _new_spool(self) -> Spool:
        segment_bytes = min(limits.SEGMENT_BYTES_MAX, self._bytes_max)
        return Spool(self.path, bytes_max=self._bytes_max, segment_bytes=segment_bytes)

    def open(self) -> None:
        """Take the directory, which is made when missing. Raises CapflowError when another process writes it, or it cannot be read."""
        self._spool, self._ended = self._new_spool(), None
        self._frames.clear()
        self._done.clear()
        self._spool.open()
        try:
            self._recall()
        except BaseException:
            self._spool.close()
            raise

    def _recall(self) -> None:
        """Note what is there from before."""
        for _, head in self._spool.heads():
            match _decode(head):
                case FrameHeader() as header:
                    self._frame(header)
                case RequestDone(engine, request):
                    self._done.add((engine, request))

    def engine(self, name: str, model: ModelInfo) -> None:
        """Note that an engine connected."""
        self._append(b"E" + _encoder.encode(RecordedEngine(name, model)))

    def frame(self, frame: Frame) -> bool:
        """Take a frame, all of it; return False when it is there already. Its payload must not change any more."""
        if frame.header.seq in self._frames[frame.header.source]:
            return False
        header, payload = frame.encode()
        self._append(b"F" + header, payload)
        self._frame(frame.header)
        return True

    def done(self, done: RequestDone, *, sync: bool) -> None:
        """Note that a request is over, once.

        sync: return when all up to here is on the disk, and raise when it does not get there.
        """
        key = done.engine, done.request
        if key in self._done:
            self._done.remove(key)
            return
        if self._ended is None or self._ended[0] != done:
            self._ended = done, self._append(b"D" + _encoder.encode(done))
        if sync and not self._spool.wait_synced(self._ended[1], _SYNC_S):
            raise RetryError(explain(f"recording {self.path}", got="a disk that does not answer"))
        self._spool.check()
        self._ended = None

    def _append(self, head: bytes, body: Any = b"") -> int:
        """Put a record down; return its number. Raises RetryError when the disk takes nothing now, CapflowError when the recording is full."""
        try:
            return self._spool.append(head, body)
        except FullError as e:
            if e.reason == "spool_full":
                raise
            raise RetryError(str(e)) from e

    def _frame(self, header: FrameHeader) -> None:
        self._frames[header.source].add(header.seq, header.seq)
        self._done.difference_update([(header.engine, part.id) for part in header.requests])

    def close(self) -> None:
        """Give the directory back. Raises CapflowError when not everything is on the disk."""
        try:
            self._spool.check()
        finally:
            whole = self._spool.close()
        if not whole:
            raise CapflowError(explain(f"recording {self.path}", got="a disk that did not take the last of it"))

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def is_recording(path: Path) -> bool:
    """Return whether a directory holds a recording, and not some other spool."""
    try:
        first = next(iter(records(path)), None)
    except UsageError:
        return False
    return first is not None and (isinstance(first, Lost) or first.head[:1] in _decoders)


def read(path: Path) -> Iterator[Said]:
    """Yield what a recording says, in order; what cannot be read as `Lost`. It is not changed, and may be written meanwhile.

    Raises UsageError when the directory is no recording, CapflowError when it cannot be read.
    """
    for found in records(path):
        if isinstance(found, Lost):
            yield found
            continue
        try:
            said = _decode(found.head)
        except (msgspec.MsgspecError, KeyError):
            do = "read it with the capflow that wrote it, if it is a recording"
            got = f"record {found.id}"
            raise UsageError(explain(str(path), got=got, expected="a record of a recording", do=do)) from None
        yield Frame(said, memoryview(found.body).cast("B")) if isinstance(said, FrameHeader) else said


def _decode(head: bytes) -> RecordedEngine | FrameHeader | RequestDone:
    said: RecordedEngine | FrameHeader | RequestDone = _decoders[head[:1]].decode(head[1:])
    return said
