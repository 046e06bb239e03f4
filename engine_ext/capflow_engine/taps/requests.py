"""The running requests of one worker, as the planner sees them: what each one asks for, and how far it is.

A program is a request's choice of sites and positions. While the request runs, its `RequestProgress` says which sites
want its next positions, and where that changes.

`RequestTable` has the same in arrays, with a place for each request, and what steers the request. So a step is planned
by some operations on arrays, and only requests for which something changes in the step are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from capflow.capture.positions import Positions
from capflow.capture.spec import Capture
from capflow.steering.program import ProgramGate
from capflow_engine.taps.acting import SlotRange

SHIP, VIEW = 0, 1
"""The channels: rows for consumers, and rows that only a controller reads."""

Indices = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_encoder = msgspec.msgpack.Encoder()
_SITE_SETS_KEPT_MAX = 4096
# For at most this many positions, `RequestProgress.runs` goes stretch by stretch.
_STEPS_MAX = 8


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


class _Computed:
    """The field `Tracked.computed`. It is in the table while the request has a place there."""

    def __get__(self, tracked: Tracked | None, _: type[Tracked]) -> int:
        if tracked is None:
            return 0  # the field's default
        table = tracked.table
        return tracked.reached if table is None else int(table.computed[tracked.place])

    def __set__(self, tracked: Tracked, position: int) -> None:
        if tracked.table is None:
            tracked.reached = position
        else:
            tracked.table.version += 1
            tracked.table.computed[tracked.place] = position


class _Steered:
    """The field `Tracked.steered`, of which the table has the last range."""

    def __get__(self, tracked: Tracked | None, _: type[Tracked]) -> tuple[SlotRange, ...] | None:
        return None if tracked is None else tracked.ranges

    def __set__(self, tracked: Tracked, ranges: Sequence[SlotRange] | None) -> None:
        tracked.ranges = None if ranges is None else tuple(ranges)
        if tracked.table is not None:
            tracked.table.steer(tracked)


@dataclass(eq=False)
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
    gates: the gates of its program; set before `steered`.
    latched: whether one of them is latched.
    adapter: the name of the LoRA adapter that it runs with; empty for none.
    table, place: its place in the planner's table; None without one.
    """

    table: RequestTable | None = field(default=None, init=False, repr=False)
    place: int = field(default=-1, init=False, repr=False)
    # The values of `computed` and `steered`.
    reached: int = field(default=0, init=False, repr=False)
    ranges: tuple[SlotRange, ...] | None = field(default=None, init=False, repr=False)
    key: str
    id: str
    prompt_length: int
    ship: Program
    view: Program
    capture: Capture | None = None
    generated: int = 0
    computed: _Computed = _Computed()
    steered: _Steered = _Steered()
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


class RequestTable:
    """The requests that have a part in the steps of one worker, in arrays `[requests]`.

    A request has a place from its first step on, until it is dropped. The arrays of a channel are `[2, requests]`.

    computed: positions below this one were planned.
    asks: whether the request has a program.
    first, stop: the stretch of positions that the same sites want.
    sites: the set of sites that wants them, as its `id`; 0 for none.
    steered: whether anything ever steered the request.
    gated: whether its program has gates.
    steady: from this position on, the slot `decode` steers it alone; -1: none.
    held, key: where its last range of slots begins, and the key of that range.
    whole, shared: a hash of the request with its last range, as one pipeline stage has it and as all stages have it;
        `shared` is 0 if the range has nothing that all stages share.
    counts: how many requests have `asks` in each channel, and how many have `steered`.
    version: it grows with each change of anything but `computed` by the planner.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._sets: list[list[SiteSet | None]] = [[], []]
        self._size = 0
        self._grow(64)
        # The last requests that `places` was asked for, and its answer.
        self._requests: tuple[Tracked, ...] = ()
        self._places: Indices = np.empty(0, np.int64)
        self.counts = [0, 0, 0]
        self.version = 0

    def places(self, requests: tuple[Tracked, ...]) -> Indices:
        """Return the places of the requests of a step; those without one get it."""
        if requests is not self._requests:
            for request in requests:
                if request.table is not self:
                    self._add(request)
            self._requests = requests
            self._places = np.fromiter((request.place for request in requests), np.int64, len(requests))
        return self._places

    def site_set(self, channel: int, place: int) -> SiteSet:
        """Return the set of sites that wants the stretch of a request."""
        site_set = self._sets[channel][place]
        assert site_set is not None
        return site_set

    def move(self, request: Tracked, channel: int) -> None:
        """Take the progress of a request in a channel."""
        self.version += 1
        progress = request.ship_progress if channel == SHIP else request.view_progress
        assert progress is not None
        self.first[channel, request.place], self.stop[channel, request.place] = progress.first, progress.stop
        self._sets[channel][request.place] = progress.sites
        self.sites[channel, request.place] = 0 if progress.sites is None else id(progress.sites)

    def steer(self, request: Tracked) -> None:
        """Take what steers a request."""
        self.version += 1
        place, ranges = request.place, request.ranges
        self.counts[_STEERED] += (ranges is not None) - int(self.steered[place])
        self.steered[place] = ranges is not None
        self.gated[place] = ranges is not None and bool(request.gates)
        if ranges is None:
            return
        last = ranges[-1]
        self.steady[place] = max(last.first, last.split, last.steered.patched_last + 1)
        self.decode[place] = last.steered.decode
        self.held[place], self.key[place] = last.first, last.key
        self.whole[place], self.shared[place] = hashes_of(request, [(0, last.key, last.shared_key)])

    def drop(self, request: Tracked) -> None:
        """Give back the place of a request that ended, or that another one replaces."""
        if request.table is not self:
            return
        self.version += 1
        place, reached = request.place, request.computed
        self.counts[SHIP] -= int(self.asks[SHIP, place])
        self.counts[VIEW] -= int(self.asks[VIEW, place])
        self.counts[_STEERED] -= int(self.steered[place])
        self.asks[:, place] = self.steered[place] = self.gated[place] = False
        self._sets[SHIP][place] = self._sets[VIEW][place] = None
        self._free.append(place)
        self._requests = ()
        request.table, request.place, request.reached = None, -1, reached

    def _add(self, request: Tracked) -> None:
        if request.table is not None:
            request.table.drop(request)
        if not self._free:
            self._grow(2 * self._size)
        place, reached = self._free.pop(), request.computed
        request.table, request.place = self, place
        self.computed[place] = reached
        for channel, progress in ((SHIP, request.ship_progress), (VIEW, request.view_progress)):
            self.asks[channel, place] = progress is not None
            self.counts[channel] += progress is not None
            if progress is not None:
                self.move(request, channel)
        self.steered[place] = False
        self.steer(request)

    def _grow(self, size: int) -> None:
        """Make room for `size` requests."""
        more = size - self._size
        for name, shape, dtype in _COLUMNS:
            column = np.zeros((*shape, size), dtype)
            if self._size:
                column[..., : self._size] = getattr(self, name)
            setattr(self, name, column)
        for sets in self._sets:
            sets.extend([None] * more)
        self._free += range(size - 1, self._size - 1, -1)
        self._size = size

    computed: Indices
    asks: npt.NDArray[np.bool_]
    first: Indices
    stop: Indices
    sites: Indices
    steered: npt.NDArray[np.bool_]
    gated: npt.NDArray[np.bool_]
    steady: Indices
    decode: Indices
    held: Indices
    key: Hashes
    whole: Hashes
    shared: Hashes


_STEERED = 2
_COLUMNS: tuple[tuple[str, tuple[int, ...], Any], ...] = (
    *((name, (2,), np.int64) for name in ("first", "stop", "sites")),
    *((name, (), np.int64) for name in ("computed", "steady", "decode", "held")),
    *((name, (), np.uint64) for name in ("key", "whole", "shared")),
    *((name, (), np.bool_) for name in ("steered", "gated")),
    ("asks", (2,), np.bool_),
)


def hashes_of(request: Tracked, programs: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return a hash of a request and the programs that steer it, and of the part of them that all stages share.

    programs: as `capflow_engine.taps.acting.programs_of` returns them.
    """
    shared: list[tuple[int, int]] = []
    for first, _, program in programs:
        if not shared or shared[-1][1] != program:  # a controller's action begins no program in other stages
            shared.append((first, program))
    whole = xxhash.xxh3_64_intdigest(_encoder.encode((request.key, programs)))
    if not any(program for _, program in shared):
        return whole, 0
    return whole, xxhash.xxh3_64_intdigest(_encoder.encode((request.key, shared))) or 1
