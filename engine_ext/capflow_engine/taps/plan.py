"""The plan: what the taps do in one step, for every request of its batch.

The planner is told the batch, in the order in which its tokens lie in the model's tensors, and says
which token rows each site copies to where, and which slot of the bank steers which tokens.

Tokens of the step that are wanted at exactly the same sites form one *group*; each token is in one group at most. A group's rows
lie in the step's buffer as `[sites of the group, rows, hidden]`, groups one after another. So the work of planning
grows with the requests that are captured, and not with how many sites they name or how differently.

A request carries, for each channel, a `RequestProgress`: the sites that want its next positions, and up to which position that
holds. Mostly that is for good, and planning a request is a comparison and a span.

A row of a request is planned once: positions below `Tracked.computed`, computed again after a
preemption, are passed over. Planning changes `Tracked.computed` and cursors, and nothing else.

A position that is computed again is steered as it was the first time: `Tracked.steered` says from which position on each
change of a request's steering holds.

Rows for consumers (`SHIP`) come first in the buffer, those of each hub together; rows that only a controller looks at (`VIEW`)
lie behind them and never leave the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import Acted, Block, Span
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import Capture
from capflow_engine.taps.bank import Steered

SHIP, VIEW = 0, 1

Indices = npt.NDArray[np.int64]


class SiteSet:
    """Sites by index, in order, for requests of one hub; one object for each different set of a program, compared by identity."""

    __slots__ = ("hub", "sites")

    def __init__(self, sites: tuple[int, ...], hub: int) -> None:
        self.sites = sites
        self.hub = hub


class Program:
    """The positions wanted at each site, sites with the same positions together; compared by identity.

    parts: the different sets of positions, each with its sites by index.
    """

    def __init__(
        self, parts: tuple[tuple[Positions, tuple[int, ...]], ...], site_sets: dict[tuple[int, ...], SiteSet], hub: int
    ) -> None:
        self.parts = parts
        self.hub = hub
        self.any = bool(parts)
        sites = tuple(sorted(site for _, some in parts for site in some))
        # The sites of all parts.
        self.every = site_sets.setdefault(sites, SiteSet(sites, hub))
        # The planner's, shared by all programs of the hub.
        self._site_sets = site_sets
        # At most 2 to the number of parts, and few in fact.
        self._found: dict[tuple[bool, ...], SiteSet | None] = {}

    def sites(self, parts: tuple[bool, ...]) -> SiteSet | None:
        """Return the sites of the chosen parts; None when there are none."""
        found = self._found.get(parts)
        if found is None and any(parts):
            chosen = zip(self.parts, parts, strict=True)
            sites = tuple(sorted(site for (_, sites), here in chosen if here for site in sites))
            found = self._found[parts] = self._site_sets.setdefault(sites, SiteSet(sites, self.hub))
        return found


class RequestProgress:
    """Where one request stands in its program: `sites` want each of the positions `first .. stop`."""

    __slots__ = ("_places", "_program", "first", "sites", "stop")

    def __init__(self, program: Program, prompt_length: int) -> None:
        self._program = program
        self._places = [positions.at(prompt_length) for positions, _ in program.parts]
        self.first = self.stop = 0
        self.sites: SiteSet | None = None

    def move(self, position: int) -> None:
        """Go to a position, forwards or back."""
        self.first = position
        if len(self._places) == 1:
            inside, self.stop = self._places[0].stretch(position)
            self.sites = self._program.every if inside else None
            return
        stretches = [places.stretch(position) for places in self._places]
        self.stop = min(stop for _, stop in stretches)
        self.sites = self._program.sites(tuple(inside for inside, _ in stretches))

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int, SiteSet]]:
        """Yield the wanted parts of positions `first .. end`, each with the sites that want it."""
        if len(self._places) == 1 and end - first > _STEPS_MAX:
            for begin, stop in self._places[0].runs(first, end):
                yield begin, stop, self._program.every
            return
        while first < end:
            if not self.first <= first < self.stop:
                self.move(first)
            stop = min(end, self.stop)
            if self.sites is not None:
                yield first, stop, self.sites
            first = stop


class SlotRange(NamedTuple):
    """The slots of the bank that steer a request from position `first` on, up to the next one's `first`.

    split: the position from which on its slots for generated positions hold; those for the prompt hold before it.
    """

    first: int
    split: int
    steered: Steered


@dataclass(eq=False, slots=True)
class Tracked:
    """A request that is running, as one worker knows it.

    key: vLLM's id of it.
    id: the id it is known by outside.
    computed: its positions below this were planned.
    generated: how many of the prompt's last tokens are steered as generated ones are.
    steered: what steers it, by position, in order; None when nothing ever did.
    hub: the number of the hub that has it.
    acted: what its end tells of what steered it.
    incarnation: differs between requests that have the same id one after another.
    watched: some stage ships rows of it, so each stage tells of its end.
    noted: what steers it is told with its end.
    """

    key: str
    id: str
    prompt_length: int
    ship: Program
    view: Program
    capture: Capture | None = None
    generated: int = 0
    computed: int = 0
    steered: list[SlotRange] | None = None
    hub: int = 0
    acted: list[Acted] = field(default_factory=list)
    incarnation: str = ""
    watched: bool = True
    noted: bool = False
    ship_cursor: RequestProgress | None = field(init=False, repr=False)
    view_cursor: RequestProgress | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ship_cursor = RequestProgress(self.ship, self.prompt_length) if self.ship.any else None
        self.view_cursor = RequestProgress(self.view, self.prompt_length) if self.view.any else None

    @property
    def steered_from(self) -> int:
        """The first position that is steered as generated ones are."""
        return self.prompt_length - self.generated


class Scheduled(NamedTuple):
    """A request's part of a step: its tokens are rows `row .. row+length` of the model's tensors.

    start: the position of the first of them.
    """

    request: Tracked
    row: int
    start: int
    length: int


class Run(NamedTuple):
    """Token rows `source .. source+length` become rows `target .. target+length` of a group."""

    source: int
    target: int
    length: int


class Group(NamedTuple):
    """Tokens that are wanted at the same sites, given by index; the rows of the first lie at row `base` of the buffer.

    spans name requests by their number in `Plan.batch`; all of them are the hub's.
    """

    channel: int
    sites: tuple[int, ...]
    rows: int
    base: int
    runs: tuple[Run, ...]
    spans: tuple[Span, ...]
    hub: int = 0


def token_rows(runs: Sequence[Run]) -> Indices:
    """Return the token row of each row that runs make, one run after another."""
    begins, _, lengths = np.array(runs, np.int64).T
    return np.repeat(begins, lengths) + counted(lengths)


def counted(sizes: Indices) -> Indices:
    """Return 0, 1, … up to each size, one after another."""
    behind: Indices = np.cumsum(sizes)
    return np.arange(behind[-1]) - np.repeat(behind - sizes, sizes)


class Slotted(NamedTuple):
    """Token rows `source .. source+length` are steered by a slot of the bank."""

    source: int
    length: int
    slot: int


@dataclass(frozen=True)
class Plan:
    """One step.

    rows: rows of the buffer.
    ship_rows: how many of them are for consumers.

    steered: which token rows are steered; where two name the same row, the later one holds.
    """

    batch: tuple[Scheduled, ...]
    groups: tuple[Group, ...]
    rows: int
    ship_rows: int
    steered: tuple[Slotted, ...]
    tokens: int

    @property
    def idle(self) -> bool:
        """Whether no tap has anything to do."""
        return not self.groups and not self.steered

    def slots(self, tokens: int) -> npt.NDArray[np.int32]:
        """Return the slot that steers each of `tokens` token rows; -1: none."""
        slots = np.full(tokens, -1, np.int32)
        for source, length, slot in self.steered:
            slots[source : source + length] = slot
        return slots

    def shipped(self, hub: int) -> tuple[Group, ...]:
        """Return the groups for the consumers of a hub: they lie in the buffer one after another."""
        return tuple(group for group in self.groups if group.channel == SHIP and group.hub == hub)


def block_of(group: Group, sites: Sequence[Site]) -> Block:
    """Return a group as a block of a frame, given the tapped sites in order."""
    return Block(tuple(sites[i] for i in group.sites), group.rows, group.spans)


class Planner:
    """Makes plans for one worker.

    num_sites: the sites it taps, known by index from here on.
    hubs: how many its rows go to.
    """

    def __init__(self, num_sites: int, hubs: int = 1) -> None:
        self.num_sites = num_sites
        self.hubs = hubs
        self._site_sets: list[dict[tuple[int, ...], SiteSet]] = [{} for _ in range(hubs)]
        self.nothing = Program((), self._site_sets[0], 0)

    def program(self, wanted: Mapping[int, Positions], hub: int = 0) -> Program:
        """Return a program that wants these positions at these site indices, for a request of a hub."""
        parts: dict[Positions, list[int]] = {}
        for site in sorted(wanted):
            if wanted[site]:
                parts.setdefault(wanted[site], []).append(site)
        if not parts:
            return self.nothing
        site_sets = self._site_sets[hub]
        if len(site_sets) >= _SITE_SETS_KEPT_MAX:  # programs that still use them keep them
            site_sets.clear()
        return Program(tuple((positions, tuple(sites)) for positions, sites in parts.items()), site_sets, hub)

    def plan(self, batch: Sequence[Scheduled]) -> Plan:
        """Return the plan of a step and mark its positions as computed."""
        ship: _Taken = {}
        view: _Taken = {}
        tokens = 0
        steered = False
        for number, (request, row, start, length) in enumerate(batch):
            tokens += length
            if request.steered is not None:
                steered = True
            end = start + length
            computed = request.computed
            if computed >= end:
                continue
            request.computed = end
            first = max(start, computed)
            source = row + first - start
            cursor = request.ship_cursor
            if cursor is not None:
                if cursor.first <= first and end <= cursor.stop:  # as nearly always while a request decodes
                    if cursor.sites is not None:
                        ship.setdefault(cursor.sites, []).append((number, first, end - first, source))
                else:
                    _take(ship, cursor, number, first, end, source)
            if request.view_cursor is not None:
                _take(view, request.view_cursor, number, first, end, source)
        if self.hubs > 1:  # each hub's together
            ship = dict(sorted(ship.items(), key=lambda taken: taken[0].hub))
        shipped = _groups(ship, SHIP, 0)
        ship_rows = _end(shipped, 0)
        viewed = _groups(view, VIEW, ship_rows)
        slotted = _slotted(batch) if steered else ()
        return Plan(tuple(batch), (*shipped, *viewed), _end(viewed, ship_rows), ship_rows, slotted, tokens)


_Taken = dict[SiteSet, list[tuple[int, int, int, int]]]
"""Of the tokens that are wanted at each set of sites: the request's number, first position, how many, first token row."""


def _take(taken: _Taken, cursor: RequestProgress, number: int, first: int, end: int, source: int) -> None:
    """Take what is wanted of positions `first .. end` of a request, the first of which is token row `source`."""
    for begin, stop, sites in cursor.runs(first, end):
        taken.setdefault(sites, []).append((number, begin, stop - begin, source + begin - first))


def _groups(taken: _Taken, channel: int, base: int) -> list[Group]:
    """Return the groups, their rows from row `base` of the buffer on."""
    groups = []
    for sites, parts in taken.items():
        spans: list[Span] = []
        runs: list[Run] = []
        rows = 0
        begin = target = 0  # of the run being built; runs that touch are one
        expected = -1
        for number, first, length, source in parts:
            spans.append(_span((number, first, length, rows)))
            if source != expected:
                if rows:
                    runs.append(_run((begin, target, rows - target)))
                begin, target = source, rows
            expected = source + length
            rows += length
        runs.append(_run((begin, target, rows - target)))
        groups.append(Group(channel, sites.sites, rows, base, tuple(runs), tuple(spans), sites.hub))
        base += rows * len(sites.sites)
    return groups


_span = functools.partial(tuple.__new__, Span)
_run = functools.partial(tuple.__new__, Run)
_slotted_run = functools.partial(tuple.__new__, Slotted)
"""Like calling the class, at a third of the time: there is one of each for each request."""

_SITE_SETS_KEPT_MAX = 4096
_STEPS_MAX = 8  # positions that a cursor goes through one stretch after another


def _end(groups: Sequence[Group], base: int) -> int:
    """Return the row behind the last group, `base` when there is none."""
    return groups[-1].base + groups[-1].rows * len(groups[-1].sites) if groups else base


def _slotted(batch: Sequence[Scheduled]) -> tuple[Slotted, ...]:
    """Return what steers each token row, by what held at its position when that was computed first."""
    slotted: list[Slotted] = []
    for request, row, start, length in batch:
        history = request.steered
        if history is None:
            continue
        first, from_here, steered = history[-1]
        if first <= start and steered.patched_last < start:  # as nearly always
            split = from_here - start
            if split <= 0:
                if steered.decode >= 0:
                    slotted.append(_slotted_run((row, length, steered.decode)))
                continue
            if split >= length:
                if steered.prefill >= 0:
                    slotted.append(_slotted_run((row, length, steered.prefill)))
                continue
        stop = start + length
        for held in reversed(history):
            if held.first < stop:
                first = max(held.first, start)
                _slot(slotted, held, row + first - start, first, stop)
                if held.first <= start:
                    break
                stop = first
    return tuple(slotted)


def _slot(slotted: list[Slotted], held: SlotRange, row: int, first: int, stop: int) -> None:
    """Add what steers positions `first .. stop`, the first of which is token row `row`; single positions may differ."""
    steered = held.steered
    split = min(max(held.split, first), stop)
    if first < split and steered.prefill >= 0:
        slotted.append(Slotted(row, split - first, steered.prefill))
    if split < stop and steered.decode >= 0:
        slotted.append(Slotted(row + split - first, stop - split, steered.decode))
    if steered.patched_last >= first:
        slotted += (
            Slotted(row + position - first, 1, slot)
            for position, slot in steered.patched.items()
            if first <= position < stop
        )
