"""The relay: actions on their way to schedulers, and outcomes on their way back.

An action goes to one scheduler or to several. An action on a request has the first `ActionApplied` as its outcome, or
else the last `Rejected`. An action for whole engines is over when all their schedulers answered: it is applied if any
applied it, and its reason names the engines that did not. A scheduler whose connection was lost gets the action again
when it is back; it applies the action once, and repeats its first answer.

Invariant: an action that any scheduler applied is answered with `ActionApplied`. Schedulers ignore an expired action,
and the relay gives an outcome of its own only after that.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.errors import RoomError, explain
from capflow.hub.peers.roster import Peer
from capflow.hub.requests.request import Request
from capflow.protocol.message import Act, Hello
from capflow.steering.action import NO_ENGINE, Action, ActionApplied, Freeze, Outcome, Rejected, Unknown
from capflow.text.engine_name import is_of, name_of

# The memory of an action that waits: a fixed part, and so many bytes for each byte on the wire.
_ACTION_BYTES, _DECODED = 2048, 4


class Ask(NamedTuple):
    """An action, and who asked for it.

    own_id: the id that the asker gave the action.
    asked_by: the asker's name for consumers.
    owner: the owner of the memory that the action takes, as in `capflow.buffers.shares`.
    nbytes: the size of the action on the wire.
    lane: the number of the lane that asked; None for a client.
    peer: the client's connection.
    client: the session of the client when it asked.
    sender, number: as in `Act`.
    """

    own_id: str
    action: Action
    asked_by: str
    owner: str
    nbytes: int = 0
    lane: int | None = None
    peer: bytes = b""
    client: Peer | None = None
    sender: str = ""
    number: int = 0

    @property
    def key(self) -> tuple[str, str, int] | None:
        """Equal for the same action, however often it was sent; None for one that is never sent again."""
        return (self.asked_by, self.sender, self.number) if self.sender else None


class Settled(NamedTuple):
    """An action with its outcome, for who asked for it. The outcome has the id that the asker gave the action."""

    ask: Ask
    outcome: Outcome


class Heard(NamedTuple):
    """What became of an action on one engine, for consumers. Each engine has one, also if the action was sent again.

    engine: the engine that runs the request; "" if that is not known.
    """

    ask: Ask
    outcome: Outcome
    engine: str = ""


@dataclass(slots=True)
class _Waiting:
    """An action whose outcome is not known.

    engines: the engine of each scheduler that was asked, by its boot.
    has_request: whether the hub knows the request.
    asked: boots of schedulers that have not answered.
    until: when the action expires.
    nbytes: the memory that it takes.
    act: the message to the schedulers.
    every: whether all schedulers have to answer it.
    answers: the answers so far, by boot, in their order.
    left: boots of schedulers that left before they answered.
    repeats: the same action, sent again.
    """

    ask: Ask
    engines: Mapping[str, str]
    has_request: bool
    asked: tuple[str, ...]
    until: float
    nbytes: int
    act: Act
    every: bool = False
    answers: dict[str, Outcome] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    repeats: list[Ask] = field(default_factory=list)

    def of(self, engine: str) -> Outcome | None:
        """Return what became of the action on one engine; None if one of its schedulers has not answered."""
        boots = [boot for boot, name in self.engines.items() if name == engine]
        return None if any(boot in self.asked for boot in boots) else self._joined(boots)

    def of_all(self) -> Outcome:
        """Return what became of the action, when every scheduler has answered."""
        return self._joined(self.engines)

    def _joined(self, boots: Collection[str]) -> Outcome:
        """Return one outcome for the answers of some schedulers: applied if it holds anywhere."""
        answers = {boot: answer for boot, answer in self.answers.items() if boot in boots}
        applied = [answer for answer in answers.values() if isinstance(answer, ActionApplied)]
        if applied and isinstance(self.ask.action, Freeze):
            answers = {boot: answer for boot, answer in answers.items() if boot not in self.left}
        others = {boot: answer for boot, answer in answers.items() if not isinstance(answer, ActionApplied)}
        several = len({self.engines[boot] for boot in boots}) > 1
        reason = self._reason(others, several=several)[: limits.TEXT_LENGTH_MAX]
        if applied:
            return msgspec.structs.replace(applied[-1], reason=reason)
        kind = Unknown if any(isinstance(answer, Unknown) for answer in others.values()) else Rejected
        return kind(self.ask.own_id, reason)

    def _reason(self, others: Mapping[str, Outcome], *, several: bool) -> str:
        """Return why some schedulers did not apply the action; each engine is named if there are several."""
        reasons: dict[str, str] = {}
        # A replica that left says less than one that rejected the action.
        for boot, answer in sorted(others.items(), key=lambda item: item[0] not in self.left):
            reasons[self.engines[boot]] = answer.reason
        if not several:
            return next(iter(reasons.values()), "")
        listed = [f"{name_of(engine)}: {reason}" for engine, reason in reasons.items()]
        more = len(listed) - limits.ENGINES_TOLD_MAX
        return "; ".join(listed[: limits.ENGINES_TOLD_MAX]) + (f"; and {more} more engines" if more > 0 else "")


class Relay:
    """The actions that wait for their outcome.

    state: the memory that actions share.
    hub_id: an id that no other hub has.
    """

    def __init__(self, state: Shares, hub_id: str) -> None:
        self.applied = 0
        self.rejected = 0
        self.unknown = 0
        # The answers to actions that were sent again while the first was under way; `Actions` takes them.
        self.repeats: list[Settled] = []
        self._count = Shares("actions waiting for an engine", limits.ACTIONS_WAITING_MAX, unit="actions")
        self._state = state
        # The waiting actions by the id that the hub gave them, until the outcome, or a while after `until`.
        self._waiting: dict[str, _Waiting] = {}
        self._hub_id = hub_id
        self._ids = itertools.count(1)
        # For actions that may be sent again: the id that the hub gave them, or their outcome; the oldest first.
        self._answers: dict[tuple[str, str, int], str | Outcome] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def repeated(self, ask: Ask) -> list[Settled] | None:
        """Take an action that came before, and return its outcome if it has one; None if it did not come before."""
        answer = self._answers.get(ask.key) if ask.key is not None else None
        if answer is None:
            return None
        if not isinstance(answer, str):
            return [Settled(ask, msgspec.structs.replace(answer, id=ask.own_id))]
        self._waiting[answer].repeats.append(ask)
        return []

    def ask(
        self, ask: Ask, schedulers: Mapping[str, str], now: float, *, has_request: bool, every: bool = False
    ) -> Act | list[Heard | Settled]:
        """Return the message for the schedulers, or the outcome when there is no room for the action.

        every: whether all schedulers have to answer the action.
        schedulers: the engine of each scheduler, by its boot.
        has_request: whether the hub knows the request.
        """
        owner, memory = ask.owner, _ACTION_BYTES + _DECODED * ask.nbytes
        try:
            self._state.take(owner, memory, label="actions waiting for an engine")
            if not self._count.offer(owner, 1):
                self._state.give(owner, memory)
                self._count.take(owner, 1)
        except RoomError as e:
            engine = _engine_of(schedulers.values(), has_request=has_request)
            outcome = Rejected(ask.own_id, str(e))
            return [Heard(ask, outcome, engine), self._settled(ask, outcome)]
        until = now + limits.ACTION_S_MAX
        action = msgspec.structs.replace(ask.action, engine="")
        act_id = f"{self._hub_id}-{next(self._ids)}"
        act = Act(act_id, action, until, ask.sender, ask.number, ask.asked_by)
        engines, boots = dict(schedulers), tuple(schedulers)
        self._waiting[act.id] = _Waiting(ask, engines, has_request, boots, until, memory, act, every=every)
        self._keep(ask, act.id)
        return act

    def refuse(self, ask: Ask, reason: str) -> list[Heard | Settled]:
        """Return the rejection of an action that no scheduler is asked to do; sent again, it is looked at again."""
        self.rejected += 1
        outcome = Rejected(ask.own_id, reason)
        return [Heard(ask, outcome), Settled(ask, outcome)]

    def again(self, scheduler: str, now: float) -> list[Act]:
        """Return the messages for a scheduler that is back: actions that have no answer of it and are not expired."""
        waits = (waiting for waiting in self._waiting.values() if scheduler in waiting.asked and now < waiting.until)
        return [waiting.act for waiting in waits]

    def outcome(self, scheduler: str, outcome: Outcome) -> list[Heard | Settled]:
        """Take a scheduler's answer; return what it decides: the outcome on its engine, and that of the action."""
        hub_id = outcome.id
        waiting = self._waiting.get(hub_id)
        if waiting is None or scheduler not in waiting.asked:
            return []
        waiting.asked = tuple(boot for boot in waiting.asked if boot != scheduler)
        answer = msgspec.structs.replace(outcome, id=waiting.ask.own_id)
        waiting.answers[scheduler] = answer
        engine = waiting.engines[scheduler]
        if not waiting.every:
            if waiting.asked and not isinstance(answer, ActionApplied):
                return []
            if isinstance(answer, ActionApplied):
                return [Heard(waiting.ask, answer, engine), self._end(hub_id, answer)]
            answers = [each for boot, each in waiting.answers.items() if boot not in waiting.left]
            answer = answers[-1] if answers else answer
            engine = _engine_of(waiting.engines.values(), has_request=waiting.has_request)
            return [Heard(waiting.ask, answer, engine), self._end(hub_id, answer)]
        heard = waiting.of(engine)
        decided: list[Heard | Settled] = [] if heard is None else [Heard(waiting.ask, heard, engine)]
        return decided if waiting.asked else [*decided, self._end(hub_id, waiting.of_all())]

    def gone(self, scheduler: str) -> list[Heard | Settled]:
        """Note that a scheduler left; return what this decides. Nothing steers its requests any more."""
        asked = [hub_id for hub_id, waiting in self._waiting.items() if scheduler in waiting.asked]
        decided: list[Heard | Settled] = []
        for hub_id in asked:
            self._waiting[hub_id].left.add(scheduler)
            decided += self.outcome(scheduler, Rejected(hub_id, "action: the engine left before it answered"))
        return decided

    def expire(self, now: float) -> list[Heard | Settled]:
        """Return what is decided about actions that expired a while ago without an answer."""
        due = now - limits.ACTION_ANSWER_S_MAX
        reason = explain(
            f"action: the engine did not answer in {limits.ACTION_S_MAX:g} s; whether it did it is not known",
            do="see `capflow status` for whether the engine runs",
        )
        decided: list[Heard | Settled] = []
        for hub_id, waiting in [(hub_id, each) for hub_id, each in self._waiting.items() if due >= each.until]:
            if waiting.every:
                for boot in waiting.asked:
                    decided += self.outcome(boot, Unknown(hub_id, reason))
                continue
            unknown = Unknown(waiting.ask.own_id, reason)
            engine = _engine_of(waiting.engines.values(), has_request=waiting.has_request)
            decided += [Heard(waiting.ask, unknown, engine), self._end(hub_id, unknown)]
        return decided

    def _end(self, hub_id: str, outcome: Outcome) -> Settled:
        waiting = self._waiting.pop(hub_id)
        self._count.give(waiting.ask.owner, 1)
        self._state.give(waiting.ask.owner, waiting.nbytes)
        self.repeats += (Settled(ask, msgspec.structs.replace(outcome, id=ask.own_id)) for ask in waiting.repeats)
        return self._settled(waiting.ask, outcome)

    def _keep(self, ask: Ask, answer: str | Outcome) -> None:
        """Keep the answer to an action for the case that it is sent again."""
        if ask.key is None:
            return
        self._answers[ask.key] = answer
        if len(self._answers) > limits.ACTIONS_KNOWN_MAX:
            oldest = next(iter(self._answers))
            if not isinstance(self._answers[oldest], str):
                del self._answers[oldest]

    def _settled(self, ask: Ask, outcome: Outcome) -> Settled:
        self._keep(ask, outcome)
        match outcome:
            case ActionApplied():
                self.applied += 1
            case Rejected():
                self.rejected += 1
            case Unknown():
                self.unknown += 1
        return Settled(ask, outcome)


def _engine_of(engines: Iterable[str], *, has_request: bool) -> str:
    """Return the engine that runs a request, of the engines that were asked; "" if that is not known."""
    names = set(engines)
    return names.pop() if len(names) == 1 and has_request else ""


def asked_of(action: Action, named: Sequence[Request], schedulers: Sequence[Hello]) -> tuple[list[str], str | None]:
    """Return the boots of the schedulers to ask for an action, or why none of them is asked.

    Only the engine that runs the request is asked. If the hub does not know the request, because no consumer wants rows
    of it, this is the only engine. An action with an incarnation belongs to one request, so several engines may be
    asked.

    An action without a request is for every engine, or for the one that it names.

    named: the hub's requests of this id; if the action names an engine, only the requests of that engine.
    schedulers: all connected schedulers.
    """
    mine = [hello for hello in schedulers if is_of(hello.engine, action.engine)]
    if not mine:
        return [], NO_ENGINE if not schedulers else _no_such(action, schedulers)
    if not action.request:
        return [hello.boot for hello in mine], None
    requests = [request for request in named if request.status is None] or named
    if action.incarnation and len(requests) != 1:
        return [hello.boot for hello in mine], None
    if len(requests) > 1:
        return [], _several(action, "an id that several engines have", [request.key[0] for request in requests])
    if requests:
        engine, replica = requests[0].engine, requests[0].replica
        boots = [hello.boot for hello in mine if (hello.engine, hello.rank.dp) == (engine, replica)]
        if boots:
            return boots, None
        if requests[0].status is None:
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
