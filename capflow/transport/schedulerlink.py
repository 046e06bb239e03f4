"""A scheduler's link to its hub."""

from __future__ import annotations

from collections import deque

from capflow import limits
from capflow.action import Outcome
from capflow.frame import Frame
from capflow.message import Act, ActionOutcome, Hello, Message
from capflow.session import State
from capflow.transport.link import Link
from capflow.transport.sockets import Dealer


class SchedulerLink(Link):
    """A scheduler's link: what the hub wants captured, and actions to take. It starts when it is made."""

    def __init__(self, address: str, hello: Hello, *, key: str | None = None) -> None:
        super().__init__(address, hello, key=key)
        self._acts: deque[Act] = deque(maxlen=limits.ACTIONS_WAITING_MAX)  # filled by the thread, emptied by `actions`
        self._outcomes: deque[Outcome] = deque()  # filled by `outcome`, emptied by the thread
        self.start()

    def actions(self) -> list[Act]:
        """Return the actions that came since the last call; never waits."""
        acts = []
        while self._acts:
            acts.append(self._acts.popleft())
        return acts

    def outcome(self, outcome: Outcome) -> None:
        """Say what came of an action; never waits."""
        self._outcomes.append(outcome)
        self._waker.wake()

    def _fill(self, dealer: Dealer, now: float) -> None:
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if self._session.state is State.OPEN:  # otherwise the hub that asked is gone
                dealer.send(self._session.send(ActionOutcome(outcome), now))

    def _drained(self) -> bool:
        return not self._outcomes or not self.connected

    def _received(self, said: Frame | Message) -> None:
        if isinstance(said, Act):
            self._acts.append(said)
