"""The GPU's tables say what the plan says, whatever they said before."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.positions import Positions
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import SHIP, VIEW, Tracked
from capflow_engine.taps.tables import Tables
from tests.kit.selectors_model import forms

SITES, TOKENS = 5, 40


def make_tables():
    return Tables(
        sites=SITES,
        tokens=TOKENS,
        rows=1,
        hidden=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        resident=True,
    )


def read(tables, tokens):
    """Return the staging row of each channel, site and token that has one, as the kernel computes it."""
    rows = {}
    for channel in (SHIP, VIEW):
        for site in range(SITES):
            line = int(tables.site_line[channel, site])
            for token in range(tokens) if line >= 0 else ():
                if (row := int(tables.token_row[channel, line, token])) >= 0:
                    rows[channel, site, token] = row + int(tables.site_base[channel, site])
    return rows


def planned(plan):
    return {
        (block.channel, site, run.source + i): block.base + place * block.rows + run.target + i
        for block in plan.blocks
        for place, site in enumerate(block.sites)
        for run in block.runs
        for i in range(run.length)
    }


wants = st.dictionaries(st.integers(0, SITES - 1), forms, max_size=SITES)
requests = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8), st.integers(1, 6), wants, wants), max_size=5)


@given(st.lists(st.tuples(requests, st.integers(0, 4), st.booleans()), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_each_token_finds_its_row_at_each_site_and_no_other(steps):
    planner, tables = Planner(SITES), make_tables()
    for parts, padding, again in steps:
        batch, row = [], 0
        for number, (prompt, start, length, ship, view) in enumerate(parts):
            programs = [
                planner.program({site: Positions.parse(form) for site, form in want.items()}) for want in (ship, view)
            ]
            batch.append(Scheduled(Tracked(f"r{number}", f"r{number}", prompt, *programs), row, start, length))
            row += length
        plan = planner.plan(batch)
        for _ in range(1 + again):
            tables.load(plan, row + padding)
            assert read(tables, row + padding) == planned(plan)


def test_a_batch_that_decodes_uploads_nothing_again():
    planner, tables = Planner(SITES), make_tables()
    program = planner.program(dict.fromkeys(range(SITES), Positions.ALL))
    tracked = [Tracked(f"r{n}", f"r{n}", 4, program, planner.nothing) for n in range(3)]
    for step in range(3):
        plan = planner.plan([Scheduled(request, row, 4 + step, 1) for row, request in enumerate(tracked)])
        uploads = []
        tables._upload = lambda target, values, uploads=uploads: (
            uploads.append(values),
            target.copy_(torch.from_numpy(values)),
        )
        tables.load(plan, 4)
        assert bool(uploads) == (step == 0)
        assert np.array_equal(sorted(read(tables, 4).values()), np.arange(plan.rows))
