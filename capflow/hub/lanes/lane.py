"""A lane: one consumer, its thread, and the queue of what the hub gives it.

What waits for the consumer is in memory (`capflow.hub.lanes.memory`) or on disk (`capflow.hub.lanes.durable`). A
consumer's methods are called on its lane's thread only. The kind of an exception decides what the lane does
(`capflow.errors.kind_of`):

* retry: the lane makes the same call again, after a growing pause, until it works or the hub stops;
* fatal: the lane closes the consumer, opens it again and makes the call again, at most `limits.RESTARTS_MAX` times in a
  row, and once in `limits.RETRY_S_MAX` while each record breaks the consumer;
* poison: the lane counts the exception, logs the first of its kind, and the results of the affected requests name it.
"""

from __future__ import annotations

import abc
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from capflow import limits
from capflow.buffers.queue import ByteQueue
from capflow.capture.frame import Finished, RequestRows
from capflow.capture.losses import LossLog
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone
from capflow.errors import CapflowError, explain, kind_of
from capflow.hub.effects import Hold
from capflow.hub.lanes.backoff import Backoff
from capflow.hub.lanes.notes import Notes
from capflow.hub.lanes.pace import ConsumerPace
from capflow.hub.lanes.tally import Delivery, Tally
from capflow.hub.requests.index import Arrival, Wish
from capflow.hub.requests.request import Request, RequestName
from capflow.plugins.configure import ConfiguredConsumer, rename
from capflow.plugins.consumer import Backlog, Consumer
from capflow.steering.action import Action, Answered
from capflow.text.engine_name import is_of

logger = logging.getLogger("capflow.consumer")


_ANEW = "the consumer was opened again while the request ran; rows given to it before may be missing"


class LeftError(Exception):
    """The hub stops, and the consumer could not take what it was given."""


class HubCalls(NamedTuple):
    """What a lane calls of its hub.

    on_result: takes a request, the lane's index and the result, on the lane's thread, or on that which ends a Future of
        the consumer's. The request is the hub's own, or named by a lane that has requests of earlier hubs.
    on_action: takes the consumer's name and an action, on the lane's thread.
    on_release: takes the holds of frames that the lane does not need any more, on any thread.
    status: returns the hub's status.
    """

    on_result: Callable[[Request | RequestName, int, CaptureResult], None]
    on_action: Callable[[str, Action], None]
    on_release: Callable[[Sequence[Hold]], None]
    status: Callable[[], dict[str, Any]] = dict


class LaneFiles(NamedTuple):
    """What the lane of a consumer has on disk.

    directory: the directory of its inbox; None while the inbox is not open.
    status: the counters of its inbox; None while the inbox is not open.
    letters: frames and ends in its dead letters.
    requests_unkept: requests that were too long for the inbox.
    """

    directory: Path | None
    status: dict[str, Any] | None
    letters: int
    requests_unkept: int


class Lane(abc.ABC):
    """One consumer's queue and thread, from `open` to `close`."""

    durable: ClassVar[bool] = False
    """Whether what waits for the consumer outlives the hub."""

    def __init__(self, index: int, configured: ConfiguredConsumer, calls: HubCalls) -> None:
        self.index = index
        self.name = configured.name
        self.policy = configured.policy
        self.consumer: Consumer = configured.consumer
        self.wish = Wish(self.name, configured.spec, self.consumer.reads_requests, self.durable)
        self.queue: ByteQueue[Any] = ByteQueue(configured.queue_bytes_max)
        # Frames, rows and bytes given to `on_frame`; written by the thread.
        self.frames = 0
        self.rows = 0
        self.bytes = 0
        # Exceptions of the consumer that cost a record; guarded by `_lock`.
        self.errors = 0
        # Times that the consumer was opened again; written by the thread.
        self.restarts = 0
        # Requests whose rows it was given and did not store, as its own results say; guarded by `_lock`.
        self.unkept = 0
        # Whether the hub stopped while the consumer could not go on; never cleared.
        self.gave_up = False
        # Requests that it is done with, by status; by the hub's thread.
        self.results: Counter[str] = Counter()
        # Written by the thread.
        self.pace = ConsumerPace()
        # Until when a hub that stops waits for the consumer; written by the hub's owner.
        self.ends_at: float | None = None
        # The consumer's own; guarded by `_lock`.
        self.counts: Counter[str] = Counter()
        # Rows by reason; by the hub's thread, at shutdown by the lane's.
        self.dropped: Counter[str] = Counter()
        self._losses = LossLog(logger, f"consumer {self.name}", consumer=self.name)
        # Notes in the queue, and notes that had no room.
        self.notes = Notes()
        self._on_result, self._on_action, self._on_release, self._hub_status = calls
        self._lock = threading.Lock()
        # Kinds of errors whose traceback is in the log; guarded by `_lock`.
        self._logged: set[tuple[str, type[BaseException]]] = set()
        # Of requests that are over, and since when; guarded by `_lock`.
        self._unsettled: dict[Future[CaptureResult], float] = {}
        # The requests in what the consumer is given now; written by the thread.
        self._given: Sequence[RequestRows | Finished] = ()
        # The engine that these requests are of; written by the thread.
        self._given_of = ""
        # Restarts by item, until it is handled; the thread's, as are these.
        self._fatal: Counter[int | str] = Counter()
        # The method in which each record breaks it now.
        self._breaks = ""
        # Before this time a consumer that breaks is not opened again.
        self._opens_at = 0.0
        self._is_open = False
        # Set by `discard`: rows are discarded, ends are still given.
        self._discarded = threading.Event()
        self.backoff = Backoff(logger, self.name, self._discarded)
        # Set by the thread when `open` is through.
        self._opened = threading.Event()
        # Set by the thread before `_opened`.
        self._open_error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"capflow-{self.name}", daemon=True)

    @property
    def minds_actions(self) -> bool:
        """Whether the consumer takes the outcomes of actions."""
        return type(self.consumer).on_action is not Consumer.on_action

    # What the hub tells the consumer, in order, on the hub's thread. None of it waits.

    @abc.abstractmethod
    def take(self, arrivals: Sequence[Arrival], holds: Sequence[Hold]) -> None:
        """Take the rows that the consumer wants of frames of one worker.

        A frame that the lane needs is held until `on_release`.

        holds: that of each frame.
        """

    @abc.abstractmethod
    def finish(self, request: Request, taken: Callable[[], None] | None) -> bool:
        """Take the end of a request, after all of its frames; return whether the lane will call `taken`."""

    @abc.abstractmethod
    def greet(self, engine: str, model: ModelInfo, *, worker: bool = False) -> None:
        """Note that an engine connected, or one more worker of it. The note follows all earlier calls."""

    @abc.abstractmethod
    def lose(
        self, engine: str, replica: int | None = None, stage: int | None = None, *, restarted: bool = False
    ) -> None:
        """Note that a part of an engine is gone; the arguments are those of `RequestIndex.lose`."""

    @abc.abstractmethod
    def tell(self, answered: Answered) -> None:
        """Take the outcome of an action, if the consumer handles outcomes."""

    def wake(self) -> None:
        """Wake the thread, if it waits for what `take` and `finish` added: they leave that to their caller."""
        self.queue.wake()

    def note_full(self, engine: str) -> None:  # noqa: B027  most lanes need not know
        """Note that the hub had no room for requests of an engine."""

    def missed(self, here: set[tuple[str, int]], now: float) -> Iterator[tuple[str, int]]:  # noqa: ARG002
        """Yield the engines and replicas of open requests that were not connected for `limits.MISSED_S`.

        here: those that are connected.
        """
        return iter(())

    # From open to close; called by the hub's owner.

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

    def close(self) -> None:
        """Take nothing more; the consumer is closed when it has handled what it has."""
        self.queue.close()

    def discard(self) -> None:
        """Throw away the rows that the consumer has not handled yet."""
        self._discarded.set()

    def leave(self) -> None:  # noqa: B027  a lane in memory has nothing to leave
        """Leave what the consumer has not handled to the next hub, if that can be."""

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
        return self.backoff.trouble() or self.pace.trouble(now) or self.backlog.trouble or None

    @property
    def backlog(self) -> Backlog:
        """What the consumer has yet to deliver elsewhere; empty while it is not open."""
        return (self.consumer.backlog() if self._is_open else None) or Backlog()

    def status(self) -> dict[str, Any]:
        """Return the lane's counters."""
        now = time.monotonic()
        return {
            "kind": self.consumer.name,
            "claim": self.consumer.claim(),
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
            "backlog": self.backlog._asdict(),
        }

    def stored(self) -> LaneFiles | None:
        """Return what the lane has on disk; None for a lane in memory."""
        return None

    @property
    def left(self) -> tuple[int, int]:
        """How many frames, and how many open requests, wait for the next hub."""
        return 0, 0

    # What the consumer is offered: `Context`.

    def act(self, action: Action) -> None:
        """Send an action to the engine that runs its request; by default the engine whose frame is in hand."""
        if not action.incarnation and is_of(self._given_of, action.engine):
            for part in self._given:
                if part.id == action.request:
                    action = msgspec.structs.replace(action, incarnation=part.incarnation, engine=self._given_of)
        self._on_action(self.name, action)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this consumer."""
        with self._lock:
            self.counts[name] += amount

    def hub_status(self) -> dict[str, Any]:
        """Return the hub's counters."""
        return self._hub_status()

    def left_s(self) -> float | None:
        """Return how long the hub that stops still waits for the consumer; None while it does not stop."""
        return None if self.ends_at is None else max(0.0, self.ends_at - time.monotonic())

    def working(self) -> None:
        """Note that the call under way makes progress."""
        self.pace.working()

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

    @abc.abstractmethod
    def _run(self) -> None:
        """Open the consumer, have it handle what comes, and close it."""

    def _idle(self) -> None:
        self._guard("on_idle", self.consumer.on_idle)

    def _close_consumer(self) -> BaseException | None:
        """Close the consumer, if it is open; return what it raised."""
        if not self._is_open:
            return None
        self._is_open = False
        return self._call(self.consumer.close)

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
        self.bytes += delivery.frame.bytes_of(delivery.rows)
        if error is not None:
            for tally, rows in delivery.parts:
                tally.rows_failed += rows
                tally.error = tally.error or error

    def _hand_over(self, delivery: Delivery) -> str | None:
        """Have the consumer take a frame; return what is wrong with it, None when the consumer took it."""
        return self._guard("on_frame", self.consumer.on_frame, delivery.frame)

    def _finish(self, tally: Tally, settled: Callable[[], None] | None) -> None:
        """Tell the consumer that a request is over; `settled` is called, on any thread, when there is a result."""
        if self.minds_actions:
            for acted in tally.request.acted():
                self._guard("on_action", self.consumer.on_action, acted)
        done = tally.done()
        answers: list[CaptureResult | Future[CaptureResult] | None] = []
        self._given, self._given_of = done.finished, done.engine
        error = self._guard("on_request_done", lambda: answers.append(self.consumer.on_request_done(done)))
        self._given = ()
        if error is not None:
            self._settle(tally, settled, CaptureResult("error", self._give_up(tally.request, done, error)))
        elif isinstance(answer := answers[-1], Future):
            with self._lock:
                self._unsettled[answer] = time.monotonic()
            answer.add_done_callback(functools.partial(self._ended, tally, settled))
        else:
            self._take_result(tally, settled, answer)

    def _ended(self, tally: Tally, settled: Callable[[], None] | None, future: Future[CaptureResult]) -> None:
        """Take what became of a request for which the consumer wanted time."""
        with self._lock:
            self._unsettled.pop(future, None)
        try:
            result = future.result()
        except BaseException as e:  # noqa: BLE001  as in `_guard`
            if self._take_failure(tally, settled, e):
                return
            self._settle(tally, settled, CaptureResult("error", self._failed("on_request_done", e)))
        else:
            self._take_result(tally, settled, result)

    def _give_up(self, request: Request, done: RequestDone, error: str) -> str:  # noqa: ARG002  what others set aside
        """Note that the end of a request can never be handled; return the error that its result names."""
        return error

    def _take_failure(
        self,
        tally: Tally,  # noqa: ARG002
        settled: Callable[[], None] | None,  # noqa: ARG002
        error: BaseException,  # noqa: ARG002
    ) -> bool:
        """Return whether the consumer's thread will handle a request whose Future failed. Called on any thread."""
        return False

    def _take_result(self, tally: Tally, settled: Callable[[], None] | None, result: CaptureResult | None) -> None:
        """Take the consumer's own result of a request, and log the error in it."""
        if result is not None and result.error is not None:
            request = tally.request
            self._losses.tell_failed(request.id, result.error, engine=request.engine, status=result.status)
        self._settle(tally, settled, result)

    def _settle(self, tally: Tally, settled: Callable[[], None] | None, result: CaptureResult | None) -> None:
        if tally.opening not in (None, self.restarts):
            tally.error = tally.error or _ANEW
        judged = tally.judge(result)
        if tally.unkept(result, judged):
            with self._lock:
                self.unkept += 1
        self._losses.tell(tally.request.id, judged.dropped, engine=tally.request.engine)
        self._on_result(self._name(tally.request), self.index, self._final(tally, judged))
        if settled is not None:
            settled()

    def _final(self, tally: Tally, judged: CaptureResult) -> CaptureResult:  # noqa: ARG002
        """Return the result of a request for the hub. Called on any thread."""
        return judged

    def _name(self, request: Request) -> Request | RequestName:
        """Return a request as the hub knows it."""
        return request

    def _guard(self, method: str, call: Callable[..., Any], *args: Any) -> str | None:
        """Call a method of the consumer until it works or cannot work; return the final error, None if it worked.

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
        """Return whether the consumer may be opened again for the record in hand."""
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

    @abc.abstractmethod
    def _restart(self, method: str, error: BaseException) -> None:
        """Close the consumer and open it again, its method having raised a fatal error."""

    def _open_again(self, method: str, error: BaseException) -> None:
        """Close the consumer and open it again, however long that takes. Raises LeftError when the hub stops first."""
        event = {"event": "consumer_restarts", "consumer": self.name, "method": method}
        text = "consumer %s: %s failed, and the consumer is closed and opened again: %s"
        error_text = f"{type(error).__name__}: {error}"
        logger.error(text, self.name, method, error_text, exc_info=None if self.restarts else error, extra=event)
        if (unclosed := self._close_consumer()) is not None:
            self._failed("close", unclosed)
        failed: BaseException | None = error
        while failed is not None:
            self._wait("open", failed)
            failed = self._call(self.consumer.open, self)
        self._is_open = True
        self.restarts += 1

    def _failed(self, method: str, e: BaseException) -> str:
        """Count an exception of the consumer; return its text."""
        kind = (method, type(e))
        with self._lock:
            self.errors += 1
            is_logged = kind in self._logged
            self._logged.add(kind)
        event = {"event": "consumer_failed", "consumer": self.name, "method": method}
        if not is_logged and method == "close" and isinstance(e, CapflowError):
            logger.error("consumer %s: %s", self.name, e, extra=event)
        elif not is_logged:
            text = "consumer %s: %s failed; more of this kind are counted only"
            logger.error(text, self.name, method, exc_info=e, extra=event)
        return f"{self.name}.{method}: {type(e).__name__}: {e}"
