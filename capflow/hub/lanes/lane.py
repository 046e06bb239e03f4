"""The fan-out: one lane per consumer, each with a queue and a thread, so that none waits for another.

In a queue engines take turns, so that what one engine's worker sends holds up the rows of another by one item at most.

A consumer's methods are called on its lane's thread only. The kind of an exception decides what the lane does (`capflow.errors.kind_of`):

* retry: the lane makes the same call again, after a pause that grows, until it works or the hub stops;
* fatal: the lane closes the consumer, opens it again and makes the call again, at most `limits.RESTARTS_MAX` times in a row, and
  while each record breaks it once in `limits.RETRY_S_MAX`;
* poison: the lane counts the exception, logs the first of its kind, and the results of the requests that it hits name it.

Whatever a consumer does, what waits for it is bounded: rows by its policy, and what has no rows by `capflow.hub.lanes.notes`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.policy import WhenFull
from capflow.buffers.queue import ByteQueue
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Finished, RequestRows
from capflow.capture.losses import LossLog, note_chunk
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone
from capflow.errors import CapflowError, explain, kind_of
from capflow.hub.lanes.backoff import Backoff
from capflow.hub.lanes.notes import Notes, weight
from capflow.hub.lanes.pace import ConsumerPace
from capflow.hub.requests.ledger import Delivery, Request, Tally
from capflow.plugins.configure import ConfiguredConsumer, rename
from capflow.plugins.consumer import Consumer
from capflow.steering.action import Action, Answered
from capflow.text.engine_name import is_of

logger = logging.getLogger("capflow.consumer")


_STOPPED = "the hub stopped while the consumer could not go on"
_ANEW = "the consumer was opened again while the request ran; rows given to it before may be missing"


class LeftError(Exception):
    """The hub stops, and the consumer could not take what it was given."""


class _Rows(NamedTuple):
    delivery: Delivery
    taken: Callable[[], None] | None  # called, from the lane's thread, when the frame is no longer needed
    at: float  # when it was delivered, on the monotonic clock


class _Done(NamedTuple):
    request: Request
    taken: Callable[[], None] | None
    weight: int  # of the note, as of those below; 0 when a frame's credit bounds it


class _Session(NamedTuple):
    engine: str
    model: ModelInfo
    weight: int


class _Gone(NamedTuple):
    engine: str


class _Told(NamedTuple):
    answered: Answered
    weight: int


class Lane:
    """One consumer's queue and thread, from `open` to `close`.

    on_result(request, consumer, result) is called on the lane's thread, or on that which ends a Future of the consumer's; on_action(action) on the lane's.
    keeps: it has an inbox and a ledger of its own.
    """

    keeps: ClassVar[bool] = False

    def __init__(
        self,
        index: int,
        configured: ConfiguredConsumer,
        *,
        on_result: Callable[[Request, int, CaptureResult], None],
        on_action: Callable[[str, Action], None],
    ) -> None:
        self.index = index
        self.name = configured.name
        self.policy = configured.policy
        self.consumer: Consumer = configured.consumer
        self.queue: ByteQueue[Any] = ByteQueue(configured.queue_bytes_max)
        self.frames = 0  # given to `on_frame`, as are rows and bytes; written by the thread
        self.rows = 0
        self.bytes = 0
        self.errors = 0  # exceptions of the consumer by which something was set aside or lost; guarded by `_lock`
        self.restarts = 0  # times that the consumer was opened again; written by the thread
        self.unkept = (
            0  # requests whose rows it was given and did not store, as its own results say; guarded by `_lock`
        )
        self.gave_up = False  # whether the hub stopped while the consumer could not go on; never cleared
        self.results: Counter[str] = Counter()  # requests that it is done with, by status; by the hub's thread
        self.pace = ConsumerPace()  # written by the thread
        self.counts: Counter[str] = Counter()  # the consumer's own; guarded by `_lock`
        self.dropped: Counter[str] = Counter()  # rows by reason; by the hub's thread, at shutdown by the lane's
        self._losses = LossLog(logger, f"consumer {self.name}", consumer=self.name)
        self.notes = Notes()  # those in the queue, and those that had no room
        self._on_result = on_result
        self._on_action = on_action
        self._lock = threading.Lock()
        self._logged: set[tuple[str, type[BaseException]]] = (
            set()
        )  # kinds of errors whose traceback is in the log; so too
        self._unsettled: dict[Future[CaptureResult], float] = {}  # of requests that are over, and since when; so too
        self._greeting: dict[str, ModelInfo] = {}  # engines that wait in the queue to be told of; so too
        self._unmet: dict[
            str, None
        ] = {}  # engines, oldest first, of which there was no room to tell; the hub's thread's
        self._connected: set[str] = set()  # engines that were put in the queue, until they are gone; the hub's thread's
        # The requests in what the consumer is given now; written by the thread.
        self._given: Sequence[RequestRows | Finished] = ()
        # The engine that these requests are of; written by the thread.
        self._given_of = ""
        self._fatal: Counter[int | str] = Counter()  # restarts by item, until it is handled; the thread's, as are these
        self._breaks = ""  # the method in which each record breaks it now
        self._opens_at = 0.0  # before this time a consumer that breaks is not opened again
        self._is_open = False
        self._met: dict[
            str, ModelInfo
        ] = {}  # engines that the consumer was told of; the latest, of `limits.NOTES_BYTES_MAX` by weight
        self._met_bytes = 0  # of these
        self._discarded = threading.Event()  # set by `discard`: rows are thrown away, ends are still told
        self.backoff = Backoff(logger, self.name, self._discarded)
        self._opened = threading.Event()  # set by the thread when `open` is through
        self._open_error: Exception | None = None  # set by the thread before `_opened`
        self._thread = threading.Thread(target=self._run, name=f"capflow-{self.name}", daemon=True)

    @property
    def minds_actions(self) -> bool:
        """Whether the consumer wants to be told of actions."""
        return type(self.consumer).on_action is not Consumer.on_action

    # Called by the hub.

    def open(self) -> None:
        """Start the thread and open the consumer.

        Raises CapflowError when the consumer cannot be opened.
        """
        self._thread.start()
        self._opened.wait()
        error = self._open_error
        if isinstance(error, CapflowError):
            rename(error, self.consumer.name, self.name)
            raise error
        if error is not None:
            got = f"{type(error).__name__}: {error}"
            raise CapflowError(explain(f"consumer {self.name} cannot be opened", got=got)) from error

    def deliver(self, delivery: Delivery, taken: Callable[[], None]) -> bool:
        """Take a frame; return whether `taken` will be called: only a `block` consumer is waited for.

        The memory of a `block` lane is bounded by the workers' credit, that of a `drop` or `skip` lane by its queue.
        """
        waited_for = taken if self.policy is WhenFull.BLOCK else None
        for tally, rows in delivery.parts:
            tally.rows += rows
        item = _Rows(delivery, waited_for, time.monotonic())
        skips = self.policy is WhenFull.SKIP and not self.queue.closed
        if delivery.frame.header.engine in self._unmet:
            self._lose(delivery, "consumer_queue_full")
        elif self._accept(item, "skipped" if skips else "consumer_queue_full"):
            return waited_for is not None
        return False

    def _accept(self, item: _Rows, reason: str) -> bool:
        """Put rows in the queue; return whether they are in it. Rows that have no room are lost for the reason."""
        engine, nbytes = item.delivery.frame.header.engine, item.delivery.frame.memory_bytes
        if self.policy is WhenFull.BLOCK and not self.queue.closed:
            self.queue.force(item, nbytes, engine)
            return True

        def lose(other: _Rows) -> None:
            self._lose(other.delivery, reason)

        accepted = self.queue.displace(item, nbytes, engine, lose, newest=self.policy is not WhenFull.SKIP)
        if not accepted:
            lose(item)
        return accepted

    def finish(self, request: Request, taken: Callable[[], None] | None) -> bool:
        """Tell the consumer, after everything before, that a request is over; return as `deliver` does.

        An end that has no room is not told: the request's result says so.
        """
        if self.queue.closed:
            return False
        waited_for = taken is not None and self.policy is WhenFull.BLOCK and request.engine not in self._unmet
        nbytes = 0 if waited_for else weight(tuple(request.finished.values()))
        if not waited_for and (request.engine in self._unmet or not self.notes.admit(nbytes)):
            self.notes.lost["end"] += 1
            untold = CaptureResult("error", "the consumer was not told of its end: consumer_queue_full")
            self._settle(request, self.index, None, untold)
            return False
        self.queue.force(_Done(request, taken if waited_for else None, nbytes), source=request.engine)
        return waited_for

    def greet(self, engine: str, model: ModelInfo) -> None:
        """Tell the consumer, after everything before, that an engine connected; once, if it comes and goes before that is told.

        When there is no room for it, all rows of the engine are lost until it connects again.
        """
        if self.queue.closed:
            return
        self._unmet.pop(engine, None)
        with self._lock:
            if self._greeting.get(engine) == model:
                return
        nbytes = weight(model)
        if not self.notes.admit(nbytes):
            self.notes.lost["session"] += 1
            self._unmet[engine] = None
            # A hub knows no more at once: the oldest are gone.
            keep_newest(self._unmet, 2 * limits.SESSIONS_MAX)
            return
        with self._lock:
            self._greeting[engine] = model
        self._connected.add(engine)
        self.queue.force(_Session(engine, model, nbytes), source=engine)

    def part(self, engine: str) -> None:
        """Tell the consumer, after everything before, that an engine is gone, if it was told that the engine connected.

        It needs no room of its own: there is at most one for each engine that `greet` had room for.
        """
        self._unmet.pop(engine, None)
        if engine not in self._connected:
            return
        self._connected.remove(engine)
        with self._lock:
            self._greeting.pop(engine, None)  # the engine is to be told of anew when it comes back
        self.queue.force(_Gone(engine), source=engine)

    def tell(self, answered: Answered) -> None:
        """Tell the consumer, if it minds them, what came of an action; the oldest that wait make room for the newest."""
        if not self.minds_actions:
            return
        if self.keeps:
            self.queue.force(answered)
            return
        told = _Told(answered, weight(answered))
        while not self.notes.admit(told.weight):
            self.notes.lost["action"] += 1
            oldest = self.queue.remove(lambda item: isinstance(item, _Told))
            if oldest is None:
                return
            self.notes.taken(oldest.weight)
        self.queue.force(told, source=answered.engine)

    def close(self) -> None:
        """Take nothing more; the consumer is closed when it has handled what it has."""
        self.queue.close()

    def discard(self) -> None:
        """Throw away the rows that the consumer has not handled yet."""
        self._discarded.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the consumer is closed; return whether it is."""
        self._thread.join(limits.GIVE_UP_S if timeout_s is None else max(0.0, timeout_s))
        return not self._thread.is_alive()

    def trouble(self, now: float) -> str | None:
        """Return why the consumer is taken to have failed; None when it has not. It names nothing that is captured."""
        if self._thread.ident is None:
            return "not open yet"
        if not self._thread.is_alive():
            return "closed" if self.queue.closed else "its thread ended"
        if not self._opened.is_set():
            return "not open yet"
        with self._lock:
            since = next(iter(self._unsettled.values()), now)
        if now - since > limits.CALL_S_MAX:
            return f"a request has been without a result for more than {limits.CALL_S_MAX:g} s"
        return self.backoff.trouble() or self.pace.trouble(now)

    def status(self) -> dict[str, Any]:
        """Return the lane's counters."""
        now = time.monotonic()
        return {
            "policy": self.policy.value,
            "frames": self.frames,
            "rows": self.rows,
            "bytes": self.bytes,
            "queued": len(self.queue),
            "queued_bytes": self.queue.nbytes,
            "queue_bytes_max": self.queue.bytes_max,
            "queue_bytes_peak": self.queue.bytes_peak,
            "lag_s": round(self.pace.lag_s(now), 3),
            "busy_s": round(self.pace.busy_so_far_s(now), 3),
            "trouble": self.trouble(now),
            "results": dict(self.results),
            "dropped_rows": dict(self.dropped),
            "notes": self.notes.status(),
            "errors": self.errors,
            "retries": self.backoff.retries,
            "retrying": self.backoff.status(now),
            "restarts": self.restarts,
            "counts": dict(self.counts),
        }

    # What the consumer is offered: `Context`.

    def act(self, action: Action) -> None:
        """Send an action to the engine that runs its request: the one that the consumer is given now, if it has that id."""
        if not action.incarnation and is_of(self._given_of, action.engine):
            for part in self._given:
                if part.id == action.request:
                    action = msgspec.structs.replace(action, incarnation=part.incarnation, engine=self._given_of)
        self._on_action(self.name, action)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this consumer."""
        with self._lock:
            self.counts[name] += amount

    # The thread.

    def _open_consumer(self) -> bool:
        try:
            self.consumer.open(self)
        except Exception as e:  # noqa: BLE001  whatever it is, it is raised again by `open`
            self._open_error = e
            return False
        finally:
            self._opened.set()
        self._is_open = True
        return True

    def _run(self) -> None:
        if not self._open_consumer():
            return
        idle_at = time.monotonic() + limits.IDLE_S
        while True:
            item = self.queue.get(max(0.0, idle_at - time.monotonic()))
            if item is not None:
                self._safely_handle(item)
                del item  # the frame's memory goes when the consumer lets go of it
            elif self.queue.closed:
                break
            if time.monotonic() >= idle_at:
                with contextlib.suppress(LeftError):
                    self._idle()
                idle_at = time.monotonic() + limits.IDLE_S
        if error := self._close_consumer():
            self._failed("close", error)

    def _idle(self) -> None:
        self._guard("on_idle", self.consumer.on_idle)

    def _close_consumer(self) -> BaseException | None:
        """Close the consumer, if it is open; return what it raised."""
        if not self._is_open:
            return None
        self._is_open = False
        return self._call(self.consumer.close)

    def _safely_handle(self, item: _Rows | _Done | _Session | _Gone | _Told) -> None:
        """Handle an item; whatever goes wrong outside the consumer, such as no memory, costs this item and not the thread."""
        try:
            self._handle(item)
        except LeftError:
            if isinstance(item, _Rows):  # not taken, as those behind it
                self._lose(item.delivery, "shutdown")
            else:
                self._leave(item, _STOPPED)
        except Exception as e:  # noqa: BLE001  without this thread nothing of the consumer's would be acknowledged any more
            self._leave(item, self._failed("lane", e))

    def _leave(self, item: _Rows | _Done | _Session | _Gone | _Told, error: str) -> None:
        """Let go of an item that the consumer did not take; the results of its requests say so."""
        match item:
            case _Rows(delivery, taken):
                for tally, rows in delivery.parts:
                    tally.rows_failed += rows
                    tally.error = tally.error or error
                if taken is not None:
                    taken()
            case _Done(request, taken):
                self._settle(request, self.index, taken, CaptureResult("error", error))

    def _handle(self, item: _Rows | _Done | _Session | _Gone | _Told) -> None:
        match item:
            case _Rows(delivery, taken, at):
                if self._discarded.is_set():  # not taken: a worker that is waited for keeps it for the next hub
                    self._lose(delivery, "shutdown")
                else:
                    self.pace.waited_since = at
                    self._give(delivery)
                    self.pace.waited_since = None
                    if taken is not None:
                        taken()
            case _Done(request, taken, nbytes):
                self.notes.taken(nbytes)
                self._finish(request, self.index, taken)
            case _Session(engine, model, nbytes):
                self.notes.taken(nbytes)
                with self._lock:
                    if self._greeting.get(engine) is model:
                        del self._greeting[engine]
                self._meet(engine, model)
            case _Gone(engine):
                if (before := self._met.pop(engine, None)) is not None:
                    self._met_bytes -= weight(before)
                self._guard("on_engine_gone", self.consumer.on_engine_gone, engine)
            case _Told(answered, nbytes):
                self.notes.taken(nbytes)
                self._guard("on_action", self.consumer.on_action, answered)

    def _meet(self, engine: str, model: ModelInfo) -> None:
        if (before := self._met.pop(engine, None)) is not None:
            self._met_bytes -= weight(before)
        self._guard("on_session", self.consumer.on_session, engine, model)
        self._met[engine] = model
        self._met_bytes += weight(model)
        while self._met_bytes > limits.NOTES_BYTES_MAX and len(self._met) > 1:
            self._met_bytes -= weight(self._met.pop(next(iter(self._met))))

    def _give(self, delivery: Delivery) -> None:
        header = delivery.frame.header
        self._given, self._given_of = header.requests, header.engine
        error = self._hand_over(delivery)
        self._given = ()
        for tally, _ in delivery.parts:
            if tally.opening is None:
                tally.opening = self.restarts
        self.pace.failed_in_a_row = 0 if error is None else self.pace.failed_in_a_row + 1
        self.frames += 1
        self.rows += delivery.rows
        self.bytes += delivery.rows * header.hidden_size * DTYPES[header.dtype].itemsize
        if error is not None:
            for tally, rows in delivery.parts:
                tally.rows_failed += rows
                tally.error = tally.error or error

    def _hand_over(self, delivery: Delivery) -> str | None:
        """Have the consumer take a frame; return what is wrong with it, None when the consumer took it."""
        return self._guard("on_frame", self.consumer.on_frame, delivery.frame)

    def _finish(self, request: Request, place: int, settled: Callable[[], None] | None) -> None:
        """Tell the consumer, which has this place in the request's ledger, that it is over; `settled` is called, on any thread, when there is a result."""
        if self.minds_actions:
            for acted in request.acted():
                self._guard("on_action", self.consumer.on_action, acted)
        done = request.done_for(place)
        said: list[CaptureResult | Future[CaptureResult] | None] = []
        self._given, self._given_of = done.finished, done.engine
        error = self._guard("on_request_done", lambda: said.append(self.consumer.on_request_done(done)))
        self._given = ()
        answer = said[-1] if error is None else CaptureResult("error", self._give_up(request, done, error))
        if isinstance(answer, Future):
            with self._lock:
                self._unsettled[answer] = time.monotonic()
            answer.add_done_callback(functools.partial(self._ended, request, place, settled))
        else:
            self._settle(request, place, settled, answer)

    def _ended(
        self, request: Request, place: int, settled: Callable[[], None] | None, future: Future[CaptureResult]
    ) -> None:
        """Take what became of a request for which the consumer wanted time."""
        with self._lock:
            self._unsettled.pop(future, None)
        try:
            result = future.result()
        except BaseException as e:  # noqa: BLE001  as in `_guard`
            if self._take_failure(request, settled, e):
                return
            result = CaptureResult("error", self._failed("on_request_done", e))
        self._settle(request, place, settled, result)

    def _give_up(self, request: Request, done: RequestDone, error: str) -> str:  # noqa: ARG002  what others set aside
        """Note that the end of a request can never be handled; return the error that its result names."""
        return error

    def _take_failure(
        self,
        request: Request,  # noqa: ARG002  of lanes that keep
        settled: Callable[[], None] | None,  # noqa: ARG002
        error: BaseException,  # noqa: ARG002
    ) -> bool:
        """Return whether the thread sees to a request whose Future failed. Called on any thread."""
        return False

    def _settle(
        self, request: Request, place: int, settled: Callable[[], None] | None, result: CaptureResult | None
    ) -> None:
        tally = request.tallies[place]
        if tally is not None and tally.opening not in (None, self.restarts):
            tally.error = tally.error or _ANEW
        judged = request.judge(place, result)
        if _is_unkept(request, place, result, judged):
            with self._lock:
                self.unkept += 1
        self._losses.tell(request.id, judged.dropped, engine=request.engine)
        self._on_result(request, self.index, judged)
        if settled is not None:
            settled()

    def _guard(self, method: str, call: Callable[..., Any], *args: Any) -> str | None:
        """Call a method of the consumer, again and again while it may work later; return what is wrong for good, None for nothing.

        Raises LeftError when the hub stops first.
        """
        while (error := self._call(call, *args)) is not None:
            kind, place = kind_of(error), self._place(method)
            if kind == "retry":
                self._wait(method, error)
            elif kind == "fatal" and self._may_restart(place):
                self._fatal[place] += 1
                self._restart(method, error)
            else:
                self.backoff.over(works=False)
                if kind == "fatal":
                    self._opens_at = time.monotonic() + limits.RETRY_S_MAX if self._breaks else 0.0
                    self._breaks = method
                if self._fatal and place == method:  # what comes next may open it again
                    self._fatal.pop(place, None)
                return self._failed(method, error)
        if self.backoff.since is not None:
            self.backoff.over()
        if method == self._breaks:
            self._breaks = ""
        if self._fatal and self._place(method) == method:
            del self._fatal[method]
        return None

    def _may_restart(self, place: int | str) -> bool:
        """Return whether the consumer is opened again for the record in hand: when each record breaks it, once in a while."""
        if self._breaks:
            return time.monotonic() >= self._opens_at and place not in self._fatal
        return self._fatal[place] < limits.RESTARTS_MAX

    def _call(self, call: Callable[..., Any], *args: Any) -> BaseException | None:
        """Call a method of the consumer; return what it raised."""
        since = self.pace.begin()
        try:
            call(*args)
        except BaseException as e:  # noqa: BLE001  `sys.exit` too: what waits for this thread must not wait for ever
            return e
        finally:
            self.pace.end(since)
        return None

    def _place(self, method: str) -> int | str:
        """Return what restarts are counted by: the item in hand, or the method where there is none."""
        return method

    def _wait(self, method: str, error: BaseException) -> None:
        """Wait before a call is made again. Raises LeftError when the hub stops instead."""
        if not self.backoff.wait(method, error):
            self.gave_up = True
            raise LeftError

    def _restart(self, method: str, error: BaseException) -> None:
        """Close the consumer, open it again, however long that takes, and call `on_session` for its engines. Raises LeftError."""
        self._open_again(method, error)
        opening = self.restarts
        for engine, model in list(self._met.items()):
            self._meet(engine, model)
            if self.restarts != opening:  # a nested restart has called it for the other engines
                return

    def _open_again(self, method: str, error: BaseException) -> None:
        """Close the consumer and open it again, however long that takes. Raises LeftError when the hub stops first."""
        event = {"event": "consumer_restarts", "consumer": self.name, "method": method}
        text = "consumer %s: %s failed, and the consumer is closed and opened again: %s"
        what = f"{type(error).__name__}: {error}"
        logger.error(text, self.name, method, what, exc_info=None if self.restarts else error, extra=event)
        if (unclosed := self._close_consumer()) is not None:
            self._failed("close", unclosed)
        failed: BaseException | None = error
        while failed is not None:
            self._wait("open", failed)
            failed = self._call(self.consumer.open, self)
        self._is_open = True
        self.restarts += 1

    def _failed(self, method: str, e: BaseException) -> str:
        """Count an exception of the consumer; return what is said of it."""
        kind = (method, type(e))
        with self._lock:
            self.errors += 1
            known = kind in self._logged
            self._logged.add(kind)
        if not known:
            event = {"event": "consumer_failed", "consumer": self.name, "method": method}
            what = "consumer %s: %s failed; more of this kind are counted only"
            logger.error(what, self.name, method, exc_info=e, extra=event)
        return f"{self.name}.{method}: {type(e).__name__}: {e}"

    def _lose(self, delivery: Delivery, reason: str) -> None:
        self.dropped[reason] += delivery.rows
        tallies: dict[str, Tally] = {tally.request: tally for tally, _ in delivery.parts}
        for chunk in delivery.frame.chunks():
            note_chunk(tallies[chunk.request.id].lost, chunk, reason)
        for tally, rows in delivery.parts:
            tally.rows -= rows


def _is_unkept(request: Request, place: int, result: CaptureResult | None, judged: CaptureResult) -> bool:
    """Return whether a consumer has not stored rows that it was given, as its own result says, or what it raised."""
    tally = request.tallies[place]
    if tally is None or not tally.rows:
        return False
    own = "ok" if result is None else result.status
    lost = judged.dropped or request.status == "error"
    return tally.error is not None or own == "error" or (own == "partial_error" and not lost)
