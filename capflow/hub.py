"""The hub: binds an address, takes frames from workers, and gives each consumer what it wants of them.

One thread owns the socket, the sessions, the ledger and the relay, and never waits for a consumer; each
consumer has a lane. What other threads want of the hub's thread they `post`. A frame holds its worker's credit until every
consumer with policy `block` has handled it, and is acknowledged then; what `drop` consumers hold is bounded by
their own queues. A peer that breaks the protocol is refused and forgotten; nothing it sends ends the hub.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import capflow
from capflow import limits
from capflow.action import Action, Applied, Outcome, Rejected
from capflow.address import check_address, held, is_local
from capflow.counts import Counts, Snapshot
from capflow.errors import RemoteProtocolError, UsageError, explain
from capflow.fanout import Lane
from capflow.frame import Frame, FrameHeader
from capflow.ledger import Engine, Ledger, Request, Wish
from capflow.message import (
    Ack,
    Act,
    ActionOutcome,
    Await,
    Bye,
    Hello,
    Message,
    Results,
    Status,
    Welcome,
    encode,
)
from capflow.plugins import ConfiguredConsumer, ConfiguredController
from capflow.queue import Overload
from capflow.relay import Relay
from capflow.result import CaptureResult
from capflow.roster import Peer, Roster, Source
from capflow.session import HubSession, Parts, State, UnexpectedMessageError, cost
from capflow.transport import Router
from capflow.waiters import Waiters

logger = logging.getLogger("capflow.hub")

_TICK_S = limits.HEARTBEAT_S / 2
_RECEIVE_BATCH = 64  # messages taken before posted work is looked at again

ACTIONS_OFF = explain(
    "actions are off",
    got="a hub off loopback",
    expected="one that only this machine can reach, for anyone could send them",
)


@dataclass
class _Hold:
    """A frame that consumers have not handled; it goes back to its worker's credit when `left` is 0."""

    source: Source
    seq: int
    left: int


class Hub:
    """A hub with its consumers, from `start` to `stop`. `address` is where it listens, once started.

    consumers and controllers come from `capflow.plugins.configure`. insecure allows TCP off loopback.
    on_refused is called, on the hub's thread, with why an engine was refused.
    """

    def __init__(
        self,
        address: str,
        consumers: Sequence[ConfiguredConsumer],
        controllers: Sequence[ConfiguredController] = (),
        *,
        insecure: bool = False,
        message_bytes_max: int = limits.PAYLOAD_BYTES_MAX,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        self.address = check_address(address, insecure=insecure)
        self.consumers = tuple(consumers)
        self.controllers = tuple(controllers)
        self.message_bytes_max = message_bytes_max
        self.on_refused = on_refused
        self.counts = Counts()
        self.lanes = tuple(
            Lane(index, consumer, on_result=self._on_result, on_action=self._on_action)
            for index, consumer in enumerate(consumers)
        )
        wishes = [Wish(c.name, c.consumer.spec(), c.consumer.reads_requests) for c in consumers]
        self._id = uuid.uuid4().hex
        self._ledger = Ledger(wishes)
        self._captures = tuple(wish.spec for wish in wishes if wish.spec is not None)
        window_bytes = min(
            (c.queue_bytes_max for c in consumers if c.policy is Overload.BLOCK), default=limits.CREDIT_BYTES_DEFAULT
        )
        # The thread's alone, from `start` to `stop`; `status` and `snapshot` read copies of them.
        self._roster = Roster(
            min(window_bytes, limits.CREDIT_BYTES_DEFAULT),
            self.controllers,
            fits=self._ledger.check,
            on_engine=self._greet,
            on_lost=self._lose,
        )
        self._relay = Relay()
        self._waiters = Waiters()
        self._told: set[tuple[str, str]] = set()  # refusals that were logged, by engine and reason
        self._tick_at = 0.0
        self._draining = False  # set by `stop`: frames are left to their workers, for the next hub
        self._ended = False  # set by `stop`: the thread says Bye and ends
        self._posted: deque[Callable[[], None]] = deque()  # for the thread to call; any thread appends
        self._thread = threading.Thread(target=self._run, name="capflow-hub", daemon=True)
        self._open = contextlib.ExitStack()  # the address's lock and the router, from `start` to `stop`
        self._router: Router | None = None  # from `start`
        self._started = 0.0  # when

    # From start to stop; called by the owner's thread.

    def start(self) -> None:
        """Bind the address, open the consumers and begin.

        Raises CapflowError when the address is in use or a consumer cannot be opened.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(held(self.address))
            router = Router(self.address, message_bytes_max=self.message_bytes_max)
            undo.callback(router.close)
            for lane in self.lanes:
                lane.open()
                undo.callback(lane.join)
                undo.callback(lane.close)
            self._open = undo.pop_all()
        self._router = router
        self.address = router.address
        self._started = time.monotonic()
        self._thread.start()

    def stop(self, drain_s: float = limits.DRAIN_S_MAX) -> bool:
        """Let the consumers handle what they have, for at most `drain_s` seconds, close them and end.

        Open requests are ended with status `error`. Frames that come meanwhile stay with their workers.
        Return whether everything was handled and every consumer closed.
        """
        deadline = time.monotonic() + drain_s
        drained = threading.Event()

        def drain() -> None:
            self._draining = True
            for engine in list(self._roster.engines.values()):
                self._lose(engine, None)
            for lane in self.lanes:
                lane.close()
            drained.set()

        self.post(drain)
        drained.wait(limits.SILENCE_S_MAX)
        in_time = [lane.join(deadline - time.monotonic()) for lane in self.lanes]
        for lane in self.lanes:
            lane.discard()
        closed = [lane.join() for lane in self.lanes]
        for lane, is_closed in zip(self.lanes, closed, strict=True):
            if not is_closed:
                logger.error("consumer %s does not stop; it is left behind", lane.name)

        def end() -> None:
            self._ended = True

        self.post(end)
        self._thread.join(limits.SILENCE_S_MAX)
        self._open.close()
        return all(in_time) and all(closed)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # For any thread.

    def post(self, call: Callable[[], None]) -> None:
        """Have the hub's thread call something soon."""
        self._posted.append(call)
        if self._router is not None:
            self._router.waker.wake()

    def snapshot(self) -> Snapshot:
        """Return how things stand."""
        dropped = Counter(self._ledger.dropped)
        for lane in self.lanes:
            dropped.update(dict(lane.dropped))
        return Snapshot(
            requests_done=self._ledger.requests_done,
            requests_open=self._ledger.requests_open,
            requests_failed=self._ledger.requests_failed,
            tokens=self.counts.tokens,
            frames=self.counts.frames,
            rows=self.counts.rows,
            bytes=self.counts.bytes,
            queued_bytes=sum(lane.queue.nbytes for lane in self.lanes),
            dropped_rows=dict(dropped),
            sessions=len(self._roster.peers),
            engines=self._roster.engines_connected(),
            refused=sum(self.counts.refused.values()),
            errors=sum(lane.errors for lane in self.lanes),
        )

    def status(self) -> dict[str, Any]:
        """Return every counter of the hub, its sessions and its consumers, as plain JSON values."""
        counts = self.counts
        return {
            "version": capflow.__version__,
            "address": self.address,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "frames": counts.frames,
            "rows": counts.rows,
            "bytes": counts.bytes,
            "tokens": counts.tokens,
            "duplicate_frames": counts.duplicates,
            "protocol_errors": counts.protocol_errors,
            "sessions_lost": counts.sessions_lost,
            "refused": dict(counts.refused),
            "requests": {
                "open": self._ledger.requests_open,
                "done": self._ledger.requests_done,
                "failed": self._ledger.requests_failed,
            },
            "dropped_rows": dict(self._ledger.dropped),
            "spilled": 0,
            "actions": {"applied": self._relay.applied, "rejected": self._relay.rejected, "waiting": len(self._relay)},
            "sessions": [peer.status() for peer in list(self._roster.peers.values())],
            "consumers": {lane.name: lane.status() for lane in self.lanes},
            "controllers": [controller.name for controller in self.controllers],
        }

    def _on_result(self, request: Request, consumer: int, result: CaptureResult) -> None:
        """A consumer is done with a request; called on its thread."""
        self.post(lambda: self._settle(request, consumer, result))

    def _on_action(self, consumer: str, action: Action) -> None:
        """A consumer wants something done; called on any thread."""

        def answer(outcome: Outcome) -> None:
            kind = "applied" if isinstance(outcome, Applied) else "rejected"
            lane.counts[f"actions_{kind}"] += 1
            if isinstance(outcome, Rejected):
                logger.warning("consumer %s: %s", consumer, outcome.reason)

        lane = next(lane for lane in self.lanes if lane.name == consumer)
        self.post(lambda: self._act("", action, answer))

    # The thread.

    def _run(self) -> None:
        router = self._router
        assert router is not None
        while not self._ended:
            router.poll(_TICK_S)
            router.waker.clear()
            while self._posted:
                self._safely(self._posted.popleft())
            for _ in range(_RECEIVE_BATCH):
                received = router.receive()
                if received is None:
                    break
                self._receive(*received)
            now = time.monotonic()
            if now >= self._tick_at:
                self._tick_at = now + _TICK_S
                self._tick(now)
        for peer in list(self._roster.peers):
            self._send(peer, [encode(Bye())])

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("the hub failed at something and goes on")

    def _receive(self, peer: bytes, parts: Parts) -> None:
        """Take one message; whatever is wrong with it is the peer's loss."""
        now = time.monotonic()
        known = self._roster.peers.get(peer)
        if known is None and len(parts) == limits.MESSAGE_PARTS_MAX:
            self._send(peer, [encode(Bye())])  # a frame of a connection that was given up: say Hello again
            return
        session = known.session if known is not None else HubSession(now=now)
        try:
            said = session.receive(parts, now)
            if isinstance(said, Hello):
                self._hello(peer, session, said, now)
            elif known is not None:
                self._handle(peer, known, said, parts, now)
        except UnexpectedMessageError as e:
            if known is None:  # of a connection that was given up: say Hello again
                self._send(peer, [encode(Bye())])
            else:
                self._cut_off(peer, session, str(e), now)
        except RemoteProtocolError as e:
            self._cut_off(peer, session, str(e), now)
        except Exception:
            logger.exception("the hub failed at a message and gives its sender up")
            self._cut_off(peer, session, "the hub failed at a message of this peer; see its log", now)

    def _handle(self, peer: bytes, known: Peer, said: Frame | Message, parts: Parts, now: float) -> None:
        match said:
            case Frame():
                self._frame(peer, known, said, cost(parts), now)
            case Act():
                self._client_act(peer, said)
            case ActionOutcome():
                self._relay.outcome(peer, said.outcome)
            case Await():
                self._await(peer, said)
            case Status():
                self._say(peer, Status(self.status()))
            case Bye():
                self._forget(peer, for_good=True)

    # Sessions.

    def _hello(self, peer: bytes, session: HubSession, hello: Hello, now: float) -> None:
        if self._draining:
            return
        self._forget(peer, for_good=False)
        try:
            known = self._roster.join(peer, session, hello)
        except UsageError as e:
            self._refuse(peer, session, str(e), now)
            return
        welcome = Welcome(self._id, self._roster.window_bytes)
        if hello.role == "scheduler":
            controllers = tuple(controller.spec() for controller in self.controllers)
            welcome = Welcome(self._id, 0, captures=self._captures, controllers=controllers)
        elif hello.role == "client":
            welcome = Welcome(self._id, 0, captures=self._captures)
        for parts in session.welcome(welcome, now, known.source.intake if known.source is not None else None):
            self._send(peer, parts)

    def _greet(self, engine: Engine) -> None:
        for lane in self.lanes:
            lane.greet(engine.name, engine.model)

    def _refuse(self, peer: bytes, session: HubSession, reason: str, now: float) -> None:
        self.counts.refused[reason] += 1
        engine = session.hello.engine if session.hello is not None else ""
        if (engine, reason) not in self._told:
            if len(self._told) < limits.SESSIONS_MAX:
                self._told.add((engine, reason))
            logger.error("refused %s: %s", session.hello.role if session.hello is not None else "a peer", reason)
            if session.hello is not None and self.on_refused is not None:
                self.on_refused(reason)
        self._send(peer, session.refuse(reason, now))

    def _cut_off(self, peer: bytes, session: HubSession, reason: str, now: float) -> None:
        """Refuse a peer that broke the protocol, and forget it."""
        self.counts.protocol_errors += 1
        self._refuse(peer, session, reason, now)
        self._forget(peer, for_good=True)

    def _forget(self, peer: bytes, *, for_good: bool) -> None:
        known = self._roster.leave(peer, for_good=for_good)
        if known is not None and known.hello.role == "scheduler":
            self._relay.gone(peer)
        elif known is not None and known.hello.role == "client":
            self._waiters.gone(peer)

    def _tick(self, now: float) -> None:
        self._safely(lambda: self._relay.expire(now))
        for peer, known in list(self._roster.peers.items()):
            if known.session.silent(now):
                if known.hello.role != "client":
                    self.counts.sessions_lost += 1
                    logger.warning("engine %s: its %s fell silent", known.hello.engine, known.hello.role)
                self._forget(peer, for_good=False)
                if known.source is not None:  # it may come back, but its requests are not waited for
                    self._lose(known.source.engine, known.hello.rank.dp)
            elif (beat := known.session.tick(now)) is not None:
                self._send(peer, beat)

    # Frames, requests and results.

    def _frame(self, peer: bytes, known: Peer, frame: Frame, nbytes: int, now: float) -> None:
        if self._draining:
            return  # not taken, so not acknowledged: its worker keeps it for the next hub
        source, header = known.source, frame.header
        assert source is not None
        if not source.intake.take(header.seq, nbytes):
            self.counts.duplicates += 1
            self._send(peer, known.session.send(source.intake.refund(nbytes), now))
            return
        self._count(source, header)
        hold = _Hold(source, header.seq, 1)

        def taken() -> None:
            self.post(lambda: self._release(hold))

        for delivery in self._ledger.take(frame, source.engine):
            if self.lanes[delivery.consumer].deliver(delivery, taken):
                hold.left += 1
        self._release(hold)
        if header.finished:
            for request in self._ledger.finish(header, source.engine):
                self._over(request)

    def _count(self, source: Source, header: FrameHeader) -> None:
        rows = sum(len(block.sites) * block.rows for block in header.blocks)
        source.count(header, rows)
        self.counts.frames += 1
        self.counts.rows += rows
        self.counts.bytes += header.payload_bytes
        if header.step > source.engine.step_last.get(header.rank.dp, -1):  # every stage tells of the same step
            source.engine.step_last[header.rank.dp] = header.step
            self.counts.tokens += header.step_tokens

    def _release(self, hold: _Hold) -> None:
        """One of those who held a frame needs it no more."""
        hold.left -= 1
        if hold.left:
            return
        source = hold.source
        ack = source.intake.release(hold.seq)
        if source.peer is not None:
            self._say(source.peer, ack)

    def _over(self, request: Request) -> None:
        for lane, tally in zip(self.lanes, request.tallies, strict=True):
            if tally is not None:
                lane.finish(request)
        self._answer_waiters(request)

    def _lose(self, engine: Engine, replica: int | None) -> None:
        for request in self._ledger.lose(engine, replica):
            self._over(request)

    def _settle(self, request: Request, consumer: int, result: CaptureResult) -> None:
        request.results[consumer] = result
        self._answer_waiters(request)

    def _await(self, peer: bytes, said: Await) -> None:
        for request in said.requests:
            found = self._ledger.results_of(request)
            if not said.wait or (found is not None and found[1]):
                self._say(peer, Results(request, found[0] if found is not None else {}))
                continue
            self._waiters.add(request, peer)

    def _answer_waiters(self, request: Request) -> None:
        if not self._waiters.waits(request.id) or self._ledger.find(request.id) is not request:
            return
        found = self._ledger.results_of(request.id)
        if found is not None and found[1]:
            for peer in self._waiters.pop(request.id):
                self._say(peer, Results(request.id, found[0]))

    # Actions.

    def _client_act(self, peer: bytes, act: Act) -> None:
        def answer(outcome: Outcome) -> None:
            self._say(peer, ActionOutcome(outcome))

        if not is_local(self.address):
            answer(Rejected(act.id, ACTIONS_OFF))
        else:
            self._act(act.id, act.action, answer)

    def _act(self, own_id: str, action: Action, answer: Callable[[Outcome], None]) -> None:
        """Pass an action to the engine that runs its request, or, not knowing that, to every one."""
        schedulers = dict(self._roster.schedulers())
        request = self._ledger.find(action.request)
        mine = {
            peer
            for peer, hello in schedulers.items()
            if request is not None and (hello.engine, hello.rank.dp) == (request.engine, request.replica)
        }
        now = time.monotonic()
        asked = self._relay.ask(own_id, action, mine or schedulers, now, answer)
        if asked is not None:
            act, peers = asked
            for peer in peers:
                self._say(peer, act)

    # Sending.

    def _say(self, peer: bytes, said: Ack | Act | ActionOutcome | Results | Status) -> None:
        known = self._roster.peers.get(peer)
        if known is not None and known.session.state is State.OPEN:
            self._send(peer, known.session.send(said, time.monotonic()))

    def _send(self, peer: bytes, parts: Parts) -> None:
        assert self._router is not None
        self._router.send(peer, parts)  # one that is not connected any more falls silent, and is forgotten then
