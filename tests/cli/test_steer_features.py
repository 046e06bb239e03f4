"""`capflow steer` with features of autoencoders: the vectors that it adds, and what it refuses."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from capflow.capture.site import Site
from capflow.cli.hub import act
from capflow.errors import UsageError
from tests.kit.autoencoders import saelens, weights


@pytest.fixture
def steered(tmp_path, monkeypatch):
    """Return what a command line of `capflow steer` sends."""
    sent = []
    monkeypatch.setattr(act, "_act", lambda action, _: sent.append(action))
    saelens(tmp_path / "mood", weights())
    saelens(tmp_path / "tail", weights(seed=1), hook="blocks.2.hook_resid_post")

    def steered(*words):
        result = CliRunner().invoke(act.steer, ["r1", *words])
        if result.exception is not None:
            raise result.exception
        return sent[-1]

    return steered


def test_features_are_added_as_vectors(steered, tmp_path):
    features = [
        {"sae": "mood", "features": {"3": 2.0, "5": {"add": -1.5}}},
        {"sae": "end", "features": {"7": 4.0}},
    ]
    saes = ["--sae", str(tmp_path / "mood"), "--sae", f"end={tmp_path / 'tail'}"]
    action = steered("--features", json.dumps(features), *saes, "--scale", "0.5", "--lease-positions", "9")
    assert (action.request, action.lease_positions, action.clamps) == ("r1", 9, ())
    first, second = (weights(seed=seed)["W_dec"].astype(np.float64) for seed in (0, 1))
    expected = {Site(1, "post_block"): first[3] - 0.75 * first[5], Site(2, "post_block"): 2 * second[7]}
    assert {vector.site for vector in action.vectors} == expected.keys()
    for vector in action.vectors:
        np.testing.assert_allclose(vector.array(np.float64) * vector.scale, expected[vector.site], rtol=1e-12)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ('{"sae": "mood", "features": {"7": {"set": 0}}}', "--features.features.7: got set, expected a coefficient to"),
        ('{"sae": "mood", "features": {"99": 1}}', "--features.features.99: got 99, expected a feature of "),
        ('{"sae": "sad", "features": {"1": 1}}', "--features.features.1: got autoencoder sad, expected a known one"),
        ('{"sae": "mood", "features": {"1": 1}, "gate": "g"}', "--features.features.1.gate: got g, expected one of"),
        ("{", "--features: got {: "),
    ],
)
def test_what_cannot_be_added_is_refused(steered, tmp_path, features, message):
    with pytest.raises(UsageError) as caught:
        steered("--features", features, "--sae", str(tmp_path / "mood"))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "got"),
    [
        ([], "neither"),
        (["--vector", "v.safetensors"], "--vector"),
        (["--features", "{}"], "--features"),
        (["--sae", "x"], "--sae"),
        (["--vector", "v.safetensors", "--site", "post_block:1", "--sae", "x"], "--vector and --site and --sae"),
    ],
)
def test_a_vector_or_features_are_given(steered, words, got):
    with pytest.raises(UsageError) as caught:
        steered(*words)
    assert str(caught.value) == f"steer: got {got}, expected --vector with --site, or --features with --sae"
