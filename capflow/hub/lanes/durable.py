"""A durable lane: frames wait in the inbox of the consumer on disk, which it reads like a hub of one consumer.

A frame belongs to its worker until it is durable in the inbox, and to the inbox until the consumer is done with its
requests. So a consumer may be slow, and a hub that was killed, or stopped while requests ran, leaves the rest to the
next hub. The next hub gives the consumer those frames again. A consumer that stores the worker and the number of each
frame recognises frames that it has.

While the consumer asks for a retry, the lane keeps its place. After a fatal error the lane reads the inbox again from
the first needed record, as the next hub would. Poisonous records go to the dead letters of the consumer
(`capflow.hub.lanes.dead_letters`) and are not given to it again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from capflow import limits
from capflow.buffers.policy import WhenFull
from capflow.buffers.shares import Shares
from capflow.buffers.spool import FullError, Lost
from capflow.capture.frame import Frame, FrameHeader, Rank, RequestRows, rows_of
from capflow.capture.losses import note_chunk
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone
from capflow.errors import CapflowError, RemoteProtocolError, kind_of
from capflow.hub.effects import Hold
from capflow.hub.lanes.dead_letters import SUFFIX, DeadLetters, Letter, cut
from capflow.hub.lanes.given_up import GivenUp
from capflow.hub.lanes.inbox import Gone, Inbox, InboxItem, Known, Missed, RequestDoneMark, Unkept
from capflow.hub.lanes.lane import HubCalls, Lane, LaneFiles, LeftError
from capflow.hub.lanes.leftover import take_beside, tell_of_others
from capflow.hub.lanes.notes import weight
from capflow.hub.lanes.tally import Delivery, Tallies, Tally
from capflow.hub.lanes.writer import Greeting, InboxWriter, QueuedFrame, Taken
from capflow.hub.requests.index import Arrival, RequestIndex
from capflow.hub.requests.request import KnownEngine, Request, RequestName
from capflow.plugins.configure import ConfiguredConsumer
from capflow.steering.action import Answered
from capflow.steering.events import events_of

logger = logging.getLogger("capflow.consumer")

# How often the inbox stores for how long an engine is missed.
_MISSED_S = 0.5

DEAD_FULL = "dead_letters_full"
"""The reason of lost rows that a consumer could not handle and for which its dead letters had no room."""

FRAME_INVALID = "frame_invalid"
"""The reason of lost rows in a frame of an inbox that no hub accepts any more."""

# The part of the inbox that open requests may use. Above it, the oldest ones are not kept for the next hub any more.
_PINNED_MAX = 0.5


@dataclass
class _Open:
    """A request without a result.

    first: its first record.
    taken_bytes: the length of the records that were read before that one.
    over_at: when the consumer got the end of the request.
    rows: the record number, the stage and the number of rows of each of its frames here.
    forgotten: the number of its rows in forgotten frames, by stage.
    recalled: the number of its rows in frames that an earlier hub forgot.
    """

    first: int
    taken_bytes: int
    request: Request
    part: RequestRows
    rank: Rank
    model: ModelInfo | None = None
    rows: deque[tuple[int, int, int]] = field(default_factory=deque)
    forgotten: Counter[int] = field(default_factory=Counter)
    recalled: int = 0
    over_at: float | None = None

    def unkept(self, number: int) -> Unkept:
        """Return the entry for a checkpoint after which the records up to `number` are forgotten."""
        while self.rows and self.rows[0][0] <= number:
            _, stage, rows = self.rows.popleft()
            self.forgotten[stage] += rows
        return Unkept(self.request.engine, self.rank, self.part, dict(self.forgotten))


class ReopenError(Exception):
    """The lane must close the consumer, open it again, and read the inbox again. The cause is the consumer's error."""

    def __init__(self, method: str) -> None:
        super().__init__(method)
        self.method = method


class DurableLane(Lane):
    """One consumer's inbox and threads, from `open` to `close`; `taken` of a frame is called when the frame is durable.

    The writer decides what happens when the inbox has no room.

    state: the memory for the open requests of the inbox.
    """

    durable = True

    def __init__(self, index: int, configured: ConfiguredConsumer, calls: HubCalls, *, state: Shares) -> None:
        super().__init__(index, configured, calls)
        spill = configured.spill
        assert spill is not None
        self.inbox = Inbox(spill.root, spill.name, spill.bytes_max, on_synced=self._synced)
        # Only the consumer's thread uses it while the lane is open.
        self.dead = DeadLetters(spill.root / f"{spill.name}{SUFFIX}", min(limits.DEAD_BYTES_DEFAULT, spill.bytes_max))
        self.state = state
        # The requests of the frames that were read. Only the consumer's thread uses the index and the tallies; the
        # results are in the hub's index.
        self.requests = self._new_index()
        self._tallies = Tallies(0)
        self.writer = InboxWriter(self.name, self.inbox, self.queue, spill.fallback, self.dropped)
        # Whether an unreadable record was read.
        self._lost_unknown = False
        # The engines of these requests. Fields without another note are used by the consumer's thread alone.
        self._engines: dict[str, KnownEngine] = {}
        # Engines for whose requests the hub had no room. Only the hub's thread uses it.
        self._full: set[str] = set()
        # The boot of each worker, at its last frame.
        self._boots: dict[tuple[str, Rank], str] = {}
        # Open requests that the inbox keeps from their beginning, in the order of their first records.
        self._open: dict[tuple[str, str], _Open] = {}
        # Open requests of which the inbox forgot the beginning.
        self._long: dict[tuple[str, str], _Open] = {}
        # For how many seconds each engine and replica is missed, and when that was computed. Only the hub's thread uses
        # it.
        self._missing: dict[tuple[str, int], tuple[float, float]] = {}
        # Departures that are in the queue already. Only the hub's thread uses it.
        self._gone: set[Gone] = set()
        # The time when the inbox was opened. Set by `open`, read by the hub's thread.
        self._opened_at = 0.0
        # The record that was handled last.
        self._handled = 0
        # Another hub may have stored records up to this one, so their frames are checked once more; set by `open`.
        self._found_through = 0.0
        self._given_up = GivenUp()
        # Whether the last `RequestDoneMark` could not be stored. It is logged once.
        self._stuck = False
        # Requests that have results and are still in `_open` or `_long`: the last record of each, and whether the inbox
        # has its `RequestDoneMark`. Filled by any thread.
        self._settled: SimpleQueue[tuple[Request, int, bool]] = SimpleQueue()
        # Each `RequestDoneMark` that found no room, with the first record of its request.
        self._owed: deque[tuple[int, RequestDoneMark]] = deque()
        # When these were last tried again.
        self._owed_at = 0.0
        # When the last result came, or the consumer last asked for a retry.
        self._result_at = 0.0
        # Requests with results of which records are in the inbox, each with its last record.
        self._done: dict[tuple[str, str], int] = {}
        # The record that is being handled.
        self._at = 0
        # The length of the records that were read before that one.
        self._taken_bytes = 0
        # Requests whose Futures failed, with the errors. Filled by any thread, emptied by the consumer's thread.
        self._failures: SimpleQueue[tuple[Tally, Callable[[], None] | None, BaseException]] = SimpleQueue()
        # Set before the consumer is closed for good.
        self._is_closing = False
        # Whether the log has named the directory of the dead letters.
        self._told_of_dead = False
        # Open requests of which frames are dead letters.
        self._aside: set[tuple[str, str]] = set()
        # How many requests were too long for the inbox.
        self.requests_unkept = 0

    # Called by the hub.

    def open(self) -> None:
        """Open the inbox and the consumer. It first gets the frames that an earlier hub left. Raises CapflowError."""
        self.inbox.open()
        self.dead.directory = self.inbox.directory.with_name(f"{self.inbox.directory.name}{SUFFIX}")
        self._opened_at = time.monotonic()
        self._handled = self.inbox.spool.last - self.inbox.unread
        beside: list[Inbox] = []
        try:
            beside += take_beside(self.inbox)
            self._found_through = math.inf if beside else self.inbox.spool.last
            here = self.inbox.frames_here() if beside else {}
            for other in beside:
                self.inbox.join(other, here)
            if self.inbox.frames_left:
                event = {"event": "inbox_found", "consumer": self.name, "frames": self.inbox.frames_left}
                text = "consumer %s: %d frames wait that an earlier hub left"
                logger.info(text, self.name, self.inbox.frames_left, extra=event)
            tell_of_others(self.inbox, self.name)
            self.dead.open()
            super().open()
        except BaseException:
            for other in beside:
                other.spool.close()
            self.inbox.close(0, self._unkept_by, keep=False)
            raise
        self.writer.start(beside, here)

    def take(self, arrivals: Sequence[Arrival], holds: Sequence[Hold]) -> None:
        """Take each whole frame that concerns the consumer, and hold it until it is durable."""
        for arrival, hold in zip(arrivals, holds, strict=True):
            if not (arrival.concerns(self.index) or (self.minds_actions and arrival.events)):
                continue
            frame = arrival.frame
            if self._gone:
                self._gone = {gone for gone in self._gone if gone.engine != frame.header.engine}
            taken = functools.partial(self._on_release, (hold,))
            self.queue.force(QueuedFrame(frame, taken, arrival.model), frame.nbytes, wake=False)
            hold.left += 1

    def finish(self, request: Request, taken: Taken | None) -> bool:  # noqa: ARG002
        """Do nothing: the frames in the inbox carry the end."""
        return False

    def lose(
        self, engine: str, replica: int | None = None, stage: int | None = None, *, restarted: bool = False
    ) -> None:
        """Note that a part of an engine is gone; the arguments are those of `RequestIndex.lose`."""
        gone = Gone(engine, replica, stage, restarted)
        if gone not in self._gone:
            self._gone.add(gone)
            self.queue.force(gone)

    def greet(self, engine: str, model: ModelInfo, *, worker: bool = False) -> None:
        """Note that a worker connected. Without room for a note, the consumer learns of it before the first frame."""
        if not worker:  # frames come with workers
            return
        self._gone = {gone for gone in self._gone if gone.engine != engine}
        nbytes = weight(model)
        if self.notes.admit(nbytes):
            self.queue.force(Greeting(Known(engine, model), functools.partial(self.notes.taken, nbytes)))
        else:
            self.notes.lost["session"] += 1

    def tell(self, answered: Answered) -> None:
        """Take the outcome of an action, if the consumer handles outcomes."""
        if self.minds_actions:
            self.queue.force(answered)

    def note_full(self, engine: str) -> None:
        """Note that the hub had no room for requests of an engine."""
        if len(self._full) < limits.SESSIONS_MAX:
            self._full.add(engine)

    def missed(self, here: set[tuple[str, int]], now: float) -> Iterator[tuple[str, int]]:
        """Yield the engines and replicas that were away for `limits.MISSED_S` while a hub ran, this or an earlier one.

        A replica counts if it has open requests, and an engine without any if none of it is connected.

        here: the engines and replicas that are connected.
        """
        waits = {
            (entry.request.engine, entry.request.replica) for entry in [*self._open.values(), *self._long.values()]
        }
        connected = {engine for engine, _ in here}
        waits |= {(engine, 0) for engine in self.inbox.engines if engine not in connected}
        before, self._missing = self._missing, dict.fromkeys(here, (0.0, now))
        waits |= self.inbox.left.keys()
        waiting = {engine for engine, _ in waits}
        self._gone = {gone for gone in self._gone if gone.engine in waiting}
        for key in sorted(waits - here):
            left = self.inbox.left.get(key)
            seconds, since = before.get(key) or ((0.0, now) if left is None else (left, self._opened_at))
            total = seconds + now - since
            self._missing[key] = (total, now)
            if total >= limits.MISSED_S:
                yield key
            elif total // _MISSED_S > seconds // _MISSED_S:
                self.queue.force(Missed(key[0], total))

    def trouble(self, now: float) -> str | None:
        """Return why the consumer or its inbox counts as failed; None if neither does.

        The text names nothing that is captured.
        """
        return super().trouble(now) or self.writer.trouble()

    def leave(self) -> None:
        """Leave what the consumer has not handled to the next hub."""
        self.discard()

    def status(self) -> dict[str, Any]:
        """Return the lane's counters."""
        own = {"requests_unkept": self.requests_unkept, "events_lost": self.writer.events_lost}
        spool = self.inbox.status() | own if self.inbox.is_open else None
        dead = {"directory": str(self.dead.directory), "letters": self.dead.letters, "refused": self.dead.refused}
        return super().status() | {"spool": spool, "dead_letters": dead}

    def stored(self) -> LaneFiles:
        """Return what the inbox and the dead letters hold."""
        directory, status = (self.inbox.directory, self.inbox.status()) if self.inbox.is_open else (None, None)
        return LaneFiles(directory, status, self.dead.letters, self.requests_unkept)

    @property
    def left(self) -> tuple[int, int]:
        """How many frames the consumer was not given, and how many requests are open."""
        return self.inbox.frames_waiting if self.inbox.is_open else 0, len(self._open) + len(self._long)

    def _synced(self, number: int) -> None:
        self.writer.synced(number)

    # The consumer's thread.

    def _run(self) -> None:
        if not self._open_consumer():
            return
        through = False  # whether everything was handled
        # The error for which the lane starts again.
        failed: tuple[str, BaseException] | None = None
        while not through and not self._discarded.is_set():
            try:
                if failed is not None:
                    self._begin_again(*failed)
                    failed = None
                through = self._take_all()
            except LeftError:
                break
            except ReopenError as e:
                failed = e.method, e.__cause__ or e
            except Exception as e:  # noqa: BLE001  without this thread nothing more would be handled
                failed = "lane", e
        self._end_thread(through=through)

    def _end_thread(self, *, through: bool) -> None:
        """Close the consumer and the inbox.

        through: whether everything was handled.
        """
        self._is_closing = True
        if error := self._close_consumer():
            self._failed("close", error)
        self.writer.ended.wait(limits.SILENCE_S_MAX)
        with contextlib.suppress(LeftError):
            self._see_to_failures()
        self._let_go()
        if through:
            self._pass_notes()
        self.dead.close()
        keep = bool(self.inbox.engines or self._long or self.inbox.unkept)
        self._put_owed()
        self.inbox.close(self._needless(), self._unkept_by, keep=keep, needed=self._engines_open, done=self._owed_by)

    def _take_all(self) -> bool:
        """Handle records as they come; return True when all were handled, False when the rest is discarded."""
        self._recall()
        idle_at = time.monotonic() + limits.IDLE_S
        while not self._discarded.is_set():
            written = self.writer.ended.is_set()
            self._taken_bytes = self.inbox.taken_bytes
            item = self.inbox.take(max(0.0, idle_at - time.monotonic()))
            if item is not None:
                self._at = item.number
                self._safely(item)
                self._handled = item.number
                del self._fatal[item.number]
                del item
            elif written:
                return True
            self._see_to_failures()
            self._let_go()
            self._forget()
            if time.monotonic() >= idle_at:
                self._idle()
                self.dead.rest()
                idle_at = time.monotonic() + limits.IDLE_S
        return False

    def _begin_again(self, method: str, error: BaseException) -> None:
        """Open the consumer again and give it all unfinished requests, as the next hub would. Raises LeftError."""
        self._given = ()
        self.pace.waited_since = None
        self._open_again(method, error)
        # Their requests come again.
        self._failures = SimpleQueue()
        self._let_go()
        needless = self._needless()
        running = [*self._open.values(), *self._long.values()]
        models = {each.request.engine: each.model for each in running if each.model is not None}
        done = {key: through for key, through in self._done.items() if through > needless}
        self.inbox.again(needless, self._unkept_by(needless), models, done)
        self.requests, self._tallies = self._new_index(), Tallies(0)
        self._engines, self._boots, self._open, self._long, self._aside = {}, {}, {}, {}, set()
        self._handled = needless

    def _new_index(self) -> RequestIndex:
        self.state.clear()  # an earlier index may have used it
        return RequestIndex([self.wish._replace(durable=False)], self.state, results_kept_max=0)

    def _place(self, method: str) -> int | str:
        return method if method == "on_idle" else self._at

    def _restart(self, method: str, error: BaseException) -> None:
        raise ReopenError(method) from error

    def _wait(self, method: str, error: BaseException) -> None:
        super()._wait(method, error)
        self._result_at = time.monotonic()

    def _take_failure(self, tally: Tally, settled: Callable[[], None] | None, error: BaseException) -> bool:
        """Leave a request whose Future failed to the consumer's thread. Called on any thread."""
        self._failures.put((tally, settled, error))
        return True

    def _see_to_failures(self) -> None:
        """Repeat requests whose Futures failed, or set them aside. Raises ReopenError and LeftError."""
        while not self._failures.empty():
            tally, settled, error = self._failures.get()
            request = tally.request
            key = f"{request.engine} {request.id}"
            if kind_of(error) != "poison" and self._is_closing:
                # The inbox keeps it.
                self.gave_up = True
            elif kind_of(error) != "poison" and self._fatal[key] < limits.RESTARTS_MAX:
                self._fatal[key] += 1
                raise ReopenError("on_request_done") from error
            else:
                del self._fatal[key]
                text = self._give_up(request, tally.done(), self._failed("on_request_done", error))
                self._settle(tally, settled, CaptureResult("error", text))

    def _pass_notes(self) -> None:
        """Take the records that were stored after all others were handled: results that came with `close`."""
        while (item := self.inbox.take(0.0)) is not None:
            self._handled = item.number

    def _recall(self) -> None:
        """Open the requests of which an earlier hub forgot frames. Their ends name the rows that were lost so."""
        while self.inbox.unkept:
            long = self.inbox.unkept[0]
            engine = self._engine(long.engine)
            if engine is not None and self.inbox.done.get((long.engine, long.request.id), 0) == 0:
                request = self.requests.recall(long.request, engine, long.rank, long.rows)
                forgotten = Counter(long.rows)
                entry = _Open(0, 0, request, long.request, long.rank, engine.model)
                entry.forgotten, entry.recalled = forgotten, forgotten.total()
                self._long[long.engine, long.request.id] = entry
            del self.inbox.unkept[0]

    def _engines_open(self) -> dict[str, ModelInfo]:
        """Return the engines of requests without a result, each with the model for the next hub."""
        models = {entry.request.engine: entry.model for entry in reversed(self._open.values())}  # of the oldest
        for entry in self._long.values():
            engine = entry.request.engine
            models.setdefault(engine, self.inbox.model(engine) or entry.model)
        return {engine: model for engine, model in models.items() if model is not None}

    def _unkept_by(self, number: int) -> list[Unkept]:
        """Return the open requests of which records up to a number are forgotten."""
        return [*self.inbox.unkept, *(long.unkept(number) for long in list(self._long.values()))]

    def _owed_by(self, number: int) -> list[RequestDoneMark]:
        """Return the done marks that are not in the inbox and whose requests have records on both sides of a number."""
        return [done for first, done in self._owed if first <= number < done.through]

    def _put_owed(self, again_s: float = 0.0) -> None:
        """Store the done marks that had no room, as far as they fit, unless the last try is newer than `again_s`."""
        if time.monotonic() < self._owed_at + again_s:
            return
        self._owed_at = time.monotonic()
        while self._owed and (self._owed[0][1].through <= self.inbox.forgotten or self._put_done(self._owed[0][1])):
            self._owed.popleft()

    def _needless(self) -> int:
        """Return the last record that no next hub would need."""
        return next((entry.first for entry in self._open.values()), self._handled + 1) - 1

    def _may_settle(self, entry: _Open) -> bool:
        """Return whether a result is worth waiting for: the request is over, results come, and frames wait for room."""
        if entry.over_at is None or self.writer.fallback is not WhenFull.BLOCK:
            return False
        return time.monotonic() < max(entry.over_at, self._result_at) + limits.RESULT_S_MAX

    def _forget(self) -> None:
        held_max = min(_PINNED_MAX * self.inbox.bytes_max, self.inbox.held_bytes_max)
        while self._open:
            key, oldest = next(iter(self._open.items()))
            if self.inbox.taken_bytes - oldest.taken_bytes <= held_max or self._may_settle(oldest):
                break
            self._long[key] = self._open.pop(key)
            self.requests_unkept += 1
            if self.requests_unkept == 1:
                text = "consumer %s: the spool is too small for the open requests; if the hub ends now, rows are lost"
                logger.warning(text, self.name, extra={"event": "inbox_small", "consumer": self.name})
        needless = self._needless()
        self.inbox.forget(needless, self._unkept_by, needed=self._engines_open, done=self._owed_by)
        if self._owed:
            self._put_owed(again_s=limits.IDLE_S)
        while self._done and self._done[key := next(iter(self._done))] <= needless:
            del self._done[key]

    def _safely(self, item: InboxItem) -> None:
        """Handle an item; one that the lane itself fails at again and again is set aside.

        Raises ReopenError and LeftError.
        """
        try:
            self._handle_item(item)
        except (ReopenError, LeftError):
            raise
        except Exception as e:
            if not isinstance(e, RemoteProtocolError) and self._fatal[item.number] < limits.RESTARTS_MAX:
                self._fatal[item.number] += 1
                raise ReopenError("lane") from e
            self._failed("lane", e)
            if isinstance(item.record, Frame):
                requests = [part.id for part in item.record.header.requests]
                self._set_aside("lane", f"{type(e).__name__}: {e}", item.record, requests)

    def _handle_item(self, item: InboxItem) -> None:
        match item.record:
            case Frame() as frame:
                self._frame(frame, item)
            case Known(engine, model):
                if (before := self._engines.get(engine)) is not None and before.model != model:
                    self._end_all(self.requests.lose(before), item.number - 1)
                self._greeted(engine, model)
            case Gone() as gone:
                self._gone_now(gone, item.number)
            case Answered() as answered:
                self._guard("on_action", self.consumer.on_action, answered)
            case Lost() as lost:
                self._damaged(lost, item.number)

    def _greeted(self, name: str, model: ModelInfo) -> KnownEngine:
        engine = self._engines.get(name)
        if engine is None or engine.model != model:
            engine = self._engines[name] = KnownEngine(name, model)
            self._guard("on_session", self.consumer.on_session, name, model)
        return engine

    def _engine(self, name: str) -> KnownEngine | None:
        engine = self._engines.get(name)
        if engine is None and (model := self.inbox.model(name)) is not None:
            return self._greeted(name, model)
        return engine

    def _frame(self, frame: Frame, item: InboxItem) -> None:
        header = frame.header
        engine = self._engine(header.engine)
        if engine is None:  # all of its requests are over, and done with
            return
        boot = self._boots.get((engine.name, header.rank), header.boot)
        if boot != header.boot:  # started again, while no hub was there to tell
            self._end_all(self.requests.lose(engine, header.rank.dp, header.rank.pp, restarted=True), item.number - 1)
        self._boots[engine.name, header.rank] = header.boot
        if self.inbox.has_done:
            for name in {*(part.id for part in header.requests), *(finished.id for finished in header.finished)}:
                if self.inbox.is_done(engine.name, name, item.number):
                    self.requests.pass_over(name, engine, header.rank)
        try:
            if item.number <= self._found_through:
                frame.check(hashed=False)  # the spool has a checksum of its own
            engine.format.check(header)
        except RemoteProtocolError as e:
            self._refuse(frame, engine, item.number, e)
            return
        delivery = self._tallies.of(self.requests.take(frame, engine))
        self._note_open(engine, header, item.number)
        if delivery is not None:
            for tally, rows in delivery.parts:
                tally.rows += rows
            self.pace.waited_since = time.monotonic()
            self._give(delivery)
            self.pace.waited_since = None
        self._finish_all(engine, header, item.number)

    def _refuse(self, frame: Frame, engine: KnownEngine, number: int, error: RemoteProtocolError) -> None:
        """Set aside a frame that an earlier version of the hub let in, whole, and count its rows as lost.

        Raises LeftError.
        """
        header = frame.header
        self._failed("lane", error)
        letter = self._letter("lane", str(error), engine.name, [part.id for part in header.requests], header=header)
        self._put_dead(letter, frame.payload, 0)
        self._lose_rows(header, engine, number, FRAME_INVALID)

    def _lose_rows(self, header: FrameHeader, engine: KnownEngine, number: int, reason: str) -> None:
        """Count the rows of a frame as lost; the ends of requests in it hold."""
        self.dropped[reason] += self.requests.miss(header, engine, reason, placed=reason != FRAME_INVALID)
        self._note_open(engine, header, number)
        self._finish_all(engine, header, number)

    def _hand_over(self, delivery: Delivery) -> str | None:
        """Have the consumer take a frame, or set it aside; return what is wrong with it.

        Raises ReopenError and LeftError.
        """
        header = delivery.frame.header
        requests = [tally.request.id for tally, _ in delivery.parts]
        if self.dead.has(header, requests):  # by an earlier hub, or before the consumer was opened again
            error: str | None = f"{self.name}.on_frame failed before; see its dead letters"
        else:
            error = super()._hand_over(delivery)
            if error is None:
                return None
            aside = self._set_aside("on_frame", error, delivery.frame, requests)
            error += aside
            if DEAD_FULL in aside:
                tallies = {tally.request.id: tally for tally, _ in delivery.parts}
                for chunk in delivery.frame.chunks():
                    note_chunk(tallies[chunk.request.id].lost, chunk, DEAD_FULL)
        self._aside.update((header.engine, name) for name in requests)
        return error

    def _set_aside(self, method: str, error: str, frame: Frame, requests: Sequence[str]) -> str:
        """Put the rows of a frame that the consumer wants into its dead letters; return what to add to the error.

        Raises LeftError.
        """
        try:
            mine = cut(frame)
        except Exception:  # noqa: BLE001  the frame cannot be read: all of it is put there
            mine = Frame(frame.header, frame.payload)
        engine = frame.header.engine
        letter = self._letter(method, error, engine, requests, header=mine.header)
        return self._put_dead(letter, mine.payload, rows_of(mine.header).total())

    def _give_up(self, request: Request, done: RequestDone, error: str) -> str:
        """Set a request aside whose end can never be handled, with its rows in the inbox; return its error.

        Raises LeftError.
        """
        share, entry = request.shares[0], self._known(request)
        wanted = {} if share is None else share.wanted
        for number in sorted({number for number, _, _ in entry.rows}) if entry is not None else ():
            frame = self._read_again(number)
            if frame is not None and not self.dead.has(frame.header, [request.id]):
                mine = frame.narrowed(lambda part: wanted if part.id == request.id else {})
                self._set_aside("on_request_done", error, mine, [request.id])
        letter = self._letter("on_request_done", error, request.engine, [request.id], done=done)
        return error + self._put_dead(letter, b"", 0)

    def _letter(self, method: str, error: str, engine: str, requests: Sequence[str], **parts: Any) -> Letter:
        return Letter(
            consumer=self.name,
            method=method,
            error=error,
            time_ns=time.time_ns(),
            engine=engine,
            requests=tuple(requests),
            model=self.inbox.model(engine),
            **parts,
        )

    def _put_dead(self, letter: Letter, payload: Any, rows: int) -> str:
        """Put a letter down, however long the disk takes; return what to add to the error.

        Raises LeftError when the hub stops first.
        """
        while True:
            try:
                kept = self.dead.put(letter, payload)
            except (CapflowError, OSError, MemoryError) as e:
                self._wait("dead letters", e)
                continue
            self.backoff.over()
            if kept:
                self._tell_of_dead()
                return "; set aside in its dead letters"
            self.dropped[DEAD_FULL] += rows
            return f"; its dead letters have no room for it ({DEAD_FULL})"

    def _tell_of_dead(self) -> None:
        """Log where the dead letters are, once."""
        if not self._told_of_dead:
            self._told_of_dead = True
            event = {"event": "dead_letter", "consumer": self.name, "directory": str(self.dead.directory)}
            text = "consumer %s: what it cannot handle is in %s; `capflow spool dead list %s` lists it"
            logger.error(text, self.name, self.dead.directory, self.dead.directory, extra=event)

    def _read_again(self, number: int) -> Frame | None:
        """Return a frame that was taken out before, however long the disk takes; None when it is damaged.

        Raises LeftError.
        """
        while True:
            try:
                return next(frame for _, frame in self.inbox.look([number]))
            except OSError as e:
                self._wait("dead letters", e)

    def _known(self, request: Request) -> _Open | None:
        """Return the entry of a request that the consumer is not done with."""
        key = request.engine, request.id
        return next(
            (entry for entry in (self._open.get(key), self._long.get(key)) if entry and entry.request is request), None
        )

    def _finish_all(self, engine: KnownEngine, header: FrameHeader, number: int) -> None:
        if self.minds_actions:
            for event in events_of(header):
                self._guard("on_action", self.consumer.on_action, event)
        if header.finished:
            engine.full = engine.full or engine.name in self._full
            untold = {}
            for finished in header.finished:
                if self.requests.was_lost(finished, engine):  # the hub may have been another one then
                    late = self.requests.late(finished, engine, header.rank.pp)
                    if late is None:
                        continue  # the hub, too, waits for the other pipeline stages
                    again = RequestName(engine.name, finished.id)
                    if (result := self._given_up.late(again, late)) is not None:
                        self._on_result(again, self.index, result)
                    if late.untold:
                        untold[finished.id] = late.untold
                    for lost in late.untold:
                        self.dropped[lost.reason] += lost.rows
            self._losses.tell_late(untold, engine.name)
            for request in self.requests.finish(header, engine):
                self._end(request, number)
            ends = (RequestRows(f.id, f.prompt_length, 0, (), capture=f.capture) for f in header.finished)
            self._note(engine, ends, header.rank, number)

    def _note_open(self, engine: KnownEngine, header: FrameHeader, number: int) -> None:
        """Note which open requests a frame has rows of, and how many."""
        self._note(engine, header.requests, header.rank, number)
        for name, rows in rows_of(header).items():
            entry = self._open.get((engine.name, name)) or self._long.get((engine.name, name))
            if entry is not None:
                entry.rows.append((number, header.rank.pp, rows))

    def _note(self, engine: KnownEngine, parts: Iterable[RequestRows], rank: Rank, number: int) -> None:
        for part in parts:
            request = engine.open.get(part.id)
            key = (engine.name, part.id)
            if request is None or request.shares[0] is None:
                continue
            entry = self._open.get(key) or self._long.get(key)
            if entry is not None and entry.request is not request:  # one of the same id, whose result is to come
                self._let_go(entry.request)
            elif entry is not None:
                continue
            bare = RequestRows(part.id, part.prompt_length, 0, (), capture=part.capture)
            self._open[key] = _Open(number, self._taken_bytes, request, bare, rank, engine.model)

    def _gone_now(self, gone: Gone, number: int) -> None:
        engine = self._engine(gone.engine)
        if engine is None:
            return
        self._end_all(self.requests.lose(engine, gone.replica, gone.stage, restarted=gone.restarted), number)
        if gone.replica is None:
            del self._engines[engine.name]
            self._boots = {worker: boot for worker, boot in self._boots.items() if worker[0] != engine.name}
            self._guard("on_engine_gone", self.consumer.on_engine_gone, engine.name)

    def _end_all(self, lost: Iterable[Request], number: int) -> None:
        for request in lost:
            self._end(request, number, given_up=True)

    def _end(self, request: Request, number: int, *, given_up: bool = False) -> None:
        """Tell the consumer of the end of a request, whose last record has this number, unless an earlier hub did.

        given_up: its engine is gone.
        """
        if request.shares[0] is None:
            return
        tally = self._tallies.pop(request)
        if given_up:
            self._given_up.begin(tally)
        if rows := request.lost.rows["earlier_hub"]:
            self._explain(request, rows)
        if (request.engine, request.id) in self._aside:
            error = "the end of a request of which frames failed"
            done = tally.done()
            self._put_dead(self._letter("on_frame", error, request.engine, [request.id], done=done), b"", 0)
            self._aside.remove((request.engine, request.id))
        if (entry := self._known(request)) is not None:
            entry.over_at = time.monotonic()
        self._finish(tally, functools.partial(self._done_with, request, number))
        self._let_go()

    def _explain(self, request: Request, rows: int) -> None:
        """Count the missing rows of a request that is over.

        An earlier hub or its worker had them, or they were in an unreadable record.
        """
        entry = self._long.get((request.engine, request.id))
        damaged = rows - (entry.recalled if entry is not None and entry.request is request else 0)
        if damaged and (self._lost_unknown or self.writer.lost_unknown):
            request.lost.blame("spool_damaged", damaged, instead_of="earlier_hub")
            self.dropped["spool_damaged"] += damaged
            rows -= damaged
        if rows:
            self.dropped["earlier_hub"] += rows

    def _name(self, request: Request) -> RequestName:
        """Return a request as the hub knows it, which may never have seen it."""
        return RequestName(request.engine, request.id)

    def _final(self, tally: Tally, judged: CaptureResult) -> CaptureResult:
        return self._given_up.settle(tally, judged)

    def _done_with(self, request: Request, number: int) -> None:
        """Put down that the consumer has made a request its own. Called on any thread."""
        self._settled.put((request, number, self._put_done(RequestDoneMark(request.engine, request.id, number))))

    def _put_done(self, done: RequestDoneMark) -> bool:
        """Return whether there was room for the record. Called on any thread."""
        try:
            self.inbox.put(done)
        except FullError as e:
            if not self._stuck:
                event = {"event": "inbox_full", "consumer": self.name, "reason": e.reason}
                text = "consumer %s: what it is done with may be given to it again: %s"
                logger.warning(text, self.name, e, extra=event)
            self._stuck = True
            return False
        self._stuck = False
        return True

    def _let_go(self, until: Request | None = None) -> None:
        """Forget the requests of which there are results; wait for that of `until`.

        Raises ReopenError and LeftError when it has none.
        """
        while until is not None or not self._settled.empty():
            try:
                request, number, is_put = self._settled.get(timeout=limits.IDLE_S)
            except Empty:
                if self._discarded.is_set():
                    raise LeftError from None
                self._see_to_failures()
                self._idle()
                continue
            self._result_at = time.monotonic()
            key = (request.engine, request.id)
            self._done[key] = number
            entry = self._known(request)
            if not is_put:
                self._owed.append((entry.first if entry is not None else 0, RequestDoneMark(*key, number)))
            for each in (self._open, self._long):
                if entry is not None and each.get(key) is entry:
                    del each[key]
            until = None if request is until else until

    def _damaged(self, lost: Lost, number: int) -> None:
        """Count the rows of a record that cannot be read again; what its head says holds."""
        header = self.inbox.header_of(lost)
        engine = self._engine(header.engine) if header is not None else None
        if header is None:
            self._lost_unknown = True
        if header is None or engine is None:
            return
        self._lose_rows(header, engine, number, "spool_damaged")
