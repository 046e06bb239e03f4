"""Networks and features of autoencoders, held against torch, and files that are none."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from capflow.errors import UsageError
from capflow.probes.kinds import MLP_ACTIVATIONS, load_probe
from capflow.probes.probe import Probe
from tests.kit.networks import ROWS, activations, encoder, network

META = {"site": "post_block:3"}


def saved(tmp_path, tensors, **metadata):
    path = tmp_path / "p.safetensors"
    save_file(tensors, path, META | metadata)
    return path


@pytest.mark.parametrize("activation", MLP_ACTIVATIONS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_a_network_scores_as_torch_does(tmp_path, activation, dtype):
    tensors = network((16, 9, 5, 2))
    probe = load_probe(saved(tmp_path, tensors, kind="mlp", activation=activation, names="a,b", threshold="1,2"))
    assert (probe.kind, probe.names, probe.thresholds, probe.hidden_size) == ("mlp", ("a", "b"), (1.0, 2.0), 16)
    rows = ROWS.astype(dtype)
    values = torch.from_numpy(rows.astype(np.float64))
    for i in range(3):
        values = values if i == 0 else getattr(torch.nn.functional, activation)(values)
        weight, bias = (torch.from_numpy(tensors[f"{name}.{i}"]).double() for name in ("weight", "bias"))
        values = torch.nn.functional.linear(values, weight, bias)
    scores = probe.scores(rows)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, values.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("activation", "k"), [("relu", None), ("jumprelu", None), ("topk", 3), ("topk", 24)])
@pytest.mark.parametrize("features", [None, [5, 0, 23]])
def test_features_of_an_autoencoder_are_its_activations(tmp_path, activation, k, features):
    jumps = {"threshold": np.linspace(0, 3, 24).astype(np.float32)} if activation == "jumprelu" else {}
    tensors = encoder(**jumps)
    metadata = {"kind": "sae", "activation": activation}
    metadata |= {"k": str(k)} if k else {}
    metadata |= {"features": ",".join(map(str, features))} if features else {}
    probe = load_probe(saved(tmp_path, tensors, **metadata))
    chosen = features or list(range(24))
    assert probe.names == tuple(f"p.{feature}" for feature in chosen)
    expected = activations(tensors, activation, k)[:, chosen]
    scores = probe.scores(ROWS)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    assert 0 < (scores > 0).mean() < 1
    assert ((scores > 0) == (expected > 0)).all()


def test_an_encoder_without_a_centre_takes_rows_as_they_are(tmp_path):
    tensors = encoder()
    del tensors["b_dec"]
    probe = load_probe(saved(tmp_path, tensors, kind="sae"))
    np.testing.assert_allclose(probe.scores(ROWS), activations(tensors, "relu"), rtol=1e-4, atol=1e-4)


def test_every_part_of_a_probe_tells_it_from_another(tmp_path):
    """Whatever its scores depend on is in `parts`."""

    def parts(tensors, index=0, **metadata):
        return load_probe(saved(tmp_path, tensors, **metadata)).parts(index)

    base = network((16, 4, 2))
    same = parts(base, kind="mlp")
    assert parts(network((16, 4, 2)), kind="mlp") == same
    assert len({same, parts(base, kind="mlp", activation="tanh"), parts(base, 1, kind="mlp")}) == 3
    for name in ("weight.0", "bias.0", "weight.1", "bias.1"):
        assert parts(base | {name: base[name] + 1}, kind="mlp") != same
    base = encoder()
    for metadata in ({"activation": "relu"}, {"activation": "topk", "k": "2"}):
        same = parts(base, kind="sae", **metadata)
        for name in base:
            assert parts(base | {name: base[name] + 1}, kind="sae", **metadata) != same
    assert parts(base, kind="sae", activation="topk", k="3") != same


def test_no_kind_is_a_linear_probe(tmp_path):
    probe = load_probe(saved(tmp_path, {"weight": np.ones(16, np.float32)}, pool="mean"))
    assert isinstance(probe, Probe)
    assert (probe.kind, probe.pool) == ("linear", "mean")
    probe.save(tmp_path / "again.safetensors")
    assert load_probe(tmp_path / "again.safetensors").pool == "mean"


ONES = np.ones(16, np.float32)
BAD = [
    ({"weight": ONES}, {"kind": "cubic"}, "metadata kind: got cubic, expected one of linear, mlp, sae"),
    ({"weight": ONES}, {"pool": "median"}, "metadata pool: got median, expected one of token, mean, max, last"),
    ({"weight": ONES}, {"treshold": "1"}, "metadata: got treshold, expected only site, names, threshold, pool, kind"),
    ({"weight": ONES}, {"activation": "relu"}, "metadata: got activation, expected only site"),
    ({"weight": ONES.astype(np.int8)}, {}, "weight: got dtype I8, expected one of BF16, F16, F32, F64"),
    ({"weight": np.full(16, 1e300)}, {}, "weight: got NaN or infinity, expected finite numbers"),
    ({"weight": ONES * np.inf}, {}, "weight: got NaN or infinity, expected finite numbers"),
    ({"weight": ONES, "bias": ONES[:1] * np.nan}, {}, "bias: got NaN or infinity, expected finite numbers"),
    ({"weight": np.ones((0, 16), np.float32)}, {}, "weight: got shape [0, 16]"),
    ({"weight": ONES}, {"threshold": "nan"}, "metadata threshold: got nan, expected finite numbers"),
    ({"weight": ONES}, {"kind": "mlp"}, "tensors: got weight, expected weight.0 and maybe bias.0"),
    ({"weight.0": ONES}, {"kind": "mlp"}, "weight.0: got shape [16], expected [n, hidden_size]"),
    ({"weight.1": np.eye(2)}, {"kind": "mlp"}, "tensors: got weight.1, expected weight.0 and maybe bias.0"),
    (network((16, 4, 2)) | {"weight.1": np.eye(2, 5)}, {"kind": "mlp"}, "weight.1: got shape [2, 5], expected [n, 4]"),
    (network((16, 4, 2)) | {"bias.0": np.ones(3)}, {"kind": "mlp"}, "bias.0: got shape [3], expected [4]"),
    (network((16, 4, 2)), {"kind": "mlp", "activation": "sin"}, "activation: got sin, expected one of relu, gelu"),
    (network((16, 4, 2)), {"kind": "mlp", "names": "a"}, "names: got a, expected 2 different names"),
    (network((16, 4, 2)), {"kind": "mlp", "threshold": "1,2,3"}, "threshold: got 3 numbers, expected 1 or 2"),
    ({"W_enc": np.eye(16)}, {"kind": "sae"}, "tensors: got W_enc, expected W_enc, b_enc and maybe b_dec"),
    (encoder(threshold=np.ones(24)), {"kind": "sae"}, "tensors: got W_enc, b_dec, b_enc, threshold, expected W_enc"),
    (encoder(), {"kind": "sae", "activation": "jumprelu"}, "expected W_enc, b_enc, threshold and maybe b_dec"),
    (encoder(W_enc=ONES), {"kind": "sae"}, "W_enc: got shape [16], expected [hidden_size, d_sae]"),
    (encoder(b_enc=ONES), {"kind": "sae"}, "b_enc: got shape [16], expected [24]"),
    (encoder(b_dec=ONES[:3]), {"kind": "sae"}, "b_dec: got shape [3], expected [16]"),
    (
        encoder(),
        {"kind": "sae", "features": "1,24"},
        "metadata features: got 1,24, expected numbers of features, 0..23",
    ),
    (encoder(), {"kind": "sae", "features": "1,-1"}, "metadata features: got 1,-1"),
    (encoder(), {"kind": "sae", "features": "1,1"}, "names: got p.1,p.1, expected 2 different names"),
    (encoder(), {"kind": "sae", "activation": "topk"}, "metadata k: got nothing, expected how many features"),
    (encoder(), {"kind": "sae", "activation": "topk", "k": "25"}, "metadata k: got 25, expected how many features"),
    (encoder(), {"kind": "sae", "k": "2"}, "metadata: got k, expected only site"),
    (encoder(count=5000), {"kind": "sae"}, "features: got none, which means all 5000, expected which to record"),
]


@pytest.mark.parametrize(("tensors", "metadata", "message"), BAD)
def test_a_bad_file_is_refused_with_its_name_and_fault(tmp_path, tensors, metadata, message):
    path = saved(tmp_path, tensors, **metadata)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        load_probe(path)
    assert str(caught.value).startswith(str(path))


def test_what_takes_linear_probes_alone_says_so(tmp_path):
    with pytest.raises(UsageError, match="metadata kind: got mlp, expected one of linear"):
        Probe.load(saved(tmp_path, network((16, 4, 2)), kind="mlp"))
