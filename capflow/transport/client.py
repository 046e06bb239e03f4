"""The client: asks a hub for results and status, and sends actions."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, overload

import msgspec
from msgspec import UNSET

from capflow import limits
from capflow.capture.frame import Frame
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, HubUnreachableError, RemoteProtocolError, UsageError, explain
from capflow.protocol.message import (
    Act,
    ActBatch,
    ActionOutcome,
    Await,
    Bye,
    Hello,
    Message,
    Refused,
    Results,
    Status,
    encode,
)
from capflow.protocol.session import PeerSession, State
from capflow.steering.action import NO_ENGINE, Action, Outcome, Rejected, Unknown
from capflow.transport.address import check_address, default_address
from capflow.transport.keys import peer_key
from capflow.transport.sockets import Dealer, Event, why_not

# How often the hub is asked whether its consumers make progress.
_LOOK_S = 5.0
_PENDING = CaptureResult("pending")
# Several actions are sent in messages of about this size.
_ACTS_BYTES_MAX = limits.HEADER_BYTES_MAX // 4


class Client:
    """A synchronous connection to a hub, for one thread. It connects at its first use or at `with`.

    Raises HubUnreachableError if the hub does not answer, CapflowError if it refuses, UsageError for a wrong address or
    key.

    address: the hub's address; `CAPFLOW_HUB` or the default address if None.
    timeout: how many seconds the hub may take to answer.
    key: this peer's key, by name or path, for an address with the hub's key; by default `CAPFLOW_KEY`.
    insecure: allow TCP beyond loopback to a hub without a key.
    """

    def __init__(
        self,
        address: str | None = None,
        timeout: float = limits.HUB_WAIT_S_DEFAULT,
        *,
        key: str | None = None,
        insecure: bool = False,
    ) -> None:
        self.address = check_address(address or default_address(), insecure=insecure)
        self.timeout = timeout
        self._key = peer_key(self.address, key)
        self._session = PeerSession(Hello("client", "", uuid.uuid4().hex))
        # Actions are numbered, and are applied once however often they are sent.
        self._sender = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        # Set from the first use until `close` or the loss of the hub.
        self._dealer: Dealer | None = None
        # When the connection was last checked.
        self._used = 0.0

    def __enter__(self) -> Self:
        self._connect(time.monotonic() + self.timeout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether the hub had welcomed this client and was connected at the last check."""
        return self._is_open()

    @property
    def captures(self) -> tuple[CaptureSpec, ...]:
        """The specs that the hub captures of every request, at the last connection."""
        welcome = self._session.welcome
        return welcome.captures if welcome is not None else ()

    @property
    def readers(self) -> tuple[str, ...] | None:
        """The consumers that requests may name, at the last connection; None if the hub did not send them."""
        welcome = self._session.welcome
        return None if welcome is None or welcome.readers is UNSET else welcome.readers

    def close(self) -> None:
        """Disconnect from the hub."""
        if self._dealer is not None:
            if self._session.state is State.OPEN:
                self._dealer.send(self._session.send(Bye(), time.monotonic()))
            self._disconnect()

    def results(
        self, request_ids: Iterable[str], wait: bool = True, timeout: float | None = None, *, engine: str = ""
    ) -> dict[str, dict[str, CaptureResult]]:
        """Return the results of requests by id and consumer. An unknown request has no results.

        Raises UsageError with the engines' names if several engines have a request with an id and `engine` is not
        given.

        wait: wait until every consumer is done with the requests, for at most `timeout` seconds. The result of a
            consumer that is not done is `pending`.
        engine: the name of the engine that runs the requests.
        """
        asked = tuple(dict.fromkeys(request_ids))
        results: dict[str, dict[str, CaptureResult]] = {}
        if wait and asked:
            timeout = self.timeout if timeout is None else timeout
            self._ask_results(Await(asked, True, engine), results, timeout)
        missing = tuple(request for request in asked if request not in results)
        if missing and not self._ask_results(Await(missing, False, engine), results, self.timeout):
            raise self._unreachable()
        return {request: results[request] for request in asked}

    def final_results(
        self, request_ids: Iterable[str], still_s: float, *, engine: str = ""
    ) -> dict[str, dict[str, CaptureResult]]:
        """Return the results of requests once every consumer is done with them, as `results` does.

        It waits for as long as the results come in or a consumer that they wait for makes progress.

        still_s: after so many seconds without progress, the result of a consumer that is not done is `pending`.
        engine: the name of the engine that runs the requests.
        """
        asked = tuple(dict.fromkeys(request_ids))
        results: dict[str, dict[str, CaptureResult]] = {}
        left = dict.fromkeys(asked)
        pending: set[str] = set()
        works: dict[str, Any] = {}
        if asked:
            self._send(Await(asked, True, engine))
        moved = time.monotonic()
        while left and time.monotonic() - moved < still_s:
            message = self._next(time.monotonic() + min(_LOOK_S, still_s / 4))
            match message:
                case None:
                    # The answer to the first question names the consumers of which the second tells the progress.
                    self._send(Await((next(iter(left)),), False, engine))
                    self._send(Status())
                case Results() if message.request in left and message.engine in (engine, UNSET):
                    pending = {name for name, result in message.results.items() if result == _PENDING}
                    if len(message.engines) > 1:
                        raise ambiguous(message.request, message.engines)
                    # A hub without consumers has no results.
                    if message.engines and not pending:
                        del left[message.request]
                        results[message.request] = message.results
                        moved = time.monotonic()
                case Status():
                    for name, counters in message.counters["consumers"].items():
                        before, works[name] = works.get(name), _work(counters)
                        if before is not None and before != works[name] and (name in pending or not pending):
                            moved = time.monotonic()
        if left and not self._ask_results(Await(tuple(left), False, engine), results, self.timeout):
            raise self._unreachable()
        return {request: results[request] for request in asked}

    @overload
    def act(self, action: Action, timeout: float | None = None) -> Outcome: ...

    @overload
    def act(self, action: Sequence[Action], timeout: float | None = None) -> list[Outcome]: ...

    def act(self, action: Action | Sequence[Action], timeout: float | None = None) -> Outcome | list[Outcome]:
        """Send an action, or several in one message, and return the outcome of each.

        Several actions of one request are applied in their order. If the hub is lost, the actions without an outcome
        are sent again when it is back; each is applied once.

        The hub answers within `limits.ACTION_S_MAX + limits.ACTION_ANSWER_S_MAX` seconds; the default timeout is a
        little longer. Raises CapflowError if an answer did not come in time; the action may still be applied then.
        """
        several = [action] if isinstance(action, msgspec.Struct) else list(action)
        acts = {}
        for each in several:
            number = next(self._numbers)
            act = Act(f"{self._sender}-{number}", each, sender=self._sender, number=number)
            acts[act.id] = act
        longest = limits.ACTION_S_MAX + 2 * limits.ACTION_ANSWER_S_MAX
        deadline = time.monotonic() + (longest if timeout is None else timeout)
        outcomes = self._outcomes_of(acts, deadline)
        ordered = [outcomes[each] for each in acts]
        return ordered[0] if isinstance(action, msgspec.Struct) else ordered

    def _outcomes_of(self, acts: Mapping[str, Act], deadline: float) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        sent_again: set[str] = set()
        left: list[Act] = []
        self._send_acts(list(acts.values()))
        while len(outcomes) < len(acts):
            try:
                self._send_acts(left)
                left = []
                message = self._next(deadline)
            except HubUnreachableError:
                if time.monotonic() >= deadline:
                    raise
                self._reconnect(min(deadline, time.monotonic() + self.timeout))
                left = [act for each, act in acts.items() if each not in outcomes]
                sent_again |= {act.id for act in left}
                continue
            if message is None:
                do = "see `capflow status` for whether an engine runs"
                raise CapflowError(explain("no outcome of the action in time", do=do))
            if isinstance(message, ActionOutcome) and message.outcome.id in acts:
                outcome = message.outcome
                if outcome.id in sent_again and isinstance(outcome, Rejected) and outcome.reason == NO_ENGINE:
                    # The engine that may have got the action is not back at the hub.
                    if _pause(deadline):
                        left = [acts[outcome.id]]
                        continue
                    reason = "action: the engine that may have got it did not come back to the hub in time"
                    outcome = Unknown(outcome.id, reason)
                outcomes[outcome.id] = outcome
        return outcomes

    def _send_acts(self, acts: Sequence[Act]) -> None:
        """Send actions, in messages of bounded size."""
        some: list[Act] = []
        nbytes = 0
        for act in acts:
            size = len(encode(act))
            if some and (nbytes + size > _ACTS_BYTES_MAX or len(some) == limits.ACTIONS_WAITING_MAX):
                self._send(ActBatch(tuple(some)))
                some, nbytes = [], 0
            some.append(act)
            nbytes += size
        if some:
            self._send(some[0] if len(some) == 1 else ActBatch(tuple(some)))

    def status(self) -> dict[str, Any]:
        """Return the hub's counters."""
        self._send(Status())
        deadline = time.monotonic() + self.timeout
        while (message := self._next(deadline)) is not None:
            if isinstance(message, Status):
                return message.counters
        raise self._unreachable()

    def _ask_results(self, asked: Await, results: dict[str, dict[str, CaptureResult]], timeout: float) -> bool:
        """Add the results that are asked for to `results`; return whether all came in time."""
        deadline = time.monotonic() + timeout
        self._send(asked)
        left = set(asked.requests)
        while left and (message := self._next(deadline)) is not None:
            if isinstance(message, Results) and message.request in left and message.engine in (asked.engine, UNSET):
                if len(message.engines) > 1:
                    raise ambiguous(message.request, message.engines)
                left.discard(message.request)
                results[message.request] = message.results
        return not left

    def _send(self, message: Message) -> None:
        now = time.monotonic()
        if now - self._used > limits.HEARTBEAT_S:  # the connection may be lost
            self.close()
        self._connect(now + self.timeout)
        assert self._dealer is not None
        self._dealer.send(self._session.send(message, now))

    def _connect(self, deadline: float) -> None:
        if self._is_open():
            return
        self._disconnect()
        self._dealer = Dealer(self.address, key=self._key)
        while not self._is_open():
            if not self._turn(deadline):
                self._disconnect()
                raise self._unreachable()

    def _reconnect(self, deadline: float) -> None:
        """Connect to the hub again, or to the next one, which may not have begun."""
        while not self._is_open():
            try:
                self._connect(deadline)
            except HubUnreachableError:
                if not _pause(deadline):
                    raise

    def _is_open(self) -> bool:
        return self._session.state is State.OPEN

    def _disconnect(self) -> None:
        self._session.lost()
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def _next(self, deadline: float) -> Frame | Message | None:
        """Return the next message; None if none came in time."""
        while self._dealer is not None:
            message = self._receive()
            if message is not None:
                return message
            if not self._turn(deadline):
                return None
        raise self._unreachable()

    def _receive(self) -> Frame | Message | None:
        assert self._dealer is not None
        parts = self._dealer.receive()
        if parts is None:
            return None
        try:
            message = self._session.receive(parts, time.monotonic())
        except RemoteProtocolError:
            self._disconnect()
            raise
        if isinstance(message, Refused):
            self._disconnect()
            raise CapflowError(explain(f"the hub at {self.address} refused", got=message.reason))
        if isinstance(message, Bye):
            self._disconnect()
            raise self._unreachable()
        return message

    def _turn(self, deadline: float) -> bool:
        """Wait for the next event and handle it; return False after the deadline."""
        assert self._dealer is not None
        now = time.monotonic()
        if now >= deadline:
            return False
        due = self._session.due()
        self._dealer.poll(min(deadline, due if due is not None else deadline) - now)
        now = self._used = time.monotonic()
        for event in self._dealer.events():
            if (why := why_not(event, self.address, self._key)) is not None:
                self._disconnect()
                raise CapflowError(why)
            if event is Event.DISCONNECTED:
                self._disconnect()
                raise self._unreachable()
            self._dealer.send(self._session.connected(now))
        if self._session.silent(now):
            self._disconnect()
            raise self._unreachable()
        if (beat := self._session.tick(now)) is not None:
            self._dealer.send(beat)
        if self._session.state is State.HELLO:
            self._receive()
        return True

    def _unreachable(self) -> HubUnreachableError:
        do = "start one with `capflow run`, or name its address with --address or CAPFLOW_HUB"
        return HubUnreachableError(explain(f"no hub answers at {self.address}", do=do))


def _pause(deadline: float) -> bool:
    """Wait a little, at most until a deadline; return whether there is time left."""
    time.sleep(max(0.0, min(limits.IDLE_S, deadline - time.monotonic())))
    return time.monotonic() < deadline


def _work(counters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what changes while a consumer makes progress.

    counters: the consumer's, as the hub's status has them.
    """
    # A consumer in trouble hangs in a call.
    busy_s = 0.0 if counters["trouble"] else counters["busy_s"]
    # What comes into its inbox.
    spilled = (counters.get("spool") or {}).get("frames_spilled")
    return counters["frames"], counters["results"], counters["backlog"], busy_s, spilled


def ambiguous(request: str, engines: Iterable[str]) -> UsageError:
    """Return the error for an id that requests of several engines have."""
    expected = f"the name of its engine, one of {', '.join(sorted(engines))}"
    return UsageError(explain(f"request {request}", got="an id that several engines have", expected=expected))
