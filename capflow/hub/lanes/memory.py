"""A lane in memory: what waits for the consumer is in a queue, and is lost with the hub.

In the queue engines take turns, so that what one engine's worker sends holds up the rows of another by one item at
most. Whatever the consumer does, what waits for it is bounded: rows by its policy, and what has no rows by
`capflow.hub.lanes.notes`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.policy import WhenFull
from capflow.capture.losses import note_chunk
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.hub.effects import Hold
from capflow.hub.lanes.lane import HubCalls, Lane, LeftError
from capflow.hub.lanes.notes import weight
from capflow.hub.lanes.tally import Delivery, Tallies, Tally
from capflow.hub.requests.index import Arrival
from capflow.hub.requests.request import Request
from capflow.plugins.configure import ConfiguredConsumer
from capflow.steering.action import Answered

_STOPPED = "the hub stopped while the consumer could not go on"


class _Rows(NamedTuple):
    # Of one engine, in order; the consumer's thread removes each that it is through with.
    deliveries: deque[Delivery]
    # That of each frame, if it is held.
    holds: Sequence[Hold]
    # The time of delivery, on the monotonic clock.
    at: float


class _Done(NamedTuple):
    tally: Tally
    taken: Callable[[], None] | None
    # The bytes of the note; 0 when a frame's credit bounds it.
    weight: int


class _Session(NamedTuple):
    engine: str
    model: ModelInfo
    weight: int


class _Gone(NamedTuple):
    engine: str


class _Told(NamedTuple):
    answered: Answered
    weight: int


class MemoryLane(Lane):
    """One consumer's queue in memory and its thread, from `open` to `close`."""

    def __init__(self, index: int, configured: ConfiguredConsumer, calls: HubCalls) -> None:
        super().__init__(index, configured, calls)
        # Only the hub's thread uses it.
        self._tallies = Tallies(index)
        # Engines whose note waits in the queue; guarded by `_lock`.
        self._greeting: dict[str, ModelInfo] = {}
        # Engines, oldest first, whose notes found no room. Only the hub's thread uses it.
        self._unmet: dict[str, None] = {}
        # Engines that were put in the queue, until they are gone. Only the hub's thread uses it.
        self._connected: set[str] = set()
        # The latest engines that the consumer knows, within `limits.NOTES_BYTES_MAX`. Only the consumer's thread uses
        # it.
        self._met: dict[str, ModelInfo] = {}
        # The memory of `_met`. Only the consumer's thread uses it.
        self._met_bytes = 0

    # What the hub tells the consumer.

    def take(self, arrivals: Sequence[Arrival], holds: Sequence[Hold]) -> None:
        """Take the rows that the consumer wants. Only a lane with policy `block` holds frames.

        Its memory is bounded by the workers' credit, that of a `drop` or `skip` lane by its queue.
        """
        deliveries, held = deque[Delivery](), list[Hold]()
        for arrival, hold in zip(arrivals, holds, strict=True):
            if (delivery := self._tallies.of(arrival)) is not None:
                deliveries.append(delivery)
                held.append(hold)
            if arrival.events and self.minds_actions:
                self._deliver(deliveries, held)
                deliveries, held = deque(), []
                for event in arrival.events:
                    self.tell(event)
        self._deliver(deliveries, held)

    def _deliver(self, deliveries: deque[Delivery], holds: Sequence[Hold]) -> None:
        """Put rows in the queue, those of a `block` lane as one item. Rows that have no room are lost."""
        if not deliveries:
            return
        for delivery in deliveries:
            for tally, rows in delivery.parts:
                tally.rows += rows
        engine, now = deliveries[0].frame.header.engine, time.monotonic()
        if engine in self._unmet:
            self._lose(deliveries, "consumer_queue_full")
        elif self.policy is WhenFull.BLOCK and not self.queue.closed:
            nbytes = sum([delivery.frame.memory_bytes for delivery in deliveries])
            self.queue.force(_Rows(deliveries, holds, now), nbytes, engine, wake=False)
            for hold in holds:
                hold.left += 1
        else:
            for delivery in deliveries:
                self._offer(delivery, engine, now)

    def _offer(self, delivery: Delivery, engine: str, now: float) -> None:
        """Put the rows of a frame in the queue if they have room, or have it made for them."""
        reason = "skipped" if self.policy is WhenFull.SKIP and not self.queue.closed else "consumer_queue_full"
        item, newest = _Rows(deque((delivery,)), (), now), self.policy is not WhenFull.SKIP

        def lose(other: _Rows) -> None:
            self._lose(other.deliveries, reason)

        nbytes = delivery.frame.memory_bytes
        if not self.queue.displace(item, nbytes, engine, lose, newest=newest, wake=False):
            lose(item)

    def finish(self, request: Request, taken: Callable[[], None] | None) -> bool:
        """Take the end of a request, after everything before; return whether `taken` will be called.

        An end that has no room does not reach the consumer: the request's result says so.
        """
        tally = self._tallies.pop(request)
        if self.queue.closed:
            return False
        waited_for = taken is not None and self.policy is WhenFull.BLOCK and request.engine not in self._unmet
        nbytes = 0 if waited_for else weight(tuple(request.finished.values()))
        if not waited_for and (request.engine in self._unmet or not self.notes.admit(nbytes)):
            self.notes.lost["end"] += 1
            untold = CaptureResult("error", "the consumer did not get its end: consumer_queue_full")
            self._settle(tally, None, untold)
            return False
        self.queue.force(_Done(tally, taken if waited_for else None, nbytes), source=request.engine, wake=False)
        return waited_for

    def greet(self, engine: str, model: ModelInfo, *, worker: bool = False) -> None:
        """Note that an engine connected. An engine that comes and goes before the note is read is noted once.

        When there is no room for it, all rows of the engine are lost until it connects again.
        """
        if worker or self.queue.closed:  # the note is about the engine
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

    def lose(
        self,
        engine: str,
        replica: int | None = None,
        stage: int | None = None,  # noqa: ARG002
        *,
        restarted: bool = False,  # noqa: ARG002
    ) -> None:
        """Note that an engine is gone, if the consumer gets a note of it. The loss of a part is not noted.

        It needs no room of its own: there is at most one for each engine that `greet` had room for.
        """
        if replica is not None:
            return
        self._unmet.pop(engine, None)
        if engine not in self._connected:
            return
        self._connected.remove(engine)
        with self._lock:
            self._greeting.pop(engine, None)  # its return is noted again
        self.queue.force(_Gone(engine), source=engine)

    def tell(self, answered: Answered) -> None:
        """Take the outcome of an action, if the consumer handles outcomes; the newest displace the oldest that wait."""
        if not self.minds_actions:
            return
        item = _Told(answered, weight(answered))
        while not self.notes.admit(item.weight):
            self.notes.lost["action"] += 1
            oldest = self.queue.remove(lambda item: isinstance(item, _Told))
            if oldest is None:
                return
            self.notes.taken(oldest.weight)
        self.queue.force(item, source=answered.engine)

    # The consumer's thread.

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

    def _safely_handle(self, item: _Rows | _Done | _Session | _Gone | _Told) -> None:
        """Handle an item. A failure outside of the consumer costs the item and not the thread."""
        try:
            self._handle(item)
        except LeftError:
            if isinstance(item, _Rows):  # lost, as the frames after it are
                self._lose(item.deliveries, "shutdown")
            else:
                self._leave(item, _STOPPED)
        except Exception as e:  # noqa: BLE001  without this thread nothing more would be acknowledged
            self._leave(item, self._failed("lane", e))

    def _leave(self, item: _Rows | _Done | _Session | _Gone | _Told, error: str) -> None:
        """Let go of an item that the consumer did not take; the results of its requests say so."""
        match item:
            case _Rows(deliveries, holds):
                for delivery in deliveries:
                    for tally, rows in delivery.parts:
                        tally.rows_failed += rows
                        tally.error = tally.error or error
                if holds:
                    self._on_release(holds[len(holds) - len(deliveries) :])
            case _Done(tally, taken):
                self._settle(tally, taken, CaptureResult("error", error))

    def _handle(self, item: _Rows | _Done | _Session | _Gone | _Told) -> None:
        match item:
            case _Rows():
                self._give_all(item)
            case _Done(tally, taken, nbytes):
                self.notes.taken(nbytes)
                self._finish(tally, taken)
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

    def _give_all(self, item: _Rows) -> None:
        """Have the consumer take the frames of an item, and release each that it took.

        Those for which it is too late are lost. They are not released: a worker that is waited for keeps them for the
        next hub.
        """
        deliveries, holds, at = item
        if self.policy is WhenFull.SKIP and time.monotonic() - at > limits.SKIP_AGE_S:
            self._lose(deliveries, "shutdown" if self._discarded.is_set() else "skipped")
            return
        self.pace.waited_since = at
        try:
            while deliveries and not self._discarded.is_set():
                self._give(deliveries[0])
                deliveries.popleft()
        finally:
            self.pace.waited_since = None
            if holds:
                self._on_release(holds[: len(holds) - len(deliveries)])
        self._lose(deliveries, "shutdown")

    def _meet(self, engine: str, model: ModelInfo) -> None:
        if (before := self._met.pop(engine, None)) is not None:
            self._met_bytes -= weight(before)
        self._guard("on_session", self.consumer.on_session, engine, model)
        self._met[engine] = model
        self._met_bytes += weight(model)
        while self._met_bytes > limits.NOTES_BYTES_MAX and len(self._met) > 1:
            self._met_bytes -= weight(self._met.pop(next(iter(self._met))))

    def _restart(self, method: str, error: BaseException) -> None:
        """Close the consumer, open it again, however long that takes, and call `on_session` for its engines.

        Raises LeftError.
        """
        self._open_again(method, error)
        opening = self.restarts
        for engine, model in list(self._met.items()):
            self._meet(engine, model)
            if self.restarts != opening:  # a nested restart has called it for the other engines
                return

    def _lose(self, deliveries: Iterable[Delivery], reason: str) -> None:
        for delivery in deliveries:
            self.dropped[reason] += delivery.rows
            tallies = {tally.request.id: tally for tally, _ in delivery.parts}
            for chunk in delivery.frame.chunks():
                note_chunk(tallies[chunk.request.id].lost, chunk, reason)
            for tally, rows in delivery.parts:
                tally.rows -= rows
