"""What steers the requests of one worker, by position: what each came with, and the actions on it since.

An action holds from a position on. What held before it stays in the bank until the request is over, because a preempted
request computes those positions again.

Actions of several owners add up, each owner's as operations of its own: those of controllers in the order in which their hub
lists them, then what came through a hub.

Invariants: a position is steered by what held when it was computed first. What requests come with and what comes through a hub
always fits into the bank, because the scheduler counted it; what controllers add has a reserve of its own (`Size.reserve`), and
an action for which that has no room changes nothing.
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
from capflow.steering.program import SteeringProgram, with_vectors
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.budget import Holdings, Need, Size, needs_of
from capflow_engine.taps.bank import NOTHING, Bank
from capflow_engine.taps.plan import SlotRange, Tracked

logger = logging.getLogger("vllm.capflow.worker")


class Owner(NamedTuple):
    """Whose an action is; owners add up in their order."""

    order: int
    name: str


HUB = Owner(sys.maxsize, "hub")
"""Of what comes through a hub, from a client or a consumer: a later action takes the place of an earlier one."""

_Vectors = Mapping[Owner, tuple[SteeringVector, ...]]


class _Change(NamedTuple):
    """What holds from a position on.

    needs: what it takes of the reserve, under the name `reserved`.
    """

    held: SlotRange
    vectors: _Vectors
    needs: tuple[Need, ...] = ()
    reserved: str = ""


class Histories:
    """The histories of one worker's requests.

    reserve: how much of the bank is for what controllers add.
    """

    def __init__(self, bank: Bank, reserve: Size, info: ModelInfo) -> None:
        self.reserve = Holdings(reserve)
        self._bank = bank
        self._info = info
        # What requests came with, by vLLM's id.
        self._programs: dict[str, SteeringProgram] = {}
        # By vLLM's id, of requests that anything ever steered.
        self._changes: dict[str, list[_Change]] = {}
        self._numbers = itertools.count()

    def admit(self, tracked: Tracked, program: SteeringProgram) -> None:
        """Steer a new request by what it came with."""
        self._programs[tracked.key] = program
        self._change(tracked, 0, {})

    def vectors(self, key: str) -> _Vectors:
        """Return what is added to a request now, by owner."""
        changes = self._changes.get(key)
        return changes[-1].vectors if changes else {}

    def act(self, tracked: Tracked, owner: Owner, action: Steer | Unsteer) -> bool:
        """Do an owner's action on a request, from its next position on; return whether it changed anything.

        Only generated positions are steered by it. Raises CapflowError, with nothing changed, where a controller's action has
        no room. An action that came through a hub always has: if need be, controllers lose what they added to the request.
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
        """Take it that a request's prompt became longer by what was generated and by more input."""
        changes = self._changes.get(tracked.key)
        if not changes:
            return
        last = changes[-1]
        self._bank.share(last.held.steered)
        held = SlotRange(tracked.computed, tracked.steered_from, last.held.steered)
        self._append(tracked, last._replace(held=held, reserved=self._reserved(tracked.key, last.needs)))

    def cut(self, tracked: Tracked, limit: int) -> None:
        """Undo what controllers decided by rows at position `limit` and behind it, which are nobody's."""
        changes = self._changes.get(tracked.key, [])
        undone = [change for change in changes if change.held.first > limit]
        if not undone:
            return
        kept = changes[: len(changes) - len(undone)]
        decided = {owner: some for owner, some in (kept[-1].vectors if kept else {}).items() if owner != HUB}
        before = kept[-1].vectors if kept else {}
        self._drop(tracked, limit + 1)
        for held, vectors, _, _ in undone:
            after = {**decided, HUB: vectors[HUB]} if HUB in vectors else decided
            if after != before:
                self._order(tracked, held.first, after)
                before = after

    def forget(self, tracked: Tracked) -> None:
        """Give back what a request holds, which is over."""
        self._drop(tracked, 0)
        self._changes.pop(tracked.key, None)
        self._programs.pop(tracked.key, None)

    def _order(self, tracked: Tracked, first: int, vectors: _Vectors) -> None:
        """As `_change`, for what came through a hub: if need be, without what controllers added."""
        try:
            self._change(tracked, first, vectors)
        except CapflowError:
            logger.error("request %s: the steering bank is full, so it loses what controllers added to it", tracked.id)
            self._change(tracked, first, {HUB: vectors[HUB]} if HUB in vectors else {})

    def _change(self, tracked: Tracked, first: int, vectors: _Vectors) -> None:
        """Have a request steered by what it came with and by these vectors from a position on."""
        program, needs = self._composed(tracked, vectors)
        reserved = self._reserved(tracked.key, needs)
        try:
            steered = NOTHING if program is None else self._bank.acquire(program, tracked.steered_from)
        except CapflowError:
            self.reserve.release(reserved)
            raise
        self._append(tracked, _Change(SlotRange(first, tracked.steered_from, steered), vectors, needs, reserved))

    def _composed(self, tracked: Tracked, vectors: _Vectors) -> tuple[SteeringProgram | None, tuple[Need, ...]]:
        """Return the program that these vectors make, and what it takes of the reserve."""
        counted = program = self._programs.get(tracked.key)
        for owner, some in vectors.items():
            program = with_vectors(program, self._info.hidden_size, some)
            if owner == HUB:
                counted = with_vectors(counted, self._info.hidden_size, some)
        if program is None or not vectors.keys() - {HUB}:
            return program, ()
        known = frozenset() if counted is None else frozenset(counted.digests)
        keys = {need.key for need in needs_of(counted, tracked.steered_from)} if counted is not None else ()
        needs = [need for need in needs_of(program, tracked.steered_from) if need.key not in keys]
        return program, tuple(need.beside(known) for need in needs)

    def _reserved(self, key: str, needs: Sequence[Need]) -> str:
        """Take what is needed of the reserve; return the name that it is held under, empty where nothing is needed."""
        if not needs:
            return ""
        name = f"{key} {next(self._numbers)}"
        if not self.reserve.hold(name, needs):
            got = (
                f"no room for more {self.reserve.lacking(needs)} beside what controllers added to the running requests"
            )
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
        """Forget what holds from position `first` on or from a later one."""
        changes, held = self._changes.get(tracked.key, []), tracked.steered or []
        while changes and changes[-1].held.first >= first:
            change = changes.pop()
            held.pop()
            self._bank.release(change.held.steered)
            self.reserve.release(change.reserved)
        tracked.steered = held or None
