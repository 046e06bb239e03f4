"""The writer of an inbox: stores what a hub gives one consumer, on a thread of its own, and reports when it is durable.

Invariant: a frame belongs to its worker until it is durable here, or until its rows are counted as lost. A disk that
fails counts as a disk without room: frames wait or their rows are lost, as the fallback says, and the write is tried
again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.policy import WhenFull
from capflow.buffers.queue import ByteQueue
from capflow.buffers.spool import FullError, Lost
from capflow.capture.frame import Frame, FrameHeader, WorkerBoot, rows_of
from capflow.capture.losses import Losses, lessened, note_frame
from capflow.capture.model import ModelInfo
from capflow.hub.lanes.inbox import TOO_LARGE, Gone, Inbox, Known, Missed
from capflow.steering.action import Answered

logger = logging.getLogger("capflow.consumer")

_RETRY_S = 1.0

Taken = Callable[[], None]


class QueuedFrame(NamedTuple):
    """A frame on its way into the inbox.

    model: its engine's.
    """

    frame: Frame
    taken: Taken
    model: ModelInfo


class Greeting(NamedTuple):
    """An engine that connected, on its way into the inbox.

    engine: the record of the engine.
    done: called when the record is in the inbox.
    """

    engine: Known
    done: Callable[[], None]


class InboxWriter:
    """One inbox's writer, from `start` until the queue is closed and empty.

    fallback: what happens when the inbox has no room. `block`: frames wait, holding their workers' credit. `drop`:
        their rows are lost, counted by reason in `dropped`.
    """

    def __init__(
        self, name: str, inbox: Inbox, queue: ByteQueue[Any], fallback: WhenFull, dropped: Counter[str]
    ) -> None:
        self.name = name
        # Set when the thread has ended.
        self.ended = threading.Event()
        # Whether something went wrong, the last time, that is no disk without room.
        self.failed = False
        # How often something went wrong that is no disk without room.
        self.failures = 0
        # Events that found no room.
        self.events_lost = 0
        # Whether a record was lost of which nobody knows what it held.
        self.lost_unknown = False
        self._inbox = inbox
        self._queue = queue
        self.fallback = fallback
        self._dropped = dropped
        # Other inboxes, emptied into this one before anything else.
        self._beside: list[Inbox] = []
        # The numbers of frames that are in it since before.
        self._here: Mapping[tuple[WorkerBoot, int], int] = {}
        # Rows that did not get in, by engine and pipeline stage, and request, until the stage's end of the request says
        # so.
        self._lost: defaultdict[tuple[str, int], dict[str, Losses]] = defaultdict(dict)
        # The ends and events of requests without room.
        self._owed: deque[FrameHeader] = deque()
        # Guards the next.
        self._pending_lock = threading.Lock()
        # The record that is not durable yet: number and time of the write.
        self._pending: deque[tuple[int, Taken, float]] = deque()
        # Set by the thread while it writes.
        self._writing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"capflow-{name}-inbox", daemon=True)

    def start(self, beside: Sequence[Inbox], here: Mapping[tuple[WorkerBoot, int], int]) -> None:
        """Begin, with what other inboxes hold, each of them opened and joined.

        here: frames that were copied from them before.
        """
        self._beside = list(beside)
        self._here = here
        self._thread.start()

    def synced(self, number: int) -> None:
        """Note that every record up to here is durable. Called on any thread."""
        ready = []
        with self._pending_lock:
            while self._pending and self._pending[0][0] <= number:
                ready.append(self._pending.popleft()[1])
        for taken in ready:
            taken()

    def trouble(self) -> str | None:
        """Return why the inbox is taken to have failed; None when it has not."""
        if self.failed:
            return "its inbox failed; see the log"
        if self._inbox.is_open and not self._inbox.directory.is_dir():
            return "the directory of its inbox is gone"
        if self._stalled_s() > limits.HANG_S_MAX:
            return f"the disk of its inbox has taken nothing for {limits.HANG_S_MAX:g} s or more"
        spools = [inbox.spool for inbox in (self._inbox, *self._beside) if inbox.is_open]
        trouble = next((spool.trouble for spool in spools if spool.trouble is not None), None)
        return None if trouble is None else f"the disk of its inbox: {trouble}"

    def _stalled_s(self) -> float:
        """Return for how long the disk has been at one write, or at making one durable."""
        with self._pending_lock:
            written = self._pending[0][2] if self._pending else None
        begun = [since for since in (self._writing_since, written) if since is not None]
        return time.monotonic() - min(begun) if begun else 0.0

    # The thread.

    def _run(self) -> None:
        try:
            while self._beside:
                self._safely(self._empty, self._beside[0])
                self._beside[0].spool.close()
                self._beside = self._beside[1:]
            self._here = {}
            while (item := self._queue.get(_RETRY_S)) is not None or not self._queue.closed:
                self._put_owed()
                self._put_safely(item)
                del item
            self._put_owed()
        except FullError:  # the hub stops: the workers keep this frame and all later ones for the next hub
            pass
        finally:
            for other in self._beside:
                other.spool.close()
            self.ended.set()

    def _safely(self, do: Callable[[Any], None], item: Any) -> None:
        """Call `do` with an item. Raises nothing but FullError: then the worker keeps the frame."""
        try:
            do(item)
        except FullError:
            raise
        except Exception as e:  # noqa: BLE001  without this thread nothing would be acknowledged any more
            self._note_failure(e)

    def _put_safely(self, item: Any) -> None:
        """Put an item in.

        A frame that cannot be stored is tried again before later ones: the mark of a later frame would say that the
        inbox has it. Raises FullError.
        """
        while True:
            failed = self.failures
            self._safely(self._put, item)
            if failed == self.failures or not isinstance(item, QueuedFrame) or self._inbox.has(item.frame.header):
                return
            if self._queue.closed:
                raise FullError("disk_failed", "the hub stops")
            self.ended.wait(_RETRY_S)

    def _note_failure(self, e: Exception) -> None:
        self.failures += 1
        if not self.failed:
            event = {"event": "inbox_failed", "consumer": self.name}
            logger.error("consumer %s: its inbox failed; it continues", self.name, exc_info=e, extra=event)
        self.failed = True

    def _put(self, item: Any) -> None:
        match item:
            case QueuedFrame(frame, taken, _) if self._inbox.has(frame.header):  # perhaps it is not durable yet
                self._take_when_durable(self._inbox.spool.last, taken)
            case QueuedFrame(frame, taken, model):
                self._put_frame(frame, taken, self.fallback, model)
            case Greeting(engine, done):
                done()
                if not self._inbox.tells_of(engine.engine, engine.model):
                    with contextlib.suppress(FullError):  # it comes before its first frame
                        self._try(functools.partial(self._inbox.put, engine), 0.0)
            case Gone() | Missed() | Answered():
                self._note(item)
                if isinstance(item, Gone) and item.replica is None:
                    for stage in [stage for stage in self._lost if stage[0] == item.engine]:
                        del self._lost[stage]

    def _put_frame(self, frame: Frame, taken: Taken, fallback: WhenFull, model: ModelInfo | None = None) -> int:
        """Store a frame; return the number of its record, or 0 if it has no room and `fallback` does not wait.

        model: the model of the frame's engine, which is stored first if the inbox does not have it.
        """
        if frame.header.finished:
            frame = Frame(self._lessened(frame.header), frame.payload)
        put = functools.partial(self._inbox.put_frame, frame)
        try:
            self._put_engine(frame, fallback, model)
            number = self._insist(put) if fallback is WhenFull.BLOCK else self._try(put, 0.0)
            # The engine may have been forgotten meanwhile.
            last = self._put_engine(frame, fallback, model) or number
        except FullError as e:
            if fallback is WhenFull.BLOCK and e.reason != TOO_LARGE:
                raise
            self._refuse(frame.header, e.reason)
            taken()
            return 0
        self._take_when_durable(last, taken)
        return number

    def _take_when_durable(self, number: int, taken: Taken) -> None:
        """Call `taken` when every record up to here is durable."""
        with self._pending_lock:
            self._pending.append((number, taken, time.monotonic()))
        self.synced(self._inbox.spool.synced_through)

    def _put_engine(self, frame: Frame, fallback: WhenFull, model: ModelInfo | None) -> int:
        """Store the model of a frame's engine, unless the inbox has it; return its record, 0 for none.

        Raises FullError.
        """
        engine = frame.header.engine
        if model is None or self._inbox.tells_of(engine, model):
            return 0
        put = functools.partial(self._inbox.put, Known(engine, model))
        return self._insist(put) if fallback is WhenFull.BLOCK else self._try(put, 0.0)

    def _note(self, record: Known | Gone | Missed | Answered) -> None:
        """Store a record that is not a frame, however long it takes; one that never fits is logged and left out.

        Raises FullError when the hub stops before there is room.
        """
        try:
            self._insist(functools.partial(self._inbox.put, record))
        except FullError as e:
            if e.reason != TOO_LARGE:
                raise
            self._note_failure(e)

    def _insist(self, put: Callable[[float], int]) -> int:
        """Store a record, however long it takes; return its number.

        Raises FullError when the hub stops before there is room, and when the record never fits.

        put: stores the record, and waits for room for so many seconds.
        """
        while True:
            stopping = self._queue.closed
            try:
                return self._try(put, 0.0 if stopping else _RETRY_S)
            except FullError as e:
                if stopping or e.reason == TOO_LARGE:
                    raise

    def _try(self, put: Callable[[float], int], timeout_s: float) -> int:
        """Store a record, waiting for room for at most `timeout_s`; return its number.

        Raises nothing but FullError, also for a disk that fails.
        """
        self._writing_since = time.monotonic()
        try:
            number = put(timeout_s)
        except FullError:
            raise
        except Exception as e:
            self._note_failure(e)
            if timeout_s:
                self.ended.wait(timeout_s)
            raise FullError("disk_failed", f"{type(e).__name__}: {e}") from e
        finally:
            self._writing_since = None
        self.failed = False
        return number

    def _refuse(self, header: FrameHeader, reason: str) -> None:
        """Count the rows of a frame that is not stored as lost, and store the ends of requests in it later."""
        lost = self._lost[_stage_of(header)]
        note_frame(lost, header, reason)
        keep_newest(lost, limits.RESULTS_KEPT_MAX)
        self._dropped[reason] += rows_of(header).total()
        self._inbox.skip(header)
        if header.acted and len(self._owed) >= limits.EVENTS_OWED_MAX:
            self.events_lost += sum(len(on.acted) for on in header.acted)
            header = msgspec.structs.replace(header, acted=())
        if header.finished or header.acted:
            bare = msgspec.structs.replace(self._lessened(header), requests=(), blocks=())
            self._owed.append(Frame.seal(bare, b"").header)

    def _lessened(self, header: FrameHeader) -> FrameHeader:
        """Return the header, in which the ends of requests name the rows that were not stored."""
        lost = self._lost.get(_stage_of(header))
        if lost is None:
            return header
        shortened = lessened(header, lost)
        if not lost:
            del self._lost[_stage_of(header)]
        return shortened

    def _put_owed(self) -> None:
        while self._owed:
            try:
                self._try(lambda _: self._inbox.put_frame(Frame(self._owed[0], b""), 0.0, spared=True), 0.0)
            except FullError as e:
                if e.reason != TOO_LARGE:
                    return
                smaller = _smaller(self._owed.popleft())
                self._owed.extendleft(reversed(smaller))
                if not smaller:
                    self._note_failure(e)
            else:
                self._owed.popleft()

    def _empty(self, other: Inbox) -> None:
        """Move the records of another inbox into this one, and remove the other one.

        A record stays in the other inbox until it is durable here. Raises FullError when the hub stops before the end.
        """
        event = {"event": "inbox_joined", "consumer": self.name, "directory": str(other.directory)}
        logger.info("consumer %s: the frames in %s are given to it", self.name, other.directory, extra=event)
        done = deque(sorted(other.done.items(), key=lambda end: end[1]))
        # The number here of the last frame that was moved.
        last = 0
        while other.unread:
            item = other.take(_RETRY_S)
            if item is None:  # its disk does not return it yet
                if self._queue.closed:
                    raise FullError("disk_failed", "the hub stops")
                continue
            while done and done[0][1] < item.number:
                self._pass_over(done.popleft()[0], last)
            match item.record:
                case Frame() as frame if number := self._here.get((frame.header.source, frame.header.seq)):
                    last = max(last, number)
                case Frame() as frame:
                    taken = functools.partial(other.spool.acknowledge, item.number)
                    last = self._put_frame(frame, taken, WhenFull.BLOCK, other.model(frame.header.engine))
                case Known() | Gone() | Answered() as record:
                    self._note(record)
                case Lost() as lost:
                    self._miss(other, lost)
        for key, _ in done:
            self._pass_over(key, last)
        while not self._inbox.spool.wait_synced(self._inbox.spool.last, _RETRY_S):
            if self._queue.closed:
                raise FullError("disk_failed", "the hub stops")
        other.close(other.spool.last, lambda _: [], keep=False)

    def _pass_over(self, key: tuple[str, str], last: int) -> None:
        if last:
            self._insist(functools.partial(self._inbox.put, self._inbox.joined(key, last)))

    def _miss(self, other: Inbox, lost: Lost) -> None:
        header = other.header_of(lost)
        if header is None:
            self.lost_unknown = True
        else:
            self._refuse(header, "spool_damaged")


def _stage_of(header: FrameHeader) -> tuple[str, int]:
    return header.engine, header.rank.pp


def _smaller(header: FrameHeader) -> list[FrameHeader]:
    """Return headers that are smaller than one that does not fit; empty if none is.

    Events are left out; ends are split into halves, or one loses its places.
    """
    ends = header.finished
    if header.acted:
        return [msgspec.structs.replace(header, acted=())] if ends else []
    if len(ends) > 1:
        half = len(ends) // 2
        return [msgspec.structs.replace(header, finished=part) for part in (ends[:half], ends[half:])]
    dropped = tuple(msgspec.structs.replace(each, gaps=()) for each in ends[0].dropped)
    if dropped == ends[0].dropped:
        return []
    return [msgspec.structs.replace(header, finished=(msgspec.structs.replace(ends[0], dropped=dropped),))]
