"""The steering of one worker's requests, by position: the program of each request, and the later actions on it.

An action applies from a position on. The steering before it stays in the bank until the request ends, because a
preempted request computes those positions again.

The vectors of several owners add up, each owner's as operations of its own: first those of controllers, in the order of
their hub's list, then those that came through a hub.

Invariant: a position is steered by the program that applied when it was first computed.
Invariant: the programs of requests and of actions through a hub always fit in the bank, because the scheduler counted
them. The vectors of controllers have a reserve of their own (`Size.reserve`); an action that does not fit in it changes
nothing.

Each rank composes an action with the request's program. The scheduler compiles the programs of requests. It composes
actions through a hub only to count their needs, because vectors of controllers, which only workers have, come between
the two. Composing takes 30 µs for one vector of width 4096 and 0.4 ms for 32. A worker would read a composed program in
3 and 22 µs, but orders would have its vectors twice: 16 KiB more for each.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from capflow.capture.model import ModelInfo
from capflow.errors import CapflowError, UsageError, explain
from capflow.steering.action import Gain, SetGate, Steer, Unsteer
from capflow.steering.program import SteeringProgram
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.budget import Holdings, Need, Size, needs_of
from capflow_engine.steering.timeline import (
    ENGINE,
    FOREVER,
    HUB,
    ActionSlot,
    Live,
    Owner,
    Timeline,
    TimelinePart,
    check_owner,
    composed,
    entry_of,
    owners_of,
    slot_of,
)
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import NOTHING, Bank
from capflow_engine.taps.requests import Tracked

logger = logging.getLogger("vllm.capflow.worker")

__all__ = ["ENGINE", "HUB", "Histories", "Owner"]


class _Change(NamedTuple):
    """The steering of a request from a position on; there is one for each part of its timeline.

    held: the position and the slots of the bank.
    needs: its part of the reserve.
    reserved: the name under which the reserve holds `needs`; empty if it needs nothing.
    """

    held: SlotRange
    needs: tuple[Need, ...] = ()
    reserved: str = ""


class LeaseOver(NamedTuple):
    """The lease of a controller's action has ended.

    key: vLLM's id of the request.
    position: the first position at which the action does not hold.
    label: of the action.
    """

    key: str
    slot: ActionSlot
    position: int
    label: str


class _History:
    """The history of one request.

    changes: one for each part of the timeline.
    steered: the slots of each change.
    """

    def __init__(self, tracked: Tracked, program: SteeringProgram | None, timeline: Timeline) -> None:
        self.tracked, self.program, self.timeline = tracked, program, timeline
        self.changes: list[_Change] = []
        self.steered: list[SlotRange] = []


class Histories:
    """The histories of one worker's requests.

    reserve: the part of the bank for what controllers add.
    gains: those of owners for all requests.
    frozen: whether nothing but a request's own steering holds.
    leases: the labels of the leased actions of controllers.
    """

    def __init__(self, bank: Bank, reserve: Size, info: ModelInfo) -> None:
        self.reserve = Holdings(reserve)
        self._bank = bank
        self._info = info
        # By vLLM's id, for requests that were ever steered.
        self._histories: dict[str, _History] = {}
        self._numbers = itertools.count()
        self.gains: dict[str, float] = {}
        self.frozen = False
        self.leases: dict[tuple[str, ActionSlot], str] = {}

    def admit(self, tracked: Tracked, program: SteeringProgram) -> None:
        """Steer a new request by its own program, under the gains of the engine, and less if the engine is frozen.

        A program that the bank does not take costs this request its steering, and the engine nothing.
        """
        self._histories[tracked.key] = _History(tracked, program, Timeline(self.gains, frozen=self.frozen))
        try:
            self._renew(tracked, 0)
        except CapflowError as e:
            logger.error("request %s: %s; nothing steers it", tracked.id, e)
            self.forget(tracked)

    def vectors(self, key: str) -> Mapping[Owner, tuple[SteeringVector, ...]]:
        """Return the vectors that are added at a request's next position, by owner."""
        history = self._histories.get(key)
        if history is None:
            return {}
        live = history.timeline.at(_first(history.tracked)).live
        return {slot.owner: live[slot].vectors for slot in sorted(live) if slot.kind == "steer"}

    def act(
        self,
        tracked: Tracked,
        owner: Owner,
        action: Steer | Unsteer | Gain | SetGate,
        *,
        prompt_length: int = 0,
        controllers: Iterable[str] = (),
    ) -> bool:
        """Apply an owner's action to a request from its next position on; return whether it changed anything.

        Vectors and clamps steer generated positions only, and controllers change no others. If what controllers do does
        not fit in the reserve, CapflowError is raised and nothing is changed. An action through a hub always fits: if
        necessary, what controllers added to the request is dropped.

        prompt_length: of the request, if it may be longer than this worker knows.
        controllers: the names of those that see the request; a controller's gain may be of one of them.
        """
        steers = isinstance(action, Steer | Unsteer) or not owner.by_hub
        first = max(_first(tracked), prompt_length) if steers else tracked.computed
        slot, entry = slot_of(action, owner), entry_of(action, owner, first)
        if not owner.by_hub:
            self._check(tracked.key, action, controllers)
        history = self._history(tracked)
        before = history.timeline.parts[-1].entries.get(slot)
        later = before is not None and before.first > first  # as it was planned, before drafts were rejected
        if (
            not later
            and (None if before is None or not before.holds_at(first) else before.value, FOREVER)
            == (
                entry.value,
                entry.until,
            )
            and (before is None or before.until == FOREVER)
        ):
            return False
        kept = history.timeline.copy()
        history.timeline.set(first, {slot: entry})
        try:
            self._renew(tracked, first, by_hub=owner.by_hub)
        except CapflowError:
            history.timeline = kept
            self._renew(tracked, first, by_hub=True)
            raise
        if not owner.by_hub and entry.until != FOREVER:
            self.leases[tracked.key, slot] = action.label
        return True

    def ended_leases(self) -> list[LeaseOver]:
        """Return the leases of controllers' actions that have ended, each once."""
        over = []
        for (key, slot), label in list(self.leases.items()):
            history = self._histories[key]
            entry = history.timeline.parts[-1].entries.get(slot)
            if entry is None or entry.until == FOREVER:  # it was undone or replaced
                del self.leases[key, slot]
            elif entry.until <= history.tracked.computed:
                del self.leases[key, slot]
                over.append(LeaseOver(key, slot, entry.until, label))
        return over

    def freeze(self, tracked: Tracked, *, frozen: bool) -> None:
        """Take back everything but a request's own steering from its next position on, or end that."""
        if tracked.key in self._histories:
            timeline = self._history(tracked).timeline
            if frozen:
                timeline.freeze(tracked.computed)
            else:
                timeline.unfreeze(tracked.computed, self.gains)
            self._renew(tracked, tracked.computed, by_hub=True)

    def lengthen(self, tracked: Tracked) -> None:
        """Continue the steering of a request whose prompt grew by the generated tokens and by more input."""
        if tracked.key in self._histories:
            timeline = self._history(tracked).timeline
            timeline.set(tracked.computed, {})
            timeline.split(tracked.computed)
            self._renew(tracked, tracked.computed, by_hub=True)

    def cut(self, tracked: Tracked, limit: int) -> None:
        """Undo the actions that controllers took on rows at position `limit` and later, which belong to no request."""
        if tracked.key in self._histories:
            first = self._history(tracked).timeline.cut(limit)
            if first is not None:
                self._renew(tracked, first, by_hub=True)

    def shift(self, tracked: Tracked, first: int, count: int) -> None:
        """Lower the positions of the actions that apply from position `first` or from a later one by `count`."""
        history = self._histories.get(tracked.key)
        if history is None:
            return
        history.timeline.shift(first, count)
        self._renew(tracked, first - count, by_hub=True)

    def forget(self, tracked: Tracked) -> None:
        """Give back everything that a finished request holds."""
        history = self._histories.pop(tracked.key, None)
        for lease in [lease for lease in self.leases if lease[0] == tracked.key]:
            del self.leases[lease]
        if history is not None:
            self._drop(history, 0)
            tracked.steered = None

    def _check(self, key: str, action: Steer | Unsteer | Gain | SetGate, controllers: Iterable[str]) -> None:
        """Raise UsageError for a controller's action that does not fit the request or what holds on it."""
        if isinstance(action, Gain):
            history = self._histories.get(key)
            program, timeline = (None, None) if history is None else (history.program, history.timeline)
            check_owner(action.owner, owners_of(program, controllers, timeline))
        if isinstance(action, SetGate):
            program = self._histories[key].program if key in self._histories else None
            gates = () if program is None else [gate.name for gate in program.gates]
            if action.gate not in gates:
                expected = f"a gate of the request ({', '.join(sorted(gates))})" if gates else "a request with gates"
                raise UsageError(explain("set_gate.gate", got=action.gate, expected=expected))

    def _history(self, tracked: Tracked) -> _History:
        history = self._histories.get(tracked.key)
        if history is None:
            timeline = Timeline(self.gains, frozen=self.frozen)
            history = self._histories[tracked.key] = _History(tracked, None, timeline)
        history.tracked = tracked  # it is replaced when the prompt grows
        return history

    def _renew(self, tracked: Tracked, first: int, *, by_hub: bool = False) -> None:
        """Put the parts of a request's timeline from position `first` on into the bank.

        If the bank has no room, CapflowError is raised, and with `by_hub` what controllers added is dropped instead.
        """
        history = self._histories[tracked.key]
        self._drop(history, first)
        parts = history.timeline.parts
        for number in range(len(history.changes), len(parts)):
            part = parts[number]
            try:
                change = self._change(history, part.first, part.live, part.ordered)
            except CapflowError:
                if not by_hub:
                    raise
                logger.error("request %s: the steering bank is full; controllers no longer steer it", tracked.id)
                entries = {slot: entry for slot, entry in part.entries.items() if entry.by.by_hub}
                parts[number] = part._replace(entries=entries)
                change = self._ordered_change(history, part)
            history.changes.append(change)
            history.steered.append(change.held)
        unsteered = len(history.steered) == 1 and history.steered[0].steered is NOTHING
        tracked.steered = None if unsteered else history.steered

    def _ordered_change(self, history: _History, part: TimelinePart) -> _Change:
        """Return the steering of a request without controllers; none if the bank has no room for a frozen request."""
        try:
            return self._change(history, part.first, part.ordered, part.ordered)
        except CapflowError:
            logger.error("request %s: the steering bank is full; nothing steers it", history.tracked.id)
            return _Change(SlotRange.of(part.first, history.tracked.steered_from, NOTHING, None, None))

    def _drop(self, history: _History, first: int) -> None:
        """Give back the changes that apply from position `first` or from a later one."""
        while history.changes and history.changes[-1].held.first >= first:
            change = history.changes.pop()
            history.steered.pop()
            self._bank.release(change.held.steered)
            self.reserve.release(change.reserved)

    def _change(self, history: _History, first: int, live: Live, ordered: Live) -> _Change:
        """Return the steering of a request from position `first` on."""
        tracked, info = history.tracked, self._info
        program = composed(history.program, live, info)
        shared = program if live == ordered else composed(history.program, ordered, info)
        needs: tuple[Need, ...] = ()
        if program is not None and live != ordered:
            needs = _beside(program, shared, tracked.steered_from)
        reserved = self._reserved(tracked.key, needs)
        try:
            steered = NOTHING if program is None else self._bank.acquire(program, tracked.steered_from)
        except CapflowError:
            self.reserve.release(reserved)
            raise
        if program is not None and program.gates:  # earlier positions keep them, if a later program has none
            tracked.gates, tracked.latched = program.gates, any(gate.latched for gate in program.gates)
        return _Change(SlotRange.of(first, tracked.steered_from, steered, program, shared), needs, reserved)

    def _reserved(self, key: str, needs: Sequence[Need]) -> str:
        """Take `needs` from the reserve; return the name that holds them, empty if there are none."""
        if not needs:
            return ""
        name = f"{key} {next(self._numbers)}"
        if not self.reserve.hold(name, needs):
            got = f"no room for more {self.reserve.lacking(needs)} in its part for controllers"
            do = "start the engine with more --steering-bank-bytes, or add fewer different vectors"
            raise CapflowError(explain("steering bank", got=got, do=do))
        return name


def _first(tracked: Tracked) -> int:
    """Return the first position that an action can steer."""
    return max(tracked.computed, tracked.prompt_length)


def _beside(program: SteeringProgram, counted: SteeringProgram | None, split: int) -> tuple[Need, ...]:
    """Return what a program needs beside the one that the scheduler counted."""
    rows: frozenset[bytes] = frozenset() if counted is None else frozenset(counted.digests)
    keys = () if counted is None else {need.key for need in needs_of(counted, split)}
    return tuple(need.beside(rows) for need in needs_of(program, split) if need.key not in keys)
