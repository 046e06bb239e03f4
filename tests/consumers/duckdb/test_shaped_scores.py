"""Scores and vectors of rows that have a shape of their own."""

from __future__ import annotations

import numpy as np
import pytest

from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import Want
from capflow.errors import UsageError
from capflow.probes.probe import Probe
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from tests.kit.databases import Counts, done, opened, probe_file, query
from tests.kit.frames import make_frame, row_of
from tests.kit.shaped import HIDDEN, frame_of, positions_of, rows_total, shaped_model, width_of

PROBED = (Site(0, "post_block"), Site(1, "heads"), Site(2, "heads"), Site(2, "router"), Site(0, "neurons"))


def test_a_probe_at_any_hook_scores_its_rows_and_the_rows_are_kept(tmp_path):
    probes: dict[Site, Probe] = {}
    for site in PROBED:
        name = f"{site.hook}{site.layer}"
        probes[site] = probe_file(tmp_path, name, site, width=width_of(site), seed=site.layer)
    names = [f"{site.hook}{site.layer}" for site in PROBED]
    pooled = Probe.make(PROBED[1], np.arange(12), names=("pooled",), pool="mean")
    pooled.save(tmp_path / "pooled.safetensors")
    consumer = opened(tmp_path, *names, "pooled", vectors=True, model=shaped_model())
    for seq, (start, length) in enumerate(((0, 4), (4, 1), (5, 1)), 1):
        consumer.on_frame(frame_of([("a", 4, start, length), ("b", 4, start, length)], seq=seq))
    for name in "ab":
        result = consumer.on_request_done(done(name, computed_length=6, rows=rows_total(6)))
        assert (result.status, result.error) == ("ok", None)
    consumer.close()
    for name in "ab":
        for site in PROBED:
            rows = np.stack([row_of(name, site, p, width_of(site)) for p in positions_of(site, 6)])
            where = f"request_id = '{name}' AND layer = {site.layer} AND hook = '{site.hook}'"
            vectors = query(tmp_path, f"SELECT position, vector FROM vectors WHERE {where} ORDER BY position")
            assert [position for position, _ in vectors] == positions_of(site, 6)
            assert np.array_equal(np.array([vector for _, vector in vectors], np.float32), rows)
            scores = query(tmp_path, f"SELECT score FROM scores WHERE {where} ORDER BY position, probe")
            weight = probes[site].weight.astype(np.float64)
            expected = rows.astype(np.float64) @ weight.T + probes[site].bias
            np.testing.assert_allclose([score for (score,) in scores], expected.ravel(), rtol=2e-5)
        ((mean,),) = query(
            tmp_path, f"SELECT mean FROM request_scores WHERE request_id = '{name}' AND probe = 'pooled'"
        )
        heads = np.stack([row_of(name, PROBED[1], p, 12) for p in positions_of(PROBED[1], 6)])
        np.testing.assert_allclose(mean, (heads @ np.arange(12)).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("site", "width", "message"),
    [
        (Site(1, "heads"), HIDDEN, "weight: got 8 numbers, expected 12, the width of heads:1"),
        (Site(2, "heads"), 12, "weight: got 12 numbers, expected 24, the width of heads:2"),
        (Site(0, "post_block"), 12, "weight: got 12 numbers, expected 8, the model's width"),
        (Site(3, "heads"), 12, "site: got no tap at heads:3, expected a tapped site"),
    ],
)
def test_a_probe_of_another_width_than_its_site_is_refused(tmp_path, site, width, message):
    probe_file(tmp_path, "probe", site, width=width)
    config = DuckdbConfig(str(tmp_path / "scores.duckdb"), probes=[str(tmp_path / "probe.safetensors")])
    consumer = DuckdbConsumer(config)
    consumer.open(Counts())
    with pytest.raises(UsageError) as caught:
        consumer.on_session("engine-1", shaped_model())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    consumer.close()


def test_rows_in_frames_of_one_block_are_scored_as_those_of_several(tmp_path):
    """A frame whose blocks are tiled takes another way through the consumer than one that is narrowed."""
    site = Site(1, "heads")
    probe = probe_file(tmp_path, "p", site, width=12)
    consumer = opened(tmp_path, "p", model=shaped_model())
    consumer.on_frame(make_frame([("a", 4, 0, 4)], [site], hidden=HIDDEN, shape=(4, 3)))
    consumer.on_frame(frame_of([("a", 4, 4, 1)], seq=2, within={}).narrowed(wants_of))
    consumer.on_request_done(done("a", computed_length=5, rows=5))
    consumer.close()
    scores = query(tmp_path, "SELECT score FROM scores ORDER BY position, probe")
    rows = np.stack([row_of("a", site, p, 12) for p in range(5)])
    np.testing.assert_allclose([score for (score,) in scores], probe.scores(rows).ravel(), rtol=1e-5)


def wants_of(_):
    return {Site(1, "heads"): Want(Positions.ALL)}


def test_the_sites_of_the_table_are_those_of_the_frames(tmp_path):
    consumer = opened(tmp_path, site="router:2", vectors=True)
    consumer.on_session("engine-1", shaped_model())
    consumer.on_frame(frame_of([("a", 4, 0, 6)]))
    consumer.on_request_done(done("a", computed_length=6, rows=rows_total(6)))
    consumer.close()
    assert query(tmp_path, "SELECT DISTINCT hook, len(vector) FROM vectors") == [("router", 5)]
