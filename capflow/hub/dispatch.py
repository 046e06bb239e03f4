"""The dispatch: does the effects of an exchange, and passes it what lanes answer and what peers send.

It belongs to the hub's thread. Lanes call back on their own threads; their calls are posted to the hub's thread.
Invariant: the effects of one call are done in order, and an effect that fails costs no other.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from capflow import limits
from capflow.buffers.policy import WhenFull
from capflow.capture.frame import Frame
from capflow.capture.losses import LossLog
from capflow.capture.result import CaptureResult
from capflow.errors import explain
from capflow.hub.effects import (
    AnswerLane,
    Continue,
    CountResult,
    Effect,
    End,
    FindMissed,
    Give,
    Greet,
    Hold,
    Log,
    LogLate,
    Lose,
    NoteFull,
    Pause,
    Refuse,
    Send,
    SendStatus,
    Tell,
    TellOutcome,
)
from capflow.hub.exchange.exchange import Exchange
from capflow.hub.lanes.durable import DurableLane
from capflow.hub.lanes.lane import HubCalls, Lane
from capflow.hub.lanes.memory import MemoryLane
from capflow.hub.peers.budget import Budget
from capflow.hub.peers.departures import FAILED
from capflow.hub.peers.guard import Guard
from capflow.hub.peers.log import PeerLog
from capflow.hub.requests.index import Arrival
from capflow.hub.requests.request import Request, RequestName
from capflow.plugins.configure import ConfiguredConsumer, ConfiguredController
from capflow.protocol.session import Parts
from capflow.steering.action import Action, ActionApplied, Answered, Outcome, Rejected

logger = logging.getLogger("capflow.hub")


class Dispatch:
    """The exchange of a hub with its lanes, its connections and its log.

    send: sends a message to a connection.
    post: has a function called soon, on the hub's thread.
    status: returns the hub's counters.
    on_refused: takes the engine that was refused and the reason; each pair once.
    memory_bytes_max: the memory for what peers send, as in `capflow.hub.peers.budget`.
    """

    def __init__(
        self,
        consumers: Sequence[ConfiguredConsumer],
        controllers: Sequence[ConfiguredController],
        *,
        send: Callable[[bytes, Parts], None],
        post: Callable[[Callable[[], None]], None],
        status: Callable[[], dict[str, Any]],
        guard: Guard,
        on_refused: Callable[[str, str], None] | None = None,
        memory_bytes_max: int | None = None,
    ) -> None:
        budget = Budget(memory_bytes_max, inboxes=sum(c.policy is WhenFull.SPILL for c in consumers))
        inboxes = iter(budget.inboxes)
        self._status = status
        self.lanes = tuple(self._lane(index, consumer, inboxes) for index, consumer in enumerate(consumers))
        self._bound_queues(budget.queues_bytes_max)
        windows = [c.queue_bytes_max for c in consumers if c.policy in (WhenFull.BLOCK, WhenFull.SPILL)]
        self.exchange = Exchange(
            [lane.wish for lane in self.lanes],
            controllers,
            guard=guard,
            budget=budget,
            window_bytes=min([*windows, limits.CREDIT_BYTES_DEFAULT]),
            minds_actions=any(lane.minds_actions for lane in self.lanes),
            hub_id=uuid.uuid4().hex,
        )
        self.log = PeerLog(logger)
        self._losses = LossLog(logger, "hub")
        self._guard = guard
        self._send = send
        self._post = post
        self._on_refused = on_refused
        # Frames that a lane does not need any more, as it gave them back; any thread appends, the hub's thread takes.
        self._released: deque[Sequence[Hold]] = deque()
        # Whether `_release` is posted; set by any thread, cleared by the hub's.
        self._is_releasing = False

    def _lane(self, index: int, consumer: ConfiguredConsumer, inboxes: Iterator[Any]) -> Lane:
        """Return the lane of a consumer.

        inboxes: the memory of each lane with an inbox.
        """
        calls = HubCalls(self._on_result, self._on_action, self._let_go, self._status)
        if consumer.policy is WhenFull.SPILL:
            return DurableLane(index, consumer, calls, state=next(inboxes))
        return MemoryLane(index, consumer, calls)

    def _bound_queues(self, bytes_max: int) -> None:
        """Fit the queues of consumers that drop or skip into their part of the memory."""
        lanes = [lane for lane in self.lanes if lane.policy not in (WhenFull.BLOCK, WhenFull.SPILL)]
        for lane in lanes:
            bound = bytes_max // len(lanes)
            if lane.queue.bytes_max > bound:
                got, do = f"queue_bytes_max of {lane.queue.bytes_max:,}", "start the hub with more --memory-bytes-max"
                logger.info("%s", explain(f"consumer {lane.name}", got=got, expected=f"at most {bound:,}", do=do))
                lane.queue.bytes_max = bound

    # Called by the hub, on its thread.

    def receive(self, peer: bytes, parts: Parts, user: str = "") -> None:
        """Take a whole message of a connection and its user."""
        for _ in self.handle(peer, parts, user):
            pass

    def handle(self, peer: bytes, parts: Parts, user: str = "") -> Iterator[None]:
        """Take a message of a connection and its user; yield where other peers may have their turn."""
        return self._doing(peer, self.exchange.receive(peer, parts, time.monotonic(), user))

    def take(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Take checked frames of a worker in this process."""
        for _ in self._doing(peer, self.exchange.take(peer, frames, time.monotonic())):
            pass

    def _doing(self, peer: bytes, effects: Iterable[Effect]) -> Iterator[None]:
        """Do the effects of what a peer sent; yield where other peers may have their turn."""
        failure: BaseException | None = None
        for effect in effects:
            if type(effect) is Pause:
                yield
                continue
            if failure is not None and isinstance(effect, End):
                effect.request.status = "error"  # a lane may lack rows of the frame that ends it
            try:
                self._do(effect)
            except Exception as e:  # noqa: BLE001  it is logged, with its traceback
                failure = e
        if failure is not None:
            self.do(self.exchange.fail(peer, failure, time.monotonic()))

    def acknowledge(self) -> None:
        """Wake the lanes that wait for frames, and acknowledge the frames that were released since the last call."""
        self._wake()
        self.do(self.exchange.acknowledge(time.monotonic()))

    def overrun(self, peer: bytes) -> None:
        """Give up a peer that sent more than it may."""
        self.do(self.exchange.overrun(peer, time.monotonic()))

    def give_up(self, peer: bytes) -> None:
        """Forget a peer that does not read its messages."""
        self.do(self.exchange.give_up(peer, time.monotonic()))

    def tick(self, now: float, waiting: Container[bytes] = ()) -> None:
        """Send beats, and give up silent peers.

        waiting: peers whose messages are not handled yet.
        """
        self._guard.refresh()
        self.do(self.exchange.tick(now, waiting))
        self._wake()
        self.log.flush(now)

    def hand_over(self) -> None:
        """Have engines send new requests to their other hubs."""
        self.do(self.exchange.hand_over(time.monotonic()))

    def drain(self) -> None:
        """Take no more frames, end the open requests, and let each consumer end when it has handled what it has."""
        self.do(self.exchange.drain(time.monotonic()))
        for lane in self.lanes:
            lane.close()

    def goodbye(self) -> None:
        """Say Bye to every peer."""
        self.do(self.exchange.goodbye())

    def _wake(self) -> None:
        """Wake the threads of lanes that wait for frames and ends, once a turn.

        To wake a thread takes as long as to handle a frame, and it cannot run before the hub's thread pauses.
        """
        for lane in self.lanes:
            lane.wake()

    # Called by lanes, on any thread.

    def _on_result(self, request: Request | RequestName, lane: int, result: CaptureResult) -> None:
        self._post(lambda: self.do(self.exchange.settle(request, lane, result, time.monotonic())))

    def _on_action(self, consumer: str, action: Action) -> None:
        lane = next(lane.index for lane in self.lanes if lane.name == consumer)
        self._post(lambda: self.do(self.exchange.act(lane, consumer, action, time.monotonic())))

    # Effects.

    def do(self, effects: Iterable[Effect]) -> None:
        """Do effects in order. An effect that fails is logged."""
        for effect in effects:
            try:
                self._do(effect)
            except Exception:
                logger.exception(FAILED, extra={"event": "hub_failed"})
                if isinstance(effect, Send):  # it says Hello again, and goes on from there
                    self._post(functools.partial(self.give_up, effect.peer))

    def _do(self, effect: Effect) -> None:
        # Nearly all are; a `match` takes longer.
        if type(effect) is Give:
            self._give(effect.arrivals, effect.holds)
            return
        match effect:
            case Send(peer, parts):
                self._send(peer, parts)
            case End():
                self._end(effect)
            case CountResult(index, status):
                self.lanes[index].results[status] += 1
            case AnswerLane(index, outcome):
                self._answer(self.lanes[index], outcome)
            case Greet() | Lose() | NoteFull() | Tell() | TellOutcome():
                self._tell_lanes(effect)
            case Log() | LogLate():
                self._log(effect)
            case _:
                self._go_on(effect)

    def _go_on(self, effect: Effect) -> None:
        """Do an effect after which the exchange is called again, or which is the hub's own."""
        match effect:
            case Refuse(peer, parts, engine, reason, first):
                self._send(peer, parts)
                if first and engine and self._on_refused is not None:
                    self._on_refused(engine, reason)
            case SendStatus(peer):
                self.do(self.exchange.send_status(peer, self._status(), time.monotonic()))
            case Continue(engine):
                self._post(lambda: self.do(self.exchange.proceed(engine, time.monotonic())))
            case FindMissed(here):
                now = time.monotonic()
                for lane in self.lanes:
                    for engine, replica in lane.missed(here, now):
                        self.do(self.exchange.miss(lane.index, engine, replica, now))

    def _tell_lanes(self, effect: Greet | Lose | NoteFull | Tell | TellOutcome) -> None:
        match effect:
            case Greet(engine, model, worker):
                for lane in self.lanes:
                    lane.greet(engine, model, worker=worker)
            case Lose(engine, replica, stage, restarted, index):
                for lane in self._lanes(index):
                    lane.lose(engine, replica, stage, restarted=restarted)
            case NoteFull(engine):
                for lane in self.lanes:
                    lane.note_full(engine)
            case Tell(answered, index):
                for lane in self._lanes(index):
                    lane.tell(answered)
            case TellOutcome(action, outcome, engine, asked_by):
                answered = Answered.of(action, outcome, engine=engine, asked_by=asked_by)
                for lane in self.lanes:
                    lane.tell(answered)

    def _end(self, effect: End) -> None:
        hold = effect.hold
        released = None if hold is None else functools.partial(self._let_go, (hold,))
        for index in effect.lanes:
            holds = self.lanes[index].finish(effect.request, released)
            if hold is not None:
                hold.left += holds
        effect.request.let_go()

    def _give(self, arrivals: Sequence[Arrival], holds: Sequence[Hold]) -> None:
        """Give frames to each lane, also after one that fails; raise what it failed with."""
        failure: Exception | None = None
        for lane in self.lanes:
            try:
                lane.take(arrivals, holds)
            except Exception as e:  # noqa: BLE001  raised below
                failure = e
        if failure is not None:
            raise failure

    def _lanes(self, index: int | None) -> Sequence[Lane]:
        return self.lanes if index is None else (self.lanes[index],)

    def _let_go(self, holds: Sequence[Hold]) -> None:
        """Note, on any thread, that a lane does not need frames any more."""
        self._released.append(holds)
        if not self._is_releasing:
            self._is_releasing = True
            self._post(self._release)

    def _release(self) -> None:
        """Release what lanes do not need any more, all at once."""
        # First: what a lane appends from now on is taken here or by the next call.
        self._is_releasing = False
        while self._released:
            self.exchange.release(self._released.popleft())

    @staticmethod
    def _answer(lane: Lane, outcome: Outcome) -> None:
        """Count the outcome of an action for the consumer that asked for it."""
        lane.count(f"actions_{outcome.__struct_config__.tag}")
        if not isinstance(outcome, ActionApplied):
            rejected = isinstance(outcome, Rejected)
            event = {"event": "action_rejected"} if rejected else {"event": "action_unknown"}
            extra = {**event, "consumer": lane.name, "reason": outcome.reason}
            logger.warning("consumer %s: %s", lane.name, outcome.reason, extra=extra)

    def _log(self, line: Log | LogLate) -> None:
        if isinstance(line, LogLate):
            self._losses.tell_late(line.lost, line.engine)
        elif line.who is None:
            logger.log(line.level, line.text, *line.args, extra=line.event, exc_info=line.error)
        else:
            now = time.monotonic()
            self.log.say(line.level, line.who, now, line.text, *line.args, event=line.event, exc_info=line.error)
