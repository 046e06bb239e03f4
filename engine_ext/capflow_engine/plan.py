"""The plan: what the taps do in one step, for every request of its batch.

The planner is told the batch, in the order in which its tokens lie in the model's tensors, and says
which token rows each site copies to where, and which bank row each site adds to which tokens.

Requests that want the same positions at the same sites share a `Program`. Sites that, over the whole
batch, want exactly the same rows form one *group*, planned once; its rows lie in the step's buffer as
`[sites of the group, rows, hidden]`, groups one after another. So the work of planning grows with the
number of different programs, not with requests times sites.

A row of a request is planned once: positions below `Tracked.computed`, computed again after a
preemption, are passed over. Planning changes `Tracked.computed` and nothing else.

Rows for consumers (`SHIP`) come first in the buffer; rows that only a controller looks at (`VIEW`)
lie behind them and never leave the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from capflow.frame import Block, Span
from capflow.site import Site
from capflow.spec import CaptureSpec, Positions, span

SHIP, VIEW = 0, 1


class Program:
    """The positions wanted at each tapped site, as plain ints in site order; compared by identity."""

    __slots__ = ("any", "positions")

    def __init__(self, positions: tuple[int, ...]) -> None:
        self.positions = positions
        self.any = any(positions)


@dataclass(eq=False)
class Tracked:
    """A request that is running, as one worker knows it.

    key: vLLM's id of it; id: the id it is known by outside. computed: its positions below this were
    planned. prefill_steer, decode_steer: for each steered site index the bank row that is added to
    its prompt positions and to its generated ones.
    """

    key: str
    id: str
    prompt_length: int
    ship: Program
    view: Program
    capture: CaptureSpec | None = None
    computed: int = 0
    prefill_steer: Mapping[int, int] = field(default_factory=dict)
    decode_steer: Mapping[int, int] = field(default_factory=dict)


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
    """Sites, by index, that take the same rows; their first lies at row `base` of the buffer.

    spans name requests by their number in `Plan.batch`.
    """

    channel: int
    sites: tuple[int, ...]
    rows: int
    base: int
    runs: tuple[Run, ...]
    spans: tuple[Span, ...]


class Add(NamedTuple):
    """A site adds bank row `bank` to token rows `source .. source+length`."""

    source: int
    length: int
    bank: int


@dataclass(frozen=True)
class Plan:
    """One step. rows: rows of the buffer; ship_rows: how many of them are for consumers.

    adds: for each steered site index, what it adds.
    """

    batch: tuple[Scheduled, ...]
    groups: tuple[Group, ...]
    rows: int
    ship_rows: int
    adds: Mapping[int, tuple[Add, ...]]
    tokens: int

    @property
    def idle(self) -> bool:
        """Whether no tap has anything to do."""
        return not self.groups and not self.adds

    def blocks(self, sites: Sequence[Site]) -> tuple[Block, ...]:
        """Return the shipped groups as the blocks of a frame, given the tapped sites in order."""
        return tuple(
            Block(tuple(sites[i] for i in group.sites), group.rows, group.spans)
            for group in self.groups
            if group.channel == SHIP
        )


class Planner:
    """Makes plans for one worker. num_sites: the sites it taps, known by index from here on."""

    def __init__(self, num_sites: int) -> None:
        self.num_sites = num_sites
        self.nothing = Program((0,) * num_sites)
        self._programs: dict[tuple[int, ...], Program] = {self.nothing.positions: self.nothing}
        self._groupings: dict[tuple[Program, ...], dict[tuple[int, ...], tuple[int, ...]]] = {}

    def program(self, wanted: Mapping[int, Positions]) -> Program:
        """Return the one program that wants these positions at these site indices."""
        positions = tuple(int(wanted.get(i, 0)) for i in range(self.num_sites))
        return self._programs.setdefault(positions, Program(positions))

    def plan(self, batch: Sequence[Scheduled]) -> Plan:
        """Return the plan of a step and mark its positions as computed."""
        groups: list[Group] = []
        rows = self._add_groups(groups, SHIP, batch, 0)
        ship_rows = rows
        rows = self._add_groups(groups, VIEW, batch, rows)
        adds = _adds(batch)
        tokens = 0
        for request, _, start, length in batch:
            tokens += length
            request.computed = max(request.computed, start + length)
        return Plan(tuple(batch), tuple(groups), rows, ship_rows, adds, tokens)

    def _add_groups(self, groups: list[Group], channel: int, batch: Sequence[Scheduled], base: int) -> int:
        """Append the channel's groups, their rows from `base` on; return the row behind the last."""
        members: dict[Program, list[_Member]] = {}
        order: list[tuple[Program, _Member]] = []
        for number, part in enumerate(batch):
            program = part.request.ship if channel == SHIP else part.request.view
            if program.any:
                member = _Member(number, part, {})
                members.setdefault(program, []).append(member)
                order.append((program, member))
        if not members:
            return base
        programs = tuple(members)
        for signature, sites in self._grouping(programs).items():
            wanted = {p: positions for p, positions in zip(programs, signature, strict=True) if positions}
            if len(wanted) == len(programs):  # in the batch's order, where neighbours make long runs
                parts = [(wanted[program], member) for program, member in order]
            else:
                parts = [(positions, member) for program, positions in wanted.items() for member in members[program]]
            runs, spans, rows = _lay(parts)
            if rows:
                groups.append(Group(channel, sites, rows, base, runs, spans))
                base += rows * len(sites)
        return base

    def _grouping(self, programs: tuple[Program, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the sites by what each of the programs wants there; sites nobody wants are left out."""
        grouping = self._groupings.get(programs)
        if grouping is None:
            if len(self._groupings) >= 1024:
                self._groupings.clear()
            collected: dict[tuple[int, ...], list[int]] = {}
            for site, signature in enumerate(zip(*(p.positions for p in programs), strict=True)):
                if any(signature):
                    collected.setdefault(signature, []).append(site)
            grouping = {signature: tuple(sites) for signature, sites in collected.items()}
            self._groupings[programs] = grouping
        return grouping


class _Member(NamedTuple):
    """A request's part of the batch, its number there, and what was found of it: `(first, size)` by positions."""

    number: int
    part: Scheduled
    found: dict[int, tuple[int, int]]


def _lay(parts: Sequence[tuple[int, _Member]]) -> tuple[tuple[Run, ...], tuple[Span, ...], int]:
    """Return the runs, spans and number of rows of a group, given the positions wanted of each member."""
    runs: list[Run] = []
    spans: list[Span] = []
    rows = 0
    source, target, length = -1, 0, 0  # the run being built; runs that touch are one
    for positions, (number, (request, row, start, count), found) in parts:
        known = found.get(positions)
        if known is None:
            done = request.computed
            first, end = span(positions, request.prompt_length, max(done, start), start + count)
            known = found[positions] = (first, end - first)
        first, size = known
        if size <= 0:
            continue
        spans.append(Span(number, first, size, rows))
        begin = row + first - start
        if length and begin == source + length:
            length += size
        else:
            if length:
                runs.append(Run(source, target, length))
            source, target, length = begin, rows, size
        rows += size
    if length:
        runs.append(Run(source, target, length))
    return tuple(runs), tuple(spans), rows


def _adds(batch: Sequence[Scheduled]) -> dict[int, tuple[Add, ...]]:
    """Return what each site adds; prompt and generated positions of a request may differ."""
    adds: dict[int, list[Add]] = {}
    for request, row, start, length in batch:
        if not request.prefill_steer and not request.decode_steer:
            continue
        split = min(max(request.prompt_length - start, 0), length)
        for steer, source, size in (
            (request.prefill_steer, row, split),
            (request.decode_steer, row + split, length - split),
        ):
            if size:
                for site, bank in steer.items():
                    adds.setdefault(site, []).append(Add(source, size, bank))
    return {site: tuple(entries) for site, entries in adds.items()}
