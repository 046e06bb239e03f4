"""The relay: actions on their way to schedulers, and outcomes on their way back.

It belongs to the hub's thread and does no I/O. An action goes to one scheduler or to several; the first `ActionApplied`
is its outcome, or else the last `Rejected`. A scheduler whose connection is lost is sent the action again when it is back: it
does it once, and gives the first answer again. Invariant: schedulers do nothing with an action that expired, and the relay
answers by itself only after that.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.errors import RoomError, explain
from capflow.hub.requests.request import Request
from capflow.protocol.message import Act, Hello
from capflow.steering.action import Action, ActionApplied, Outcome, Rejected, Unknown
from capflow.text.engine_name import is_of, name_of

NO_ENGINE = explain(
    "action: no engine is connected to this hub", do="start one with its hub set to this address, then try again"
)


_ACTION_BYTES, _DECODED = 2048, 4  # of memory, of an action that waits, and for each of its bytes on the wire


@dataclass(slots=True)
class _Waiting:
    """An action whose outcome is not known."""

    own_id: str  # what the asker calls it
    answer: Callable[[Outcome], None]
    asked: tuple[str, ...]  # boots of schedulers that have not answered
    until: float
    owner: str  # of what it takes, as of `capflow.buffers.shares`
    nbytes: int
    act: Act | None = None
    reason: str = ""  # the last rejection


class Relay:
    """The actions that wait for their outcome, by the id that the hub gave them."""

    def __init__(self, state: Shares) -> None:
        self._count = Shares("actions waiting for an engine", limits.ACTIONS_WAITING_MAX, unit="actions")
        self._state = state  # the memory that actions share
        self.applied = 0
        self.rejected = 0
        self.unknown = 0
        self._waiting: dict[str, _Waiting] = {}  # until the outcome, or a while after `until`
        self._hub = uuid.uuid4().hex  # so that no other hub gives the same ids
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(
        self,
        own_id: str,
        action: Action,
        schedulers: Iterable[str],
        now: float,
        answer: Callable[[Outcome], None],
        *,
        owner: str = "",
        nbytes: int = 0,
    ) -> Act | None:
        """Return what to send to the schedulers, which are named by their boots; None when it was answered at once.

        owner: who asks; nbytes: of the action, on the wire.
        """
        memory = _ACTION_BYTES + _DECODED * nbytes
        waiting = _Waiting(own_id, answer, tuple(schedulers), now + limits.ACTION_S_MAX, owner, memory)
        try:
            self._state.take(owner, memory, label="actions waiting for an engine")
            if not self._count.offer(owner, 1):
                self._state.give(owner, memory)
                self._count.take(owner, 1)
        except RoomError as e:
            self._answer(waiting, Rejected(own_id, str(e)))
            return None
        waiting.act = Act(f"{self._hub}-{next(self._ids)}", action, waiting.until)
        self._waiting[waiting.act.id] = waiting
        return waiting.act

    def refuse(self, own_id: str, reason: str, answer: Callable[[Outcome], None]) -> None:
        """Reject an action that no scheduler is asked to do."""
        self._answer(_Waiting(own_id, answer, (), 0.0, "", 0), Rejected(own_id, reason))

    def again(self, scheduler: str, now: float) -> list[Act]:
        """Return what to send to a scheduler that is back: what it was asked, has not answered and may still do."""
        waits = (waiting for waiting in self._waiting.values() if scheduler in waiting.asked and now < waiting.until)
        return [waiting.act for waiting in waits if waiting.act is not None]

    def outcome(self, scheduler: str, outcome: Outcome) -> None:
        """Take a scheduler's answer."""
        waiting = self._waiting.get(outcome.id)
        if waiting is None or scheduler not in waiting.asked:
            return
        waiting.asked = tuple(boot for boot in waiting.asked if boot != scheduler)
        if isinstance(outcome, Rejected):
            waiting.reason = outcome.reason
        if isinstance(outcome, ActionApplied) or not waiting.asked:
            self._pop(outcome.id)
            self._answer(waiting, msgspec.structs.replace(outcome, id=waiting.own_id))

    def gone(self, scheduler: str) -> None:
        """A scheduler said goodbye: it does nothing any more."""
        reason = "action: the engine left before it answered"
        for hub_id in [hub_id for hub_id, waiting in self._waiting.items() if scheduler in waiting.asked]:
            self.outcome(scheduler, Rejected(hub_id, self._waiting[hub_id].reason or reason))

    def expire(self, now: float) -> None:
        """Answer what no scheduler answered, a while after it expired."""
        due = now - limits.ACTION_ANSWER_S_MAX
        for hub_id in [hub_id for hub_id, waiting in self._waiting.items() if due >= waiting.until]:
            waiting = self._pop(hub_id)
            reason = explain(
                f"action: the engine did not answer in {limits.ACTION_S_MAX:g} s; whether it did it is not known",
                do="see `capflow status` for whether the engine runs",
            )
            self._answer(waiting, Unknown(waiting.own_id, reason))

    def _pop(self, hub_id: str) -> _Waiting:
        waiting = self._waiting.pop(hub_id)
        self._count.give(waiting.owner, 1)
        self._state.give(waiting.owner, waiting.nbytes)
        return waiting

    def _answer(self, waiting: _Waiting, outcome: Outcome) -> None:
        match outcome:
            case ActionApplied():
                self.applied += 1
            case Rejected():
                self.rejected += 1
            case Unknown():
                self.unknown += 1
        waiting.answer(outcome)


def asked_of(action: Action, known: Sequence[Request], schedulers: Sequence[Hello]) -> tuple[list[str], str | None]:
    """Return the boots of the schedulers to ask to do an action, or why none of them is asked.

    The engine whose request it is, is asked, and never another. Of a request that the hub does not know, which consumers want no rows
    of, that is the only engine. An action with an incarnation is of one request, and so done by one engine, whoever is asked.

    known: the hub's requests of the id, of the engine that the action names if it names one.
    schedulers: all that are connected.
    """
    mine = [hello for hello in schedulers if is_of(hello.engine, action.engine)]
    if not mine:
        return [], NO_ENGINE if not schedulers else _no_such(action, schedulers)
    found = [request for request in known if request.status is None] or known
    if action.incarnation and len(found) != 1:
        return [hello.boot for hello in mine], None
    if len(found) > 1:
        return [], _several(action, "an id that several engines have", [request.key[0] for request in found])
    if found:
        engine, replica = found[0].engine, found[0].replica
        boots = [hello.boot for hello in mine if (hello.engine, hello.rank.dp) == (engine, replica)]
        if boots:
            return boots, None
        if found[0].status is None:
            return [], explain(f"request {action.request}", got=f"engine {name_of(engine)}, which is not connected")
    engines = {name_of(hello.engine) for hello in mine}
    if len(engines) > 1:
        return [], _several(action, "an id that the hub does not know, and several engines", engines)
    return [hello.boot for hello in mine], None


def _several(action: Action, got: str, engines: Iterable[str]) -> str:
    expected = f"the name of its engine, one of {_listed(engines)}"
    return explain(f"request {action.request}", got=got, expected=expected, do="name it, e.g. with --engine")


def _no_such(action: Action, schedulers: Sequence[Hello]) -> str:
    expected = f"one that is connected: {_listed({name_of(hello.engine) for hello in schedulers})}"
    return explain("engine of the action", got=action.engine, expected=expected)


def _listed(engines: Iterable[str]) -> str:
    names = sorted(engines)
    more = len(names) - limits.ENGINES_TOLD_MAX
    return ", ".join(names[: limits.ENGINES_TOLD_MAX]) + (f" and {more} more" if more > 0 else "")
