"""The exchange: what a hub does with each message of a peer, and with each answer of a consumer.

It does no I/O, reads no clock and calls nothing outside of itself. Each method takes the time, in seconds of any
monotonic clock, and returns effects (`capflow.hub.effects`). A peer that breaks the protocol is refused and forgotten;
nothing that a peer sends ends the hub.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from capflow import limits
from capflow.capture.frame import Frame
from capflow.capture.frame_cost import is_large
from capflow.capture.result import CaptureResult
from capflow.errors import RemoteProtocolError, RoomError, explain
from capflow.hub.counts import Counts
from capflow.hub.effects import Effect, Effects, FindMissed, Hold, Log, Lose, Pause, Send, SendStatus
from capflow.hub.exchange.actions import Actions
from capflow.hub.exchange.answers import Answers
from capflow.hub.exchange.frames import Frames
from capflow.hub.exchange.handover import Handover
from capflow.hub.exchange.sessions import Sessions, name_of_peer
from capflow.hub.exchange.shared_steering import SharedStates
from capflow.hub.exchange.watchers import Watchers
from capflow.hub.peers.budget import Budget
from capflow.hub.peers.departures import Departures
from capflow.hub.peers.guard import Guard
from capflow.hub.peers.roster import Peer, Roster
from capflow.hub.requests.index import RequestIndex, Wish
from capflow.hub.requests.request import KnownEngine, Request, RequestName
from capflow.plugins.configure import ConfiguredController
from capflow.protocol.credit import Pool
from capflow.protocol.message import (
    Act,
    ActBatch,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    FollowSteering,
    HeldSteering,
    Hello,
    Message,
    SharedSteering,
    Status,
    WatchRequest,
    WorkerCounts,
    encode,
)
from capflow.protocol.session import FRAME_PARTS, HubSession, Parts, cost, frames_in
from capflow.steering.action import Action

FAILED_AT_MESSAGE = "the hub failed at a message of this peer; see its log"


class Exchange:
    """The state of a hub.

    wishes: what each consumer wants.
    controllers: those that each engine runs.
    guard: who may do what.
    budget: the memory for what peers send.
    window_bytes: the most credit that a worker gets.
    minds_actions: whether any consumer handles the outcomes of actions.
    hub_id: an id that no other hub has.
    """

    def __init__(
        self,
        wishes: Sequence[Wish],
        controllers: Sequence[ConfiguredController],
        *,
        guard: Guard,
        budget: Budget,
        window_bytes: int,
        minds_actions: bool,
        hub_id: str,
    ) -> None:
        self.counts = Counts()
        self.budget = budget
        self.index = RequestIndex(wishes, budget.state, results_bytes_max=budget.results_bytes_max)
        self.roster = Roster(
            Pool(window_bytes, budget.frames.total, budget.frames),
            budget.state,
            controllers,
            fits=self.index.check,
            on_engine=self._greet,
            on_lost=self._lose,
        )
        self._effects = effects = Effects(self.roster)
        self.departures = Departures(effects)
        self.watchers = Watchers(effects)
        self.shared = SharedStates(budget.state, effects)
        self.answers = Answers(self.index, self.roster, budget.state, effects)
        self.actions = Actions(self.index, self.roster, self.watchers, budget.state, effects, hub_id)
        self.handover = Handover(self.index, self.roster, effects)
        self.frames: Frames = Frames(self.index, self.answers, self.watchers, self.departures, self.counts, effects)
        self.sessions = Sessions(
            self.roster,
            self.frames,
            self.actions,
            self.answers,
            self.watchers,
            self.shared,
            self.departures,
            self.handover,
            guard,
            self.counts,
            effects,
            captures=[wish.spec for wish in wishes if wish.spec is not None],
            readers=self.index.readers,
            minds_actions=minds_actions,
            hub_id=hub_id,
        )
        self._guard = guard

    def _greet(self, engine: KnownEngine) -> None:
        self.frames.greet(engine)

    def _lose(
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, restarted: bool = False
    ) -> None:
        self.frames.lose(engine, replica, stage, restarted=restarted)

    # Messages of peers.

    def receive(self, peer: bytes, parts: Parts, now: float, user: str = "") -> Iterator[Effect]:
        """Take a message of a connection; yield the effects, and a `Pause` where other peers may have their turn.

        An invalid message ends the session of its own peer only.

        user: the public key of the peer; "" if the hub has no keys.
        """
        self._effects.now = now
        return self._sliced(self._receive(peer, parts, user))

    def take(self, peer: bytes, frames: Sequence[Frame], now: float) -> Iterator[Effect]:
        """Take frames of a worker in this process, which has measured and checked them; yield as `receive` does."""
        self._effects.now = now
        return self._sliced(self._take_checked(peer, frames))

    def _sliced(self, slices: Iterator[None]) -> Iterator[Effect]:
        """Yield the effects of each slice, and a `Pause` between two."""
        for _ in slices:
            yield from self._effects.take()
            yield Pause()
        yield from self._effects.take()

    def _receive(self, peer: bytes, parts: Parts, user: str) -> Iterator[None]:
        now = self._effects.now
        if self._guard.offences.ignored(user or peer, now):
            self.counts.ignored += 1
            return
        member = self.roster.peers.get(peer)
        if member is not None and member.session.user != user:  # another key uses the id of the connection
            self.sessions.forget(peer, for_good=False)
            member = None
        frames = frames_in(parts)
        if member is None and frames:
            # A frame of a session that is over. The Bye makes its worker say Hello again.
            self._effects.add(Send(peer, [encode(Bye())]))
            return
        session = member.session if member is not None else HubSession(now=now, user=user)
        try:
            if member is not None and frames:
                yield from self._take_frames(peer, member, parts)
                return
            message = session.receive(parts, now)
            if isinstance(message, Hello):
                yield from self.sessions.hello(peer, session, message)
            elif member is not None and self.sessions.may(peer, member, message):
                if isinstance(message, Await):
                    yield from self.answers.ask(peer, member, message)
                else:
                    self._handle(peer, member, message, parts)
        except (RemoteProtocolError, RoomError) as e:
            self.sessions.turn_down(peer, member, session, e)
        except Exception as e:  # noqa: BLE001  it is logged, with its traceback
            self._fail(peer, session, e)

    def _take_frames(self, peer: bytes, member: Peer, parts: Parts) -> Iterator[None]:
        """Take the frames of a message in order, a few in a slice; a large one is decoded in a slice of its own."""
        now, session, taken = self._effects.now, member.session, 0
        for at in range(0, len(parts), FRAME_PARTS):
            pair = parts[at : at + FRAME_PARTS]
            frame = Frame.read(*pair)
            if is_large(pair[0]) or taken == limits.SLICE_FRAMES:
                yield
                taken = 0
            if not taken:
                yield from self.departures.done(member.hello.engine)
                if self.roster.peers.get(peer) is not member:
                    return  # it left meanwhile, or said Hello again
            message = session.receive(pair, now, frame)
            if not taken and not self.sessions.may(peer, member, message):
                return
            self._handle(peer, member, message, pair)
            taken += 1

    def _take_checked(self, peer: bytes, frames: Sequence[Frame]) -> Iterator[None]:
        """Take frames that were checked. All are one slice: a worker in this process sends only few at once."""
        member = self.roster.peers.get(peer)
        if member is None:
            self._effects.add(Send(peer, [encode(Bye())]))
            return
        yield from self.departures.done(member.hello.engine)
        if self.roster.peers.get(peer) is not member:
            return
        try:
            for frame in frames:
                self.frames.take(peer, member, frame)
        except (RemoteProtocolError, RoomError) as e:
            self.sessions.turn_down(peer, member, member.session, e)
        except Exception as e:  # noqa: BLE001  it is logged, with its traceback
            self._fail(peer, member.session, e)

    def _handle(self, peer: bytes, member: Peer, message: Frame | Message, parts: Parts) -> None:
        match message:
            case Frame():
                self.frames.take(peer, member, message, parts)
            case Act():
                self.actions.ask_for_client(peer, member, message, cost(parts))
            case ActBatch():
                for act in message.acts:
                    self.actions.ask_for_client(peer, member, act, cost(parts) // len(message.acts))
            case ActionOutcome():
                self.actions.outcome(member.hello.boot, message.outcome)
            case Status():
                self._effects.add(SendStatus(peer))
            case WatchRequest():
                engines = list(self.roster.engines.values())
                name = name_of_peer(peer, member.session)
                self.watchers.take(peer, name, member.owner, message, engines)
            case FollowSteering() | SharedSteering() | HeldSteering():
                self.shared.receive(peer, member, message)
            case Beat(counts=WorkerCounts() as counts) if member.source is not None:
                source = member.source
                source.reported, source.troubles = counts, message.troubles
                source.controllers, source.determinism = message.controllers, message.determinism
            case Beat() if member.hello.role == "scheduler":
                member.troubles[:] = message.troubles
                self.handover.note(peer, message)
            case Bye():
                self.sessions.forget(peer, for_good=True)
                self.actions.gone(member.hello.boot)

    def fail(self, peer: bytes, error: BaseException, now: float) -> list[Effect]:
        """Cut off a peer, because the hub failed at its message."""
        self._effects.now = now
        member = self.roster.peers.get(peer)
        self._fail(peer, HubSession(now=now) if member is None else member.session, error)
        return self._effects.take()

    def _fail(self, peer: bytes, session: HubSession, error: BaseException) -> None:
        text = "the hub failed at a message and gives up its sender"
        who = session.user or peer
        self._effects.add(Log(logging.ERROR, text, (), {"event": "hub_failed"}, who, error))
        self.sessions.cut_off(peer, session, FAILED_AT_MESSAGE)

    def share_bytes(self, peer: bytes) -> tuple[int, int]:
        """Return how many bytes of a peer's messages may wait: of any kind, and how many more by a worker's credit."""
        member = self.roster.peers.get(peer)
        if member is None:
            return limits.HELLO_BYTES_MAX, 0
        # The credit is below 0 while the hub holds a frame that was larger than all credit.
        paid_bytes = max(0, member.source.intake.credit_bytes) if member.source is not None else 0
        return limits.READ_AHEAD_EACH_BYTES_MAX, paid_bytes

    def overrun(self, peer: bytes, now: float) -> list[Effect]:
        """Cut off a peer that sent more than `share_bytes`; it may say Hello again."""
        self._effects.now = now
        member = self.roster.peers.get(peer)
        if member is None:
            self.counts.ignored += 1  # it may not know yet that its session is over
        else:
            expected = "a worker's frames within its credit, and little else at once"
            reason = explain("messages", got="more than are handled", expected=expected)
            self.sessions.cut_off(peer, member.session, reason)
        return self._effects.take()

    def give_up(self, peer: bytes, now: float) -> list[Effect]:
        """Forget a peer that does not read its messages; it may say Hello again."""
        self._effects.now = now
        self.sessions.give_up(peer)
        return self._effects.take()

    def send_status(self, peer: bytes, status: dict[str, Any], now: float) -> list[Effect]:
        """Answer a client that asked for the hub's counters."""
        self._effects.now = now
        self._effects.say(peer, Status(status))
        return self._effects.take()

    # Answers of consumers.

    def settle(self, request: Request | RequestName, lane: int, result: CaptureResult, now: float) -> list[Effect]:
        """Take a consumer's result of a request.

        lane: the number of its lane.
        """
        self._effects.now = now
        self.answers.settle(request, lane, result)
        return self._effects.take()

    def act(self, lane: int, consumer: str, action: Action, now: float) -> list[Effect]:
        """Take an action of a consumer.

        lane: the number of its lane.
        """
        self._effects.now = now
        self.actions.ask_for_consumer(lane, consumer, action)
        return self._effects.take()

    def miss(self, lane: int, engine: str, replica: int, now: float) -> list[Effect]:
        """Note that a replica is missing of which a lane has open requests that an earlier hub left."""
        self._effects.now = now
        member = self.roster.engines.get(engine)
        if engine in self.departures or (member is not None and member.open):
            return []  # the requests of this hub end first, then the lane gets its own `Lose`
        return [Lose(engine, replica if self.roster.connected(engine) else None, lane=lane)]

    def release(self, holds: Iterable[Hold]) -> None:
        """Note that one lane fewer needs each of some frames. The next `acknowledge` sends the credit to its worker."""
        self.frames.release(holds)

    # The hub's turns.

    def acknowledge(self, now: float) -> list[Effect]:
        """Acknowledge to each worker, once, the frames that were released since the last call."""
        self._effects.now = now
        self.frames.acknowledge()
        return self._effects.take()

    def proceed(self, engine: str, now: float) -> list[Effect]:
        """Do the next slice of what is left to do for an engine, given by its name."""
        self._effects.now = now
        self.departures.proceed(engine)
        return self._effects.take()

    def tick(self, now: float, waiting: Container[bytes] = ()) -> list[Effect]:
        """Send beats; end the sessions of silent peers, and of peers that lost their rights.

        waiting: peers whose messages are not handled yet.
        """
        self._effects.now = now
        self.sessions.check_rights()
        self.actions.expire()
        self.shared.tick()
        workers = (member.hello for member in self.roster.peers.values() if member.source is not None)
        self._effects.add(FindMissed({(hello.engine, hello.rank.dp) for hello in workers}))
        self.roster.forget_missed(now)
        self.sessions.tick(waiting)
        self.handover.tick()
        return self._effects.take()

    def hand_over(self, now: float) -> list[Effect]:
        """Have engines send new requests to their other hubs."""
        self._effects.now = now
        self.handover.begin()
        return self._effects.take()

    def drain(self, now: float) -> list[Effect]:
        """Take no more frames, and end the open requests."""
        self._effects.now = now
        self.departures.finish()
        self.frames.drain(list(self.roster.engines.values()))
        return self._effects.take()

    def goodbye(self) -> list[Effect]:
        """Say Bye to every peer."""
        return [Send(peer, [encode(Bye())]) for peer in self.roster.peers]
