"""The plan: what the taps do in one step, for every request of its batch.

The planner takes the batch in the order of its tokens in the model's tensors. The plan names the token rows that each
site copies, their target rows, and the slot of the bank that steers each token.

Tokens of a step that are wanted at exactly the same sites form one *block*. In each channel, a token is in at most one
block. The rows of a block lie in the step's buffer as `[sites of the block, rows, width]`, block after block. So the
cost of planning grows with the number of captured requests, not with their sites.

There are two channels. Rows for consumers (`SHIP`) come first in the buffer, ordered by hub. Rows that only a
controller reads (`VIEW`) follow them and never leave the worker.

Each width class (`capflow_engine.taps.widths`) has a buffer of its own. Sites that are wanted together and are of
several classes are in a block for each. Controllers read rows of class 0 alone.

For each channel, a request has a `RequestProgress`: the sites that want its next positions, and the position where that
set of sites changes. Mostly the set never changes again; planning the request is then one comparison and one span.

A row of a request is planned once. After a preemption vLLM computes positions below `Tracked.computed` again; their
rows are not planned again. Planning changes `Tracked.computed` and each `RequestProgress`, and nothing else.

A position that is computed again is steered as it was the first time: `Tracked.steered` holds the position from which
each change of a request's steering applies.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import Block, Span
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import Capture
from capflow.steering.program import ProgramGate
from capflow_engine.taps.acting import SlotRange

SHIP, VIEW = 0, 1

Indices = npt.NDArray[np.int64]


class SiteSet:
    """A set of sites that requests of one hub want, by index in ascending order; compared by identity.

    Within a program, equal sets are one object; programs of one hub share most of them.

    classes: the sites of each width class, by class.
    """

    __slots__ = ("classes", "hub", "sites")

    def __init__(self, sites: tuple[int, ...], hub: int, of_site: Sequence[int]) -> None:
        self.sites = sites
        self.hub = hub
        self.classes = tuple(
            (number, tuple(site for site in sites if of_site[site] == number))
            for number in sorted({of_site[site] for site in sites})
        )


class SiteSets:
    """The sets of sites of one hub.

    of_site: the width class of each site.
    """

    __slots__ = ("_of_site", "_sets", "hub")

    def __init__(self, hub: int, of_site: Sequence[int]) -> None:
        self.hub, self._of_site = hub, of_site
        self._sets: dict[tuple[int, ...], SiteSet] = {}

    def of(self, sites: tuple[int, ...]) -> SiteSet:
        """Return the set of these sites."""
        site_set = self._sets.get(sites)
        if site_set is None:
            site_set = self._sets[sites] = SiteSet(sites, self.hub, self._of_site)
        return site_set

    def trim(self) -> None:
        """Forget the sets if they are many; running programs keep those that they use."""
        if len(self._sets) >= _SITE_SETS_KEPT_MAX:
            self._sets.clear()


class Program:
    """The positions that a request wants at each site; compared by identity.

    parts: each different set of positions, with the indices of the sites that want it.
    site_sets: the planner's sets of sites, shared by all programs of the hub.
    """

    def __init__(self, parts: tuple[tuple[Positions, tuple[int, ...]], ...], site_sets: SiteSets) -> None:
        self.parts = parts
        self.hub = site_sets.hub
        self.any = bool(parts)
        self._site_sets = site_sets
        # The sites by chosen parts: at most 2 to the power of the number of parts; in practice, few.
        self._chosen: dict[tuple[bool, ...], SiteSet] = {}
        self.all_sites = self.sites((True,) * len(parts))

    def sites(self, chosen: tuple[bool, ...]) -> SiteSet | None:
        """Return the sites of the chosen parts; None if no part is chosen."""
        site_set = self._chosen.get(chosen)
        if site_set is None and any(chosen):
            sites = tuple(
                sorted(site for (_, part), use in zip(self.parts, chosen, strict=True) if use for site in part)
            )
            site_set = self._chosen[chosen] = self._site_sets.of(sites)
        return site_set


class RequestProgress:
    """The progress of one request in its program: all of `sites` want each position in `first .. stop`."""

    __slots__ = ("_places", "_program", "first", "sites", "stop")

    def __init__(self, program: Program, prompt_length: int) -> None:
        self._program = program
        self._places = [positions.at(prompt_length) for positions, _ in program.parts]
        self.first = self.stop = 0
        self.sites: SiteSet | None = None

    def move(self, position: int) -> None:
        """Move to a position, forwards or backwards."""
        self.first = position
        if len(self._places) == 1:
            inside, self.stop = self._places[0].stretch(position)
            self.sites = self._program.all_sites if inside else None
            return
        stretches = [places.stretch(position) for places in self._places]
        self.stop = min(stop for _, stop in stretches)
        self.sites = self._program.sites(tuple(inside for inside, _ in stretches))

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int, SiteSet]]:
        """Yield the wanted parts of positions `first .. end`, each with the sites that want it."""
        if len(self._places) == 1 and end - first > _STEPS_MAX:
            assert self._program.all_sites is not None
            for begin, stop in self._places[0].runs(first, end):
                yield begin, stop, self._program.all_sites
            return
        while first < end:
            if not self.first <= first < self.stop:
                self.move(first)
            stop = min(end, self.stop)
            if self.sites is not None:
                yield first, stop, self.sites
            first = stop


@dataclass(eq=False, slots=True)
class Tracked:
    """A running request in one worker.

    key: vLLM's id of the request.
    id: the id that users and consumers see.
    ship: the program of rows for consumers.
    view: the program of rows for controllers.
    generated: how many of the prompt's last tokens are steered like generated ones.
    computed: positions below this one were planned.
    steered: the slots that steer the request, in order of position; None if nothing ever steered it.
    hub: the index of the request's hub.
    incarnation: differs between requests that use the same id one after another.
    watched: whether any pipeline stage ships rows of it. Then every stage reports its end.
    noted: whether consumers get the events of its steering.
    gates: the gates of its program.
    latched: whether one of them is latched.
    adapter: the name of the LoRA adapter that it runs with; empty for none.
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
    incarnation: str = ""
    watched: bool = True
    noted: bool = False
    gates: tuple[ProgramGate, ...] = ()
    latched: bool = False
    adapter: str = ""
    ship_progress: RequestProgress | None = field(init=False, repr=False)
    view_progress: RequestProgress | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ship_progress = RequestProgress(self.ship, self.prompt_length) if self.ship.any else None
        self.view_progress = RequestProgress(self.view, self.prompt_length) if self.view.any else None

    @property
    def steered_from(self) -> int:
        """The first position that is steered like generated ones."""
        return self.prompt_length - self.generated


class Scheduled(NamedTuple):
    """A request's part of a step: its tokens are rows `row .. row+length` of the model's tensors.

    start: the position of the first token.
    """

    request: Tracked
    row: int
    start: int
    length: int


class Run(NamedTuple):
    """Token rows `source .. source+length` become rows `target .. target+length` of a block."""

    source: int
    target: int
    length: int


class PlannedBlock(NamedTuple):
    """Tokens that are wanted at the same sites.

    sites: the sites, by index.
    rows: the number of rows at each site.
    base: the row of the class's buffer where the rows of the first site begin.
    runs: the token rows of the block.
    spans: the requests of the block, by their index in `Plan.batch`; all belong to `hub`.
    width_class: the number of the width class of its sites.
    """

    channel: int
    sites: tuple[int, ...]
    rows: int
    base: int
    runs: tuple[Run, ...]
    spans: tuple[Span, ...]
    hub: int = 0
    width_class: int = 0

    @property
    def end(self) -> int:
        """The row of the class's buffer after the last one."""
        return self.base + self.rows * len(self.sites)


def token_rows(runs: Sequence[Run]) -> Indices:
    """Return the token row of each row of the runs, run after run."""
    begins, _, lengths = np.array(runs, np.int64).T
    return np.repeat(begins, lengths) + counted(lengths)


def counted(sizes: Indices) -> Indices:
    """Return `0, 1, … size - 1` for each size, concatenated."""
    ends: Indices = np.cumsum(sizes)
    return np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)


class Slotted(NamedTuple):
    """Token rows `source .. source+length` that one slot of the bank steers."""

    source: int
    length: int
    slot: int


@dataclass(frozen=True)
class Plan:
    """The plan of one step.

    blocks: those of class 0 for consumers, those for controllers, then those of further classes, class by class.
    rows: the number of rows of the buffer of class 0.
    ship_rows: the number of rows for consumers in it, which come first.
    shaped: the number of rows of each further class; all are for consumers. Empty if there are none.
    steered: the token rows that are steered; if two entries name the same row, the later one applies.
    gated: the requests with gates, by their index in `batch`.
    latched: those with a latched gate.
    gates: the largest number of gates of a request; 0 if none has a gate.
    histories: the steering of each request that consumers want rows of, by index in `batch`, if it was ever steered.
    steers: whether a request was ever steered, be it on another pipeline stage.
    """

    batch: tuple[Scheduled, ...]
    blocks: tuple[PlannedBlock, ...]
    rows: int
    ship_rows: int
    steered: tuple[Slotted, ...]
    tokens: int
    gated: tuple[int, ...] = ()
    latched: tuple[int, ...] = ()
    gates: int = 0
    histories: Mapping[int, tuple[SlotRange, ...]] = field(default_factory=dict)
    steers: bool = False
    shaped: tuple[int, ...] = ()

    @property
    def ships(self) -> bool:
        """Whether there are rows for consumers."""
        return bool(self.ship_rows or self.shaped)

    @property
    def idle(self) -> bool:
        """Whether no tap has anything to do."""
        return not self.blocks and not self.steered

    def slots(self, tokens: int) -> npt.NDArray[np.int32]:
        """Return the slot that steers each of `tokens` token rows; -1: none."""
        slots = np.full(tokens, -1, np.int32)
        for source, length, slot in self.steered:
            slots[source : source + length] = slot
        return slots

    def unsent(self, kept: Collection[int] = ()) -> Plan:
        """Return the plan without rows for consumers.

        kept: the width classes whose rows are copied all the same, each to its place: another rank sends them.
        """
        blocks = [block._replace(base=block.base - self.ship_rows) for block in self.blocks if block.channel == VIEW]
        blocks += (block for block in self.blocks if block.channel == SHIP and block.width_class in kept)
        return replace(self, blocks=tuple(blocks), rows=self.rows - self.ship_rows, ship_rows=0, shaped=())

    def shipped(self, hub: int) -> tuple[PlannedBlock, ...]:
        """Return the blocks for the consumers of a hub; their rows are contiguous in the buffer of each class."""
        return tuple(block for block in self.blocks if block.channel == SHIP and block.hub == hub)


def block_of(block: PlannedBlock, sites: Sequence[Site]) -> Block:
    """Return a block of the plan as a block of a frame.

    sites: the tapped sites, in the order of their indices.
    """
    return Block(tuple(sites[i] for i in block.sites), block.rows, block.spans)


class Planner:
    """Makes the plans of one worker.

    num_sites: the number of tapped sites.
    hubs: the number of hubs that the rows go to.
    of_site: the width class of each site; without it, all are of class 0.
    """

    def __init__(self, num_sites: int, hubs: int = 1, of_site: Sequence[int] | None = None) -> None:
        self.num_sites = num_sites
        self.hubs = hubs
        classes = of_site or (0,) * num_sites
        self._classes = max(classes, default=0) + 1
        self._site_sets = [SiteSets(hub, classes) for hub in range(hubs)]
        self.nothing = Program((), self._site_sets[0])

    def program(self, wanted: Mapping[int, Positions], hub: int = 0) -> Program:
        """Return a request's program.

        wanted: the positions that are wanted at each site, by the site's index.
        hub: the index of the request's hub.
        """
        parts: dict[Positions, list[int]] = {}
        for site in sorted(wanted):
            if wanted[site]:
                parts.setdefault(wanted[site], []).append(site)
        if not parts:
            return self.nothing
        site_sets = self._site_sets[hub]
        site_sets.trim()
        return Program(tuple((positions, tuple(sites)) for positions, sites in parts.items()), site_sets)

    def plan(self, batch: Sequence[Scheduled]) -> Plan:
        """Return the plan of a step and mark its positions as computed."""
        ship: _Taken = {}
        view: _Taken = {}
        tokens = 0
        steered = False
        gated: list[int] = []
        for number, (request, row, start, length) in enumerate(batch):
            tokens += length
            if request.steered is not None:
                steered = True
                if request.gates:
                    gated.append(number)
            end = start + length
            computed = request.computed
            if computed >= end:
                continue
            request.computed = end
            first = max(start, computed)
            source = row + first - start
            progress = request.ship_progress
            if progress is not None:
                # Nearly always true while a request decodes.
                if progress.first <= first and end <= progress.stop:
                    if progress.sites is not None:
                        ship.setdefault(progress.sites, []).append((number, first, end - first, source))
                else:
                    _take(ship, progress, number, first, end, source)
            if request.view_progress is not None:
                _take(view, request.view_progress, number, first, end, source)
        if self.hubs > 1:  # the rows of one hub are contiguous
            ship = dict(sorted(ship.items(), key=lambda taken: taken[0].hub))
        ends = [0] * self._classes
        shipped = _blocks(ship, SHIP, ends)
        ship_rows = ends[0]
        viewed = _blocks(view, VIEW, ends)
        blocks = (*shipped, *viewed) if self._classes == 1 else tuple(sorted((*shipped, *viewed), key=_class_of))
        slotted = _slotted(batch) if steered else ()
        shaped = tuple(ends[1:]) if any(ends[1:]) else ()
        plan = Plan(tuple(batch), blocks, ends[0], ship_rows, slotted, tokens, shaped=shaped)
        if steered:
            plan = replace(plan, histories=_histories(batch), steers=True)
        return _with_gates(plan, gated) if gated else plan


def _histories(batch: Sequence[Scheduled]) -> dict[int, tuple[SlotRange, ...]]:
    return {
        number: tuple(request.steered)
        for number, (request, _, _, _) in enumerate(batch)
        if request.steered is not None and request.ship_progress is not None
    }


def _with_gates(plan: Plan, gated: Sequence[int]) -> Plan:
    latched = tuple(number for number in gated if plan.batch[number].request.latched)
    gates = max(len(plan.batch[number].request.gates) for number in gated)
    return replace(plan, gated=tuple(gated), latched=latched, gates=gates)


_Taken = dict[SiteSet, list[tuple[int, int, int, int]]]
"""The spans that are wanted at each set of sites: the request's index, first position, length and first token row."""


def _take(taken: _Taken, progress: RequestProgress, number: int, first: int, end: int, source: int) -> None:
    """Add the wanted positions of `first .. end` of a request to `taken`; `source` is the token row of `first`."""
    for begin, stop, sites in progress.runs(first, end):
        taken.setdefault(sites, []).append((number, begin, stop - begin, source + begin - first))


def _blocks(taken: _Taken, channel: int, ends: list[int]) -> list[PlannedBlock]:
    """Return the blocks.

    ends: the rows of each class's buffer that are taken; those of the blocks are added.
    """
    blocks = []
    for sites, parts in taken.items():
        spans: list[Span] = []
        runs: list[Run] = []
        rows = 0
        # Of the run that is being built; adjacent runs are merged.
        begin = target = 0
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
        for number, members in sites.classes:
            block = PlannedBlock(channel, members, rows, ends[number], tuple(runs), tuple(spans), sites.hub, number)
            blocks.append(block)
            ends[number] = block.end
    return blocks


_class_of = operator.attrgetter("width_class")
_span = functools.partial(tuple.__new__, Span)
_run = functools.partial(tuple.__new__, Run)
_slotted_run = functools.partial(tuple.__new__, Slotted)
"""These build the tuples in a third of the time that calling the class takes: every step makes one per request."""

_SITE_SETS_KEPT_MAX = 4096
# For at most this many positions, `RequestProgress.runs` goes stretch by stretch.
_STEPS_MAX = 8


def _slotted(batch: Sequence[Scheduled]) -> tuple[Slotted, ...]:
    """Return the slot that steers each token row: the one that applied when its position was first computed."""
    slotted: list[Slotted] = []
    for request, row, start, length in batch:
        history = request.steered
        if history is None:
            continue
        first, from_here, steered = history[-1][:3]
        if first <= start and steered.patched_last < start:  # nearly always true
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
    """Add the slots that steer positions `first .. stop` under `held`; `row` is the token row of `first`."""
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
