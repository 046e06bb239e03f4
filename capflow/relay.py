"""The relay: actions on their way to schedulers, and outcomes on their way back.

It belongs to the hub's thread and does no I/O. An action goes to one scheduler or to several; the first `Applied`
is its outcome, or else the last `Rejected`, or silence for `limits.ACTION_S_MAX`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from capflow import limits
from capflow.action import Action, Applied, Outcome, Rejected
from capflow.errors import explain
from capflow.message import Act

NO_ENGINE = explain(
    "action: no engine is connected to this hub", do="start one with its hub set to this address, then try again"
)


@dataclass
class _Waiting:
    """An action whose outcome is not known."""

    own_id: str  # what the asker calls it
    answer: Callable[[Outcome], None]
    asked: set[bytes]  # schedulers that have not answered
    until: float
    reason: str = ""  # the last rejection


class Relay:
    """The actions that wait for their outcome, by the id that the hub gave them."""

    def __init__(self) -> None:
        self.applied = 0
        self.rejected = 0
        self._waiting: dict[str, _Waiting] = {}  # until the outcome, or `until`
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(
        self, own_id: str, action: Action, schedulers: Iterable[bytes], now: float, answer: Callable[[Outcome], None]
    ) -> tuple[Act, set[bytes]] | None:
        """Return what to send to which schedulers; None when it was answered at once."""
        asked = set(schedulers)
        waiting = _Waiting(own_id, answer, asked, now + limits.ACTION_S_MAX)
        if not asked:
            self._answer(waiting, Rejected(own_id, NO_ENGINE))
            return None
        if len(self._waiting) >= limits.ACTIONS_WAITING_MAX:
            reason = explain("actions waiting for an engine", got=len(self._waiting), expected="fewer; try again later")
            self._answer(waiting, Rejected(own_id, reason))
            return None
        hub_id = f"{next(self._ids)}"
        self._waiting[hub_id] = waiting
        return Act(hub_id, action), set(asked)

    def outcome(self, scheduler: bytes, outcome: Outcome) -> None:
        """Take a scheduler's answer."""
        waiting = self._waiting.get(outcome.id)
        if waiting is None or scheduler not in waiting.asked:
            return
        waiting.asked.discard(scheduler)
        if isinstance(outcome, Rejected):
            waiting.reason = outcome.reason
        if isinstance(outcome, Applied) or not waiting.asked:
            del self._waiting[outcome.id]
            self._answer(waiting, msgspec.structs.replace(outcome, id=waiting.own_id))

    def gone(self, scheduler: bytes) -> None:
        """A scheduler left: it answers nothing any more."""
        reason = "action: the engine left before it answered"
        for hub_id in [hub_id for hub_id, waiting in self._waiting.items() if scheduler in waiting.asked]:
            self.outcome(scheduler, Rejected(hub_id, self._waiting[hub_id].reason or reason))

    def expire(self, now: float) -> None:
        """Answer what waited too long."""
        for hub_id in [hub_id for hub_id, waiting in self._waiting.items() if now >= waiting.until]:
            waiting = self._waiting.pop(hub_id)
            reason = waiting.reason or f"action: the engine did not answer in {limits.ACTION_S_MAX:g} s"
            self._answer(waiting, Rejected(waiting.own_id, reason))

    def _answer(self, waiting: _Waiting, outcome: Outcome) -> None:
        if isinstance(outcome, Applied):
            self.applied += 1
        else:
            self.rejected += 1
        waiting.answer(outcome)
