"""The timeline of a request: which actions apply to it at which positions.

The scheduler has a timeline of each request with the actions of hubs; workers have one with those of controllers, too.

Invariant: an action changes no position before the one from which it applies.
Invariant: an entry that ends at a position needs no further order: its end is part of the timeline.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from capflow.capture.model import ModelInfo
from capflow.errors import UsageError, explain
from capflow.steering.action import Gain, Leased, SetGate, Steer, Unsteer
from capflow.steering.clamp import Clamp
from capflow.steering.compiler import with_clamps, with_vectors
from capflow.steering.compose import own, scaled, with_gate
from capflow.steering.program import SteeringProgram
from capflow.steering.vector import SteeringVector

FOREVER = sys.maxsize


class Owner(NamedTuple):
    """The owner of an action; what owners add comes in this order."""

    order: int
    name: str

    @property
    def by_hub(self) -> bool:
        """Whether its actions come through a hub."""
        return self.order >= _CONSUMERS

    @property
    def gain_name(self) -> str:
        """Its name in a `Gain`."""
        return self.name if self.by_hub else f"controller {self.name}"


_CONSUMERS, _CLIENTS = sys.maxsize - 1, sys.maxsize

HUB = Owner(_CLIENTS, "client")
"""A client without a key."""

ENGINE = Owner(_CLIENTS, "")
"""The owner of what applies to all requests of the engine."""


def hub_owner(name: str) -> Owner:
    """Return the owner of actions through a hub. Consumers are ordered by name, and clients come after them.

    name: as in `capflow.steering.action.Answered.asked_by`.
    """
    client = name == "client" or name.startswith("client ") or not name
    return Owner(_CLIENTS if client else _CONSUMERS, name or HUB.name)


class ActionSlot(NamedTuple):
    """The thing that an action changes; a later action on the same slot replaces the earlier one.

    kind: `steer`, `gain`, `set_gate` or `frozen`.
    owner: of `steer`, and of what a controller changes. Gains of several owners multiply.
    target: the owner of a gain, or the gate.
    """

    kind: str
    owner: Owner = ENGINE
    target: str = ""


FROZEN = ActionSlot("frozen")


class Contribution(NamedTuple):
    """What a `Steer` adds."""

    vectors: tuple[SteeringVector, ...]
    clamps: tuple[Clamp, ...]
    gain: float = 1.0


class SlotEntry(NamedTuple):
    """The content of a slot from position `first` up to `until`.

    value: None: nothing.
    by: the owner of the action.
    """

    first: int
    until: int
    value: Any
    by: Owner

    def holds_at(self, position: int) -> bool:
        """Return whether it applies at a position."""
        return self.value is not None and self.first <= position < self.until


Live = Mapping[ActionSlot, Any]
"""The values that apply at a position, by slot."""


class TimelinePart(NamedTuple):
    """The entries from position `first` on, up to `first` of the next part."""

    first: int
    entries: Mapping[ActionSlot, SlotEntry]

    @property
    def live(self) -> Live:
        """The values that apply."""
        return {slot: entry.value for slot, entry in self.entries.items() if entry.holds_at(self.first)}

    @property
    def ordered(self) -> Live:
        """The values that apply and came through a hub."""
        return {
            slot: entry.value for slot, entry in self.entries.items() if entry.by.by_hub and entry.holds_at(self.first)
        }


def slot_of(action: Steer | Unsteer | Gain | SetGate, owner: Owner) -> ActionSlot:
    """Return the slot of an action."""
    match action:
        case Gain():
            return ActionSlot("gain", ENGINE if owner.by_hub else owner, action.owner)
        case SetGate():
            return ActionSlot("set_gate", ENGINE if owner.by_hub else owner, action.gate)
        case _:
            return ActionSlot("steer", owner)


def entry_of(action: Steer | Unsteer | Gain | SetGate, owner: Owner, first: int) -> SlotEntry:
    """Return the entry of an action that applies from position `first` on."""
    until = FOREVER
    value: Any = None
    if isinstance(action, Leased) and action.lease_positions is not None:
        until = first + action.lease_positions
    match action:
        case Steer(vectors=vectors, clamps=clamps) if vectors or clamps:
            value = Contribution(vectors, clamps, action.gain)
        case Gain(scale=scale) if scale != 1.0:
            value = scale
        case SetGate():
            value = (action.threshold, action.sharpness, action.enabled)
            value = None if value == (None, None, None) else value
        case _:
            pass
    return SlotEntry(first, until, value, owner)


def composed(program: SteeringProgram | None, live: Live, info: ModelInfo) -> SteeringProgram | None:
    """Return a request's program with what applies to it.

    Raises UsageError for vectors of another width or beyond float32.
    """
    if FROZEN in live:
        return own(program)
    gains: dict[str, float] = {}
    for slot in sorted(live):
        if slot.kind == "gain":
            gains[slot.target] = gains.get(slot.target, 1.0) * live[slot]
        if slot.kind == "set_gate":  # that of a hub comes last
            program = with_gate(program, slot.target, *live[slot])
    program = scaled(program, gains)
    for slot in sorted(live):
        if slot.kind == "steer":
            added, gain = live[slot], live[slot].gain * gains.get(slot.owner.gain_name, 1.0)
            vectors = added.vectors if gain == 1.0 else tuple(replace(v, scale=v.scale * gain) for v in added.vectors)
            program = with_vectors(program, info, vectors)
            program = with_clamps(program, info, added.clamps, gain)
    return program


def owners_of(program: SteeringProgram | None, controllers: Iterable[str], timeline: Timeline | None) -> set[str]:
    """Return the owners that contribute, or may contribute, to a request, by their names in a `Gain`.

    program: its own.
    controllers: the names of those that see it.
    """
    names = {"request"} if program is None else {*(program.owners or ("request",))}
    names |= {HUB.gain_name} | {f"controller {name}" for name in controllers}
    return names if timeline is None else names | {slot.owner.gain_name for slot in steering(timeline)}


def steering(timeline: Timeline) -> list[ActionSlot]:
    """Return the slots of what owners add, without those that end by themselves."""
    entries = timeline.parts[-1].entries
    return [slot for slot, entry in entries.items() if slot.kind == "steer" and entry.until == FOREVER]


def check_owner(owner: str, names: Iterable[str], *prefixes: str) -> None:
    """Raise UsageError for the owner of a `Gain` that does not contribute.

    names: the owners that may contribute.
    prefixes: the beginnings of further owners, before a name. The engine does not know the keys of clients.
    """
    named = any(owner.startswith(prefix) and len(owner) > len(prefix) for prefix in ("client ", *prefixes))
    if owner not in names and not named:
        raise UsageError(explain("gain.owner", got=owner, expected=f"one that contributes: {', '.join(sorted(names))}"))


class Timeline:
    """The parts of a request, in order of position. Values apply from a position on, until others replace them."""

    def __init__(self, gains: Mapping[str, float] | None = None, *, frozen: bool = False) -> None:
        self.parts: list[TimelinePart] = [TimelinePart(0, {})]
        if frozen:
            self.freeze(0)
        elif gains:
            self.set(
                0,
                {
                    ActionSlot("gain", target=name): SlotEntry(0, FOREVER, scale, ENGINE)
                    for name, scale in gains.items()
                },
            )

    def copy(self) -> Timeline:
        """Return a timeline that changes independently."""
        other = Timeline()
        other.parts = list(self.parts)
        return other

    def at(self, position: int) -> TimelinePart:
        """Return the part that applies at a position."""
        number = len(self.parts) - 1
        while number and self.parts[number].first > position:
            number -= 1
        return self.parts[number]

    def set(self, first: int, entries: Mapping[ActionSlot, SlotEntry]) -> None:
        """Replace slots from position `first` on."""
        after = [(slot, entry) for slot, entry in self._from(first) if slot not in entries]
        self._rebuild(first, [*after, *entries.items()])

    def freeze(self, first: int) -> None:
        """Take everything back from position `first` on."""
        last = self.parts[-1].entries
        nothing = {slot: SlotEntry(first, FOREVER, None, ENGINE) for slot in last}
        self._rebuild(first, [*nothing.items(), (FROZEN, SlotEntry(first, FOREVER, True, ENGINE))])

    def unfreeze(self, first: int, gains: Mapping[str, float]) -> None:
        """End `freeze` from position `first` on.

        gains: those of the engine.
        """
        scales = {
            ActionSlot("gain", target=name): SlotEntry(first, FOREVER, scale, ENGINE) for name, scale in gains.items()
        }
        self.freeze(first)
        self.set(first, {**scales, FROZEN: SlotEntry(first, FOREVER, None, ENGINE)})

    def split(self, first: int) -> None:
        """Begin a part at position `first`."""
        at = self.at(first)
        if at.first != first:
            number = self.parts.index(at) + 1
            self.parts.insert(number, TimelinePart(first, at.entries))

    def cut(self, limit: int) -> int | None:
        """Undo what controllers did after position `limit`; return the first changed position, None if there is none.

        Rows after that position belong to no request.
        """
        later = self._from(limit + 1)
        kept = [(slot, entry) for slot, entry in later if entry.by.by_hub]
        if len(kept) == len(later):
            return None
        self._rebuild(limit + 1, kept)
        return limit + 1

    def shift(self, first: int, count: int) -> None:
        """Lower the positions of what applies from position `first` or from a later one by `count`."""
        moved = [
            (slot, entry._replace(first=entry.first - count, until=_shifted(entry.until, count)))
            if entry.first >= first
            else (slot, entry)
            for slot, entry in self._from(first - count)
        ]
        self._rebuild(first - count, moved)

    def _from(self, first: int) -> list[tuple[ActionSlot, SlotEntry]]:
        """Return the entries that apply from position `first` or from a later one."""
        entries: dict[tuple[ActionSlot, int], SlotEntry] = {}
        for part in reversed(self.parts):
            if part.first < first:
                break
            for slot, entry in part.entries.items():
                if entry.first >= first:
                    entries.setdefault((slot, entry.first), entry)
        return [(slot, entry) for (slot, _), entry in entries.items()]

    def _rebuild(self, first: int, entries: Iterable[tuple[ActionSlot, SlotEntry]]) -> None:
        """Replace all parts from position `first` on; `entries` begin there or later, or between the others."""
        while self.parts and self.parts[-1].first >= first:
            self.parts.pop()
        state = dict(self.parts[-1].entries) if self.parts else {}
        floor = self.parts[-1].first if self.parts else -1
        entries = sorted(entries, key=lambda each: each[1].first)
        all_entries = [*state.values(), *(entry for _, entry in entries)]
        points = {entry.first for _, entry in entries} | {e.until for e in all_entries if floor < e.until < FOREVER}
        if not self.parts:
            points.add(0)
        for point in sorted(points):
            state.update((slot, entry) for slot, entry in entries if entry.first == point)
            self.parts.append(TimelinePart(point, dict(state)))


def _shifted(until: int, count: int) -> int:
    return until if until == FOREVER else until - count
