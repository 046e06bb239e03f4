"""The client: asks a hub what became of requests, how it is, and to have engines act."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from msgspec import UNSET

from capflow import limits
from capflow.capture.frame import Frame
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, HubUnreachableError, RemoteProtocolError, UsageError, explain
from capflow.protocol.message import Act, ActionOutcome, Await, Bye, Hello, Message, Refused, Results, Status
from capflow.protocol.session import PeerSession, State
from capflow.steering.action import Action, Outcome
from capflow.transport.address import check_address, default_address
from capflow.transport.keys import peer_key
from capflow.transport.sockets import Dealer, Event, why_not


class Client:
    """A synchronous connection to a hub, for one thread. It connects when first used, or entered.

    timeout: how many seconds the hub has to answer.
    key: this peer's, by name or path, for an address with the hub's; without one that of `CAPFLOW_KEY`.
    insecure: allows TCP off loopback to a hub without a key.

    Raises HubUnreachableError when the hub does not answer, CapflowError when it refuses, UsageError for a wrong address or key.
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
        # From the first use to `close`, or until the hub is lost.
        self._dealer: Dealer | None = None
        # When the connection was last looked at.
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
        """Whether the hub has welcomed this client, and was there when it was last looked at."""
        return self._is_open()

    @property
    def captures(self) -> tuple[CaptureSpec, ...]:
        """What the hub captures of every request, as it said when it was last connected to."""
        welcome = self._session.welcome
        return welcome.captures if welcome is not None else ()

    @property
    def readers(self) -> tuple[str, ...] | None:
        """The consumers that requests may name, as the hub said when it was last connected to; None when it did not say."""
        welcome = self._session.welcome
        return None if welcome is None or welcome.readers is UNSET else welcome.readers

    def close(self) -> None:
        """Leave the hub."""
        if self._dealer is not None:
            if self._session.state is State.OPEN:
                self._dealer.send(self._session.send(Bye(), time.monotonic()))
            self._disconnect()

    def results(
        self, request_ids: Iterable[str], wait: bool = True, timeout: float | None = None, *, engine: str = ""
    ) -> dict[str, dict[str, CaptureResult]]:
        """Return what became of requests, by id and consumer.

        With `wait`, that is when every consumer is done with them, or when `timeout` seconds are over; a consumer that
        is not done by then is `pending`. A request that the hub knows nothing of has no results.

        engine: the name of the engine that runs them. Without it each id stands for the request of the only engine that
            has one; raises UsageError, naming the engines, where several have.
        """
        asked = tuple(dict.fromkeys(request_ids))
        found: dict[str, dict[str, CaptureResult]] = {}
        if wait and asked:
            timeout = self.timeout if timeout is None else timeout
            self._ask_results(Await(asked, True, engine), found, timeout)
        missing = tuple(request for request in asked if request not in found)
        if missing and not self._ask_results(Await(missing, False, engine), found, self.timeout):
            raise self._unreachable()
        return {request: found[request] for request in asked}

    def act(self, action: Action, timeout: float | None = None) -> Outcome:
        """Have an action done; return what came of it.

        The hub answers in `limits.ACTION_S_MAX + limits.ACTION_ANSWER_S_MAX` seconds at the latest, so by default a little longer is waited.
        Raises CapflowError when no answer came in time: the action may still be done then.
        """
        act = Act(uuid.uuid4().hex, action)
        longest = limits.ACTION_S_MAX + 2 * limits.ACTION_ANSWER_S_MAX
        deadline = time.monotonic() + (longest if timeout is None else timeout)
        self._say(act)
        while (said := self._next(deadline)) is not None:
            if isinstance(said, ActionOutcome) and said.outcome.id == act.id:
                return said.outcome
        raise CapflowError(
            explain("no outcome of the action in time", do="see `capflow status` for whether an engine runs")
        )

    def status(self) -> dict[str, Any]:
        """Return the hub's counters."""
        self._say(Status())
        deadline = time.monotonic() + self.timeout
        while (said := self._next(deadline)) is not None:
            if isinstance(said, Status):
                return said.counters
        raise self._unreachable()

    def _ask_results(self, asked: Await, found: dict[str, dict[str, CaptureResult]], timeout: float) -> bool:
        """Put the results of what was asked into `found`; return whether all came in time."""
        deadline = time.monotonic() + timeout
        self._say(asked)
        left = set(asked.requests)
        while left and (said := self._next(deadline)) is not None:
            if isinstance(said, Results) and said.request in left and said.engine in (asked.engine, UNSET):
                if len(said.engines) > 1:
                    raise ambiguous(said.request, said.engines)
                left.discard(said.request)
                found[said.request] = said.results
        return not left

    def _say(self, said: Message) -> None:
        now = time.monotonic()
        if now - self._used > limits.HEARTBEAT_S:  # unlooked at, it may have been lost unseen
            self.close()
        self._connect(now + self.timeout)
        assert self._dealer is not None
        self._dealer.send(self._session.send(said, now))

    def _connect(self, deadline: float) -> None:
        if self._is_open():
            return
        self._disconnect()
        self._dealer = Dealer(self.address, key=self._key)
        while not self._is_open():
            if not self._turn(deadline):
                self._disconnect()
                raise self._unreachable()

    def _is_open(self) -> bool:
        return self._session.state is State.OPEN

    def _disconnect(self) -> None:
        self._session.lost()
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def _next(self, deadline: float) -> Frame | Message | None:
        """Return the next message; None when none came in time."""
        while self._dealer is not None:
            said = self._receive()
            if said is not None:
                return said
            if not self._turn(deadline):
                return None
        raise self._unreachable()

    def _receive(self) -> Frame | Message | None:
        assert self._dealer is not None
        parts = self._dealer.receive()
        if parts is None:
            return None
        try:
            said = self._session.receive(parts, time.monotonic())
        except RemoteProtocolError:
            self._disconnect()
            raise
        if isinstance(said, Refused):
            self._disconnect()
            raise CapflowError(explain(f"the hub at {self.address} refused", got=said.reason))
        if isinstance(said, Bye):
            self._disconnect()
            raise self._unreachable()
        return said

    def _turn(self, deadline: float) -> bool:
        """Wait for something to happen and take note of it; return False when the time is over."""
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


def ambiguous(request: str, engines: Iterable[str]) -> UsageError:
    """Return the error of an id that requests of several engines have."""
    expected = f"the name of its engine, one of {', '.join(sorted(engines))}"
    return UsageError(explain(f"request {request}", got="an id that several engines have", expected=expected))
