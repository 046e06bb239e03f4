"""Any mixture of shapes, sites, requests and chunks is read back exactly, from every store."""

from __future__ import annotations

import tempfile
from pathlib import Path

import duckdb
import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import capflow
from capflow.capture.model import grouped
from capflow.capture.site import HOOKS, SHAPED_HOOKS, Site
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from tests.kit.databases import Counts
from tests.kit.databases import done as ended
from tests.kit.frames import make_frame, make_model, row_of, token_of
from tests.kit.stored import done, opened
from tests.kit.stored_layouts import LAYOUTS

_SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple)


@st.composite
def cases(draw):
    """Sites with their shapes, and positions; steps of requests of any length."""
    hooks = st.sampled_from(HOOKS)
    sites = draw(st.lists(st.builds(Site, st.integers(0, 3), hooks), min_size=1, max_size=7, unique=True))
    shapes = {site: draw(_SHAPES) for site in sites if site.hook in SHAPED_HOOKS}
    within = {}
    for hook in draw(st.sets(st.sampled_from([site.hook for site in sites]), max_size=2)):
        first = draw(st.integers(0, 5))
        within[hook] = first, first + draw(st.integers(1, 6))
    hooks_left = {site.hook for site in sites} - set(within)
    if not hooks_left:  # each request of a frame has rows
        within.popitem()
    runs = {}
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        runs[name] = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return sites, shapes, within, runs, draw(st.sampled_from(["bfloat16", "float16", "float32"])), draw(st.booleans())


@settings(max_examples=16, deadline=None)
@given(cases())
def test_rows_are_read_back(case):
    sites, shapes, within, runs, dtype, early = case
    plain = make_model()
    model = msgspec.structs.replace(plain, sites=tuple(sorted(sites)), shapes=grouped(shapes), dtype=dtype)
    frames = []
    starts = dict.fromkeys(runs, 0)
    for step in range(max(map(len, runs.values()))):
        running = []
        for name, lengths in runs.items():
            if step < len(lengths):
                running.append((name, lengths[0], starts[name], lengths[step]))
                starts[name] += lengths[step]
        frame = make_frame(running, sites, dtype=dtype, seq=step + 1, shapes=shapes, within=within)
        frames.append(frame)
    positions = {
        (name, site): [p for p in range(length) if p in range(*within.get(site.hook, (0, length)))]
        for name, length in starts.items()
        for site in sites
    }
    counts = {name: sum(len(positions[name, site]) for site in sites) for name in runs}
    with tempfile.TemporaryDirectory() as directory:
        for layout, options in LAYOUTS.items():
            root = Path(directory, layout)
            more = {"buffer_bytes_max": 0} if early else {}
            consumer = opened(root, tuple(sites), capture="requests", **options, **more)
            consumer.on_session("engine-1", model)
            for frame in frames:
                consumer.on_frame(frame)
            for name, length in starts.items():
                over = done(name, runs[name][0], computed_length=length, rows=counts[name])
                assert consumer.on_request_done(over).status == "ok"
            consumer.close()
            data = capflow.open(root)
            data.verify()
            for (name, site), places in positions.items():
                assert (site in data[name]) == bool(places)
                if places:
                    captured = data[name][site]
                    expected = np.stack([row_of(name, site, p, model.width_of(site), dtype) for p in places])
                    assert captured.positions.tolist() == places
                    assert captured.token_ids.tolist() == [token_of(name, p) for p in places]
                    assert captured.shaped.shape == (len(places), *model.shape_of(site))
                    assert captured.rows.tobytes() == expected.tobytes()
        # The vectors of the last site alone: a store of duckdb has the rows of the sites that it is told. It has no
        # rows that come early, and a database takes longer than the files.
        for site in sites[-1:] if not early else ():
            path = Path(directory, "scores.duckdb")
            consumer = DuckdbConsumer(DuckdbConfig(str(path), site=str(site), vectors=True))
            consumer.open(Counts())
            consumer.on_session("engine-1", model)
            for frame in frames:
                consumer.on_frame(frame)
            for name, length in starts.items():
                over = ended(name, computed_length=length, rows=counts[name])
                assert consumer.on_request_done(over).status == "ok"
            consumer.close()
            with duckdb.connect(str(path), read_only=True) as database:
                sql = "SELECT request_id, position, vector FROM vectors ORDER BY ALL"
                stored = {(name, position): vector for name, position, vector in database.sql(sql).fetchall()}
            assert stored.keys() == {(name, p) for name in runs for p in positions[name, site]}
            for (name, position), vector in stored.items():
                expected = row_of(name, site, position, model.width_of(site), dtype).astype(np.float32)
                assert np.array_equal(np.array(vector, np.float32), expected)
