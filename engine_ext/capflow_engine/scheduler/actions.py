"""The actions on running requests, in the process of the scheduler: what applies where, until when, and what is frozen.

Workers get each change with the orders of a step. The scheduler counts what actions need of the steering bank, so what
it orders always fits. It decides when the time of a lease is over, once for all ranks.

Invariant: an action is answered once, and one that is answered with `Rejected` is in no order.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from capflow.capture.model import ModelInfo
from capflow.errors import UsageError, explain
from capflow.protocol.message import Act
from capflow.steering.action import (
    FROZEN,
    ActionApplied,
    Freeze,
    Gain,
    Leased,
    Outcome,
    Rejected,
    SetGate,
    Steer,
    Unfreeze,
    Unsteer,
    check_action,
    not_running,
)
from capflow.steering.compose import fits, own
from capflow.steering.program import SteeringProgram
from capflow.steering.request import Steering, Tier
from capflow_engine.scheduler.orders import FreezeOrder, LeaseEnd, News, Ordered
from capflow_engine.steering.budget import HOLDS_MORE, Holdings, Need, needs_of
from capflow_engine.steering.timeline import (
    ENGINE,
    FOREVER,
    HUB,
    ActionSlot,
    Timeline,
    TimelinePart,
    check_owner,
    composed,
    entry_of,
    hub_owner,
    owners_of,
    slot_of,
    steering,
)

logger = logging.getLogger("vllm.capflow.scheduler")


class RunningRequest(NamedTuple):
    """A running request.

    request: vLLM's.
    name: its id outside of vLLM.
    program: the steering that it came with.
    split: its first position that is steered like a generated one.
    controllers: the names of the controllers that see it.
    preempted_at: how many positions it had computed when it was preempted, with those of steps under way.
    """

    request: Any
    name: str
    program: SteeringProgram | None
    split: int
    controllers: Sequence[str] = ()
    preempted_at: int = 0

    @property
    def reached(self) -> int:
        """Its first position that was never computed. A preempted request has computed nothing in vLLM's eyes."""
        request = self.request
        computed: int = max(request.num_computed_tokens, self.preempted_at)
        generating = request.num_tokens > request.num_prompt_tokens
        return max(computed, request.num_tokens - 1) if generating else computed

    def forked(self, *, after_prompt: bool = False) -> int:
        """Return the position from which an action changes its cache blocks.

        Drafts under way may be rejected. Blocks that are in the cache already end before the last token.
        """
        tokens: int = self.request.num_tokens
        prompt: int = self.request.num_prompt_tokens
        first = min(self.reached, tokens - 1)
        return max(first, prompt) if after_prompt else first


class Taken(NamedTuple):
    """An action that a step's orders have.

    key: vLLM's id of its request; empty for all requests of the engine.
    position: the first position at which it holds, if the drafts under way are all accepted.
    """

    action_id: str
    key: str = ""
    position: int | None = None


class _Lease(NamedTuple):
    """An action that ends by itself.

    over_s: when its time is over, on the monotonic clock; None without a time.
    until: the position where it ends; `FOREVER` without one.
    """

    over_s: float | None
    until: int
    by: str
    ends: Unsteer | Gain | SetGate
    label: str


class EngineActions:
    """The actions of one engine.

    held: the parts of the bank that the engine's requests hold.
    waiting: the needs of each request that waits for room in the bank; they change with the gains of the engine.
    fork: gives a request's cache blocks from a position on a key of their own.
    note: reports an action on a request: vLLM's id, the action, and its first position.
    answer: sends an outcome.
    certain: takes vLLM's request, which gets no drafts from the next step on, so that its positions are certain.
    controllers: returns the owners' names of all hubs' controllers; called in any thread.
    taking: whether a step is being scheduled. `begin` sets it; the caller ends it when the step has its orders.
    """

    def __init__(
        self,
        info: ModelInfo,
        held: Holdings,
        waiting: MutableMapping[str, tuple[Need, ...]],
        *,
        fork: Callable[[Any, int], None],
        note: Callable[[str, Steer | Unsteer | Gain | SetGate, int], None],
        answer: Callable[[Outcome], None],
        certain: Callable[[Any], None] = lambda _: None,
        controllers: Callable[[], Iterable[str]] = lambda: (),
    ) -> None:
        self.gains: dict[str, float] = {}
        self.frozen = False
        self._info = info
        self._held = held
        self._waiting = waiting
        self._fork, self._note, self._answer, self._certain = fork, note, answer, certain
        self._controllers = controllers
        self._numbers = itertools.count()
        # By vLLM's id, for requests that an action changed, or that a gain of the engine may change.
        self._timelines: dict[str, Timeline] = {}
        # The names of the holdings in the bank that actions made, by request and by needs.
        self._acted: dict[str, dict[tuple[Need, ...], str]] = {}
        self._leases: dict[tuple[str, ActionSlot], _Lease] = {}
        # For the next step's orders: the action's id, what is ordered, and its position.
        self._ordered: list[tuple[str, Ordered, int | None]] = []
        self._ended: list[LeaseEnd] = []
        self._freezes: list[FreezeOrder] = []
        # Ids of freezes and their ends that are answered with the next step.
        self._frozen_ids: list[str] = []
        # Actions for the engine that were answered while it was idle; guarded by `_lock`.
        self._latched: list[Act] = []
        # It is set under `_lock`, so that nothing is latched from then on.
        self.taking = False
        self._lock = threading.Lock()

    def admit(self, key: str, program: SteeringProgram | None) -> SteeringProgram | None:
        """Return the steering of a new request under the gains of the engine; nothing but its own if it is frozen."""
        if program is None or not (self.gains or self.frozen):
            return program
        timeline = self._timelines[key] = Timeline(self.gains, frozen=self.frozen)
        return composed(program, timeline.parts[0].live, self._info)

    def end(self, key: str, name: str | None) -> None:
        """Forget a request that ended, and reject the actions on it that no step took."""
        self._timelines.pop(key, None)
        for held in self._acted.pop(key, {}).values():
            self._held.release(held)
        for lease in [lease for lease in self._leases if lease[0] == key]:
            del self._leases[lease]
        for action_id, ordered, _ in self._ordered:
            if ordered.key == key:
                self._answer(Rejected(action_id, not_running(name)))
        self._ordered = [each for each in self._ordered if each[1].key != key]

    def reaches(self, key: str) -> bool:
        """Return whether an action reached a request, or a gain of the engine may."""
        return key in self._timelines

    def shift(self, key: str, first: int, count: int) -> None:
        """Lower the positions of a request's actions that apply from position `first` or from a later one."""
        if key in self._timelines:
            self._timelines[key].shift(first, count)
            for (its, slot), lease in self._leases.items():
                entry = self._timelines[key].parts[-1].entries.get(slot)
                if its == key and entry is not None:
                    self._leases[its, slot] = lease._replace(until=entry.until)

    def begin(self, running: Callable[[], Iterable[tuple[str, RunningRequest]]]) -> None:
        """Begin a step: take what was answered while the engine was idle, and end leases."""
        with self._lock:
            self.taking, latched = True, bool(self._latched)
        if latched:
            self.catch_up(running)
        if self._leases:
            self._end_leases(dict(running()))

    def catch_up(self, running: Callable[[], Iterable[tuple[str, RunningRequest]]]) -> None:
        """Take what was answered while the engine was idle."""
        with self._lock:
            latched, self._latched = self._latched, []
        for act in latched:
            if (reason := self.apply_to_all(act, running, answered=True)) is not None:
                logger.error("%s", reason)

    def at_once(self, act: Act, step: int, *, idle: bool) -> Outcome | None:
        """Answer an action for the whole engine while the engine is idle; None if the next step takes it.

        It is called in another thread. The first step that begins afterwards takes the action.

        idle: whether no request runs.
        """
        with self._lock:
            if self.taking or not (idle or isinstance(act.action, Freeze | Unfreeze)):
                return None
            latched = [isinstance(each.action, Freeze) for each in self._latched if not isinstance(each.action, Gain)]
            try:
                self._check_engine(act.action, (), self._gains_after_latched(), frozen=[self.frozen, *latched][-1])
            except UsageError as e:
                return Rejected(act.id, str(e))
            self._latched.append(act)
        return ActionApplied(act.id, step + 1)

    def apply(self, act: Act, key: str, running: RunningRequest) -> str | None:
        """Prepare an action on a request for the next step; return the reason if it cannot be applied, else None."""
        action = act.action
        assert isinstance(action, Steer | Unsteer | Gain | SetGate)
        owner = hub_owner(act.owner)
        first = running.reached
        if isinstance(action, Steer | Unsteer):
            first = max(first, running.request.num_prompt_tokens)
        try:
            self._check(action, key, running)
            slot, entry = slot_of(action, owner), entry_of(action, owner, first)
            timeline = self._timeline(key).copy()
            timeline.set(first, {slot: entry})
            needs = self._needs(running, [part for part in timeline.parts if part.first >= first])
        except UsageError as e:
            return str(e)
        if (reason := self._hold(key, needs)) is not None:
            return reason
        self._timelines[key] = timeline
        if not isinstance(action, Unsteer):
            self._fork(running.request, running.forked(after_prompt=isinstance(action, Steer)))
        if entry.until != FOREVER:
            self._certain(running.request)
        self._lease(key, slot, action, entry.until, act.owner)
        self._ordered.append((act.id, Ordered(key, act.owner, action, running.request.num_prompt_tokens), first))
        return None

    def apply_to_all(
        self, act: Act, running: Callable[[], Iterable[tuple[str, RunningRequest]]], *, answered: bool = False
    ) -> str | None:
        """Prepare an action on the whole engine for the next step; return the reason if it cannot be applied.

        answered: whether it was answered already.
        """
        action, action_id = act.action, "" if answered else act.id
        requests = dict(running())
        try:
            self._check_engine(action, requests.values(), self.gains, frozen=self.frozen)
        except UsageError as e:
            return str(e)
        if isinstance(action, Gain):
            return self._gain_all(action_id, act.owner, action, requests)
        frozen = isinstance(action, Freeze)
        self._frozen_ids += [action_id] if action_id else []
        if frozen == self.frozen:
            return None
        self.frozen = frozen
        self._freezes.append(FreezeOrder(frozen, action.label))
        self._leases.clear()
        for rejected, ordered, _ in self._ordered:
            if ordered.key:  # it would hold for no position
                self._answer(Rejected(rejected, FROZEN))
        self._ordered = [each for each in self._ordered if not each[1].key]
        for key, each in requests.items():
            if each.program is None and key not in self._timelines:
                continue
            timeline = self._timeline(key)
            if frozen:
                timeline.freeze(each.reached)
            else:
                timeline.unfreeze(each.reached, self.gains)
            self._after_all(key, each, timeline)
        return None

    @property
    def any(self) -> bool:
        """Whether there is anything for the next step's orders."""
        return bool(self._ordered or self._ended or self._freezes or self._frozen_ids)

    def take(self, news: News) -> list[Taken]:
        """Put everything into a step's orders; return the actions that it has and that are to be answered."""
        ordered, self._ordered = self._ordered, []
        for _, (key, _, action, _), position in ordered:
            if position is not None:
                self._note(key, action, position)
        news.actions = [each for _, each, _ in ordered]
        news.leases, self._ended = self._ended, []
        news.freezes, self._freezes = self._freezes, []
        frozen, self._frozen_ids = self._frozen_ids, []
        taken = [Taken(action_id, each.key, position) for action_id, each, position in ordered if action_id]
        return [*(Taken(action_id) for action_id in frozen), *taken]

    def _gain_all(self, action_id: str, by: str, action: Gain, requests: Mapping[str, RunningRequest]) -> str | None:
        after: dict[str, Timeline] = {}
        held: list[tuple[str, tuple[Need, ...]]] = []
        slot, reason = slot_of(action, ENGINE), None
        for key, each in requests.items():
            if each.program is None and key not in self._timelines:
                continue
            timeline = after[key] = self._timeline(key).copy()
            timeline.set(each.reached, {slot: entry_of(action, ENGINE, each.reached)})
            try:
                needs = self._needs(each, timeline.parts, since=each.reached)
            except UsageError as e:
                reason = f"request {each.name}: {e}"
                break
            if key in self._waiting:
                continue
            new = needs and needs not in self._acted.get(key, {})
            if (reason := self._hold(key, needs)) is not None:
                break
            held += [(key, needs)] if new else []
        if reason is not None:
            for other, some in held:
                self._held.release(self._acted[other].pop(some))
            return reason
        self._timelines |= after
        _set_gain(self.gains, action)
        for key, timeline in after.items():
            self._leases.pop((key, slot_of(action, ENGINE)), None)  # a request's own gain is replaced with its lease
            self._after_all(key, requests[key], timeline)
        self._ordered.append((action_id, Ordered("", by, action), None))
        return None

    def _after_all(self, key: str, running: RunningRequest, timeline: Timeline) -> None:
        """Key the cache of a request that a change of the engine reaches, and count what it needs."""
        self._timelines[key] = timeline
        self._fork(running.request, running.forked())
        needs = self._needs(running, timeline.parts, since=running.reached)
        if key in self._waiting:
            self._waiting[key] = needs
        elif (reason := self._hold(key, needs)) is not None:
            logger.error("request %s: %s; nothing steers it", running.name, reason)

    def _gains_after_latched(self) -> dict[str, float]:
        """Return the gains of the engine with those that were answered while it was idle."""
        gains = dict(self.gains)
        for act in self._latched:
            if isinstance(act.action, Gain):
                _set_gain(gains, act.action)
        return gains

    def _check_engine(
        self, action: Any, requests: Iterable[RunningRequest], gains: Mapping[str, float], *, frozen: bool
    ) -> None:
        """Raise UsageError for an action that cannot be done to the whole engine.

        gains: those of the engine before it.
        """
        check_action(action)
        if not isinstance(action, Gain):
            return
        if frozen:
            raise UsageError(FROZEN)
        names = {"request", "global", HUB.name, *self._controllers(), *gains}
        names |= {name for each in requests for name in self._owners("", each)}
        names |= {slot.owner.gain_name for timeline in list(self._timelines.values()) for slot in steering(timeline)}
        # Modules are known to the front ends alone, which read them.
        check_owner(action.owner, names, "module ")

    def _check(self, action: Steer | Unsteer | Gain | SetGate, key: str, running: RunningRequest) -> None:
        """Raise UsageError for an action that does not fit the model or its request."""
        check_action(action)
        if self.frozen:
            raise UsageError(FROZEN)
        match action:
            case Steer():
                Steering(base=Tier(action.vectors, action.clamps)).check(self._info)
            case Gain():
                check_owner(action.owner, self._owners(key, running))
            case SetGate():
                gates = () if running.program is None else [gate.name for gate in running.program.gates]
                if action.gate not in gates:
                    expected = (
                        f"a gate of the request ({', '.join(sorted(gates))})" if gates else "a request with gates"
                    )
                    raise UsageError(explain("set_gate.gate", got=action.gate, expected=expected))
            case _:
                pass

    def _owners(self, key: str, running: RunningRequest) -> set[str]:
        """Return the owners that contribute, or may contribute, to a request."""
        return owners_of(running.program, running.controllers, self._timelines.get(key))

    def _timeline(self, key: str) -> Timeline:
        if key not in self._timelines:
            self._timelines[key] = Timeline(self.gains, frozen=self.frozen)
        return self._timelines[key]

    def _needs(self, running: RunningRequest, parts: Sequence[TimelinePart], *, since: int = 0) -> tuple[Need, ...]:
        """Return what a request needs of the bank for some parts of its timeline; UsageError if they cannot run."""
        needs: dict[str, Need] = {}
        for part in parts:
            if part.first >= since:
                program = composed(running.program, part.live, self._info)
                if not fits(program):
                    do = "add fewer clamps or vectors there"
                    raise UsageError(explain("action", got="too many operations at one site", expected="fewer", do=do))
                if program is not None:
                    needs |= {need.key: need for need in needs_of(program, running.split)}
        return tuple(needs.values())

    def _hold(self, key: str, needs: tuple[Need, ...]) -> str | None:
        """Hold the room in the bank that an action needs, until the request ends; return the reason if it lacks it.

        Holdings of earlier actions stay: a preempted request computes again the positions that they steered.
        """
        acted = self._acted.setdefault(key, {})
        if not needs or needs in acted:
            return None
        name = f"{key} {next(self._numbers)}"
        if not self._held.hold(name, needs):
            lacking = self._held.lacking(needs)
            assert lacking is not None
            do = f"try again when requests have ended, or start the engine with {HOLDS_MORE[lacking]}"
            got = f"no room for more {lacking} beside those of the running requests"
            return explain("steering bank", got=got, do=do)
        acted[needs] = name
        return None

    def _lease(self, key: str, slot: ActionSlot, action: Steer | Unsteer | Gain | SetGate, until: int, by: str) -> None:
        """Note when an action ends; it replaces the action of its slot."""
        self._leases.pop((key, slot), None)
        if not isinstance(action, Leased) or action.lease_s is action.lease_positions is None:
            return
        ends: Unsteer | Gain | SetGate
        match action:
            case Steer():
                ends = Unsteer(action.request)
            case Gain():
                ends = Gain(action.request, action.owner, 1.0)
            case SetGate():
                ends = SetGate(action.request, action.gate)
        over_s = None if action.lease_s is None else time.monotonic() + action.lease_s
        self._leases[key, slot] = _Lease(over_s, until, by, ends, action.label)

    def _end_leases(self, requests: Mapping[str, RunningRequest]) -> None:
        """Order the ends of the leases that are over."""
        now = time.monotonic()
        for (key, slot), lease in list(self._leases.items()):
            running = requests[key]
            first = running.reached
            if lease.until <= first:
                self._ended.append(LeaseEnd(key, lease.by, None, lease.until, lease.label))
            elif lease.over_s is not None and now >= lease.over_s:
                if slot.kind == "steer":
                    first = max(first, running.request.num_prompt_tokens)
                self._timelines[key].set(first, {slot: entry_of(lease.ends, hub_owner(lease.by), first)})
                self._ended.append(LeaseEnd(key, lease.by, lease.ends, first, lease.label))
            else:
                continue
            del self._leases[key, slot]


def frozen_needs(program: SteeringProgram | None, split: int) -> tuple[Need, ...]:
    """Return what a request needs of the bank when the engine is frozen."""
    kept = own(program)
    return () if kept is None or kept is program else needs_of(kept, split)


def _set_gain(gains: dict[str, float], gain: Gain) -> None:
    gains.pop(gain.owner, None)
    if gain.scale != 1.0:
        gains[gain.owner] = gain.scale
