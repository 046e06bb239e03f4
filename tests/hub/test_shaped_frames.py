"""Frames of several shapes through the whole hub: to its consumers, over its disk, and again from a recording."""

from __future__ import annotations

import re
from types import MappingProxyType

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError
from capflow.plugins.configure import configure
from capflow.protocol import recording
from capflow.replay.dataset import entries_of
from capflow.replay.player import Replay, ReplayPace
from capflow.testing import MemoryHub
from capflow_consumers.log import LogConfig, LogConsumer
from tests.kit.frames import make_frame, row_of
from tests.kit.recordings import KNOWN, record
from tests.kit.shaped import SHAPES, SITES, assert_site, positions_of, rows_total, shaped_model, width_of
from tests.kit.stored_layouts import LAYOUTS

SOME = {"heads": (1, 4), "router": (1, 4)}
PLAIN = sorted({site.hook for site in SITES} - SOME.keys())


def spec_of(hooks, positions="all"):
    layers = {hook: sorted(site.layer for site in SITES if site.hook == hook) for hook in hooks}
    return CaptureSpec.parse({"hooks": layers, "positions": positions})


EVERYTHING = spec_of({site.hook for site in SITES})


def filesystem(root, name="filesystem", **options):
    return configure(name, {"root": str(root), "fsync": False, "policy": "block", **options}, KNOWN)


def run(hub, lengths, capture=EVERYTHING, within=MappingProxyType({})):
    engine = hub.engine(model=shaped_model(), capture=capture)
    for step in range(max(lengths.values()) - 3):
        start, length = (0, 4) if step == 0 else (step + 3, 1)
        running = [(name, 4, start, length) for name, end in lengths.items() if start + length <= end]
        engine.step(running, within=within)
        for name, *_ in running:
            if lengths[name] == start + length:
                engine.finish(name)


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_hooks_at_different_positions_reach_a_consumer(tmp_path, policy):
    """The consumer wants all positions of some hooks, and requests three positions of the others."""
    lengths = {"a": 7, "b": 5}
    more = {"spool_dir": str(tmp_path / "spool")} if policy == "spill" else {}
    consumer = filesystem(tmp_path / "rows", hooks=PLAIN, policy=policy, **more)
    with MemoryHub(consumer) as hub:
        run(hub, lengths, spec_of(SOME, [1, 2, 3]), SOME)
        for name, length in lengths.items():
            result = hub.result(name)
            assert (result.status, result.error) == ("ok", None)
            assert result.payload["rows"] == rows_total(length, within=SOME)
        assert hub.stop()
        (lane,) = hub.lanes
        assert lane.rows == sum(rows_total(length, within=SOME) for length in lengths.values())
        nbytes = [4 * width_of(site) * len(positions_of(site, length, SOME)) for site in SITES for length in (7, 5)]
        assert lane.bytes == sum(nbytes)
    data = capflow.open(tmp_path / "rows")
    data.verify()
    for name, length in lengths.items():
        for site in SITES:
            assert_site(data[name], name, site, length, within=SOME)


def test_a_consumer_gets_the_shapes_that_it_wants(tmp_path):
    roots = tmp_path / "heads", tmp_path / "rest"
    heads = filesystem(roots[0], "filesystem@heads", hooks=["heads"])
    rest = filesystem(roots[1], "filesystem@rest", hooks=PLAIN)
    with MemoryHub(heads, rest) as hub:
        run(hub, {"a": 6}, None)
        assert {result.status for result in hub.results("a").values()} == {"ok"}
        assert hub.stop()
    assert {site.hook for site in capflow.open(roots[0])["a"].sites} == {"heads"}
    assert {site.hook for site in capflow.open(roots[1])["a"].sites} == set(PLAIN)
    for root in roots:
        capture = capflow.open(root)["a"]
        for site in capture.sites:
            assert_site(capture, "a", site, 6, within={})


def test_lost_rows_are_told_by_site(tmp_path):
    with MemoryHub(filesystem(tmp_path / "rows", capture="requests")) as hub:
        engine = hub.engine(model=shaped_model(), capture=EVERYTHING)
        engine.step([("a", 4, 0, 4)])
        engine.finish("a", lost=[(3, "full")])
        result = hub.result("a")
        assert result.status == "partial_error"
        assert "3 rows dropped" in (result.error or "") or "full" in (result.error or "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_data_set_is_replayed_in_its_shapes(tmp_path, layout):
    lengths = {"a": 7, "b": 5}
    with MemoryHub(filesystem(tmp_path / "rows", capture="requests", **LAYOUTS[layout])) as hub:
        run(hub, lengths)
        assert hub.stop()
    with MemoryHub(filesystem(tmp_path / "again", capture="requests", **LAYOUTS[layout])) as hub:
        Replay(hub.hub, ReplayPace()).run(entries_of(capflow.open(tmp_path / "rows"), ask=True))
        assert hub.stop()
    assert_same(tmp_path / "again", lengths)


def test_a_recording_is_replayed_in_its_shapes(tmp_path):
    lengths = {"a": 7, "b": 5}
    with MemoryHub(record(tmp_path / "recorded", policy="block", capture="requests")) as hub:
        run(hub, lengths)
        assert hub.stop()
    with MemoryHub(filesystem(tmp_path / "again", capture="requests")) as hub:
        Replay(hub.hub, ReplayPace()).run(recording.read(tmp_path / "recorded"))
        assert hub.stop()
    assert_same(tmp_path / "again", lengths)


def assert_same(root, lengths):
    data = capflow.open(root)
    for name, length in lengths.items():
        assert data[name].status == "ok", data[name].error
        for site in SITES:
            assert_site(data[name], name, site, length, within={})


def test_a_frame_of_another_shape_than_the_model_s_costs_its_worker_the_session(tmp_path, caplog):
    with MemoryHub(filesystem(tmp_path / "rows", capture="requests")) as hub:
        engine = hub.engine(model=shaped_model(), sites=[Site(1, "heads")], capture=EVERYTHING)
        engine.step([("a", 4, 0, 4)])
        refused = "frame rows at heads:1: got rows of [3, 4], expected [4, 3], as the Hello says"

        # The hub's thread answers while the step is sent or after it.
        def step_and_hear():
            engine.step([("b", 4, 0, 4)], shapes={Site(1, "heads"): (3, 4)})
            engine.worker.hear(timeout_s=60)

        with pytest.raises(CapflowError, match=re.escape(refused)):
            step_and_hear()
    assert refused in caplog.text


def test_the_mean_norm_of_the_log_is_over_rows_of_all_shapes():
    consumer = LogConsumer(LogConfig())
    frame = make_frame([("a", 4, 0, 4)], [Site(0, "post_block"), Site(0, "heads")], shapes=SHAPES)
    consumer.on_frame(frame)
    rows, total, sites = consumer.seen["engine-1", "a"]
    norms = [np.linalg.norm(row_of("a", site, p, width_of(site))) for site in sites for p in range(4)]
    assert (rows, len(sites)) == (8, 2)
    assert total == pytest.approx(sum(norms), rel=1e-5)
