"""The planner against a reference that looks at every site, request and token by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.places import FOREVER
from capflow.capture.positions import Positions
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Steered
from capflow_engine.taps.plan import SHIP, VIEW, Planner, Scheduled, Tracked
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
