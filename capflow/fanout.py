"""The fan-out: one lane per consumer, each with a queue and a thread, so that none waits for another.

A consumer's methods are called on its lane's thread only. What its exceptions mean is decided here: they
are counted, logged once per kind, and told to the requests that they hit. Whatever a consumer does, what waits for it is bounded: rows
by its policy, and what has no rows by `capflow.notes`.
"""

from __future__ import annotations

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
from capflow.action import Action, Answered
from capflow.consumer import Consumer
from capflow.enginename import is_of
from capflow.errors import CapflowError, explain
from capflow.frame import DTYPES, Finished, RequestRows
from capflow.ledger import Delivery, Request, Tally
from capflow.losses import note_chunk
from capflow.losslog import LossLog
from capflow.message import ModelInfo
from capflow.notes import Notes, weight
from capflow.pace import Pace
from capflow.plugins import ConfiguredConsumer, rename
from capflow.queue import ByteQueue, Overload
from capflow.result import CaptureResult

logger = logging.getLogger("capflow.consumer")


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
        self.errors = 0  # exceptions of the consumer; guarded by `_lock`
        self.results: Counter[str] = Counter()  # requests that it is done with, by status; by the hub's thread
        self.pace = Pace()  # written by the thread
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
        # The requests in what the consumer is given now; written by the thread.
        self._given: Sequence[RequestRows | Finished] = ()
        # The engine that these requests are of; written by the thread.
        self._given_of = ""
        self._discarding = False  # set by `discard`: rows are thrown away, ends are still told
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
        waited_for = taken if self.policy is Overload.BLOCK else None
        item, nbytes = _Rows(delivery, waited_for, time.monotonic()), delivery.frame.nbytes
        accepted = delivery.frame.header.engine not in self._unmet and self._accept(item, nbytes)
        if accepted:
            for tally, rows in delivery.parts:
                tally.rows += rows
        else:
            self._lose(delivery, "consumer_queue_full")
        return accepted and item.taken is not None

    def _accept(self, item: _Rows, nbytes: int) -> bool:
        if self.policy is Overload.DROP or self.queue.closed:
            return self.queue.offer(item, nbytes)
        if self.policy is Overload.BLOCK:
            self.queue.force(item, nbytes)
        else:
            for skipped in self.queue.displace(item, nbytes):
                self._lose(skipped.delivery, "skipped")
        return True

    def finish(self, request: Request, taken: Callable[[], None] | None) -> bool:
        """Tell the consumer, after everything before, that a request is over; return as `deliver` does.

        An end that has no room is not told: the request's result says so.
        """
        if self.queue.closed:
            return False
        waited_for = taken is not None and self.policy is Overload.BLOCK and request.engine not in self._unmet
        nbytes = 0 if waited_for else weight(tuple(request.finished.values()))
        if not waited_for and (request.engine in self._unmet or not self.notes.admit(nbytes)):
            self.notes.lost["end"] += 1
            untold = CaptureResult("error", "the consumer was not told of its end: consumer_queue_full")
            self._settle(request, self.index, None, untold)
            return False
        self.queue.force(_Done(request, taken if waited_for else None, nbytes))
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
            if len(self._unmet) > 2 * limits.SESSIONS_MAX:  # more than a hub knows at once: the oldest are gone
                del self._unmet[next(iter(self._unmet))]
            return
        with self._lock:
            self._greeting[engine] = model
        self.queue.force(_Session(engine, model, nbytes))

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
        self.queue.force(told)

    def close(self) -> None:
        """Take nothing more; the consumer is closed when it has handled what it has."""
        self.queue.close()

    def discard(self) -> None:
        """Throw away the rows that the consumer has not handled yet."""
        self._discarding = True

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
        return self.pace.trouble(now)

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
        return True

    def _run(self) -> None:
        if not self._open_consumer():
            return
        idle_at = time.monotonic() + limits.IDLE_S
        while True:
            item = self.queue.get(max(0.0, idle_at - time.monotonic()))
            if item is not None:
                self._handle(item)
                del item  # the frame's memory goes when the consumer lets go of it
            elif self.queue.closed:
                break
            if time.monotonic() >= idle_at:
                self._guard("on_idle", self.consumer.on_idle)
                idle_at = time.monotonic() + limits.IDLE_S
        self._guard("close", self.consumer.close)

    def _handle(self, item: _Rows | _Done | _Session | _Told) -> None:
        match item:
            case _Rows(delivery, taken, at):
                if self._discarding:
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
                self._guard("on_session", self.consumer.on_session, engine, model)
            case _Told(answered, nbytes):
                self.notes.taken(nbytes)
                self._guard("on_action", self.consumer.on_action, answered)

    def _give(self, delivery: Delivery) -> None:
        header = delivery.frame.header
        self._given, self._given_of = header.requests, header.engine
        error = self._guard("on_frame", self.consumer.on_frame, delivery.frame)
        self._given = ()
        self.pace.failed_in_a_row = 0 if error is None else self.pace.failed_in_a_row + 1
        self.frames += 1
        self.rows += delivery.rows
        self.bytes += delivery.rows * header.hidden_size * DTYPES[header.dtype].itemsize
        if error is not None:
            for tally, rows in delivery.parts:
                tally.rows_failed += rows
                tally.error = tally.error or error

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
        answer = said[0] if error is None else CaptureResult("error", error)
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
            result = CaptureResult("error", self._failed("on_request_done", e))
        self._settle(request, place, settled, result)

    def _settle(
        self, request: Request, place: int, settled: Callable[[], None] | None, result: CaptureResult | None
    ) -> None:
        judged = request.judge(place, result)
        self._losses.tell(request.id, judged.dropped)
        self._on_result(request, self.index, judged)
        if settled is not None:
            settled()

    def _guard(self, method: str, call: Callable[..., Any], *args: Any) -> str | None:
        """Call a method of the consumer; return what went wrong, None if nothing did."""
        since = self.pace.begin()
        try:
            call(*args)
        except BaseException as e:  # noqa: BLE001  `sys.exit` too: what waits for this thread must not wait for ever
            return self._failed(method, e)
        finally:
            self.pace.end(since)
        return None

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
            if reason != "consumer_queue_full":  # they were counted as given when the queue took them
                tally.rows -= rows
