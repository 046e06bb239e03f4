"""Dead letters: what one consumer could not handle, on disk, with the reason, until somebody replays or drops it.

They are in a spool (`capflow.buffers.spool`) beside the consumer's inbox. The name of its directory is that of the
inbox and `.dead`. A record's head is the byte `P` and a `Letter` in msgpack; its body is the payload of the letter's
frame. A hub opens the spool when it has a letter to put, and closes it when no letter has come for a moment, so that
`capflow spool dead` can use it while the hub runs.

Invariants: a letter is durable before the frame or request that it holds counts as handled; a frame or an end of a
request is in the spool once.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from capflow import limits
from capflow.buffers.spool import Files, FullError, InUseError, Lost, Spool, records
from capflow.capture.frame import Frame, FrameHeader, WorkerBoot, rows_of
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.capture.wanted import wanted_rows
from capflow.errors import CapflowError, RetryError, UsageError, explain
from capflow.protocol.recording import Entry, RecordedEngine

SUFFIX = ".dead"
_SYNC_S = 5.0  # how long the disk may take for one letter before it counts as failed
_KIND = b"P"


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A frame, or the end of a request, that a consumer could not handle.

    method: the method of the consumer that failed, `on_frame` or `on_request_done`; `lane` if the lane failed.
    error: the error's text.
    requests: the ids of the requests whose rows or end it holds.
    model: the model of the engine; None if it is not known any more.
    header: the header of the frame that is the record's body; None for an end.
    done: the end of the request, as the consumer got it; None for a frame.
    """

    consumer: str
    method: str
    error: str
    time_ns: int
    engine: str
    requests: tuple[str, ...]
    model: ModelInfo | None = None
    header: FrameHeader | None = None
    done: RequestDone | None = None


class Found(NamedTuple):
    """A letter that was read, its number, and its frame if it holds one."""

    number: int
    letter: Letter
    frame: Frame | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Letter)

_Key = tuple[WorkerBoot, int]
_Incarnation = tuple[str, str, str]  # engine, id, incarnation


class DeadLetters:
    """One consumer's dead letters, from `open` to `close`; for one thread. bytes_max bounds the files."""

    def __init__(self, directory: Path, bytes_max: int, files: Files | None = None) -> None:
        self.directory = directory
        # The number of letters in the spool, as far as this process knows.
        self.letters = 0
        # The number of letters that found no room.
        self.refused = 0
        self._bytes_max = bytes_max
        self._files = files or Files()
        # The requests with rows in each frame that is here because the consumer failed at the frame.
        self._frames: dict[_Key, set[str]] = {}
        # The requests with rows in each frame that is here because the consumer failed at the end of a request.
        self._parts: dict[_Key, set[str]] = {}
        self._ends: set[bytes] = set()
        # Open while letters come.
        self._spool: Spool | None = None
        # When the last letter came, on the monotonic clock.
        self._put_at = 0.0
        # The last letter and its number, while it may not be durable yet.
        self._pending: tuple[Letter, int] | None = None

    def open(self) -> None:
        """Find what an earlier hub put there. Raises CapflowError when that cannot be read."""
        with contextlib.suppress(OSError):  # mostly because it is not there
            if self._files.names(self.directory):
                for _, head in self._opened().heads():
                    if (letter := _read(head)) is not None:
                        self._note(letter)
        self.close()

    def has(self, header: FrameHeader, requests: Sequence[str]) -> bool:
        """Return whether a frame was put here with its rows of these requests, because `on_frame` failed."""
        return bool(self._frames) and self._frames.get((header.source, header.seq), set()).issuperset(requests)

    def put(self, letter: Letter, payload: Any = b"") -> bool:
        """Store a letter, unless it is there; return False if there is no room. On return the letter is durable.

        Raises RetryError when the disk does not take it, or `capflow spool dead` has the spool: it may later.
        """
        if self._is_here(letter):
            return True
        number = self._append(letter, payload)
        if number is None:
            self.refused += 1
            return False
        self._pending = letter, number
        if not self._opened().wait_synced(number, _SYNC_S):
            raise RetryError(explain(f"spool {self.directory}", got="a disk that does not take a dead letter"))
        self._pending = None
        self._note(letter)
        return True

    def _append(self, letter: Letter, payload: Any) -> int | None:
        """Append a letter, unless an earlier try did; return its number, None if there is no room.

        Raises RetryError.
        """
        if self._pending is not None and self._pending[0] is letter:
            return self._pending[1]
        if self.letters >= limits.DEAD_LETTERS_MAX:
            return None
        try:
            return self._opened().append(_KIND + _encoder.encode(letter), payload)
        except FullError as e:
            if e.reason != "spool_full":
                raise RetryError(str(e)) from e
            return None
        except InUseError as e:
            raise RetryError(str(e)) from e

    def rest(self) -> None:
        """Give the spool back if nothing has come for a moment."""
        if self._spool is not None and time.monotonic() - self._put_at > limits.IDLE_S:
            self.close()

    def close(self) -> None:
        """Give the spool back."""
        spool, self._spool, self._pending = self._spool, None, None
        if spool is not None:
            spool.close()

    def _opened(self) -> Spool:
        self._put_at = time.monotonic()
        if self._spool is None:
            spool = Spool(self.directory, bytes_max=self._bytes_max, files=self._files)
            spool.open()
            self._spool = spool
        return self._spool

    def _is_here(self, letter: Letter) -> bool:
        header = letter.header
        if header is not None:
            return self._of(letter).get((header.source, header.seq), set()).issuperset(letter.requests)
        return letter.done is not None and _encoder.encode(letter.done) in self._ends

    def _note(self, letter: Letter) -> None:
        self.letters += 1
        header = letter.header
        if header is not None:
            self._of(letter).setdefault((header.source, header.seq), set()).update(letter.requests)
        elif letter.done is not None:
            self._ends.add(_encoder.encode(letter.done))

    def _of(self, letter: Letter) -> dict[_Key, set[str]]:
        return self._parts if letter.method == "on_request_done" else self._frames


def _read(head: bytes) -> Letter | None:
    """Return the letter of a record; None for one of another kind or version."""
    if head[:1] != _KIND:
        return None
    try:
        return _decoder.decode(head[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def read(directory: Path) -> Iterator[Found | Lost]:
    """Yield the letters in a spool, oldest first, and those that cannot be read.

    Raises UsageError when the directory holds no dead letters, CapflowError when it cannot be read.
    """
    for record in records(directory):
        if isinstance(record, Lost):
            yield record
            continue
        letter = _read(record.head)
        if letter is None:
            do = "name the directory of a consumer's dead letters: it ends in .dead"
            raise UsageError(explain(str(directory), got=f"record {record.id}, which is no dead letter", do=do))
        frame = None if letter.header is None else Frame(letter.header, memoryview(record.body).cast("B"))
        yield Found(record.id, letter, frame)


def drop(directory: Path, through: int | None = None) -> int:
    """Remove the letters up to a number, or all; return how many.

    Raises CapflowError, InUseError while a process writes the spool.
    """
    with Spool(directory) as spool:
        before = len(spool)
        while (record := spool.read(0)) is not None and (through is None or record.id <= through):
            spool.acknowledge(record.id)
        left = len(spool)
        if not spool.wait_acknowledged(spool.last - left, limits.BLOCK_S_MAX):
            raise CapflowError(explain(f"spool {directory}", got="a disk that does not answer", do="try again"))
    return before - left


def cut(frame: Frame, request: str | None = None) -> Frame:
    """Return a sealed frame with only the rows that a consumer wants, of one request or of all."""
    header, parts = wanted_rows(frame, request)
    return Frame.seal(header, b"".join(parts))


def entries_of(directory: Path) -> Iterator[Entry]:
    """Yield the letters in a spool as a recording: engines, frames and the ends of requests.

    Frames come from one boot of each worker and have the numbers of their letters, so a consumer that gets a frame
    twice notices. An end comes directly after the last letter of its request, so few requests are open at once. Ends
    that some pipeline stages did not send come last. Raises as `read` does.
    """
    models, last = _models_and_last(directory)
    boot = f"dead-{xxhash.xxh3_64_hexdigest(str(directory.resolve()).encode())}"
    met: dict[str, ModelInfo] = {}
    # The rows of each open request in letters so far, by pipeline stage.
    rows: defaultdict[_Incarnation, Counter[int]] = defaultdict(Counter)
    # A request that failed at a frame and again at its end has its end before the letters with its other rows.
    ends: dict[_Incarnation, RequestDone] = {}
    for record in read(directory):
        if isinstance(record, Lost):
            yield record
            continue
        letter = record.letter
        model = letter.model or models.get(letter.engine)
        if model is None:
            yield Lost(record.number, record.number, "no model is known of its engine")
            continue
        if met.get(letter.engine) != model:
            met[letter.engine] = model
            yield RecordedEngine(letter.engine, model)
        requests = _incarnations(letter)
        if record.frame is not None:
            header = msgspec.structs.replace(record.frame.header, boot=boot, seq=record.number, finished=(), acted=())
            counts = rows_of(header)
            for request in requests:
                rows[request][header.rank.pp] += counts[request[1]]
            yield Frame(header, record.frame.payload)
        elif letter.done is not None:
            ends[requests[0]] = letter.done
        for request in requests:
            done = ends.get(request)
            if done is not None and len(done.finished) >= model.stages and record.number >= last.get(request, 0):
                yield _narrowed(ends.pop(request), rows.pop(request, Counter()))
    for request, done in ends.items():
        yield _narrowed(done, rows[request])


def _models_and_last(directory: Path) -> tuple[dict[str, ModelInfo], dict[_Incarnation, int]]:
    """Return the model of each engine in the letters, and the number of the last letter of each request."""
    models: dict[str, ModelInfo] = {}
    last: dict[_Incarnation, int] = {}
    for record in read(directory):
        if not isinstance(record, Lost):
            if record.letter.model is not None:
                models.setdefault(record.letter.engine, record.letter.model)
            last.update(dict.fromkeys(_incarnations(record.letter), record.number))
    return models, last


def _incarnations(letter: Letter) -> list[_Incarnation]:
    """Return the requests with rows or an end in a letter: the engine, the id and the incarnation of each."""
    parts = [] if letter.header is None else [(part.id, part.incarnation) for part in letter.header.requests]
    if (done := letter.done) is not None:
        parts.append((done.request, done.finished[0].incarnation if done.finished else ""))
    return [(letter.engine, *part) for part in parts]


def _narrowed(done: RequestDone, rows: Counter[int]) -> RequestDone:
    """Return the end of a request with as many rows as the consumer was to have.

    rows: of these, those in letters, by stage.
    """
    missing = max(0, done.rows - rows.total())  # that the consumer took
    ends = [
        msgspec.structs.replace(finished, rows=rows[stage] + (0 if stage else missing))
        for stage, finished in enumerate(done.finished)
    ]
    return msgspec.structs.replace(done, finished=tuple(ends))
