"""The inbox: frames on disk that a consumer was given and has not finished, for this hub or the next.

It is a directory below the given one, named after the consumer and a hash of its configuration, and holds a spool
(`capflow.buffers.spool`). A record's head begins with a byte for its kind; msgpack follows:

| byte | record | rest of the head | body |
|---|---|---|---|
| `F` | frame | its header | its payload |
| `E` | engine connected | `[engine, model]` | |
| `L` | engine, replica or stage gone or new: its open requests are over | `[engine, replica, stage, anew]`, or nil | |
| `D` | consumer is done with a request: its records before this one are not given again | `[engine, request]` | |
| `M` | for how long hubs ran without an engine that the inbox has frames of | `[engine, seconds]` | |
| `A` | action that was answered | `Answered` of `capflow.steering.action` | |
| `C` | checkpoint | `{engines, marks, unkept, models, of, done}` | |

A checkpoint repeats what records before it said and what still holds: the engines with their models; `marks`, the
number of the last frame of each boot of each worker; `unkept`, the open requests of which frames were forgotten, with
the number of rows; and `done`, the requests of which only some frames are forgotten and whose own `D` record had no
room. A checkpoint takes at most one of `CHECKPOINT_PARTS` parts of the inbox, and only it may lie beyond `bytes_max`,
so that one always fits. If it would be larger, engines without unread frames and without open requests are left out;
they are stored again before their next frame. Invariant: records are forgotten only when a checkpoint after them is
durable, and the latest checkpoint is never forgotten. So whoever opens the inbox knows every engine, and which frames
were here, also forgotten ones.
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

_MARKS_MAX = 1024  # of workers, those of which something came last
_CHECKPOINT_S = 0.5  # between two checkpoints, unless much can be forgotten
_WAIT_S = 5.0  # for an inbox of a hub that may be ending
_WAIT_PAUSE_S = 0.05
_SPARE_BYTES = 128 * limits.KIB  # of the disk, for a checkpoint when it is full
_CLOSE_S = 10.0  # for a disk that works
_CLOSE_PAUSE_S = 0.25  # for one that does not

CHECKPOINT_PARTS = 16
"""A checkpoint is at most one of so many parts of an inbox."""

TOO_LARGE = "too_large"
"""Why a record is refused that takes more than half of an inbox, however much room there is."""

INBOXES_MAX = 64
"""Of hubs that run at once with the same consumer."""


class Known(msgspec.Struct, frozen=True, array_like=True):
    """An engine that connected."""

    engine: str
    model: ModelInfo


class Gone(msgspec.Struct, frozen=True, array_like=True):
    """An engine that is gone, or one replica of it, or one pipeline stage of that.

    anew: the stage started again.
    """

    engine: str
    replica: int | None
    stage: int | None = None
    anew: bool = False


class RequestDoneMark(msgspec.Struct, frozen=True, array_like=True):
    """A request that the consumer is done with.

    through: the last record that is of it, and not of another with its id; 0 in old records, which is this one.
    """

    engine: str
    request: str
    through: int = 0


class Missed(msgspec.Struct, frozen=True, array_like=True):
    """For how many seconds, over all hubs, an engine was not connected while one ran."""

    engine: str
    seconds: float


class Unkept(msgspec.Struct, frozen=True, array_like=True):
    """An open request of which frames were forgotten.

    rows: in these, by pipeline stage.
    """

    engine: str
    rank: Rank
    request: RequestRows
    rows: dict[int, int]


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The last frame of one boot of one worker that is here, or was."""

    engine: str
    boot: str
    rank: Rank
    seq: int


class Checkpoint(msgspec.Struct, frozen=True):
    """What stays known when the records before it are forgotten."""

    engines: list[Known]
    marks: list[Mark]
    unkept: list[Unkept] = []
    models: list[ModelInfo] = []
    of: list[tuple[str, int]] = []
    done: list[RequestDoneMark] = []

    @property
    def known(self) -> list[Known]:
        """The engines.

        `engines` has those of an earlier version; else each of `of` has its model's place in `models`.
        """
        return [*self.engines, *(Known(engine, self.models[place]) for engine, place in self.of)]


class _Place(msgspec.Struct, frozen=True):
    """Whose frame it is, of a frame's header."""

    engine: str
    boot: str
    rank: Rank
    seq: int


class InboxItem(NamedTuple):
    """A record that was taken out, and its number."""

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

    on_synced(number) is called, on the spool's thread, when every record up to that number is durable.
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
        # Put in by this process.
        self.frames = 0
        # By an earlier process.
        self.frames_left = 0
        # That could not be read again.
        self.frames_lost = 0
        # By an earlier process, here.
        self._frames_found = 0
        # Taken out by this process.
        self._frames_taken = 0
        # The highest number that was taken out; after `again` lower ones come once more.
        self._taken_through = 0
        # Of records, taken out.
        self.taken_bytes = 0
        # By an earlier process.
        self.unkept: list[Unkept] = []
        # Engines and replicas it left frames of, and for how long they were missed.
        self.left: dict[tuple[str, int], float] = {}
        # Requests of which records are here that are not given again, and up to which.
        self.done: dict[tuple[str, str], int] = {}
        # Such requests of which frames are to come from another inbox.
        self._joining: set[tuple[str, str]] = set()
        # Behind this record.
        self._joined_from = 0
        # Kept free of frames, for what makes room.
        self._spare_bytes = min(limits.MIB, bytes_max // 8)
        self._segment_bytes = min(limits.SEGMENT_BYTES_MAX, bytes_max // 8)
        # That checkpoints may take beside, where an earlier process was allowed more.
        self._over_bytes = 0
        # Of the record that waits for room, 0 while none does.
        self._wanted_bytes = 0
        self._on_synced = on_synced
        self._files = files
        # From `open`.
        self._spool: Spool | None = None
        # By name, as of what was taken out.
        self._engines: dict[str, Known] = {}
        # As of what was put in; the latest last.
        self._marks: dict[WorkerBoot, int] = {}
        # That had no room.
        self._marks_lost = 0
        # Guards the next.
        self._lock = threading.Lock()
        # Not durable: its number, and up to which is forgotten then.
        self._checkpoints: deque[tuple[int, int]] = deque()
        # The numbers of checkpoints that are not forgotten.
        self._own: deque[int] = deque()
        # Up to which a checkpoint was made.
        self._forgotten = 0
        # Whether the last one had no room, which is said once.
        self._stuck = False
        # Whether the last one had no room for what runs, which is said once.
        self._cut = False
        # When the latest was.
        self._checkpoint_at = 0.0
        # That were put in by then.
        self._checkpoint_bytes = 0
        # By this process.
        self._put_bytes = 0
        # That records here tell of, as of what was put in.
        self._put_engines: dict[str, ModelInfo] = {}
        # The last frame of each engine, as of what was put in.
        self._frame_last: dict[str, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._spool is not None

    @property
    def spool(self) -> Spool:
        """The spool, once it is open."""
        assert self._spool is not None
        return self._spool

    def open(self) -> None:
        """Take the directory and find what is in it; raises CapflowError.

        While another hub has it, there is another one beside it, for this one. A hub that is ending gives its own back:
        it is waited for.
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
        """Take this directory and no other.

        Raises InUseError while another hub has it, CapflowError when it cannot be used.
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
        """Return the directory of the hub that runs as this one of several with the same consumer, counted from 1."""
        return self.root / (self.name if number == 1 else f"{self.name}.{number}")

    def another(self) -> Inbox:
        """Return one of the same consumer, to be opened at another place, for what is left there."""
        return Inbox(self.root, self.name, self.bytes_max, on_synced=lambda _: None, files=self._files)

    def join(self, other: Inbox, here: Mapping[tuple[WorkerBoot, int], int]) -> None:
        """Take over the state of another inbox, whose frames come after those here. Call it before any put or take.

        here: as of `frames_here`. Raises CapflowError.
        """
        for source, seq in other._marks.items():
            self._mark(source, seq)
        self.unkept += other.unkept
        self.left = other.left | self.left
        self.frames_left += other.frames_left
        self._joining |= other.done.keys()
        for frame, number in other.frames_here().items():  # that came before a kill
            for key, through in other.done.items():
                if frame in here and number <= through:
                    self.done[key] = max(self.done.get(key, 0), here[frame])
        with contextlib.suppress(FullError):
            for entry in other._engines.values():
                self.put(entry)
        self._joined_from = self.spool.last

    def joined(self, key: tuple[str, str], last: int) -> RequestDoneMark:
        """Return the done mark of a request that the consumer was done with in another inbox.

        Its last frame is this record here.
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
        gone = set()  # engines whose going is here, to be taken out
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
        """Where it lies."""
        return self.spool.directory

    @property
    def unread(self) -> int:
        """How many records were not taken out."""
        return self.spool.unread

    @property
    def frames_waiting(self) -> int:
        """How many frames were not taken out."""
        return max(0, self._frames_found + self.frames - self._frames_taken)

    @property
    def forgotten(self) -> int:
        """The last record that a checkpoint has made needless."""
        return self._forgotten

    @property
    def engines(self) -> list[str]:
        """The engines that connected and are not gone, as of what was taken out."""
        return list(self._engines)

    def model(self, engine: str) -> ModelInfo | None:
        """Return the model of an engine; None when it is gone."""
        entry = self._engines.get(engine)
        return entry.model if entry is not None else None

    def frames_here(self) -> dict[tuple[WorkerBoot, int], int]:
        """Return the numbers of the frames that an earlier process left. Call it after `open` and before any put.

        Raises CapflowError.
        """
        places = ((_place.decode(head[1:]), number) for number, head in self.spool.heads() if head[:1] == b"F")
        return {((place.engine, place.boot, place.rank), place.seq): number for place, number in places}

    def status(self) -> dict[str, Any]:
        """Return the spool's counters, and the inbox's own."""
        own = {"unread": self.unread, "frames_spilled": self.frames, "frames_lost": self.frames_lost}
        return self.spool.status() | own

    # For the thread that puts in.

    def has(self, header: FrameHeader) -> bool:
        """Return whether the frame is here, or was."""
        return header.seq <= self._marks.get(header.source, 0)

    def put_frame(self, frame: Frame, timeout_s: float, *, spared: bool = False) -> int:
        """Store a frame, waiting for room for a limited time; return its number.

        Raises FullError, with `TOO_LARGE` if the frame never fits.

        spared: also where only room is left that is kept free of rows.
        """
        header, payload = frame.encode()
        spare_bytes = 0 if spared else self._spare_bytes
        ends = bool(frame.header.finished)  # of requests, without which their frames could not go
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
        """How much open requests may hold of the inbox, beside a record that waits for room; for any thread."""
        return self.bytes_max - self._spare_bytes - 2 * self._segment_bytes - self._wanted_bytes

    def skip(self, header: FrameHeader) -> None:
        """Note that a frame is not needed here if it comes again."""
        self._mark(header.source, header.seq)

    def put(self, record: Known | Gone | RequestDoneMark | Missed | Answered, timeout_s: float = 0.0) -> int:
        """Take anything else; return its record's number. Raises FullError as `put_frame` does."""
        head = _bytes[type(record)] + _encoder.encode(record)
        number = self._append(head, b"", timeout_s)
        if isinstance(record, Known):
            self._put_engines[record.engine] = record.model
        elif isinstance(record, Gone) and record.replica is None:
            self._put_engines.pop(record.engine, None)
        return number

    def tells_of(self, engine: str, model: ModelInfo) -> bool:
        """Return whether a record here says that an engine has a model."""
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

    # For the thread that takes out.

    def take(self, timeout_s: float) -> InboxItem | None:
        """Return what comes next, waiting for it for at most so long; None when nothing came."""
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
        except (msgspec.MsgspecError, KeyError):  # of another version
            return InboxItem(record.id, Lost(record.id, record.id, "unreadable", None))
        if isinstance(mark, Known):
            self._engines[mark.engine] = mark
        elif isinstance(mark, Gone) and mark.replica is None:
            self._engines.pop(mark.engine, None)
        return InboxItem(record.id, Frame(mark, record.body) if isinstance(mark, FrameHeader) else mark)

    def look(self, numbers: Sequence[int]) -> Iterator[tuple[int, Frame | None]]:
        """Read frames again by rising numbers; None for an unreadable frame. Raises OSError."""
        for number, record in zip(numbers, self.spool.look(numbers), strict=True):
            frame = None
            if not isinstance(record, Lost) and isinstance(header := read_head(record.head), FrameHeader):
                frame = Frame(header, record.body)
            yield number, frame

    def again(
        self, number: int, unkept: list[Unkept], models: Mapping[str, ModelInfo], done: Mapping[tuple[str, str], int]
    ) -> None:
        """Give every record behind a number again, as a next hub would get it.

        unkept: the open requests of which records up to there were forgotten.
        models: of the engines that the frames are of.
        done: the requests that the consumer is done with since this process began, and the last record of each.
        """
        self.unkept = unkept
        for engine, model in models.items():
            self._engines.setdefault(engine, Known(engine, model))
        for key, through in done.items():
            self.done[key] = max(self.done.get(key, 0), through)
        self.spool.rewind(number)

    def header_of(self, lost: Lost) -> FrameHeader | None:
        """Return the header of a frame of which only the rows are lost."""
        if lost.head is None or lost.head[:1] != b"F":
            return None
        with contextlib.suppress(msgspec.MsgspecError):  # of another version
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
        """Note that nothing up to a record is needed; write it to disk at once or when a checkpoint is worth it.

        unkept: gives the open requests of which frames up to a record are forgotten.
        needed: gives the engines of open requests, with the model that the next hub is to begin with.
        done: gives the requests that the consumer is done with, have frames on both sides of a record, and no record
            that says so.
        """
        while self._own and self._own[0] <= self._forgotten:
            self._own.popleft()
        if number - self._forgotten <= sum(1 for made in self._own if made <= number):
            return  # nothing but checkpoints
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
                logger.warning("spool %s: nothing is forgotten: %s", self.directory, e, extra=event)
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
        """Return the head of a checkpoint of at most so many bytes.

        What goes when it would be larger: engines that nothing needs, then the oldest marks, then the oldest requests
        that are done, then the oldest open requests, then engines.
        """
        marks = [Mark(*source, seq) for source, seq in list(self._marks.items())]
        runs = needed()
        open_engines = {name: Known(name, model) for name, model in runs.items()}  # also those that are gone
        head = _checkpoint_head(self._engines | open_engines, marks, unkept, done)
        if len(head) <= bytes_max:
            return head
        frames = dict(self._frame_last)
        for name in [name for name in self._engines if name not in runs and frames.get(name, 0) <= number]:
            self._put_engines.pop(name, None)  # before the checkpoint: it is put in again before a frame that comes now
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
            text = "spool %s: it is too small for what runs: a hub that ends now loses rows; give it more spool_bytes"
            logger.warning(text, self.directory, extra=event)
        self._cut = lost
        return head

    def _acknowledge(self, synced: int) -> None:
        """Forget what checkpoints allow that are durable.

        Called by the thread that made one, which may be late, and by the spool's.
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
        """Give the directory back; return whether every record is durable.

        needless: nothing up to this record is needed any more. When that is everything, and `keep` does not hold, the
            directory goes too.
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
            logger.error("spool %s: not everything is on the disk", self.directory, extra=event)
        return clean

    def _wait(self, reached: Callable[[int, float], bool], number: int) -> bool:
        """Wait for the disk, a while if it works and hardly if it does not; return whether it got there."""
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
