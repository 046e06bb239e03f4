"""examples/induction_heads.py: its attention against Transformers', its scores, and its claim about the demo model."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.kit.engines import Reference, save_tiny
from tests.kit.hooked import Hooked
from tests.kit.sources import ROOT

SCRIPT = ROOT / "examples" / "induction_heads.py"


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("induction_heads", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_attention_of_queries_and_keys_is_that_of_transformers(script, architecture, tmp_path):
    model = Reference(save_tiny(tmp_path, architecture)).model
    config = model.config.get_text_config()
    tokens = np.random.default_rng(0).integers(5, 290, 80).tolist()
    _, rows = Hooked(model, ("q", "k")).run(tokens)
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    for layer, window in enumerate(script.windows(config)):
        assert window == (64 if architecture == "gemma3" else None)
        queries, keys = (rows[layer, hook].unflatten(1, (-1, 32)).numpy() for hook in ("q", "k"))
        weights = script.attention(queries, keys, window, script.scale_of(config))
        assert np.abs(weights - expected[layer][0].numpy()).max() < 1e-6


def test_scores_are_attention_to_the_token_behind_the_earlier_occurrence_and_to_the_one_before(script):
    start, length = 1, 3
    # The prompt is begin a b c a b c: the second a, at 4, looks at the first b, at 2.
    weights = np.zeros((2, 7, 7))
    for query, target in ((4, 2), (5, 3), (6, 4)):
        weights[0, query, target] = 0.5
    for query in range(1, 7):
        weights[1, query, query - 1] = 1.0
    assert script.prefix_matching(weights, start, length).tolist() == [0.5, 0.0]
    assert script.previous_token(weights).tolist() == [0.0, 1.0]


def test_pairs_repeat_their_tokens_and_the_corrupted_ones_do_not(script):
    class Config:
        vocab_size = 30000

    for pair in script.make_pairs(5, Config, [2]):
        first, copy = pair["clean"][1 : 1 + script.LENGTH], pair["clean"][1 + script.LENGTH :]
        assert [*copy, pair["answer"]] == first[: len(copy) + 1]
        other = pair["corrupted"][1 : 1 + script.LENGTH]
        assert pair["corrupted"][1 + script.LENGTH :] == copy
        assert len({*first, *other}) == 2 * script.LENGTH
        assert pair["wrong_answer"] == other[len(copy)]


@pytest.mark.long
def test_the_heads_that_match_prefixes_are_those_without_which_the_answer_is_lost(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--pairs", "3", "--out", str(out)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (out / "induction_heads.png").stat().st_size > 10_000
    heads = json.loads((out / "heads.json").read_text())
    scores, previous = np.array(heads["scores"]), np.array(heads["previous"])
    for rises in map(np.array, heads["rises"].values()):
        decisive = np.unravel_index(rises.argmax(), rises.shape)
        assert decisive == (11, 2)
        assert rises[decisive] > 10
        assert (scores > scores[decisive]).sum() <= 2, "one of the three heads that match prefixes most"
        assert rises[5, 1] > 0.5
        assert scores[5, 1] == scores.max()
        for layer, head in zip(*np.nonzero(rises > 2.5), strict=True):
            assert scores[layer, head] > 0.5 or previous[layer, head] > 0.3, (layer, head)
    assert np.median(scores) < 0.05
    strongest = done.stdout.partition("sender > receiver")[2].splitlines()[1:3]
    assert {line.split("  ")[0].strip() for line in strongest} == {"10.1 > k:11", "4.1 > k:5"}, done.stdout
