"""A scheduler's link: actions that wait for the scheduler, and their outcomes.

Invariant: an action goes to the scheduler once, or is answered here, never both. An idle engine takes no actions; the
link's thread answers for it when an action expires or its request ends.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from capflow import limits
from capflow.capture.frame import Frame
from capflow.errors import explain
from capflow.protocol.message import Act, ActionOutcome, Beat, Hello, Message, Welcome
from capflow.protocol.session import Parts, State
from capflow.steering.action import ActionApplied, Freeze, Gain, Outcome, Rejected, Unfreeze, not_meant, not_running
from capflow.transport.links.link import Link
from capflow.transport.sockets import Dealer


@dataclass
class _Pending:
    """An action that arrived.

    until: when it expires.
    kept: until when its answer is kept.
    ids: the ids under which it arrived.
    arrived: when it arrived first.
    """

    until: float
    kept: float
    ids: list[str]
    arrived: float
    outcome: Outcome | None = None


_Key = tuple[str, ...]


class SchedulerLink(Link):
    """A scheduler's link: the hub's specs, and actions. It starts at construction.

    running: returns the incarnation of a running request by id, None if none runs; called on the link's thread.
    at_once: answers an action on all requests of an idle engine; None if the next step does. Called on the link's
        thread.
    holds: returns whether a request of this hub runs or waits; called on the link's thread.
    waiting: the actions that the scheduler has not taken. Whether there is any may be read without the lock.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        key: str | None = None,
        running: Callable[[str], str | None] = lambda _: "",
        at_once: Callable[[Act], Outcome | None] = lambda _: None,
        holds: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(address, hello, key=key)
        self._running = running
        self._at_once = at_once
        self._holds = holds
        # Whether the hub ends and new requests are for others; the next Welcome clears it.
        self.hands_over = False
        # Since when, on the monotonic clock, and whether the hub has been told that none of its requests is left.
        self._hands_over_since = 0.0
        self._handed_over = False
        self._lock = threading.Lock()
        # By key; guarded by `_lock`.
        self.waiting: dict[_Key, Act] = {}
        # All actions that have not expired or whose answers are kept, by key, oldest first; guarded by `_lock`.
        self._pending: dict[_Key, _Pending] = {}
        # The action that the scheduler took and has not answered, by id; guarded by `_lock`.
        self._taken: dict[str, Act] = {}
        # The hub of the last Welcome; guarded by `_lock`.
        self._hub = ""
        # Outcomes to be sent by the thread.
        self._outcomes: deque[Outcome] = deque()
        # Why controllers do not work, and what of that the hub has.
        self._troubles: tuple[str, ...] = ()
        self._reported: tuple[str, ...] = ()
        self.start()

    def actions(self, ready: Callable[[Act], bool] = lambda _: True) -> list[Act]:
        """Take and return the actions that are ready and have not expired, oldest first; never waits.

        Each action has the incarnation that ran when it arrived. The caller answers each action once with `outcome`.

        ready: returns whether the scheduler can take an action now.
        """
        if not self.waiting:
            return []
        now = time.monotonic()
        with self._lock:
            taken = {key: act for key, act in self.waiting.items() if now < self._pending[key].until and ready(act)}
            for key, act in taken.items():
                del self.waiting[key]
                self._taken[act.id] = act
        return list(taken.values())

    def outcome(self, outcome: Outcome) -> None:
        """Answer an action, with the incarnation of its request; never waits."""
        with self._lock:
            act = self._taken.pop(outcome.id, None)
            key = (outcome.id,) if act is None else act.key
            self._answer(key, outcome if act is None else _with_incarnation(outcome, act.action.incarnation))
        self._waker.wake()

    def reject(self, which: Callable[[Act], bool], reason: str) -> None:
        """Reject the actions that wait and for which `which` is true; never waits."""
        with self._lock:
            for key, act in [(key, act) for key, act in self.waiting.items() if which(act)]:
                del self.waiting[key]
                self._answer(key, Rejected(act.id, reason))
        self._waker.wake()

    def report(self, troubles: Sequence[str]) -> None:
        """Report why controllers do not work, in place of what was reported before; never waits."""
        self._troubles = tuple(trouble[: limits.TEXT_LENGTH_MAX] for trouble in troubles[: limits.REASONS_MAX])
        self._waker.wake()

    def _beat(self, now: float) -> Parts | None:
        beat, troubles = super()._beat(now), self._troubles
        # Within the first second the scheduler may admit a request that it shared out before.
        over = self.hands_over and now >= self._hands_over_since + limits.HEARTBEAT_S and not self._holds()
        news = troubles != self._reported or over != self._handed_over
        if self._session.state is not State.OPEN or not (news or ((troubles or over) and beat)):
            return beat
        self._reported, self._handed_over = troubles, over
        return self._session.send(Beat(troubles=troubles, handover=over), now)

    def _answer(self, key: _Key, outcome: Outcome) -> None:
        """Answer an action under each id under which it arrived."""
        entry = self._pending.get(key)
        if entry is None:
            self._outcomes.append(outcome)
            return
        entry.outcome = outcome
        self._outcomes += (msgspec.structs.replace(outcome, id=each) for each in entry.ids)
        entry.ids.clear()

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
            self._reported = ()
            self.hands_over = self._handed_over = False
            self._greeted(message.hub)
        elif isinstance(message, Beat) and message.handover and not self.hands_over:
            self._hands_over_since = time.monotonic()
            self.hands_over = True
        elif isinstance(message, Act):
            self._take(message)

    def _greeted(self, hub: str) -> None:
        """Drop the waiting actions of another hub: no one waits for their outcomes."""
        with self._lock:
            if hub != self._hub:
                for key in self.waiting:
                    del self._pending[key]
                self.waiting.clear()
            self._hub = hub

    def _take(self, act: Act) -> None:
        now = time.monotonic()
        until = now + limits.ACTION_S_MAX if act.until_s is None else self._session.deadline(act.until_s)
        incarnation = self._running(act.action.request) if act.action.request else ""
        kept = until + (limits.ACTION_KEPT_S if act.sender else 0.0)
        with self._lock:
            if (entry := self._pending.get(act.key)) is not None:  # it arrived before
                if entry.outcome is not None:
                    self._outcomes.append(msgspec.structs.replace(entry.outcome, id=act.id))
                elif act.id not in entry.ids:
                    entry.ids.append(act.id)
                return
            if len(self._pending) >= limits.ACTIONS_KNOWN_MAX:
                self._forget(now, all_expired=True)
            if len(self.waiting) >= limits.ACTIONS_WAITING_MAX or len(self._pending) >= limits.ACTIONS_KNOWN_MAX:
                reason = explain("actions of the engine", got=len(self._pending) + 1, expected="fewer; try again later")
            elif not now < until:
                reason = _expired()
            elif incarnation is None:
                reason = not_running(act.action.request)
            elif act.action.incarnation not in ("", incarnation):
                reason = not_meant(act.action, incarnation)
            else:
                self._pending[act.key] = _Pending(until, kept, [act.id], now)
                self.waiting[act.key] = _of_incarnation(act, incarnation)
                return
            outcome = Rejected(act.id, reason)
            self._pending[act.key] = _Pending(until, kept, [], now, outcome)
            self._outcomes.append(outcome)

    def _answer_idle(self, now: float) -> None:
        """Reject the waiting actions that expired or whose requests ended."""
        if not self._pending:
            return
        # The actions on the whole engine that wait for a step, oldest first.
        earlier: list[Act] = []
        with self._lock:
            for key, act in list(self.waiting.items()):
                if (outcome := self._idle_outcome(act, self._pending[key], now, earlier)) is not None:
                    del self.waiting[key]
                    self._answer(key, outcome)
                elif not act.action.request:
                    earlier.append(act)
            self._forget(now)

    def _idle_outcome(self, act: Act, pending: _Pending, now: float, earlier: Sequence[Act]) -> Outcome | None:
        """Return the answer to a waiting action that needs no step; None if there is none.

        earlier: the actions on the whole engine that came before it and wait for a step.
        """
        if not now < pending.until:
            return Rejected(act.id, _expired(), act.action.incarnation)
        if not act.action.request:
            # A freeze need not wait for gains. Nothing else changes places: the last of a freeze and its end counts.
            passes = all(isinstance(act.action, Freeze) and isinstance(each.action, Gain) for each in earlier)
            return self._at_once(act) if passes and now >= pending.arrived + limits.ACTION_IDLE_S else None
        if self._running(act.action.request) != act.action.incarnation:
            return Rejected(act.id, not_running(act.action.request), act.action.incarnation)
        return None

    def _forget(self, now: float, *, all_expired: bool = False) -> None:
        """Forget answered actions that are kept no more, or with `all_expired` all that expired."""
        over = itertools.takewhile(
            lambda item: not now < (item[1].until if all_expired else item[1].kept), self._pending.items()
        )
        for key in [key for key, entry in over if entry.outcome is not None]:
            del self._pending[key]

    def _timeout(self, now: float) -> float | None:
        timeout = super()._timeout(now)
        with self._lock:
            idle = any(not act.action.request for act in self.waiting.values())
        return limits.ACTION_IDLE_S if idle and (timeout is None or timeout > limits.ACTION_IDLE_S) else timeout


def _of_incarnation(act: Act, incarnation: str) -> Act:
    """Return an action on the request that runs now."""
    if isinstance(act.action, Freeze | Unfreeze):
        return act
    return msgspec.structs.replace(act, action=msgspec.structs.replace(act.action, incarnation=incarnation))


def _with_incarnation(outcome: Outcome, incarnation: str) -> Outcome:
    """Return the outcome of an action on a request of this incarnation."""
    if isinstance(outcome, ActionApplied | Rejected) and incarnation:
        return msgspec.structs.replace(outcome, incarnation=incarnation)
    return outcome


def _expired() -> str:
    do = "try again; a request that waits for streaming input or for its first step takes no actions"
    return explain("action: the engine took no step in time", do=do)
