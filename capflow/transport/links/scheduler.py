"""A scheduler's link to its hub: actions that wait for the scheduler, and the answers to them.

Invariant: an action is given to the scheduler once or answered here, never both. An engine that idles takes no actions; the link
answers for it, on its own thread, when an action expires or its request is over.
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
class _Known:
    """An action that came and has not expired."""

    until: float
    outcome: Outcome | None = None


class SchedulerLink(Link):
    """A scheduler's link: what the hub wants captured, and actions to take. It starts when it is made.

    running(request): the incarnation of a running request, None when none of that id runs; called on the link's thread.
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
        # Actions that nobody took, by id; guarded by `_lock`.
        self._waiting: dict[str, Act] = {}
        # All that came and have not expired, by id, oldest first; guarded by `_lock`.
        self._known: dict[str, _Known] = {}
        # Of the last Welcome; guarded by `_lock`.
        self._hub = ""
        # Filled by `outcome`, emptied by the thread.
        self._outcomes: deque[Outcome] = deque()
        self.start()

    def actions(self, ready: Callable[[Act], bool] = lambda _: True) -> list[Act]:
        """Take and return the actions that are ready and have not expired, oldest first; never waits.

        Each names an incarnation that ran when the action came. The caller answers each by `outcome`, once.
        """
        if not self._waiting:
            return []
        now = time.monotonic()
        with self._lock:
            taken = [act for key, act in self._waiting.items() if now < self._known[key].until and ready(act)]
            for act in taken:
                del self._waiting[act.id]
        return taken

    def outcome(self, outcome: Outcome) -> None:
        """Answer an action; never waits."""
        with self._lock:
            if (known := self._known.get(outcome.id)) is not None:
                known.outcome = outcome
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

    def _received(self, said: Frame | Message) -> None:
        if isinstance(said, Welcome):
            self._greeted(said.hub)
        elif isinstance(said, Act):
            self._take(said)

    def _greeted(self, hub: str) -> None:
        """Forget what another hub asked for and the scheduler did not take: nobody waits for it."""
        with self._lock:
            if hub != self._hub:
                for key in self._waiting:
                    del self._known[key]
                self._waiting.clear()
            self._hub = hub

    def _take(self, said: Act) -> None:
        now = time.monotonic()
        until = now + limits.ACTION_S_MAX if said.until_s is None else self._session.deadline(said.until_s)
        incarnation = self._running(said.action.request)
        with self._lock:
            if (known := self._known.get(said.id)) is not None:  # it came before, on a connection that was lost
                if known.outcome is not None:
                    self._outcomes.append(known.outcome)
                return
            if len(self._waiting) >= limits.ACTIONS_WAITING_MAX or len(self._known) >= limits.ACTIONS_KNOWN_MAX:
                reason = explain("actions of the engine", got=len(self._known) + 1, expected="fewer; try again later")
            elif not now < until:
                reason = _expired()
            elif incarnation is None or said.action.incarnation not in ("", incarnation):
                reason = _not_running(said)
            else:
                action = msgspec.structs.replace(said.action, incarnation=incarnation)
                self._known[said.id] = _Known(until)
                self._waiting[said.id] = msgspec.structs.replace(said, action=action)
                return
            outcome = Rejected(said.id, reason)
            self._known[said.id] = _Known(until, outcome)
            self._outcomes.append(outcome)

    def _answer_idle(self, now: float) -> None:
        """Reject what expired or lost its request while the scheduler did not look."""
        if not self._known:
            return
        with self._lock:
            for key, act in list(self._waiting.items()):
                expired = not now < self._known[key].until
                if expired or self._running(act.action.request) != act.action.incarnation:
                    del self._waiting[key]
                    outcome = Rejected(key, _expired() if expired else _not_running(act))
                    self._known[key].outcome = outcome
                    self._outcomes.append(outcome)
            over = itertools.takewhile(lambda item: not now < item[1].until, self._known.items())
            for key in [key for key, known in over if known.outcome is not None]:
                del self._known[key]


def _expired() -> str:
    do = "try again; a request that waits for streaming input, or for its first step, takes none meanwhile"
    return explain("action: the engine took no step in time", do=do)


def _not_running(act: Act) -> str:
    return explain("request", got=act.action.request, expected="one that is running")
