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
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from capflow.capture.model import ModelInfo
from capflow.errors import CapflowError, explain
from capflow.steering.action import Steer, Unsteer
from capflow.steering.compiler import with_vectors
from capflow.steering.program import SteeringProgram
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.budget import Holdings, Need, Size, needs_of
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import NOTHING, Bank
from capflow_engine.taps.plan import Tracked

logger = logging.getLogger("vllm.capflow.worker")


class Owner(NamedTuple):
    """The owner of an action; the vectors of owners add up in this order."""

    order: int
    name: str


HUB = Owner(sys.maxsize, "hub")
"""The owner of actions through a hub, from a client or a consumer; a later action replaces an earlier one."""

_Vectors = Mapping[Owner, tuple[SteeringVector, ...]]


class _Change(NamedTuple):
    """The steering of a request from a position on.

    held: the position and the slots of the bank.
    vectors: the vectors that are added, by owner.
    needs: its part of the reserve.
    reserved: the name under which the reserve holds `needs`; empty if it needs nothing.
    """

    held: SlotRange
    vectors: _Vectors
    needs: tuple[Need, ...] = ()
    reserved: str = ""


class Histories:
    """The histories of one worker's requests.

    reserve: the part of the bank for the vectors of controllers.
    """

    def __init__(self, bank: Bank, reserve: Size, info: ModelInfo) -> None:
        self.reserve = Holdings(reserve)
        self._bank = bank
        self._info = info
        # The programs that requests arrived with, by vLLM's id.
        self._programs: dict[str, SteeringProgram] = {}
        # By vLLM's id, for requests that were ever steered.
        self._changes: dict[str, list[_Change]] = {}
        self._numbers = itertools.count()

    def admit(self, tracked: Tracked, program: SteeringProgram) -> None:
        """Steer a new request by its own program."""
        self._programs[tracked.key] = program
        self._change(tracked, 0, {})

    def vectors(self, key: str) -> _Vectors:
        """Return the vectors that are added to a request now, by owner."""
        changes = self._changes.get(key)
        return changes[-1].vectors if changes else {}

    def act(self, tracked: Tracked, owner: Owner, action: Steer | Unsteer) -> bool:
        """Apply an owner's action to a request from its next position on; return whether it changed anything.

        It steers generated positions only. If a controller's action does not fit in the reserve, CapflowError is raised
        and nothing is changed. An action through a hub always fits: if necessary, the vectors that controllers added to
        the request are dropped.
        """
        before = self.vectors(tracked.key)
        after = {**before, owner: action.vectors} if isinstance(action, Steer) else {**before, owner: ()}
        after = {each: after[each] for each in sorted(after) if after[each]}
        if after == before:
            return False
        first = max(tracked.computed, tracked.prompt_length)
        (self._order if owner == HUB else self._change)(tracked, first, after)
        return True

    def lengthen(self, tracked: Tracked) -> None:
        """Continue the steering of a request whose prompt grew by the generated tokens and by more input."""
        changes = self._changes.get(tracked.key)
        if not changes:
            return
        last = changes[-1]
        self._bank.share(last.held.steered)
        held = last.held._replace(first=tracked.computed, split=tracked.steered_from)
        self._append(tracked, last._replace(held=held, reserved=self._reserved(tracked.key, last.needs)))

    def cut(self, tracked: Tracked, limit: int) -> None:
        """Undo the actions that controllers took on rows at position `limit` and later, which belong to no request."""
        changes = self._changes.get(tracked.key, [])
        undone = [change for change in changes if change.held.first > limit]
        if not undone:
            return
        kept = changes[: len(changes) - len(undone)]
        before = kept[-1].vectors if kept else {}
        decided = {owner: some for owner, some in before.items() if owner != HUB}
        self._drop(tracked, limit + 1)
        for held, vectors, _, _ in undone:
            after = {**decided, HUB: vectors[HUB]} if HUB in vectors else decided
            if after != before:
                self._order(tracked, held.first, after)
                before = after

    def shift(self, tracked: Tracked, first: int, count: int) -> None:
        """Lower the positions of the actions that apply from position `first` or from a later one by `count`."""
        changes, held = self._changes.get(tracked.key, []), tracked.steered or []
        for number, change in enumerate(changes):
            if change.held.first >= first:
                held[number] = change.held._replace(first=change.held.first - count)
                changes[number] = change._replace(held=held[number])

    def forget(self, tracked: Tracked) -> None:
        """Give back everything that a finished request holds."""
        self._drop(tracked, 0)
        self._changes.pop(tracked.key, None)
        self._programs.pop(tracked.key, None)

    def _order(self, tracked: Tracked, first: int, vectors: _Vectors) -> None:
        """Do `_change` for an action through a hub; if the bank is full, without the vectors of controllers."""
        try:
            self._change(tracked, first, vectors)
        except CapflowError:
            logger.error("request %s: the steering bank is full; the vectors of controllers are dropped", tracked.id)
            self._change(tracked, first, {HUB: vectors[HUB]} if HUB in vectors else {})

    def _change(self, tracked: Tracked, first: int, vectors: _Vectors) -> None:
        """Steer a request by its own program and these vectors, from position `first` on."""
        program, shared, needs = self._composed(tracked, vectors)
        reserved = self._reserved(tracked.key, needs)
        try:
            steered = NOTHING if program is None else self._bank.acquire(program, tracked.steered_from)
        except CapflowError:
            self.reserve.release(reserved)
            raise
        held = SlotRange.of(first, tracked.steered_from, steered, program, shared)
        self._append(tracked, _Change(held, vectors, needs, reserved))
        if program is not None and program.gates:  # earlier positions keep them, if a later program has none
            tracked.gates, tracked.latched = program.gates, any(gate.latched for gate in program.gates)

    def _composed(
        self, tracked: Tracked, vectors: _Vectors
    ) -> tuple[SteeringProgram | None, SteeringProgram | None, tuple[Need, ...]]:
        """Return a request's program with these vectors, without those of controllers, and its need of the reserve."""
        counted = program = self._programs.get(tracked.key)
        for owner, some in vectors.items():
            program = with_vectors(program, self._info.hidden_size, some)
            if owner == HUB:
                counted = with_vectors(counted, self._info.hidden_size, some)
        if program is None or not vectors.keys() - {HUB}:
            return program, program, ()
        rows: frozenset[bytes] = frozenset() if counted is None else frozenset(counted.digests)
        keys = () if counted is None else {need.key for need in needs_of(counted, tracked.steered_from)}
        needs = [need for need in needs_of(program, tracked.steered_from) if need.key not in keys]
        return program, counted, tuple(need.beside(rows) for need in needs)

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

    def _append(self, tracked: Tracked, change: _Change) -> None:
        self._drop(tracked, change.held.first)
        self._changes.setdefault(tracked.key, []).append(change)
        if tracked.steered is None:
            tracked.steered = []
        tracked.steered.append(change.held)

    def _drop(self, tracked: Tracked, first: int) -> None:
        """Drop the changes that apply from position `first` or from a later one."""
        changes, held = self._changes.get(tracked.key, []), tracked.steered or []
        while changes and changes[-1].held.first >= first:
            change = changes.pop()
            held.pop()
            self._bank.release(change.held.steered)
            self.reserve.release(change.reserved)
        tracked.steered = held or None
