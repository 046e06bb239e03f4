"""The exchange: what the hub does with each message, and with what its consumers and peers come back with.

It belongs to the hub's thread and does no I/O of its own: `send` takes what is to go out, `post` brings what other threads
learn back to the hub's. A peer that breaks the protocol is refused and forgotten; nothing it sends ends the hub.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.policy import WhenFull
from capflow.buffers.shares import Shares
from capflow.capture.frame import Frame, FrameHeader
from capflow.capture.frame_cost import decoded_bytes, is_large
from capflow.capture.losses import LossLog
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.errors import RemoteProtocolError, RoomError, UsageError, explain
from capflow.hub.actions import Relay, asked_of
from capflow.hub.counts import Counts
from capflow.hub.lanes.durable import DurableLane
from capflow.hub.lanes.lane import Lane
from capflow.hub.lanes.memory import MemoryLane
from capflow.hub.peers.budget import Budget
from capflow.hub.peers.departures import Departures
from capflow.hub.peers.guard import Guard
from capflow.hub.peers.log import PeerLog
from capflow.hub.peers.roster import Peer, Roster, WorkerState
from capflow.hub.requests.index import RequestIndex
from capflow.hub.requests.request import KnownEngine, Request, RequestName, answered_by
from capflow.hub.waiters import Waiters
from capflow.hub.watchers import Taps
from capflow.plugins.configure import ConfiguredConsumer, ConfiguredController
from capflow.protocol.credit import Pool
from capflow.protocol.message import (
    Ack,
    Act,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    Hello,
    Message,
    Results,
    Status,
    Watched,
    WatchRequest,
    Welcome,
    WorkerCounts,
    encode,
)
from capflow.protocol.session import HubSession, Parts, State, UnexpectedMessageError, cost
from capflow.steering.action import Action, ActionApplied, Answered, Outcome, Rejected

logger = logging.getLogger("capflow.hub")

_RIGHT: dict[type[Any], str] = {Act: "steer", Await: "read", Status: "read", WatchRequest: "read"}
"""What a client must be allowed for what it says."""


OTHER_REASONS = "other reasons"
"""Under which refusals are counted when there are more than `limits.REFUSALS_MAX` different reasons."""


_LEFT = CaptureResult("pending", "the hub stopped; what came of the request waits for the next one")


@dataclass
class _Hold:
    """A frame that consumers have not handled; it goes back to its worker's credit when `left` is 0."""

    source: WorkerState
    seq: int
    left: int


def about(hello: Hello | None) -> dict[str, Any]:
    """Return the fields that say in a log who a peer is."""
    if hello is None:
        return {}
    told: dict[str, Any] = {"role": hello.role, "engine": hello.engine, "rank": list(hello.rank)}
    return told if hello.model is None else told | {"model": hello.model.name}


class Exchange:
    """All that a hub knows, and what it does with what comes in.

    status: gives the hub's counters. guard: says who may do what. on_refused: told why an engine was refused. memory_bytes_max: as of
    `capflow.hub.peers.budget`.
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
        on_refused: Callable[[str], None] | None,
        memory_bytes_max: int | None = None,
    ) -> None:
        self.controllers = tuple(controllers)
        self.counts = Counts()
        self.budget = Budget(memory_bytes_max, inboxes=sum(c.policy is WhenFull.SPILL for c in consumers))
        inboxes = iter(self.budget.inboxes)
        self.lanes = tuple(self._lane(index, consumer, inboxes) for index, consumer in enumerate(consumers))
        self._bound_queues()
        wishes = [lane.wish for lane in self.lanes]
        self.index = RequestIndex(wishes, self.budget.state, results_bytes_max=self.budget.results_bytes_max)
        window_bytes = min(
            (c.queue_bytes_max for c in consumers if c.policy in (WhenFull.BLOCK, WhenFull.SPILL)),
            default=limits.CREDIT_BYTES_DEFAULT,
        )
        self.roster = Roster(
            Pool(min(window_bytes, limits.CREDIT_BYTES_DEFAULT), self.budget.frames.total, self.budget.frames),
            self.budget.state,
            self.controllers,
            fits=self.index.check,
            on_engine=self._greet,
            on_lost=self._lose,
        )
        self.relay = Relay(self.budget.state)
        self.log = PeerLog(logger)
        self.taps = Taps(send, self._say, self.log)
        self._waiters = Waiters(self.budget.state)
        self._departures = Departures(post)
        self._id = uuid.uuid4().hex
        self._captures = tuple(wish.spec for wish in wishes if wish.spec is not None)
        # Frames that nobody holds any more, by worker; emptied by `acknowledge`.
        self._released: dict[WorkerState, list[int]] = {}
        self._told: set[tuple[str, str]] = set()  # refusals that were logged, by engine and reason
        self._refused: dict[bytes, None] = {}  # who was refused and may stay connected; the oldest goes first
        self._rights = 0  # the state of the allow-list that sessions were last checked against
        self._losses = LossLog(logger, "hub")  # of requests whose results are told
        self._strangers: set[str] = set()  # names of consumers that are not here and were logged
        self._draining = False  # set by `drain`: frames are left to their workers, for the next hub
        self._send = send
        self._post = post
        self._status = status
        self._guard = guard
        self._on_refused = on_refused

    def _lane(self, index: int, consumer: ConfiguredConsumer, inboxes: Iterator[Shares]) -> Lane:
        """Return the lane of a consumer. inboxes: the memory of each lane with an inbox."""
        if consumer.policy is WhenFull.SPILL:
            state = next(inboxes)
            return DurableLane(index, consumer, state=state, on_result=self._on_result, on_action=self._on_action)
        return MemoryLane(index, consumer, on_result=self._on_result, on_action=self._on_action)

    def _bound_queues(self) -> None:
        """Have the queues of consumers that drop or skip fit into their part of the memory."""
        lanes = [lane for lane in self.lanes if lane.policy not in (WhenFull.BLOCK, WhenFull.SPILL)]
        for lane in lanes:
            bound = self.budget.queues_bytes_max // len(lanes)
            if lane.queue.bytes_max > bound:
                got, do = f"queue_bytes_max of {lane.queue.bytes_max:,}", "start the hub with more --memory-bytes-max"
                logger.info("%s", explain(f"consumer {lane.name}", got=got, expected=f"at most {bound:,}", do=do))
                lane.queue.bytes_max = bound

    # Called by the hub, on its thread.

    def drain(self) -> None:
        """Take no frames any more, end the open requests, and let each consumer end when it has handled what it has."""
        self._departures.finish()
        self._draining = True
        for engine in list(self.roster.engines.values()):
            self._end_open(self.index.lose(engine))
        for lane in self.lanes:
            lane.close()

    def goodbye(self) -> None:
        """Say Bye to everyone."""
        for peer in list(self.roster.peers):
            self._send(peer, [encode(Bye())])

    def receive(self, peer: bytes, parts: Parts, user: str = "") -> None:
        """Take one message of a connection and user, whole; as `handle`."""
        for _ in self.handle(peer, parts, user):
            pass

    def handle(self, peer: bytes, parts: Parts, user: str = "") -> Iterator[None]:
        """Take one message of a connection and user; yield where others may have their turn.

        Whatever is wrong with the message is the peer's loss.
        """
        now = time.monotonic()
        if self._guard.offences.ignored(user or peer, now):
            self.counts.ignored += 1
            return
        known = self.roster.peers.get(peer)
        if known is not None and known.session.user != user:  # another key took the connection's name
            self._forget(peer, for_good=False)
            known = None
        if known is None and len(parts) == limits.MESSAGE_PARTS_MAX:
            self._send(peer, [encode(Bye())])  # a frame of a connection that was given up: say Hello again
            return
        session = known.session if known is not None else HubSession(now=now, user=user)
        try:
            frame = None
            if known is not None and len(parts) == limits.MESSAGE_PARTS_MAX:
                frame = yield from self._prepared(known, parts)
                if self.roster.peers.get(peer) is not known:
                    return  # it left meanwhile, or said Hello again
            said = session.receive(parts, now, frame)
            if isinstance(said, Hello):
                yield from self._hello(peer, session, said, now)
            elif known is not None and self._may(peer, known, said, now):
                if isinstance(said, Await):
                    yield from self._await(peer, known, said)
                else:
                    self._handle(peer, known, said, parts, now)
        except (RemoteProtocolError, RoomError) as e:
            self._turn_down(peer, known, session, e, now)
        except Exception:  # noqa: BLE001  it is logged, with its traceback
            text, event = "the hub failed at a message and gives its sender up", {"event": "hub_failed"}
            self.log.say(logging.ERROR, user or peer, now, text, event=event, exc_info=True)
            self._cut_off(peer, session, "the hub failed at a message of this peer; see its log", now)

    def _prepared(self, known: Peer, parts: Parts) -> Generator[None, None, Frame | None]:
        """Do what comes before a frame, in slices: its reading where that takes long, then what is left to do for its engine; return what was read."""
        frame = None
        if is_large(parts[0]):
            frame = Frame.read(*parts)
            yield
        yield from self._departures.done(known.hello.engine)
        return frame

    def _turn_down(
        self, peer: bytes, known: Peer | None, session: HubSession, error: RemoteProtocolError | RoomError, now: float
    ) -> None:
        """Answer a message that is not taken."""
        if isinstance(error, RoomError):  # no offence: it may come again
            self._refuse(peer, session, str(error), now)
            if known is not None:
                self._leave(peer, known)
        elif known is None and isinstance(error, UnexpectedMessageError):
            self._send(peer, [encode(Bye())])  # of a connection that was given up: say Hello again
        else:
            self._cut_off(peer, session, str(error), now)

    def acknowledge(self) -> None:
        """Tell each worker, once, what consumers came to be done with since the last call."""
        while self._released:
            source = next(iter(self._released))
            ack = source.intake.release(*self._released.pop(source))
            if source.peer is None:
                continue
            try:
                self._say(source.peer, ack)
            except BaseException:
                source.intake.withdraw(ack)
                self._released[source] = []  # the next turn gives it the credit, behind the others
                raise

    def share_bytes(self, peer: bytes) -> tuple[int, int]:
        """Return how much of what a peer sent may wait to be handled: of all kinds, and how much more that its credit paid for."""
        known = self.roster.peers.get(peer)
        if known is None:
            return limits.HELLO_BYTES_MAX, 0
        # Below 0 while a frame is held that was larger than all credit.
        paid_bytes = max(0, known.source.intake.credit_bytes) if known.source is not None else 0
        return limits.READ_AHEAD_EACH_BYTES_MAX, paid_bytes

    def overrun(self, peer: bytes) -> None:
        """Give up a peer that has sent more than that; it may say Hello again."""
        known = self.roster.peers.get(peer)
        if known is None:
            self.counts.ignored += 1  # it may not know yet that its session is over
            return
        expected = "a worker's frames within its credit, and little else at once"
        reason = explain("messages", got="more than are handled", expected=expected)
        self._cut_off(peer, known.session, reason, time.monotonic())

    def settled(self, peer: bytes) -> bool:
        """Return whether a connection has a session, or was refused and may wait to be let in."""
        return peer in self.roster.peers or peer in self._refused

    def tick(self, now: float, waiting: Container[bytes] = ()) -> None:
        """Send beats, and give up on who is silent or has lost its rights. waiting: whose messages wait to be handled."""
        self._guard.refresh()
        if self._guard.version != self._rights:
            self._rights = self._guard.version
            self._check_rights(now)
        self.relay.expire(now)
        self._miss(now)
        self.roster.forget_missed(now)
        self.log.flush(now)
        for peer, known in list(self.roster.peers.items()):
            if known.session.silent(now) and peer not in waiting:
                if known.hello.role != "client":
                    self.counts.sessions_lost += 1
                    event = {"event": "session_lost", **about(known.hello)}
                    text = "engine %s: its %s fell silent"
                    who = known.session.user or peer
                    self.log.say(logging.WARNING, who, now, text, known.hello.engine, known.hello.role, event=event)
                self._leave(peer, known)
            elif (beat := known.session.tick(now)) is not None:
                self._send(peer, beat)

    def give_up(self, peer: bytes) -> None:
        """Forget a peer that takes nothing of what is sent to it; it may say Hello again."""
        known = self.roster.peers.get(peer)
        if known is not None:
            self.counts.sessions_lost += known.hello.role != "client"
            event = {"event": "session_lost", **about(known.hello)}
            text = "engine %s: its %s does not read what it is sent"
            who = known.session.user or peer
            now = time.monotonic()
            self.log.say(logging.WARNING, who, now, text, known.hello.engine, known.hello.role, event=event)
            self._leave(peer, known)

    # Called by lanes, on any thread.

    def _on_result(self, request: Request | RequestName, consumer: int, result: CaptureResult) -> None:
        """A consumer is done with a request."""
        self._post(lambda: self._settle(request, consumer, result))

    def _on_action(self, consumer: str, action: Action) -> None:
        """A consumer wants something done."""

        def answer(outcome: Outcome) -> None:
            kind = outcome.__struct_config__.tag
            lane.count(f"actions_{kind}")
            if not isinstance(outcome, ActionApplied):
                rejected = isinstance(outcome, Rejected)
                event = {"event": "action_rejected"} if rejected else {"event": "action_unknown"}
                extra = {**event, "consumer": consumer, "reason": outcome.reason}
                logger.warning("consumer %s: %s", consumer, outcome.reason, extra=extra)

        lane = next(lane for lane in self.lanes if lane.name == consumer)
        self._post(lambda: self._act("", action, answer, consumer, f"consumer {consumer}"))

    # Messages.

    def _may(self, peer: bytes, known: Peer, said: Frame | Message, now: float) -> bool:
        """Return whether a peer may say this; refuse it when it may not."""
        right = _RIGHT.get(type(said)) or ("capture" if known.hello.role != "client" else None)
        why = None if right is None else self._guard.refusal(known.session.user, right)
        if why is None:
            return True
        if isinstance(said, Act):
            self._say(peer, ActionOutcome(Rejected(said.id, why)))
        else:
            self._expel(peer, known, why, now)
        return False

    def _check_rights(self, now: float) -> None:
        """Refuse every peer that may not have any more what it has: its session, its tap, or results that it waits for.

        Who was refused before is to come again: it may have the right now. Its connection is closed for having no session.
        """
        self._refused.clear()
        for peer, known in list(self.roster.peers.items()):
            rights: tuple[str, ...] = ("capture",)
            if known.hello.role == "client":
                rights = ("read",) if peer in self.taps or peer in self._waiters else ("read", "steer")
            if (why := self._guard.refusal(known.session.user, *rights)) is not None:
                self._expel(peer, known, why, now)

    def _expel(self, peer: bytes, known: Peer, why: str, now: float) -> None:
        self._refuse(peer, known.session, why, now)
        self._leave(peer, known)

    def _handle(self, peer: bytes, known: Peer, said: Frame | Message, parts: Parts, now: float) -> None:
        match said:
            case Frame():
                self._frame(peer, known, said, parts, now)
            case Act():
                self._client_act(peer, known, said, cost(parts))
            case ActionOutcome():
                self.relay.outcome(known.hello.boot, said.outcome)
            case Status():
                self._say(peer, Status(self._status()))
            case WatchRequest():
                name, engines = _who(peer, known.session), list(self.roster.engines.values())
                self.taps.take(peer, name, known.owner, said.credit_bytes, engines)
            case Beat(counts=WorkerCounts() as counts, troubles=troubles) if known.source is not None:
                known.source.told, known.source.troubles = counts, troubles
            case Bye():
                self._forget(peer, for_good=True)
                self.relay.gone(known.hello.boot)

    # Sessions.

    def _hello(self, peer: bytes, session: HubSession, hello: Hello, now: float) -> Iterator[None]:
        if self._draining:
            return
        self._forget(peer, for_good=False)
        self._refused.pop(peer, None)
        if hello.role != "client":  # who says Hello and Bye again and again waits for what that leads to
            yield from self._departures.done(hello.engine)
        known = yield from self._joined(peer, session, hello, now)
        if known is not None:
            self._welcome(peer, known, now)

    def _joined(self, peer: bytes, session: HubSession, hello: Hello, now: float) -> Generator[None, None, Peer | None]:
        """Let a peer in and return it, or refuse it. Room that those who are gone are about to give back is waited for."""
        rights = ("read", "steer") if hello.role == "client" else ("capture",)
        for again in (False, True):
            if self._draining:
                break
            if (why := self._guard.refusal(session.user, *rights)) is not None:
                self._refuse(peer, session, why, now)
                break
            before = self._departures.engines
            try:
                return self.roster.join(peer, session, hello)
            except (UsageError, RoomError) as e:
                left = self._departures.engines - before
                if again or not left or not isinstance(e, RoomError):
                    self._refuse(peer, session, str(e), now)
                    break
            for engine in left:
                yield from self._departures.done(engine)
        return None

    def _welcome(self, peer: bytes, known: Peer, now: float) -> None:
        session, hello = known.session, known.hello
        if known.source is not None:  # after it was said that an earlier boot of it is gone
            known.source.intake.release(*self._released.pop(known.source, ()))  # the welcome says it
            model = known.source.engine.model
            self._departures.call(hello.engine, functools.partial(self._greet_lanes, hello.engine, model, worker=True))
        welcome = Welcome(self._id, 0, clock_s=now)  # a worker's credit is its intake's to say
        if hello.role == "scheduler":
            controllers = tuple(controller.spec() for controller in self.controllers)
            actions = any(lane.minds_actions for lane in self.lanes)
            welcome = msgspec.structs.replace(
                welcome, captures=self._captures, controllers=controllers, actions=actions
            )
        elif hello.role == "client":
            welcome = msgspec.structs.replace(welcome, captures=self._captures, readers=self.index.readers)
        if hello.role != "client":
            event = {"event": "session_opened", **about(hello)}
            text = "engine %s: its %s %s connected"
            who = session.user or peer
            self.log.say(logging.INFO, who, now, text, hello.engine, hello.role, tuple(hello.rank), event=event)
        for parts in session.welcome(welcome, now, known.source.intake if known.source is not None else None):
            self._send(peer, parts)
        if hello.role == "scheduler":
            for act in self.relay.again(hello.boot, now):
                self._say(peer, act)

    def _greet(self, engine: KnownEngine) -> None:
        self.taps.greet(engine)
        self._departures.call(
            engine.name, functools.partial(self._greet_lanes, engine.name, engine.model, worker=False)
        )

    def _greet_lanes(self, engine: str, model: ModelInfo, *, worker: bool) -> None:
        for lane in self.lanes:
            lane.greet(engine, model, worker=worker)

    def _refuse(self, peer: bytes, session: HubSession, reason: str, now: float, *, cut_off: bool = False) -> None:
        """Refuse a peer; one that is not cut off may stay connected, until it is let in or gone."""
        refused = self.counts.refused
        refused[reason if reason in refused or len(refused) < limits.REFUSALS_MAX else OTHER_REASONS] += 1
        engine = session.hello.engine if session.hello is not None else ""
        if (engine, reason) not in self._told:
            room = len(self._told) < limits.SESSIONS_MAX
            if room:
                self._told.add((engine, reason))
            if not cut_off:
                event = {"event": "session_refused", "reason": reason, **about(session.hello)}
                who = session.user or peer
                self.log.say(logging.ERROR, who, now, "refused %s: %s", _who(peer, session), reason, event=event)
            if room and session.hello is not None and session.hello.role != "client" and self._on_refused is not None:
                self._on_refused(reason)
        if not cut_off:
            self._refused[peer] = None
            keep_newest(self._refused, limits.REFUSED_KEPT_MAX)
        self._send(peer, session.refuse(reason, now))

    def _cut_off(self, peer: bytes, session: HubSession, reason: str, now: float) -> None:
        """Refuse a peer that broke the protocol, and forget it; one that does so again and again is ignored for a while."""
        self.counts.protocol_errors += 1
        offences = self._guard.offences.note(session.user or peer, now)
        event = {"reason": reason, **about(session.hello)}
        who = _who(peer, session)
        if offences == 1:
            event = {"event": "session_refused", **event}
            self.log.say(logging.ERROR, session.user or peer, now, "cut off %s: %s", who, reason, event=event)
        elif offences >= limits.OFFENCES_MAX:
            text = "ignoring %s for %g s: %d messages that are none"
            event = {"event": "peer_ignored", **event}
            self.log.say(logging.ERROR, session.user or peer, now, text, who, limits.IGNORED_S, offences, event=event)
        self._refuse(peer, session, reason, now, cut_off=True)
        self._forget(peer, for_good=True)

    def _leave(self, peer: bytes, known: Peer) -> None:
        """Forget a peer that may come back, and wait for nothing of it."""
        self._forget(peer, for_good=False)
        if known.source is not None:
            self._lose(known.source.engine, known.hello.rank.dp, known.hello.rank.pp)

    def _forget(self, peer: bytes, *, for_good: bool) -> None:
        known = self.roster.leave(peer, for_good=for_good)
        if known is not None and for_good and known.hello.role != "client":
            event = {"event": "session_closed", **about(known.hello)}
            text, who = "engine %s: its %s left", known.session.user or peer
            now = time.monotonic()
            self.log.say(logging.INFO, who, now, text, known.hello.engine, known.hello.role, event=event)
        if known is not None and known.hello.role == "client":
            self._waiters.gone(peer)
            self.taps.gone(peer)

    # Frames, requests and results.

    def _frame(self, peer: bytes, known: Peer, frame: Frame, parts: Parts, now: float) -> None:
        if self._draining:
            return  # not taken, so not acknowledged: its worker keeps it for the next hub
        source, header, nbytes = known.source, frame.header, cost(parts)
        assert source is not None
        if not source.intake.has(header.seq):
            self.index.admit(header, source.engine)
        if not source.intake.take(header.seq, nbytes, decoded_bytes(parts[0])):
            self.counts.duplicates += 1
            self._send(peer, known.session.send(source.intake.refund(), now))
            return
        hold = _Hold(source, header.seq, 1)
        try:
            self._count(source, header, now)
            self._hand_out(frame, source.engine, hold)
            self.taps.frame(parts, nbytes)
        finally:  # also when the hub fails at it: what the frame holds comes back
            self._release(hold)

    def _hand_out(self, frame: Frame, engine: KnownEngine, hold: _Hold) -> None:
        """Give a frame, and the ends of requests in it, to the consumers that want them; each holds it until it is done with it."""
        header, was_full = frame.header, engine.full

        def taken() -> None:
            self._post(lambda: self._release(hold))

        arrival = self.index.take(frame, engine)
        for lane in self.lanes:
            hold.left += lane.take(arrival, taken)  # `taken` is posted, not called
        if header.finished:
            self._note_late(header, engine)
            for request in self.index.finish(header, engine):
                hold.left += self._over(request, taken)
        if engine.full and not was_full:
            self._tell_full(engine)
        for over in header.acted:
            self._tell(answered_by(engine.name, over.id, header.rank.pp, over.acted), self.lanes)

    def _note_late(self, header: FrameHeader, engine: KnownEngine) -> None:
        """Count and say what was lost of requests that were ended as their engine was gone, as their own ends tell that come after."""
        untold = {}
        for finished in header.finished:
            if self.index.was_lost(finished, engine):
                late = self.index.late(finished, engine, header.rank.pp)
                if late is not None and late.given and late.untold:
                    untold[finished.id] = late.untold
                    for lost in late.untold:
                        self.index.dropped[lost.reason] += lost.rows
        self._losses.tell_late(untold, engine.name)

    def _tell_full(self, engine: KnownEngine) -> None:
        """Say once of an engine that there is no room for its requests."""
        for lane in self.lanes:
            lane.note_full(engine.name)
        state = self.budget.state
        got = f"{len(engine.open):,} open requests, and {state.held(engine.owner):,} bytes for them and their specs"
        what = f"engine {engine.name}: no room for more of its requests, whose rows are lost"
        expected = f"at most {state.held(engine.owner) + state.room(engine.owner):,} bytes"
        do = "run fewer at once, or start the hub with more --memory-bytes-max"
        event = {"event": "engine_full", "engine": engine.name}
        logger.error("%s", explain(what, got=got, expected=expected, do=do), extra=event)

    def _count(self, source: WorkerState, header: FrameHeader, now: float) -> None:
        rows = sum(len(block.sites) * block.rows for block in header.blocks)
        source.count(header, rows, now)
        self.counts.frame_at = now
        self.counts.frames += 1
        self.counts.rows += rows
        self.counts.bytes += header.payload_bytes
        if header.step > source.engine.step_last.get(header.rank.dp, -1):  # every stage tells of the same step
            source.engine.step_last[header.rank.dp] = header.step
            self.counts.tokens += header.step_tokens

    def _release(self, hold: _Hold) -> None:
        """One of those who held a frame needs it no more."""
        hold.left -= 1
        if not hold.left:
            self._released.setdefault(hold.source, []).append(hold.seq)

    def _over(self, request: Request, taken: Callable[[], None] | None = None) -> int:
        """Tell consumers that a request is over; return how many of them will call `taken`."""
        waited_for = 0
        for lane, share in zip(self.lanes, request.shares, strict=True):
            if share is None:
                self._tell(request.acted(), [lane])
            else:
                waited_for += lane.finish(request, taken)
        request.let_go()
        for name in request.strangers:
            self._log_stranger(request.id, name)
        self._answer_waiters(request)
        return waited_for

    @staticmethod
    def _tell(told: Iterable[Answered], lanes: Sequence[Lane]) -> None:
        for answered in told:
            for lane in lanes:
                lane.tell(answered)

    def _log_stranger(self, request: str, name: str) -> None:
        """Log, once for each name, that a request named a consumer that is not here."""
        if name not in self._strangers and len(self._strangers) < limits.REFUSALS_MAX:
            self._strangers.add(name)
            event = {"event": "consumer_unknown", "request": request, "consumer": name}
            logger.warning("request %s: %s; logged once a name", request, self.index.refusal(name), extra=event)

    def _lose(
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, anew: bool = False
    ) -> None:
        self.taps.lose(engine, replica, stage)
        self._departures.add(engine.name, self._part(engine, replica, stage, anew))

    def _part(self, engine: KnownEngine, replica: int | None, stage: int | None, anew: bool) -> Iterator[None]:
        """End what a part of an engine has not ended, in slices, and tell the consumers."""
        left = len(engine.open)
        for lost in self.index.losing(engine, replica, stage, anew=anew):
            self._end_open(lost)
            left -= limits.SLICE_REQUESTS
            if left > 0:
                yield
        for lane in self.lanes:
            lane.lose(engine.name, replica, stage, anew=anew)

    def _end_open(self, lost: Iterable[Request]) -> None:
        for request in lost:
            if self._draining:
                for lane in self.lanes:
                    if lane.durable:
                        request.results[lane.index] = request.results[lane.index] or _LEFT
            try:
                self._over(request)
            except Exception:
                logger.exception("the hub failed at the end of a request and goes on", extra={"event": "hub_failed"})

    def _miss(self, now: float) -> None:
        """End the requests of engines that an earlier hub had and that do not come."""
        here = {
            (peer.hello.engine, peer.hello.rank.dp) for peer in self.roster.peers.values() if peer.source is not None
        }
        for lane in self.lanes:
            for engine, replica in lane.missed(here, now):
                known = self.roster.engines.get(engine)
                if engine in self._departures or (known is not None and known.open):
                    continue  # the hub's own requests of it end first, and then it is told
                lane.lose(engine, replica if self.roster.connected(engine) else None)

    def _settle(self, named: Request | RequestName, consumer: int, result: CaptureResult) -> None:
        """Take a consumer's result of a request; of one result of a request, the first counts."""
        request = self.index.over(named)
        before = None if request is None else request.results[consumer]
        if before not in (None, _LEFT):
            return
        self.lanes[consumer].results[result.status] += 1
        if request is not None and before is None:
            request.settle(consumer, result)
            self._answer_waiters(request)

    def _await(self, peer: bytes, known: Peer, said: Await) -> Iterator[None]:
        for number, request in enumerate(said.requests, 1):
            if not number % limits.SLICE_REQUESTS:
                yield
                if self.roster.peers.get(peer) is not known:
                    return  # it left meanwhile, or said Hello again
            results, final = self._results(request, said.engine)
            if final or not said.wait:
                self._say(peer, results)
            else:
                self._waiters.add((said.engine, request), peer, known.owner)

    def _answer_waiters(self, request: Request) -> None:
        newest = self.index.newest(request.key)
        is_gone = newest is None or newest.engine != request.engine  # forgotten, or of an earlier start of its engine
        for engine in {"", request.key[0], request.engine}:
            if not self._waiters.waits((engine, request.id)):
                continue
            if is_gone and (engine == request.engine or not self.index.named(request.id, engine)):
                found, final = self.index.results_of(request)
                results = Results(request.id, found, engine, (request.key[0],))
            else:
                results, final = self._results(request.id, engine)
            for peer in self._waiters.pop((engine, request.id)) if final else ():
                self._say(peer, results)

    def _results(self, request: str, engine: str) -> tuple[Results, bool]:
        """Return the results of a request, and whether they are final."""
        found = self.index.named(request, engine)
        names = tuple(each.key[0] for each in found[: limits.ENGINES_TOLD_MAX])
        if len(found) == 1:
            results, final = self.index.results_of(found[0])
            return Results(request, results, engine, names), final
        return Results(request, {}, engine, names), bool(found)

    # Actions.

    def _client_act(self, peer: bytes, known: Peer, act: Act, nbytes: int) -> None:
        def answer(outcome: Outcome) -> None:
            if self.roster.peers.get(peer) is known:  # it may have said Hello again since, as someone else
                self._say(peer, ActionOutcome(outcome))

        self._act(act.id, act.action, answer, f"client {known.session.user}".rstrip(), known.owner, nbytes)

    def _act(
        self,
        own_id: str,
        action: Action,
        answer: Callable[[Outcome], None],
        asked_by: str,
        owner: str,
        nbytes: int = 0,
    ) -> None:
        """Pass an action to the engine that runs its request; reject it where that may be several."""
        schedulers = {hello.boot: (peer, hello) for peer, hello in self.roster.schedulers()}
        known = self.index.named(action.request, action.engine)
        boots, reason = asked_of(action, known, [hello for _, hello in schedulers.values()])
        asked = {boot: schedulers[boot] for boot in boots}
        engines = {hello.engine for _, hello in asked.values()}

        def answered(outcome: Outcome) -> None:
            runs = len(engines) == 1 and (known or isinstance(outcome, ActionApplied))
            told = Answered.of(action, outcome, engine=next(iter(engines)) if runs else "", asked_by=asked_by)
            self._tell([told], self.lanes)
            answer(outcome)

        if reason is not None:
            self.relay.refuse(own_id, reason, answered)
            return
        bare = msgspec.structs.replace(action, engine="")
        act = self.relay.ask(own_id, bare, asked, time.monotonic(), answered, owner=owner, nbytes=nbytes)
        if act is not None:
            for peer, _ in asked.values():
                self._say(peer, act)

    # Sending.

    def _say(self, peer: bytes, said: Ack | Act | ActionOutcome | Results | Status | Watched) -> None:
        known = self.roster.peers.get(peer)
        if known is not None and known.session.state is State.OPEN:
            self._send(peer, known.session.send(said, time.monotonic()))


def _who(peer: bytes, session: HubSession) -> str:
    """Return how a log names a peer."""
    role = session.hello.role if session.hello is not None else "peer"
    return f"{role} with key {session.user}" if session.user else f"{role} {peer.hex()}"
