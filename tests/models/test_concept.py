"""Steering of the demo model: a vector of a concept moves the odds of its words; vectors of its length do not."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from capflow_models.runs.lines import read_lines
from capflow_models.vectors.fit import Pair
from tests.kit.sources import ROOT

SCRIPT = ROOT / "examples" / "steer_concept.py"
CONTROL_FACTOR = 3


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("steer_concept", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["steer_concept"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["steer_concept"]


def words_of(text):
    return "".join(letter if letter.isalpha() else " " for letter in text.lower()).split()


def test_pairs_end_alike_and_tell_none_of_the_words_that_are_measured(script):
    pairs = read_lines(script.PAIRS, "pairs", Pair)
    words = {word for pair in pairs for text in (pair.positive, pair.negative) for word in words_of(text)}
    assert words.isdisjoint(script.GLAD + script.SAD)
    assert len({*script.GLAD, *script.SAD}) == len(script.GLAD) + len(script.SAD)
    for pair in pairs:
        assert words_of(pair.positive)[-1] == words_of(pair.negative)[-1]
        assert pair.positive != pair.negative


def test_what_is_measured_has_no_part_in_the_fit(script):
    fitted = " ".join(text for pair in script.read(script.PAIRS, "positive", "negative") for text in pair)
    prompts = [prompt for (prompt,) in script.read(script.PROMPTS, "prompt")]
    assert len(set(prompts)) == len(prompts) >= 20
    assert not [prompt for prompt in (*prompts, *script.NEUTRAL) if prompt in fitted]


def test_controls_are_as_long_as_the_vector_and_the_turned_ones_lose_what_pairs_share(script):
    shared = np.zeros(64)
    shared[0] = 5.0
    differences = shared + 0.1 * np.random.default_rng(1).standard_normal((24, 64))
    controls = script.controls(differences, 7.0)
    assert [np.linalg.norm(vector) for vector in controls.values()] == pytest.approx([7.0] * len(controls))
    assert all(abs(vector[0]) < 0.5 * 7.0 for vector in controls.values())


def test_what_examples_import_of_capflow_is_there():
    imported = 0
    for path in SCRIPT.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("capflow"):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{path.name}: {node.module}"
                imported += 1
    assert imported


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_fitted_vector_moves_the_odds_of_its_concept(script, tmp_path):
    out, figure = tmp_path / "result.json", tmp_path / "concept.svg"
    command = [sys.executable, str(SCRIPT), "--json", str(out), "--plot", str(figure)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    curves = {curve.pop("name"): script.Curve("", **curve) for curve in result["curves"]}

    vector = curves["mean"]
    middle = [abs(scale) <= 2 for scale in vector.scales]
    assert (np.diff(vector.mean()[middle]) > 0).all()
    low, high = script.interval(vector.change())
    assert all(high[n] < 0 if scale < 0 else low[n] > 0 for n, scale in enumerate(vector.scales) if scale and middle[n])

    swings = {name: abs(curve.swing()) for name, curve in curves.items() if name not in ("mean", "pca")}
    assert len(swings) == 2 * script.CONTROLS
    assert vector.swing() > CONTROL_FACTOR * max(swings.values())
    assert curves["pca"].swing() > CONTROL_FACTOR * max(swings.values())
    assert result["transformers_difference"] < 1e-3
    assert len(set(result["answers"].values())) > 2
    assert "</svg>" in figure.read_text()
