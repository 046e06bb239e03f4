"""A scheduler's link: actions that wait for the scheduler, and their outcomes.

Invariant: an action goes to the scheduler once, or is answered here, never both. An idle engine takes no actions; the
link's thread answers for it when an action expires or its request ends.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from capflow import limits
from capflow.capture.frame import Frame
from capflow.errors import explain
from capflow.protocol.message import Act, ActionOutcome, Hello, Message, Welcome
from capflow.protocol.session import State
from capflow.steering.action import Outcome, Rejected
from capflow.transport.links.link import Link
from capflow.transport.sockets import Dealer


@dataclass
class _Pending:
    """An action that arrived and has not expired."""

    until: float
    outcome: Outcome | None = None


class SchedulerLink(Link):
    """A scheduler's link: the hub's specs, and actions. It starts at construction.

    running: returns the incarnation of a running request by id, None if none runs; called on the link's thread.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        key: str | None = None,
        running: Callable[[str], str | None] = lambda _: "",
    ) -> None:
        super().__init__(address, hello, key=key)
        self._running = running
        self._lock = threading.Lock()
        # Actions that the scheduler has not taken, by id; guarded by `_lock`.
        self._waiting: dict[str, Act] = {}
        # All actions that have not expired, by id, oldest first; guarded by `_lock`.
        self._pending: dict[str, _Pending] = {}
        # The hub of the last Welcome; guarded by `_lock`.
        self._hub = ""
        # Outcomes to be sent by the thread.
        self._outcomes: deque[Outcome] = deque()
        self.start()

    def actions(self, ready: Callable[[Act], bool] = lambda _: True) -> list[Act]:
        """Take and return the actions that are ready and have not expired, oldest first; never waits.

        Each action has the incarnation that ran when it arrived. The caller answers each action once with `outcome`.

        ready: returns whether the scheduler can take an action now.
        """
        if not self._waiting:
            return []
        now = time.monotonic()
        with self._lock:
            taken = [act for key, act in self._waiting.items() if now < self._pending[key].until and ready(act)]
            for act in taken:
                del self._waiting[act.id]
        return taken

    def outcome(self, outcome: Outcome) -> None:
        """Answer an action; never waits."""
        with self._lock:
            if (entry := self._pending.get(outcome.id)) is not None:
                entry.outcome = outcome
        self._outcomes.append(outcome)
        self._waker.wake()

    def _fill(self, dealer: Dealer, now: float) -> None:
        self._answer_idle(now)
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if self._session.state is State.OPEN:  # otherwise the hub asks again, or is gone
                dealer.send(self._session.send(ActionOutcome(outcome), now))

    def _drained(self) -> bool:
        return not self._outcomes or not self.connected

    def _received(self, message: Frame | Message) -> None:
        if isinstance(message, Welcome):
            self._greeted(message.hub)
        elif isinstance(message, Act):
            self._take(message)

    def _greeted(self, hub: str) -> None:
        """Drop the waiting actions of another hub: no one waits for their outcomes."""
        with self._lock:
            if hub != self._hub:
                for key in self._waiting:
                    del self._pending[key]
                self._waiting.clear()
            self._hub = hub

    def _take(self, act: Act) -> None:
        now = time.monotonic()
        until = now + limits.ACTION_S_MAX if act.until_s is None else self._session.deadline(act.until_s)
        incarnation = self._running(act.action.request)
        with self._lock:
            if (entry := self._pending.get(act.id)) is not None:  # it arrived before, on a connection that was lost
                if entry.outcome is not None:
                    self._outcomes.append(entry.outcome)
                return
            if len(self._waiting) >= limits.ACTIONS_WAITING_MAX or len(self._pending) >= limits.ACTIONS_KNOWN_MAX:
                reason = explain("actions of the engine", got=len(self._pending) + 1, expected="fewer; try again later")
            elif not now < until:
                reason = _expired()
            elif incarnation is None or act.action.incarnation not in ("", incarnation):
                reason = _not_running(act)
            else:
                action = msgspec.structs.replace(act.action, incarnation=incarnation)
                self._pending[act.id] = _Pending(until)
                self._waiting[act.id] = msgspec.structs.replace(act, action=action)
                return
            outcome = Rejected(act.id, reason)
            self._pending[act.id] = _Pending(until, outcome)
            self._outcomes.append(outcome)

    def _answer_idle(self, now: float) -> None:
        """Reject the waiting actions that expired or whose requests ended."""
        if not self._pending:
            return
        with self._lock:
            for key, act in list(self._waiting.items()):
                expired = not now < self._pending[key].until
                if expired or self._running(act.action.request) != act.action.incarnation:
                    del self._waiting[key]
                    outcome = Rejected(key, _expired() if expired else _not_running(act))
                    self._pending[key].outcome = outcome
                    self._outcomes.append(outcome)
            over = itertools.takewhile(lambda item: not now < item[1].until, self._pending.items())
            for key in [key for key, entry in over if entry.outcome is not None]:
                del self._pending[key]


def _expired() -> str:
    do = "try again; a request that waits for streaming input or for its first step takes no actions"
    return explain("action: the engine took no step in time", do=do)


def _not_running(act: Act) -> str:
    return explain("request", got=act.action.request, expected="one that is running")
