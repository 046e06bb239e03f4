"""The series of the dashboard: norms, scores and baselines against float64."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from capflow.capture.dtypes import DTYPES
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow_dashboard import limits
from capflow_dashboard.board.series import Baseline, Measures, norms
from capflow_dashboard.consumer import Dashboard, DashboardConfig
from tests.kit.frames import make_model
from tests.kit.networks import network

SITES = tuple(Site(layer, "post_block") for layer in range(4))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 8), (18, 5, 640), (2, 700, 640), (1, 9, 65_536), (2, 0, 8)])
def test_norms_are_those_of_float64(dtype, shape):
    rows = np.random.default_rng(7).normal(0, 30, shape).astype(DTYPES[dtype])
    got = norms(rows)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.linalg.norm(rows.astype(np.float64), axis=-1), rtol=5e-6)


def test_norms_of_views_are_those_of_copies():
    rows = np.random.default_rng(7).normal(size=(6, 40, 64)).astype(DTYPES["bfloat16"])
    view = rows[1:5, 7:33]
    np.testing.assert_array_equal(norms(view), norms(view.copy()))


def test_nan_and_infinity_stay_what_they_are(recwarn):
    rows = np.ones((1, 3, 8), np.float32)
    rows[0, 0, 3], rows[0, 1, 3] = np.nan, -np.inf
    np.testing.assert_array_equal(norms(rows), np.array([[np.nan, np.inf, np.sqrt(8)]], np.float32))
    probe = Probe.make(Site(0, "post_block"), np.ones(8))
    indices, values = Measures(make_model(), SITES, [probe]).of(SITES[:1], rows)
    assert indices == [0, 4]
    np.testing.assert_array_equal(values[1], np.array([np.nan, np.nan, 8], np.float32))
    assert not len(recwarn)


def test_scores_are_those_of_float64():
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(4, 9, 8)).astype(DTYPES["bfloat16"])
    probe = Probe.make(Site(2, "post_block"), rng.normal(size=(2, 8)), [0.5, -1], names=("a", "b"), threshold=0.25)
    measures = Measures(make_model(), SITES, [probe])
    assert [(s.site.layer, s.probe, s.threshold) for s in measures.series[4:]] == [(2, "a", 0.25), (2, "b", 0.25)]
    indices, values = measures.of(SITES, rows)
    assert indices == [0, 1, 2, 3, 4, 5]
    expected = rows[2].astype(np.float64) @ probe.weight.astype(np.float64).T + probe.bias
    np.testing.assert_allclose(values[4:], expected.T, rtol=1e-5, atol=1e-6)


def test_sites_of_one_stage_give_their_own_series():
    probe = Probe.make(Site(3, "post_block"), np.ones(8))
    measures = Measures(make_model(), SITES, [probe])
    rows = np.ones((2, 1, 8), np.float32)
    assert measures.of((Site(3, "post_block"), Site(1, "mlp_in")), rows)[0] == [3, 4]
    assert measures.of((Site(1, "mlp_in"), Site(2, "mlp_in")), rows)[0] == []


def test_a_network_is_a_probe_like_any(tmp_path):
    path = tmp_path / "net.safetensors"
    save_file(network((8, 5, 1)), path, {"site": "post_block:2", "kind": "mlp"})
    (probe,) = Dashboard(DashboardConfig(probes=(str(path),)))._probes
    rows = np.random.default_rng(0).normal(size=(1, 3, 8)).astype(np.float32)
    indices, values = Measures(make_model(), SITES, [probe]).of((Site(2, "post_block"),), rows)
    np.testing.assert_allclose(values[indices.index(4)], probe.scores(rows[0])[:, 0], rtol=1e-6)


def test_a_probe_that_does_not_fit_is_named_and_left_out():
    measures = Measures(make_model(hidden=8), SITES, [Probe.make(Site(0, "post_block"), np.ones(9))])
    assert len(measures) == 4
    assert measures.problems == ["probe: weight: got 9 numbers, expected 8, the model's width"]


def test_a_baseline_is_that_of_the_first_values_and_fixed_then():
    rng = np.random.default_rng(3)
    values = rng.normal(50, 5, (3, 2 * limits.BASELINE_TOKENS)).astype(np.float32)
    values[1, 5:9] = np.nan, np.inf, -np.inf, 1e9
    baseline = Baseline(4)
    half = limits.BASELINE_TOKENS // 2
    assert not baseline.add([0, 1], values[:2, :half])
    assert not baseline.add([3], values[2:, : 2 * half])  # another stage's
    assert not baseline.add([], values[:0])
    assert baseline.add([0, 1], values[:2, half : 3 * half])
    fields = baseline.fields
    assert fields["tokens"] == limits.BASELINE_TOKENS
    for row, series in ((0, 0), (1, 1), (2, 3)):
        sample = values[row, : limits.BASELINE_TOKENS].astype(np.float64)
        sample = sample[np.isfinite(sample)]
        median = np.median(sample)
        assert fields["median"][series] == pytest.approx(median, rel=1e-5)
        assert fields["spread"][series] == pytest.approx(1.4826 * np.median(abs(sample - median)), rel=1e-5)
        first, third = np.quantile(sample, (0.25, 0.75))
        assert fields["high"][series] == pytest.approx(min(sample.max(), third + 1.5 * (third - first)), rel=1e-5)
        assert fields["low"][series] == pytest.approx(max(sample.min(), first - 1.5 * (third - first)), rel=1e-5)
    assert [fields[name][2] for name in ("median", "spread", "low", "high")] == [None] * 4
    assert not baseline.add([0], values[:1] * 100)
    assert baseline.fields is fields


def test_sites_with_a_shape_of_their_own_have_norms_and_scores():
    sites = (Site(0, "post_block"), Site(1, "heads"), Site(2, "router"))
    model = make_model(shapes={"heads": (2, 6), "router": (5,)})
    rng = np.random.default_rng(7)
    probe = Probe.make(Site(1, "heads"), rng.normal(size=12), names=("head",))
    wrong = Probe.make(Site(2, "router"), np.ones(8), names=("wide",))
    measures = Measures(model, sites, [probe, wrong])
    assert measures.problems == ["probe: weight: got 8 numbers, expected 5, the width of router:2"]
    assert [str(series.site) for series in measures.series] == ["heads:1", "post_block:0", "router:2", "heads:1"]
    for site in sites:
        rows = rng.normal(size=(1, 9, model.width_of(site))).astype(np.float32)
        indices, values = measures.of([site], rows)
        np.testing.assert_allclose(values[0], np.linalg.norm(rows[0].astype(np.float64), axis=1), rtol=1e-5)
        if site.hook == "heads":
            assert indices == [0, 3]
            np.testing.assert_allclose(values[1], rows[0].astype(np.float64) @ probe.weight[0], rtol=1e-4, atol=1e-5)
