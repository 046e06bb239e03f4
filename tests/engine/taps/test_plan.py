"""The planner against a reference that looks at every site, request and token by itself."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.places import FOREVER
from capflow.capture.positions import Positions
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Steered
from capflow_engine.taps.plan import Batch, Planner, Scheduled
from capflow_engine.taps.requests import SHIP, VIEW, Tracked
from tests.kit.selectors_model import budgets, forms, meant

SITES = 5


def tracked(planner, key, prompt_length, ship=None, computed=0):
    return Tracked(key, key, prompt_length, planner.program(ship or {}), planner.nothing, computed=computed)


def taken(plan, channel):
    """For each buffer row of a channel: (site, token row), read from the runs; None where nothing is written."""
    rows = {}
    for block in plan.blocks:
        if block.channel != channel:
            continue
        for place, site in enumerate(block.sites):
            for run in block.runs:
                for i in range(run.length):
                    row = block.base + place * block.rows + run.target + i
                    assert row not in rows
                    rows[row] = (site, run.source + i)
    return rows


def named(plan, channel):
    """For each buffer row of a channel: (site, request key, position), read from the spans."""
    rows = {}
    for block in plan.blocks:
        if block.channel != channel:
            continue
        for place, site in enumerate(block.sites):
            for span in block.spans:
                for i in range(span.length):
                    row = block.base + place * block.rows + span.row + i
                    assert row not in rows
                    rows[row] = (site, plan.batch[span.request].request.key, span.start + i)
    return rows


def planned(plan, channel):
    """For each row of a channel, by site, request key and position: the token row that it is copied from."""
    sources, names = taken(plan, channel), named(plan, channel)
    assert sources.keys() == names.keys()
    rows = {}
    for buffer_row, name in names.items():
        assert sources[buffer_row][0] == name[0]
        assert name not in rows
        rows[name] = sources[buffer_row][1]
    return rows


def program_of(planner, asked):
    return planner.program({site: Positions.parse(form, max_rows=rows) for site, (form, rows) in asked.items()})


wants = st.dictionaries(st.integers(0, SITES - 1), st.tuples(forms, budgets), max_size=SITES)
requests = st.lists(
    st.tuples(
        st.integers(1, 9),  # prompt length
        st.integers(0, 12),  # first position of the step
        st.integers(1, 8),  # tokens in the step
        st.integers(0, 14),  # computed before
        wants,
        wants,
        st.booleans(),  # whether a stranger's tokens lie before it
    ),
    min_size=1,
    max_size=6,
)


@given(requests)
@settings(max_examples=400, deadline=None)
def test_every_wanted_row_is_planned_once_and_nothing_else(parts):
    planner = Planner(SITES)
    batch, row, expected = [], 0, {SHIP: {}, VIEW: {}}
    for number, (prompt, start, length, computed, ship, view, stranger) in enumerate(parts):
        row += 3 * stranger
        key = f"r{number}"
        programs = program_of(planner, ship), program_of(planner, view)
        request = Tracked(key, key, prompt, *programs, computed=computed)
        batch.append(Scheduled(request, row, start, length))
        for channel, want in ((SHIP, ship), (VIEW, view)):
            for site, (form, rows) in want.items():
                for position in meant(form, prompt, start + length, rows):
                    if position >= max(start, computed):
                        expected[channel][site, request.key, position] = row + position - start
        row += length
    plan = planner.plan(batch)
    everything = {}
    for channel in (SHIP, VIEW):
        assert planned(plan, channel) == expected[channel]
        everything |= taken(plan, channel)
    assert sorted(everything) == list(range(plan.rows))
    assert plan.ship_rows == len(taken(plan, SHIP))
    assert sorted(taken(plan, SHIP)) == list(range(plan.ship_rows))


def test_positions_computed_again_are_not_planned_again():
    planner = Planner(1)
    request = tracked(planner, "r", 4, {0: Positions.ALL})
    assert planner.plan([Scheduled(request, 0, 0, 4)]).ship_rows == 4
    assert planner.plan([Scheduled(request, 0, 4, 1)]).ship_rows == 1
    resumed = planner.plan([Scheduled(request, 0, 0, 7)])
    assert named(resumed, SHIP) == {0: (0, "r", 5), 1: (0, "r", 6)}
    assert request.computed == 7


def test_requests_that_want_the_same_sites_form_one_group_with_one_run():
    planner = Planner(SITES)
    want = dict.fromkeys(range(SITES), Positions.ALL)
    batch = [Scheduled(tracked(planner, f"r{i}", 8, want), 8 * i, 0, 8) for i in range(16)]
    (block,) = planner.plan(batch).blocks
    assert block.sites == tuple(range(SITES))
    assert block.runs == ((0, 0, 128),)
    decode = {0: Positions.ALL_GENERATED, 1: Positions.ALL}
    batch = [Scheduled(tracked(planner, f"r{i}", 8, decode, computed=8), i, 8, 1) for i in range(4)]
    (block,) = planner.plan(batch).blocks
    assert (block.sites, block.runs) == ((0, 1), ((0, 0, 4),))


steps = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=14)


@given(wants, st.integers(1, 14), steps)
@settings(max_examples=400, deadline=None)
def test_any_split_into_steps_plans_each_row_once(want, prompt, parts):
    """Chunks of any length; after some of them the request is preempted, and computed again from its start."""
    planner = Planner(SITES)
    request = Tracked("r", "r", prompt, program_of(planner, want), planner.nothing)
    got, at, reached = [], 0, 0
    for row, (length, fate) in enumerate(parts):  # that many strangers' tokens lie before it
        rows = planned(planner.plan([Scheduled(request, row, at, length)]), SHIP)
        assert all(source == row + position - at for (_, _, position), source in rows.items())
        got += [(site, position) for site, _, position in rows]
        at += length
        reached = max(reached, at)
        if fate == 0:
            at = 0
    expected = {(site, p) for site, (form, rows) in want.items() for p in meant(form, prompt, reached, rows)}
    assert len(got) == len(set(got))
    assert set(got) == expected


@given(wants, st.integers(1, 6), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=12))
@settings(max_examples=300, deadline=None)
def test_positions_of_rejected_drafts_are_planned_again(want, prompt, parts):
    """After a step, its last few positions may be rejected: `computed` moves back, and so does the progress."""
    planner = Planner(SITES)
    request = Tracked("r", "r", prompt, program_of(planner, want), planner.nothing)
    got, at = set(), 0
    for row, (length, rejected) in enumerate(parts):  # that many strangers' tokens lie before it
        rows = planned(planner.plan([Scheduled(request, row, at, length)]), SHIP)
        assert all(source == row + position - at for (_, _, position), source in rows.items())
        new = {(site, position) for site, _, position in rows}
        assert got.isdisjoint(new)
        at += length - min(rejected, length - 1)
        request.computed = min(request.computed, at)
        got |= {row for row in new if row[1] < at}
    assert got == {(site, p) for site, (form, rows) in want.items() for p in meant(form, prompt, at, rows)}


def test_steady_decoding_moves_no_progress():
    planner = Planner(SITES)
    request = tracked(planner, "r", 3, {0: Positions.ALL, 1: Positions.ALL_PROMPT, 2: Positions.ALL_GENERATED})
    for start, length in ((0, 3), (3, 1)):
        planner.plan([Scheduled(request, 0, start, length)])
    assert (request.ship_progress.first, request.ship_progress.stop) == (3, FOREVER)
    planner.plan([Scheduled(request, 0, 4, 1)])
    assert request.ship_progress.first == 3


@pytest.mark.parametrize(
    ("start", "length", "prefill", "decode"), [(0, 4, 4, 0), (3, 1, 1, 0), (4, 1, 0, 1), (2, 5, 2, 3)]
)
def test_steering_changes_at_the_end_of_the_prompt(start, length, prefill, decode):
    planner = Planner(2)
    request = tracked(planner, "r", 4)
    request.steered = [SlotRange(0, 4, Steered(10, 11, {6: 12}))]
    plan = planner.plan([Scheduled(request, 5, start, length)])
    expected = np.array([-1] * 5 + [10] * prefill + [11] * decode + [-1] * (11 - prefill - decode))
    if start <= 6 < start + length:
        expected[5 + 6 - start] = 12
    assert plan.slots(16).tolist() == expected.tolist()
    assert not plan.idle


def seen(plan):
    """Everything that a plan says."""
    steering = None if plan.steering is None else [column.tolist() for column in plan.steering]
    blocks = [(*block._replace(spans=()), tuple(block.spans)) for block in plan.blocks]
    slots = plan.slots(64).tolist()
    return blocks, slots, plan.rows, plan.ship_rows, plan.gated, plan.latched, plan.histories, steering, plan.tokens


def meant_sources(block, batch):
    """Yield the token row of each row of a block, in order, read from the spans."""
    for span in sorted(block.spans, key=lambda span: span.row):
        _, row, start, _ = batch.part(span.request)
        yield from range(row + span.start - start, row + span.start - start + span.length)


FORMS = ["all", "all_generated", {"every": 3}, {"generated": [1, 4]}, "last_prompt", {"generated": [6, None]}]


class Twins:
    """Two planners with the same requests. The second one looks at each request of each step anew."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.planners = [Planner(SITES, hubs=2, of_site=[0, 0, 1, 0, 1]) for _ in range(2)]
        # A request of each planner, and its next position.
        self.running = []
        self.number = self.went_on = 0
        self.begin()

    def any(self):
        return self.running[self.rng.integers(len(self.running))]

    def begin(self):
        rng, key = self.rng, f"k{self.number}"
        form = Positions.parse(FORMS[rng.integers(len(FORMS))])
        sites = rng.choice(SITES, rng.integers(0, SITES + 1), replace=False).tolist()
        prompt, hub, views = int(rng.integers(1, 6)), int(rng.integers(2)), rng.integers(4) == 0
        pair = []
        for planner in self.planners:
            view = planner.program({0: Positions.ALL_GENERATED}, hub) if views else planner.nothing
            ship = planner.program(dict.fromkeys(sites, form), hub)
            pair.append(Tracked(key, key, prompt, ship, view, hub=hub))
        self.running.append([pair, 0])
        self.number += 1

    def end(self):
        if len(self.running) > 1:
            pair, _ = self.running.pop(int(self.rng.integers(len(self.running))))
            for planner, request in zip(self.planners, pair, strict=True):
                planner.drop(request)

    def steer(self):
        (pair, at), rng = self.any(), self.rng
        prompt, slots = pair[0].prompt_length, rng.integers(-1, 4, 2).tolist()
        ranges = [SlotRange(0, prompt, Steered(*slots, {}), key=int(rng.integers(1, 99)))]
        if rng.integers(2):
            ranges.append(SlotRange(at + 2, prompt, Steered(7, 8, {at + 3: 9}), key=100, shared_key=101))
        ranges = ranges if rng.integers(4) else None
        for request in pair:
            request.steered = ranges

    def go_back(self):
        """The request was preempted, or drafts were rejected."""
        entry = self.any()
        entry[1] = int(self.rng.integers(entry[1] + 1))
        if self.rng.integers(2):
            for request in entry[0]:
                request.computed = min(request.computed, entry[1])

    def shuffle(self):
        self.rng.shuffle(self.running)

    def step(self):
        lengths = self.rng.integers(1, 4 if self.rng.integers(6) == 0 else 2, len(self.running)).tolist()
        lengths = [
            max(length, pair[0].prompt_length - at) for (pair, at), length in zip(self.running, lengths, strict=True)
        ]
        starts = np.array([at for _, at in self.running], np.int64)
        plans = []
        for which, planner in enumerate(self.planners):
            requests = tuple(pair[which] for pair, _ in self.running)
            if which == 0 and requests == planner._table._requests:
                requests = planner._table._requests  # as a worker's lineup does it
                self.went_on += planner._steady is not None
            batch = Batch(requests, starts, np.array(lengths, np.int64))
            if which == 1:
                planner._steady = None
                rows = itertools.accumulate(lengths, initial=0)
                batch = Batch.of(list(map(Scheduled, requests, rows, starts.tolist(), lengths)))
            plans.append(planner.plan(batch))
        for entry, length in zip(self.running, lengths, strict=True):
            entry[1] += length
        return plans


@pytest.mark.parametrize("seed", range(40))
def test_a_step_that_goes_on_as_the_one_before_is_planned_as_any_other(seed):
    twins = Twins(seed)
    changes = [twins.begin, twins.end, twins.steer, twins.go_back, twins.shuffle]
    for _ in range(60):
        if (change := twins.rng.integers(12)) < len(changes):
            changes[change]()
        first, second = twins.step()
        assert seen(first) == seen(second)
        for block in first.blocks:
            sources = [run.source + n for run in block.runs for n in range(run.length)]
            assert sources == list(meant_sources(block, second.batch))
        assert all(one.computed == other.computed for (one, other), _ in twins.running)
    assert twins.went_on


def test_a_request_that_leaves_takes_its_positions_with_it_and_gives_its_place_to_another():
    planner = Planner(SITES)
    first, second = (tracked(planner, key, 2, {0: Positions.ALL}) for key in "ab")
    planner.plan([Scheduled(first, 0, 0, 5)])
    place = first.place
    planner.drop(first)
    assert (first.computed, first.table) == (5, None)
    assert planner.plan([Scheduled(second, 0, 0, 1)]).rows == 1
    assert (second.place, second.computed) == (place, 1)
    assert planner.plan([Scheduled(first, 0, 4, 2)]).rows == 1  # position 4 was planned
    assert first.place != place
