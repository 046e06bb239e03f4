from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import Probe, load_vector, save_vector

SITE = Site(12, "post_block")
ONES = np.ones(4, np.float32)


def test_a_file_with_one_weight_is_one_probe_named_after_the_file(tmp_path):
    save_file({"weight": ONES}, tmp_path / "happy.safetensors", {"site": "post_block:12"})
    probe = Probe.load(tmp_path / "happy.safetensors")
    assert (probe.site, probe.names, probe.thresholds, probe.hidden_size) == (SITE, ("happy",), (0.0,), 4)
    assert probe.bias.tolist() == [0.0]
    assert probe.weight.shape == (1, 4)


def test_a_file_may_hold_several_probes(tmp_path):
    tensors = {"weight": np.eye(2, 4, dtype=np.float32), "bias": np.array([1, 2], np.float32)}
    path = tmp_path / "both.safetensors"
    save_file(tensors, path, {"site": "mlp_in:0", "names": "sad, happy", "threshold": "0.5,-1"})
    probe = Probe.load(path)
    assert (probe.names, probe.thresholds) == (("sad", "happy"), (0.5, -1.0))
    assert probe.scores(np.array([[3.0, 4.0, 5.0, 6.0]])).tolist() == [[4.0, 6.0]]
    save_file(tensors, path, {"site": "mlp_in:0"})
    assert Probe.load(path).names == ("both.0", "both.1")


def test_scores_of_bfloat16_rows_are_computed_in_float32():
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(5, 640)).astype(ml_dtypes.bfloat16)
    weight, bias = rng.normal(size=(3, 640)), rng.normal(size=3)
    probe = Probe.make(SITE, weight, bias, names=("a", "b", "c"))
    expected = rows.astype(np.float64) @ probe.weight.T.astype(np.float64) + probe.bias
    np.testing.assert_allclose(probe.scores(rows), expected, rtol=1e-4, atol=1e-4)
    assert probe.scores(rows).dtype == np.float32


def test_what_is_saved_is_loaded(tmp_path):
    probe = Probe.make(SITE, np.arange(8).reshape(2, 4), [0.25, 0.5], names=("a", "b"), threshold=1 / 3)
    probe.save(tmp_path / "p.safetensors")
    again = Probe.load(tmp_path / "p.safetensors")
    assert (again.site, again.names, again.thresholds) == (probe.site, probe.names, (1 / 3, 1 / 3))
    assert again.weight.tobytes() == probe.weight.tobytes()
    assert again.bias.tobytes() == probe.bias.tobytes()


def test_a_vector_file_is_a_steering_vector(tmp_path):
    save_vector(tmp_path / "v.safetensors", SITE, [1.0, 2.0])
    vector = load_vector(tmp_path / "v.safetensors", scale=3.0)
    assert vector.site == SITE
    assert vector.array().tolist() == [3.0, 6.0]


def test_a_fitted_vector_of_one_layer_is_a_steering_vector(tmp_path):
    path = tmp_path / "v.safetensors"
    save_file({"post_block.9": np.float16([1.0, 2.0])}, path, {"method": "mean"})
    vector = load_vector(path, scale=3.0)
    assert vector.site == Site(9, "post_block")
    assert vector.array().tolist() == [3.0, 6.0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"post_block.8": ONES, "post_block.9": ONES}, "tensors: got post_block.8, post_block.9, expected only `vect"),
        ({"post_block": ONES}, "tensors: got post_block, expected only `vector`, or only one such as `post_block.9`"),
        ({"vector": ONES, "post_block.9": ONES}, "tensors: got post_block.9, vector, expected vector"),
        ({"post_block.9": ONES * np.nan}, "post_block.9: got NaN or infinity, expected finite numbers"),
        ({"post_block.9": np.ones((2, 4))}, "got shape [2, 4]"),
        ({"vector": ONES}, "metadata site: got nothing"),
    ],
)
def test_a_file_that_is_no_vector_is_refused_with_its_fault(tmp_path, tensors, message):
    path = tmp_path / "v.safetensors"
    save_file(tensors, path)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        load_vector(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"w": ONES}, {"site": "post_block:12"}, "tensors: got w, expected weight and maybe bias"),
        ({"weight": ONES, "mean": ONES}, {"site": "post_block:12"}, "tensors: got mean, weight, expected weight"),
        ({"weight": ONES}, {}, "metadata site: got nothing, expected HOOK:LAYER"),
        ({"weight": ONES}, {"site": "nose:1"}, "metadata site: got nose:1, expected HOOK:LAYER"),
        (
            {"weight": np.ones((1, 2, 3))},
            {"site": "post_block:1"},
            "weight: got shape [1, 2, 3], expected [hidden_size]",
        ),
        ({"weight": ONES * np.nan}, {"site": "post_block:1"}, "weight: got NaN or infinity, expected finite numbers"),
        ({"weight": ONES, "bias": ONES}, {"site": "post_block:1"}, "bias: got shape [4], expected [1]"),
        ({"weight": ONES}, {"site": "post_block:1", "names": "a,b"}, "names: got a,b, expected 1 different names"),
        ({"weight": ONES}, {"site": "post_block:1", "threshold": "x"}, "threshold: got x, expected finite numbers"),
        ({"weight": ONES}, {"site": "post_block:1", "threshold": "1,2"}, "threshold: got 2 numbers, expected 1 or 1"),
    ],
)
def test_a_file_that_is_no_probe_is_refused_with_its_fault(tmp_path, tensors, metadata, message):
    path = tmp_path / "p.safetensors"
    save_file(tensors, path, metadata)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        Probe.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "p.safetensors").write_bytes(b"not at all")
    for path, message in ((tmp_path / "p.safetensors", "expected a safetensors"), (tmp_path / "q", "no such file")):
        for load in (Probe.load, load_vector):
            with pytest.raises(UsageError, match=message):
                load(path)


def test_a_probe_must_fit_its_model():
    probe = Probe.make(SITE, ONES)
    probe.check([SITE], 4)
    with pytest.raises(UsageError, match="weight: got 4 numbers, expected 8, the model's width"):
        probe.check([SITE], 8)
    with pytest.raises(UsageError, match="start the engine with --sites post_block:12 to tap it"):
        probe.check([Site(0, "post_block")], 4)
