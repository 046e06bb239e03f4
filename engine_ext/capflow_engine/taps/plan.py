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

The planner works on arrays with an entry for each request of the batch (`capflow_engine.taps.requests`). It looks at a
request by itself only if something changes in the step: the set of sites that want its positions, or what steers it.
What only other threads read of a plan, such as its spans, is kept in arrays until it is asked for.

A row of a request is planned once. After a preemption vLLM computes positions below `Tracked.computed` again; their
rows are not planned again. Planning changes `Tracked.computed` and each `RequestProgress`, and nothing else.

A position that is computed again is steered as it was the first time: `Tracked.steered` holds the position from which
each change of a request's steering applies.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from capflow.capture.frame import Block, Span
from capflow.capture.places import FOREVER
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow_engine.taps.acting import SlotRange, programs_of
from capflow_engine.taps.requests import (
    SHIP,
    VIEW,
    Hashes,
    Indices,
    Program,
    RequestTable,
    SiteSet,
    SiteSets,
    Tracked,
    hashes_of,
)

T = TypeVar("T")


class Made(Sequence[T]):
    """Tuples that are kept as arrays, and made when they are first asked for."""

    __slots__ = ("_made",)
    _made: tuple[T, ...] | None

    def _make(self) -> Iterator[T]:
        raise NotImplementedError

    @property
    def made(self) -> tuple[T, ...]:
        """All of them."""
        if self._made is None:
            self._made = tuple(self._make())
        return self._made

    @overload
    def __getitem__(self, number: int) -> T: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[T]: ...

    def __getitem__(self, number: int | slice) -> T | Sequence[T]:
        return self.made[number]

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self) -> Iterator[T]:
        return iter(self.made)

    def __eq__(self, other: object) -> bool:
        return self.made == (other.made if isinstance(other, Made) else other)

    __hash__ = None  # type: ignore[assignment]


class Scheduled(NamedTuple):
    """A request's part of a step: its tokens are rows `row .. row+length` of the model's tensors.

    start: the position of the first token.
    """

    request: Tracked
    row: int
    start: int
    length: int


class Batch(Made[Scheduled]):
    """The requests of a step, in the order of their tokens.

    starts, lengths: the fields of `Scheduled`, as arrays.
    rows: the field `row`; None if the tokens of the requests follow one another from row 0 on.
    adjoins: whether they do.
    """

    __slots__ = ("_rows", "adjoins", "lengths", "requests", "starts")

    def __init__(
        self, requests: tuple[Tracked, ...], starts: Indices, lengths: Indices, rows: Indices | None = None
    ) -> None:
        self.requests, self.starts, self.lengths = requests, starts, lengths
        self._rows, self.adjoins = rows, rows is None
        self._made = None

    @property
    def rows(self) -> Indices:
        """The first token row of each request."""
        if self._rows is None:
            self._rows = np.cumsum(self.lengths) - self.lengths
        return self._rows

    def later(self, starts: Indices) -> Batch:
        """Return the batch with other positions."""
        return Batch(self.requests, starts, self.lengths, None if self.adjoins else self._rows)

    @classmethod
    def of(cls, parts: Sequence[Scheduled]) -> Batch:
        """Return the batch of these parts."""
        if isinstance(parts, Batch):
            return parts
        requests, *columns = zip(*parts, strict=True) if parts else ((),) * 4
        rows, starts, lengths = (np.array(column, np.int64) for column in columns)
        return cls(requests, starts, lengths, rows)

    def _make(self) -> Iterator[Scheduled]:
        columns = (each.tolist() for each in (self.rows, self.starts, self.lengths))
        return map(_scheduled, zip(self.requests, *columns, strict=True))

    def part(self, number: int) -> Scheduled:
        """Return the part of one request, without making those of the others."""
        return Scheduled(
            self.requests[number], int(self.rows[number]), int(self.starts[number]), int(self.lengths[number])
        )

    @property
    def end(self) -> int:
        """The end of the rows in the model's tensors that belong to the requests; 0 without requests."""
        if self._rows is None:
            return int(self.lengths.sum())
        return int((self._rows + self.lengths).max(initial=0))

    def __len__(self) -> int:
        return len(self.requests)


class Spans(Made[Span]):
    """The spans of a block. They are made when they are first asked for, mostly in the sender's thread."""

    __slots__ = ("_batch", "_begin", "_columns", "_end")

    def __init__(self, columns: tuple[Indices, ...], begin: int, end: int, batch: Batch | None = None) -> None:
        """Take entries `begin .. end` of the columns, which are the fields of `Span`.

        batch: the positions begin where those of its requests do; None: where the columns say.
        """
        self._columns, self._begin, self._end, self._batch = columns, begin, end, batch
        self._made = None

    def moved(self, batch: Batch) -> Spans:
        """Return the spans of a later step that has whole parts of the same requests in the same order."""
        return Spans(self._columns, self._begin, self._end, batch)

    def _make(self) -> Iterator[Span]:
        numbers, starts, lengths, rows = (column[self._begin : self._end] for column in self._columns)
        starts = starts if self._batch is None else self._batch.starts[numbers]
        return map(_span, zip(*(each.tolist() for each in (numbers, starts, lengths, rows)), strict=True))

    def __len__(self) -> int:
        return self._end - self._begin


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
    spans: Sequence[Span]
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


class Slots(Made[Slotted]):
    """The token rows that are steered; if two entries name the same row, the later one applies.

    sources, lengths, slots: the fields of `Slotted`, as arrays.
    """

    __slots__ = ("lengths", "slots", "sources")

    def __init__(self, sources: Indices, lengths: Indices, slots: Indices) -> None:
        self.sources, self.lengths, self.slots = sources, lengths, slots
        self._made = None

    @property
    def end(self) -> int:
        """The end of the steered token rows; 0 if there are none."""
        return int((self.sources + self.lengths).max(initial=0))

    @property
    def packed(self) -> bytes:
        """Everything as bytes."""
        return np.concatenate((self.sources, self.lengths, self.slots)).tobytes()

    def by_token(self, tokens: int) -> npt.NDArray[np.int32]:
        """Return the slot that steers each of `tokens` token rows; -1: none."""
        slots = np.full(tokens, -1, np.int32)
        if not len(self.slots):
            return slots
        if (self.lengths == 1).all():
            slots[self.sources] = self.slots
        else:
            slots[np.repeat(self.sources, self.lengths) + counted(self.lengths)] = np.repeat(self.slots, self.lengths)
        return slots

    def _make(self) -> Iterator[Slotted]:
        return map(_slotted_run, zip(self.sources.tolist(), self.lengths.tolist(), self.slots.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.slots)


_NO_INDICES = np.empty(0, np.int64)
NO_SLOTS = Slots(_NO_INDICES, _NO_INDICES, _NO_INDICES)


class SteeredParts(NamedTuple):
    """The requests of a step that were ever steered, each array in the order of the batch.

    numbers: their indices in the batch.
    starts, lengths: their positions in the step.
    held, key: as in `RequestTable`.
    whole, shared: hashes of each request with what steers it in the step, as in `RequestTable`.
    """

    numbers: Indices
    starts: Indices
    lengths: Indices
    held: Indices
    key: Hashes
    whole: Hashes
    shared: Hashes


class Plan(msgspec.Struct, frozen=True):
    """The plan of one step.

    blocks: those of class 0 for consumers, those for controllers, then those of further classes, class by class.
    rows: the number of rows of the buffer of class 0.
    ship_rows: the number of rows for consumers in it, which come first.
    shaped: the number of rows of each further class; all are for consumers. Empty if there are none.
    steered: the token rows that are steered.
    gated: the requests with gates, by their index in `batch`.
    latched: those with a latched gate.
    gates: the largest number of gates of a request; 0 if none has a gate.
    histories: the steering of each request that consumers want rows of, by index in `batch`, if it was ever steered.
    steering: the requests that were ever steered, be it on another pipeline stage; None if there are none.
    """

    batch: Batch
    blocks: tuple[PlannedBlock, ...]
    rows: int
    ship_rows: int
    steered: Slots
    gated: tuple[int, ...] = ()
    latched: tuple[int, ...] = ()
    gates: int = 0
    histories: Mapping[int, tuple[SlotRange, ...]] = msgspec.field(default_factory=dict)
    steering: SteeredParts | None = None
    shaped: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens of the step."""
        return int(self.batch.lengths.sum())

    @property
    def ships(self) -> bool:
        """Whether there are rows for consumers."""
        return bool(self.ship_rows or self.shaped)

    @property
    def steers(self) -> bool:
        """Whether a request was ever steered, be it on another pipeline stage."""
        return self.steering is not None

    @property
    def idle(self) -> bool:
        """Whether no tap has anything to do."""
        return not self.blocks and not len(self.steered.slots)

    def slots(self, tokens: int) -> npt.NDArray[np.int32]:
        """Return the slot that steers each of `tokens` token rows; -1: none."""
        return self.steered.by_token(tokens)

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
    return Block(tuple(sites[i] for i in block.sites), block.rows, tuple(block.spans))


EMPTY_PLAN = Plan(Batch.of(()), (), 0, 0, NO_SLOTS)


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
        self._table = RequestTable()
        # The last step, if the next one may go on as it did.
        self._steady: _Steady | None = None

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

    def plan(self, parts: Sequence[Scheduled]) -> Plan:
        """Return the plan of a step and mark its positions as computed."""
        batch, table = parts if isinstance(parts, Batch) else Batch.of(parts), self._table
        if not batch.requests:
            return EMPTY_PLAN
        ends = batch.starts + batch.lengths
        steady, self._steady = self._steady, None
        if steady is not None and steady.goes_on(batch, table.version):
            table.computed[steady.places] = ends
            self._steady = steady.after(batch, ends)
            return self._steady.plan
        places = table.places(batch.requests)
        computed = table.computed[places]
        table.computed[places] = np.maximum(ends, computed)
        ships, views, steers = table.counts
        if not (ships or views or steers):
            return Plan(batch, (), 0, 0, NO_SLOTS)
        version = table.version
        plan = self._plan(batch, places, np.maximum(batch.starts, computed), ends)
        if version == table.version and (computed == batch.starts).all():
            stops = np.where(table.asks[:, places], table.stop[:, places], FOREVER).min(axis=0)
            if plan.steering is None or (plan.steering.starts >= table.steady[places[plan.steering.numbers]]).all():
                left = int(((stops - ends) // np.maximum(batch.lengths, 1)).min())
                lengths = batch.lengths.tobytes()
                self._steady = _Steady(batch, places, ends, ends.tobytes(), lengths, left, version, plan)
        return plan

    def _plan(self, batch: Batch, places: Indices, firsts: Indices, ends: Indices) -> Plan:
        """Return the plan of a step of which anything is wanted.

        firsts, ends: the positions of each request that are computed for the first time.
        """
        table = self._table
        ships, views, steers = table.counts
        rows = [0] * self._classes
        shipped = self._blocks(SHIP, batch, places, firsts, ends, rows) if ships else []
        ship_rows = rows[0]
        viewed = self._blocks(VIEW, batch, places, firsts, ends, rows) if views else []
        blocks = (*shipped, *viewed) if self._classes == 1 else tuple(sorted((*shipped, *viewed), key=_class_of))
        shaped = tuple(rows[1:]) if any(rows[1:]) else ()
        plan = Plan(batch, blocks, rows[0], ship_rows, NO_SLOTS, shaped=shaped)
        numbers = np.flatnonzero(table.steered[places]) if steers else _NO_INDICES
        return self._steer(plan, places, numbers) if len(numbers) else plan

    def drop(self, request: Tracked) -> None:
        """Forget a request that ended, or that another one replaces."""
        self._table.drop(request)

    def _blocks(
        self, channel: int, batch: Batch, places: Indices, firsts: Indices, ends: Indices, rows: list[int]
    ) -> list[PlannedBlock]:
        """Return the blocks of a channel.

        firsts, ends: the positions of each request that are computed for the first time.
        rows: the rows of each class's buffer that are taken; those of the blocks are added.
        """
        table = self._table
        asks = table.asks[channel, places] & (firsts < ends)
        stays = (table.first[channel, places] <= firsts) & (ends <= table.stop[channel, places])
        numbers = np.flatnonzero(asks & stays & (table.sites[channel, places] != 0))
        here = places[numbers]
        lengths = ends[numbers] - firsts[numbers]
        sources = batch.rows[numbers] + firsts[numbers] - batch.starts[numbers]
        parts = _Parts(numbers, firsts[numbers], lengths, sources, table.sites[channel, here])
        moving = np.flatnonzero(asks & ~stays)
        moved: dict[int, SiteSet] = {}
        if len(moving):
            parts = parts.with_others(self._move(channel, batch, moving.tolist(), firsts, ends, moved))
        if not len(parts.numbers):
            return []
        groups = _grouped(parts.sites)
        sets = [
            moved.get(int(parts.sites[first])) or table.site_set(channel, int(places[parts.numbers[first]]))
            for first in groups.firsts
        ]
        order = groups.order
        if self.hubs > 1 and channel == SHIP:  # the rows of one hub are contiguous
            by_hub = sorted(range(len(sets)), key=lambda number: sets[number].hub)
            sets = [sets[number] for number in by_hub]
            order = [order[number] for number in by_hub]
        return _laid_out(parts, sets, order, channel, rows)

    def _move(
        self,
        channel: int,
        batch: Batch,
        numbers: Sequence[int],
        firsts: Indices,
        ends: Indices,
        moved: dict[int, SiteSet],
    ) -> list[tuple[int, int, int, int, int]]:
        """Return the parts of requests for which the wanted sites change, as the entries of `_Parts`.

        moved: the sets of sites are added, by `id`.
        """
        parts = []
        for number in numbers:
            request, row, start, _ = batch.part(number)
            progress = request.ship_progress if channel == SHIP else request.view_progress
            assert progress is not None
            for begin, stop, sites in progress.runs(int(firsts[number]), int(ends[number])):
                moved[id(sites)] = sites
                parts.append((number, begin, stop - begin, row + begin - start, id(sites)))
            self._table.move(request, channel)
        return parts

    def _steer(self, plan: Plan, places: Indices, numbers: Indices) -> Plan:
        """Return a plan with what steers its requests.

        numbers: the requests that were ever steered.
        """
        table, batch = self._table, plan.batch
        here = places[numbers]
        starts, lengths = batch.starts[numbers], batch.lengths[numbers]
        whole, shared = table.whole[here], table.shared[here]
        steady, slots = starts >= table.steady[here], table.decode[here]
        chosen = steady & (slots >= 0)
        entries = np.stack((numbers, batch.rows[numbers], lengths, slots))[:, chosen]
        if not steady.all():
            others = []
            for n in np.flatnonzero(~steady).tolist():
                part = batch.part(int(numbers[n]))
                others += [(int(numbers[n]), *each) for each in _slotted(part)]
                assert part.request.steered is not None
                programs = programs_of(part.request.steered, part.start, part.length)
                whole[n], shared[n] = hashes_of(part.request, programs)
            if others:
                entries = np.concatenate((entries, np.array(others, np.int64).T), axis=1)
                entries = entries[:, np.argsort(entries[0], kind="stable")]
        gated = numbers[table.gated[here]].tolist()
        requests = [batch.requests[number] for number in gated]
        shipping = numbers[table.asks[SHIP, here]].tolist()
        return replace(
            plan,
            steered=Slots(*entries[1:]),
            gated=tuple(gated),
            latched=tuple(number for number, request in zip(gated, requests, strict=True) if request.latched),
            gates=max((len(request.gates) for request in requests), default=0),
            histories={number: batch.requests[number].steered or () for number in shipping},
            steering=SteeredParts(numbers, starts, lengths, table.held[here], table.key[here], whole, shared),
        )


class _Steady(NamedTuple):
    """A step, and what makes the next one the same with later positions.

    places: of the requests in the table.
    ends: the positions after those of the step.
    follows, lengths: the bytes of `ends` and of the lengths of its parts.
    left: in how many further steps the same sites want the positions of all requests.
    version: of the table.
    """

    batch: Batch
    places: Indices
    ends: Indices
    follows: bytes
    lengths: bytes
    left: int
    version: int
    plan: Plan

    def goes_on(self, batch: Batch, version: int) -> bool:
        """Return whether a step computes the next positions of the same requests, wanted and steered as before."""
        last = self.batch
        return (
            batch.requests is last.requests
            and version == self.version
            and self.left > 0
            and batch.starts.tobytes() == self.follows
            and batch.lengths.tobytes() == self.lengths
            and batch.adjoins == last.adjoins
            and (batch.adjoins or np.array_equal(batch.rows, last.rows))
        )

    def after(self, batch: Batch, ends: Indices) -> _Steady:
        """Return the step that goes on."""
        plan = self.plan
        steering = plan.steering
        if steering is not None:
            steering = steering._replace(starts=batch.starts[steering.numbers])
        blocks = tuple(block._replace(spans=_moved(block.spans, batch)) for block in plan.blocks)
        plan = replace(plan, batch=batch, blocks=blocks, steering=steering)
        return _Steady(batch, self.places, ends, ends.tobytes(), self.lengths, self.left - 1, self.version, plan)


def _moved(spans: Sequence[Span], batch: Batch) -> Spans:
    assert isinstance(spans, Spans)
    return spans.moved(batch)


class _Parts(NamedTuple):
    """The wanted parts of the requests of a step, in the order of the batch.

    numbers: the request's index in the batch.
    firsts, lengths: its positions.
    sources: the token row of its first position.
    sites: the set of sites that wants them, as its `id`.
    """

    numbers: Indices
    firsts: Indices
    lengths: Indices
    sources: Indices
    sites: Indices

    def with_others(self, others: Sequence[tuple[int, int, int, int, int]]) -> _Parts:
        """Return these parts and others."""
        if not others:
            return self
        columns = np.concatenate((np.stack(self), np.array(others, np.int64).T), axis=1)
        return _Parts(*columns[:, np.argsort(columns[0], kind="stable")])


class _Groups(NamedTuple):
    """Parts by their set of sites, in the order in which the sets first occur.

    firsts: the index of each set's first part.
    order: the indices of each set's parts; one slice if all parts have the same set.
    """

    firsts: Sequence[int]
    order: list[Indices | slice]


def _grouped(sites: Indices) -> _Groups:
    if (sites == sites[0]).all():
        return _Groups((0,), [slice(0, len(sites))])
    _, firsts, numbers = np.unique(sites, return_index=True, return_inverse=True)
    by_set = np.argsort(numbers, kind="stable")
    bounds = np.cumsum(np.bincount(numbers))[:-1]
    order = np.split(by_set, bounds)
    ranked = np.argsort(firsts, kind="stable").tolist()
    return _Groups([int(firsts[rank]) for rank in ranked], [order[rank] for rank in ranked])


def _laid_out(
    parts: _Parts, sets: Sequence[SiteSet], order: Sequence[Indices | slice], channel: int, rows: list[int]
) -> list[PlannedBlock]:
    """Return the blocks of groups of parts.

    order: the indices of the parts of each set.
    rows: the rows of each class's buffer that are taken; those of the blocks are added.
    """
    if len(order) > 1:
        counts = [len(group) for group in order]  # type: ignore[arg-type]
        sorted_parts = np.stack(parts[:4])[:, np.concatenate(order)]  # type: ignore[arg-type,index]
    else:
        counts, sorted_parts = [len(parts.numbers)], np.stack(parts[:4])
    numbers, firsts, lengths, sources = sorted_parts
    bounds = [0, *np.cumsum(counts).tolist()]
    ends = np.cumsum(lengths)
    before = ends - lengths
    begins = before[bounds[:-1]]
    targets = before - (begins[0] if len(counts) == 1 else np.repeat(begins, counts))
    # Runs begin where a group does, and where token rows are not adjacent.
    new = np.empty(len(numbers), np.bool_)
    new[1:] = sources[1:] != sources[:-1] + lengths[:-1]
    new[bounds[:-1]] = True
    at = np.flatnonzero(new)
    run_lengths = np.diff(before[at], append=ends[-1]).tolist()
    every_run = tuple(map(_run, zip(sources[at].tolist(), targets[at].tolist(), run_lengths, strict=True)))
    run_bounds = np.searchsorted(at, bounds).tolist()
    totals = np.diff(begins, append=ends[-1]).tolist()
    columns = (numbers, firsts, lengths, targets)
    blocks = []
    for n, sites in enumerate(sets):
        runs, spans = every_run[run_bounds[n] : run_bounds[n + 1]], Spans(columns, bounds[n], bounds[n + 1])
        for number, members in sites.classes:
            block = PlannedBlock(channel, members, totals[n], rows[number], runs, spans, sites.hub, number)
            blocks.append(block)
            rows[number] = block.end
    return blocks


_class_of = operator.attrgetter("width_class")
_span = functools.partial(tuple.__new__, Span)
_run = functools.partial(tuple.__new__, Run)
_slotted_run = functools.partial(tuple.__new__, Slotted)
_scheduled = functools.partial(tuple.__new__, Scheduled)
"""These build the tuples in a third of the time that calling the class takes: every step makes one per request."""


def _slotted(part: Scheduled) -> list[Slotted]:
    """Return the slots that steer a request's token rows: those that applied when its positions were first computed."""
    slotted: list[Slotted] = []
    request, row, start, length = part
    stop = start + length
    for held in reversed(request.steered or ()):
        if held.first < stop:
            first = max(held.first, start)
            _slot(slotted, held, row + first - start, first, stop)
            if held.first <= start:
                break
            stop = first
    return slotted


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
