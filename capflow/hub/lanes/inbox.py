"""The inbox: frames on disk that the hub took for a consumer and that the consumer has not finished.

An inbox is a directory below the spool directory, named after the consumer and a hash of its configuration. It holds a
spool (`capflow.buffers.spool`), which this hub or the next one reads. The head of a record begins with a byte for its
kind; msgpack follows:

| byte | record | rest of the head | body |
|---|---|---|---|
| `F` | frame | its header | its payload |
| `E` | an engine connected | `[engine, model]` | |
| `L` | an engine, replica or stage is gone, with its requests | `[engine, replica, stage, restarted]`, as `Gone` | |
| `D` | a request is done and is not given again | `[engine, request, through]`, as `RequestDoneMark` | |
| `M` | how long hubs ran without an engine of which the inbox has frames | `[engine, seconds]` | |
| `A` | an action was answered | `Answered` of `capflow.steering.action` | |
| `C` | checkpoint | `{engines, marks, unkept, models, of, done}` | |

A checkpoint repeats what the records before it said, as far as it still holds:

* `models` and `of`: the engines, each with the index of its model. `engines` is how earlier versions stored them.
* `marks`: the number of the last frame of each boot of each worker.
* `unkept`: the open requests of which frames were forgotten, with the number of rows in these frames.
* `done`: the requests of which only some frames are forgotten, if their own `D` record had no room.

A checkpoint takes at most 1/`CHECKPOINT_PARTS` of the inbox. Only checkpoints may exceed `bytes_max`, so one always
fits. If a checkpoint would be larger, engines without unread frames and without open requests are left out; they are
stored again before their next frame.

Invariant: records are forgotten only after a later checkpoint is durable, and the latest checkpoint is never forgotten.
So a hub that opens the inbox knows every engine, and every frame that was ever here, also a forgotten one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.spool import Files, FullError, InUseError, Lost, Spool
from capflow.buffers.spool.items import HEADER_BYTES
from capflow.capture.frame import Frame, FrameHeader, Rank, RequestRows, WorkerBoot
from capflow.capture.model import ModelInfo
from capflow.errors import CapflowError, explain
from capflow.steering.action import Answered

logger = logging.getLogger("capflow.hub")

# The number of workers whose marks are kept; the workers that sent nothing for longest are forgotten first.
_MARKS_MAX = 1024
# The time between two checkpoints, unless many bytes can be forgotten.
_CHECKPOINT_S = 0.5
# How long to wait for an inbox whose hub may be ending.
_WAIT_S = 5.0
_WAIT_PAUSE_S = 0.05
# Space on the disk that is reserved for a checkpoint when the disk is full.
_SPARE_BYTES = 128 * limits.KIB
# How long `close` waits for a disk that works, and for one that does not.
_CLOSE_S = 10.0
_CLOSE_PAUSE_S = 0.25

CHECKPOINT_PARTS = 16
"""A checkpoint takes at most the size of the inbox divided by this number."""

TOO_LARGE = "too_large"
"""The reason why a record is refused that takes more than half of an inbox, even an empty one."""

INBOXES_MAX = 64
"""The number of hubs that may run at once with the same consumer."""


class Known(msgspec.Struct, frozen=True, array_like=True):
    """An engine that connected."""

    engine: str
    model: ModelInfo


class Gone(msgspec.Struct, frozen=True, array_like=True):
    """An engine is gone, or one replica of it, or one pipeline stage of a replica.

    replica: None for the whole engine.
    stage: None for the whole replica.
    restarted: whether the stage started again.
    """

    engine: str
    replica: int | None
    stage: int | None = None
    restarted: bool = False


class RequestDoneMark(msgspec.Struct, frozen=True, array_like=True):
    """A request that the consumer is done with.

    through: the last record that belongs to this request; later records with the same id belong to another request. 0
        in records of earlier versions, which means this record.
    """

    engine: str
    request: str
    through: int = 0


class Missed(msgspec.Struct, frozen=True, array_like=True):
    """For how many seconds, summed over all hubs, a hub ran while an engine was not connected."""

    engine: str
    seconds: float


class Unkept(msgspec.Struct, frozen=True, array_like=True):
    """An open request of which frames were forgotten.

    rows: the number of rows in the forgotten frames, by pipeline stage.
    """

    engine: str
    rank: Rank
    request: RequestRows
    rows: dict[int, int]


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The last frame of one boot of one worker that the inbox stored; it may be forgotten."""

    engine: str
    boot: str
    rank: Rank
    seq: int


class Checkpoint(msgspec.Struct, frozen=True):
    """What later hubs need of the records before it, which may be forgotten."""

    engines: list[Known]
    marks: list[Mark]
    unkept: list[Unkept] = []
    models: list[ModelInfo] = []
    of: list[tuple[str, int]] = []
    done: list[RequestDoneMark] = []

    @property
    def known(self) -> list[Known]:
        """The engines, in the form of this version and of earlier ones.

        `of` pairs each engine with the index of its model in `models`. Earlier versions wrote `engines` instead.
        """
        return [*self.engines, *(Known(engine, self.models[place]) for engine, place in self.of)]


class _Place(msgspec.Struct, frozen=True):
    """The fields of a frame's header that tell which worker sent it, and its number."""

    engine: str
    boot: str
    rank: Rank
    seq: int


class InboxItem(NamedTuple):
    """A record that was read, and its number."""

    number: int
    record: Frame | Known | Gone | RequestDoneMark | Missed | Answered | Checkpoint | Lost


_KINDS: dict[bytes, type[Any]] = {
    b"F": FrameHeader,
    b"E": Known,
    b"L": Gone,
    b"D": RequestDoneMark,
    b"M": Missed,
    b"A": Answered,
    b"C": Checkpoint,
}
_decoders = {kind: msgspec.msgpack.Decoder(record) for kind, record in _KINDS.items()}
_bytes = {record: kind for kind, record in _KINDS.items()}
_place = msgspec.msgpack.Decoder(_Place)
_encoder = msgspec.msgpack.Encoder()


def read_head(head: bytes) -> FrameHeader | Known | Gone | RequestDoneMark | Missed | Answered | Checkpoint:
    """Decode the head of a record. Raises KeyError and msgspec.MsgspecError for a record of another version."""
    mark: FrameHeader | Known | Gone | RequestDoneMark | Missed | Answered | Checkpoint = _decoders[head[:1]].decode(
        head[1:]
    )
    return mark


class Inbox:
    """One consumer's spool, from `open` to `close`. One thread stores records, another reads and releases them.

    root: the directory below which the inboxes of all consumers are.
    name: the name of the consumer, and the hash of its configuration.
    on_synced: called with a record's number, on the spool's thread, when every record up to it is durable.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        bytes_max: int,
        *,
        on_synced: Callable[[int], None],
        files: Files | None = None,
    ) -> None:
        self.root = root
        self.name = name
        self.bytes_max = bytes_max
        # The number of frames that this process stored.
        self.frames = 0
        # The number of frames that earlier processes left, in this inbox and in those that it joined.
        self.frames_left = 0
        # The number of frames that could not be read again.
        self.frames_lost = 0
        # The number of frames that earlier processes left in this inbox.
        self._frames_found = 0
        # The number of frames that this process read.
        self._frames_taken = 0
        # The highest record number that was read; after `again` lower ones are read once more.
        self._taken_through = 0
        # The length of the records that were read.
        self.taken_bytes = 0
        # The open requests of which an earlier process forgot frames.
        self.unkept: list[Unkept] = []
        # The engines and replicas of which an earlier process left frames, and how many seconds each was missed.
        self.left: dict[tuple[str, int], float] = {}
        # The requests that are done and have records here, each with the last record that is not given again.
        self.done: dict[tuple[str, str], int] = {}
        # The requests that were done in an inbox that was joined, while their frames there are not moved here yet.
        self._joining: set[tuple[str, str]] = set()
        # Frames of `_joining` have numbers above this one.
        self._joined_from = 0
        # Space that frames may not use; it is for the records that let other records be forgotten.
        self._spare_bytes = min(limits.MIB, bytes_max // 8)
        self._segment_bytes = min(limits.SEGMENT_BYTES_MAX, bytes_max // 8)
        # Further space for checkpoints, if an earlier process had a larger `bytes_max` and used it.
        self._over_bytes = 0
        # The length of the record that waits for room; 0 while none waits.
        self._wanted_bytes = 0
        self._on_synced = on_synced
        self._files = files
        # Set by `open`.
        self._spool: Spool | None = None
        # The connected engines by name, at the last record that was read.
        self._engines: dict[str, Known] = {}
        # The last frame of each worker, at the last record that was stored; the latest worker comes last.
        self._marks: dict[WorkerBoot, int] = {}
        # The number of marks that were forgotten because there were more than `_MARKS_MAX`.
        self._marks_lost = 0
        # Guards `_checkpoints`.
        self._lock = threading.Lock()
        # Checkpoints that are not durable yet: the number of each, and of the last record that it lets be forgotten.
        self._checkpoints: deque[tuple[int, int]] = deque()
        # The numbers of the checkpoints that are not forgotten.
        self._own: deque[int] = deque()
        # The last record that a checkpoint lets be forgotten.
        self._forgotten = 0
        # Whether the last checkpoint found no room. It is logged once.
        self._stuck = False
        # Whether the last checkpoint left out something that a next hub needs. It is logged once.
        self._cut = False
        # The time of the last checkpoint, and `_put_bytes` at that time.
        self._checkpoint_at = 0.0
        self._checkpoint_bytes = 0
        # The length of the records that this process stored.
        self._put_bytes = 0
        # The model of each engine that a record here names, at the last record that was stored.
        self._put_engines: dict[str, ModelInfo] = {}
        # The number of the last stored frame of each engine.
        self._frame_last: dict[str, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether the inbox was opened."""
        return self._spool is not None

    @property
    def spool(self) -> Spool:
        """The spool, once it is open."""
        assert self._spool is not None
        return self._spool

    def open(self) -> None:
        """Open the first free directory and read its state; raises CapflowError.

        A hub that is ending releases the first directory, so it is waited for. While another hub keeps it, this hub
        uses the next directory beside it.
        """
        give_up_at = time.monotonic() + _WAIT_S
        number = 1
        while True:
            try:
                self.open_at(self.place(number))
            except InUseError:
                if number == INBOXES_MAX:
                    raise
                if number == 1 and time.monotonic() < give_up_at:
                    time.sleep(_WAIT_PAUSE_S)
                else:
                    number += 1
            else:
                return

    def open_at(self, place: Path) -> None:
        """Open the inbox in this directory.

        Raises InUseError while another hub has the directory, CapflowError when it cannot be used.
        """
        spare_bytes = min(_SPARE_BYTES, self._spare_bytes)
        spool = Spool(
            place, bytes_max=self.bytes_max, spare_bytes=spare_bytes, on_synced=self._synced, files=self._files
        )
        spool.open()
        self._spool = spool
        if (nbytes := spool.nbytes) > self.bytes_max:
            self._over_bytes = nbytes - self.bytes_max + self._spare_bytes
        try:
            self._recover()
        except CapflowError:
            self._spool = None
            spool.close()
            raise

    def place(self, number: int) -> Path:
        """Return the directory of one of the hubs that run at once with the same consumer; they count from 1."""
        return self.root / (self.name if number == 1 else f"{self.name}.{number}")

    def another(self) -> Inbox:
        """Return another inbox of the same consumer, to be opened in a directory that an earlier hub left."""
        return Inbox(self.root, self.name, self.bytes_max, on_synced=lambda _: None, files=self._files)

    def join(self, other: Inbox, here: Mapping[tuple[WorkerBoot, int], int]) -> None:
        """Take over the state of another inbox, whose frames are stored here later. Call it before any put or take.

        Raises CapflowError.

        here: what `frames_here` returned for this inbox.
        """
        for source, seq in other._marks.items():
            self._mark(source, seq)
        self.unkept += other.unkept
        self.left = other.left | self.left
        self.frames_left += other.frames_left
        self._joining |= other.done.keys()
        # A hub that was killed may have moved some of the frames already.
        for frame, number in other.frames_here().items():
            for key, through in other.done.items():
                if frame in here and number <= through:
                    self.done[key] = max(self.done.get(key, 0), here[frame])
        with contextlib.suppress(FullError):
            for entry in other._engines.values():
                self.put(entry)
        self._joined_from = self.spool.last

    def joined(self, key: tuple[str, str], last: int) -> RequestDoneMark:
        """Return the mark of a request that was done in another inbox.

        last: the record of its last frame in this inbox.
        """
        self.done[key] = max(self.done.get(key, 0), last)
        self._joining.discard(key)
        return RequestDoneMark(*key, self.done[key])

    @property
    def has_done(self) -> bool:
        """Whether `is_done` may be true of any request."""
        return bool(self.done or self._joining)

    def is_done(self, engine: str, request: str, number: int) -> bool:
        """Return whether a record belongs to a finished request, and not to a later one with the same id."""
        key = engine, request
        return (number > self._joined_from and key in self._joining) or self.done.get(key, 0) >= number

    def _recover(self) -> None:
        spool = self.spool
        self._forgotten = spool.last - len(spool)
        # Engines that are gone by the last record, while `_engines` still needs them for the records before it.
        gone = set()
        for number, head in spool.heads():
            kind = head[:1]
            with contextlib.suppress(msgspec.MsgspecError, KeyError):
                match _place.decode(head[1:]) if kind == b"F" else _decoders[kind].decode(head[1:]):
                    case _Place(engine, boot, rank, seq):
                        self.frames_left += 1
                        self.left.setdefault((engine, rank.dp), 0.0)
                        self._frame_last[engine] = number
                        self._mark((engine, boot, rank), seq)
                    case Known() as entry:
                        self._engines[entry.engine] = entry
                        self._miss(entry.engine, 0.0)
                        gone.discard(entry.engine)
                    case Gone(engine, replica, None):
                        if replica is None:
                            gone.add(engine)
                        self.left = {
                            k: s for k, s in self.left.items() if k[0] != engine or replica not in (None, k[1])
                        }
                    case Missed(engine, seconds):
                        self._miss(engine, seconds)
                    case RequestDoneMark(engine, request, through):
                        self.done[engine, request] = through or number
                    case Checkpoint() as checkpoint:
                        marks, unkept = checkpoint.marks, checkpoint.unkept
                        self.done |= {(done.engine, done.request): done.through for done in checkpoint.done}
                        self._own.append(number)
                        self.unkept = unkept
                        for long in unkept:
                            self.left.setdefault((long.engine, long.rank.dp), 0.0)
                        self._engines |= {entry.engine: entry for entry in checkpoint.known}
                        for mark in marks:
                            self._mark((mark.engine, mark.boot, mark.rank), mark.seq)
        self._frames_found = self.frames_left
        self._put_engines = {name: entry.model for name, entry in self._engines.items() if name not in gone}

    def _miss(self, engine: str, seconds: float) -> None:
        self.left |= dict.fromkeys([key for key in self.left if key[0] == engine], seconds)

    @property
    def directory(self) -> Path:
        """The directory of the open inbox."""
        return self.spool.directory

    @property
    def unread(self) -> int:
        """The number of records that were not read."""
        return self.spool.unread

    @property
    def frames_waiting(self) -> int:
        """The number of frames that were not read."""
        return max(0, self._frames_found + self.frames - self._frames_taken)

    @property
    def forgotten(self) -> int:
        """The last record that a checkpoint lets be forgotten."""
        return self._forgotten

    @property
    def engines(self) -> list[str]:
        """The engines that connected and are not gone, at the last record that was read."""
        return list(self._engines)

    def model(self, engine: str) -> ModelInfo | None:
        """Return the model of an engine; None when the engine is gone."""
        entry = self._engines.get(engine)
        return entry.model if entry is not None else None

    def frames_here(self) -> dict[tuple[WorkerBoot, int], int]:
        """Return the numbers of the frames that an earlier process left. Call it after `open` and before any put.

        Raises CapflowError.
        """
        places = ((_place.decode(head[1:]), number) for number, head in self.spool.heads() if head[:1] == b"F")
        return {((place.engine, place.boot, place.rank), place.seq): number for place, number in places}

    def status(self) -> dict[str, Any]:
        """Return the counters of the spool and of the inbox."""
        own = {"unread": self.unread, "frames_spilled": self.frames, "frames_lost": self.frames_lost}
        return self.spool.status() | own

    # For the thread that stores records.

    def has(self, header: FrameHeader) -> bool:
        """Return whether the inbox stored the frame, also if it is forgotten."""
        return header.seq <= self._marks.get(header.source, 0)

    def put_frame(self, frame: Frame, timeout_s: float, *, spared: bool = False) -> int:
        """Store a frame, waiting for room for a limited time; return its number.

        Raises FullError, with `TOO_LARGE` if the frame never fits.

        spared: the frame may use the space that is reserved for records that let others be forgotten.
        """
        header, payload = frame.encode()
        spare_bytes = 0 if spared else self._spare_bytes
        # Frames of a request can be forgotten only when the end of the request is stored.
        ends = bool(frame.header.finished)
        number = self._append(b"F" + header, payload, timeout_s, spare_bytes=spare_bytes, needed=ends)
        self.skip(frame.header)
        self._frame_last[frame.header.engine] = number
        self.frames += 1
        return number

    def _append(self, head: bytes, body: Any, timeout_s: float, *, spare_bytes: int = 0, needed: bool = False) -> int:
        nbytes = HEADER_BYTES + len(head) + len(body)
        if nbytes > self.bytes_max // 2:
            got, expected = f"a record of {nbytes} bytes", f"at most {self.bytes_max // 2}"
            text = explain(f"spool {self.directory}", got=got, expected=expected, do="give it more spool_bytes")
            raise FullError(TOO_LARGE, text)
        if timeout_s:
            self._wanted_bytes = nbytes
        try:
            number = self.spool.put(head, body, timeout_s, spare_bytes=spare_bytes, needed=needed)
        finally:
            if timeout_s:
                self._wanted_bytes = 0
        self._put_bytes += nbytes
        return number

    @property
    def held_bytes_max(self) -> int:
        """How many bytes the open requests may use while a record waits for room; any thread may ask."""
        return self.bytes_max - self._spare_bytes - 2 * self._segment_bytes - self._wanted_bytes

    def skip(self, header: FrameHeader) -> None:
        """Note that a frame need not be stored if it comes again."""
        self._mark(header.source, header.seq)

    def put(self, record: Known | Gone | RequestDoneMark | Missed | Answered, timeout_s: float = 0.0) -> int:
        """Store a record that is not a frame; return its number. Raises FullError as `put_frame` does."""
        head = _bytes[type(record)] + _encoder.encode(record)
        number = self._append(head, b"", timeout_s)
        if isinstance(record, Known):
            self._put_engines[record.engine] = record.model
        elif isinstance(record, Gone) and record.replica is None:
            self._put_engines.pop(record.engine, None)
        return number

    def tells_of(self, engine: str, model: ModelInfo) -> bool:
        """Return whether a record here says that the engine has this model."""
        entry = self._put_engines.get(engine)
        return entry is model or entry == model

    def _mark(self, source: WorkerBoot, seq: int) -> None:
        had = self._marks.pop(source, 0)
        self._marks[source] = max(had, seq)
        if removed := keep_newest(self._marks, _MARKS_MAX):
            if not self._marks_lost:
                text = "inbox %s: more than %d workers at once; frames that older ones repeat reach the consumer again"
                logger.warning(text, self.name, _MARKS_MAX)
            self._marks_lost += removed

    # For the thread that reads records.

    def take(self, timeout_s: float) -> InboxItem | None:
        """Return the next record, waiting for at most `timeout_s`; None if none came."""
        record = self.spool.read(timeout_s)
        if record is None:
            return None
        if not isinstance(record, Lost):
            self.taken_bytes += HEADER_BYTES + len(record.head) + len(record.body)
        else:
            self.frames_lost += record.last - record.first + 1
            self._frames_taken += record.last - record.first + 1
            self._taken_through = max(self._taken_through, record.last)
            return InboxItem(record.id, record)
        if record.id > self._taken_through:
            self._taken_through = record.id
            self._frames_taken += record.head[:1] == b"F"
        try:
            mark = read_head(record.head)
        except (msgspec.MsgspecError, KeyError):  # a record of another version
            return InboxItem(record.id, Lost(record.id, record.id, "unreadable", None))
        if isinstance(mark, Known):
            self._engines[mark.engine] = mark
        elif isinstance(mark, Gone) and mark.replica is None:
            self._engines.pop(mark.engine, None)
        return InboxItem(record.id, Frame(mark, record.body) if isinstance(mark, FrameHeader) else mark)

    def look(self, numbers: Sequence[int]) -> Iterator[tuple[int, Frame | None]]:
        """Yield frames that were read before, by rising number; None for an unreadable frame. Raises OSError."""
        for number, record in zip(numbers, self.spool.look(numbers), strict=True):
            frame = None
            if not isinstance(record, Lost) and isinstance(header := read_head(record.head), FrameHeader):
                frame = Frame(header, record.body)
            yield number, frame

    def again(
        self, number: int, unkept: list[Unkept], models: Mapping[str, ModelInfo], done: Mapping[tuple[str, str], int]
    ) -> None:
        """Let `take` return every record after a number again, as a next hub would get it.

        unkept: the open requests of which records up to the number were forgotten.
        models: the models of the engines that sent the frames.
        done: the requests with which the consumer became done in this process, and the last record of each.
        """
        self.unkept = unkept
        for engine, model in models.items():
            self._engines.setdefault(engine, Known(engine, model))
        for key, through in done.items():
            self.done[key] = max(self.done.get(key, 0), through)
        self.spool.rewind(number)

    def header_of(self, lost: Lost) -> FrameHeader | None:
        """Return the header of a frame of which only the rows are lost; None if the header is lost too."""
        if lost.head is None or lost.head[:1] != b"F":
            return None
        with contextlib.suppress(msgspec.MsgspecError):  # a record of another version
            header: FrameHeader = _decoders[b"F"].decode(lost.head[1:])
            return header
        return None

    def forget(
        self,
        number: int,
        unkept: Callable[[int], list[Unkept]],
        *,
        needed: Callable[[], Mapping[str, ModelInfo]] = dict,
        done: Callable[[int], list[RequestDoneMark]] = lambda _: [],
        at_once: bool = False,
    ) -> None:
        """Note that no record up to `number` is needed; write a checkpoint that says so if that is due.

        unkept: returns the open requests of which frames up to a record are forgotten.
        needed: returns the engines of open requests, each with the model with which the next hub begins.
        done: returns the requests that are done, have frames before and after a record, and have no mark of their own.
        at_once: write the checkpoint now.
        """
        while self._own and self._own[0] <= self._forgotten:
            self._own.popleft()
        if number - self._forgotten <= sum(1 for made in self._own if made <= number):
            return  # only checkpoints could be forgotten
        now = time.monotonic()
        much = self._put_bytes - self._checkpoint_bytes > self.bytes_max // 16
        if not (at_once or much or now >= self._checkpoint_at + _CHECKPOINT_S):
            return
        self._checkpoint_at, self._checkpoint_bytes = now, self._put_bytes
        bytes_max = self.bytes_max // CHECKPOINT_PARTS
        head = self._checkpoint(number, unkept(number), needed, done(number), bytes_max)
        try:
            made = self.spool.append(head, spare_bytes=-bytes_max - self._over_bytes, needed=True)
        except FullError as e:
            if not self._stuck:
                event = {"event": "inbox_full", "directory": str(self.directory), "reason": e.reason}
                text = "spool %s: no room for a checkpoint, so no record is forgotten: %s"
                logger.warning(text, self.directory, e, extra=event)
            self._stuck = True
            return
        self._stuck = False
        self._own.append(made)
        self._forgotten = number
        self._checkpoints.append((made, number))
        self._acknowledge(self.spool.synced_through)
        for key in [key for key, last in list(self.done.items()) if last <= number]:
            del self.done[key]
        for engine, last in dict(self._frame_last).items():
            if last <= number and engine not in self._engines:
                del self._frame_last[engine]

    def _checkpoint(
        self,
        number: int,
        unkept: list[Unkept],
        needed: Callable[[], Mapping[str, ModelInfo]],
        done: list[RequestDoneMark],
        bytes_max: int,
    ) -> bytes:
        """Return the head of a checkpoint of at most `bytes_max` bytes.

        If it would be larger, it leaves out, in this order: engines that nothing needs, the oldest marks, the oldest
        requests that are done, the oldest open requests, and other engines.
        """
        marks = [Mark(*source, seq) for source, seq in list(self._marks.items())]
        runs = needed()
        # Some of these engines may be gone.
        open_engines = {name: Known(name, model) for name, model in runs.items()}
        head = _checkpoint_head(self._engines | open_engines, marks, unkept, done)
        if len(head) <= bytes_max:
            return head
        frames = dict(self._frame_last)
        for name in [name for name in self._engines if name not in runs and frames.get(name, 0) <= number]:
            # First of all, so that the other thread stores the engine again before its next frame.
            self._put_engines.pop(name, None)
            self._frame_last.pop(name, None)
            del self._engines[name]
        engines = self._engines | open_engines
        head, lost = _checkpoint_head(engines, marks, unkept, done), False
        while len(head) > bytes_max and (marks or done or unkept or engines):
            lost = True
            if marks:
                marks = marks[(len(marks) + 1) // 2 :]
            elif done:
                done = done[(len(done) + 1) // 2 :]
            elif unkept:
                unkept = unkept[(len(unkept) + 1) // 2 :]
            else:
                name = next(iter(engines))
                del engines[name]
                self._engines.pop(name, None)
            head = _checkpoint_head(engines, marks, unkept, done)
        if lost and not self._cut:
            event = {"event": "inbox_small", "directory": str(self.directory)}
            text = "spool %s: too small for the open requests: a hub that ends now loses rows; give it more spool_bytes"
            logger.warning(text, self.directory, extra=event)
        self._cut = lost
        return head

    def _acknowledge(self, synced: int) -> None:
        """Forget the records that durable checkpoints let be forgotten.

        Called by the thread that made a checkpoint and by the thread of the spool, in any order.
        """
        with self._lock:
            while self._checkpoints and self._checkpoints[0][0] <= synced:
                self.spool.acknowledge(self._checkpoints.popleft()[1])

    def _synced(self, number: int) -> None:
        self._acknowledge(number)
        self._on_synced(number)

    def close(
        self,
        needless: int,
        unkept: Callable[[int], list[Unkept]],
        *,
        keep: bool,
        needed: Callable[[], Mapping[str, ModelInfo]] = dict,
        done: Callable[[int], list[RequestDoneMark]] = lambda _: [],
    ) -> bool:
        """Unlock the directory; return whether every record is durable.

        needless: no record up to this one is needed any more. If none is needed at all, the directory is removed.
        keep: do not remove the directory.
        """
        empty = needless >= self.spool.last and not keep
        if not empty:
            self.forget(needless, unkept, needed=needed, done=done, at_once=True)
            if self._wait(self.spool.wait_synced, self.spool.last):
                self._acknowledge(self.spool.last)
                self._wait(self.spool.wait_acknowledged, self._forgotten)
        clean = self.spool.remove() if empty else self.spool.close()
        if not (clean or empty):
            event = {"event": "spool_failed", "directory": str(self.directory)}
            logger.error("spool %s: some records are not on the disk", self.directory, extra=event)
        return clean

    def _wait(self, reached: Callable[[int, float], bool], number: int) -> bool:
        """Wait for the disk, longer if it works than if it fails; return whether it reached the record."""
        deadline = time.monotonic() + _CLOSE_S
        while not reached(number, _CLOSE_PAUSE_S):
            if self.spool.trouble is not None or time.monotonic() > deadline:
                return False
        return True


def _checkpoint_head(
    engines: Mapping[str, Known], marks: list[Mark], unkept: list[Unkept], done: list[RequestDoneMark]
) -> bytes:
    """Return the head of a checkpoint, in which each model is written once."""
    models: dict[ModelInfo, int] = {}
    of = [(entry.engine, models.setdefault(entry.model, len(models))) for entry in engines.values()]
    return b"C" + _encoder.encode(Checkpoint([], marks, unkept, list(models), of, done))
