"""Lenses of other tools: converted without a change of a number, and foreign or damaged files refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
import pickle

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

import capflow
from capflow.errors import UsageError
from capflow.lenses.file import LensFile
from capflow.lenses.model_files import open_model
from capflow.lenses.unembedding import Unembedding
from capflow_models.jobs.lensjob import LensJob, import_lens
from capflow_models.lenses.published import unembedding_hash
from tests.kit.lenses import save_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def save_tuned(directory, model, *, config=None, state=None, bias=True):
    """Save a lens as `tuned_lens.TunedLens.save` does; return its translators."""
    directory.mkdir(exist_ok=True)
    torch.manual_seed(3)
    translators = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=bias) for _ in range(3)])
    about = {
        "base_model_name_or_path": model.directory,
        "d_model": 64,
        "num_hidden_layers": 3,
        "bias": bias,
        "base_model_revision": "main",
        "unembed_hash": None,
        "lens_type": "linear_tuned_lens",
    }
    (directory / "config.json").write_text(json.dumps(about | (config or {})))
    torch.save(translators.state_dict() if state is None else state, directory / "params.pt")
    return translators


def run(task, source, out, **options):
    import_lens(LensJob(task, options.pop("model", ""), str(source), str(out), **options))


@pytest.mark.parametrize("bias", [True, False])
def test_a_tuned_lens_gives_what_its_own_package_computes(llama, bias, tmp_path):
    translators = save_tuned(tmp_path / "tuned", llama, bias=bias)
    run("import-tuned", tmp_path / "tuned", tmp_path / "t.safetensors")
    lens = capflow.open_lens(llama.directory, tmp_path / "t.safetensors")
    assert lens.kind == "tuned"
    # Translator N reads what enters layer N: `hidden_states[N]` of Transformers.
    with torch.no_grad():
        states = llama.model(torch.tensor([llama.tokens]), output_hidden_states=True, use_cache=False).hidden_states
        for layer in range(3):
            hidden = states[layer][0]
            given = (hidden + translators[layer](hidden)).numpy()
            reading = lens.top(hidden.numpy(), f"pre_attn:{layer}", 8)
            expected = llama.exact(given)
            np.testing.assert_array_equal(reading.ids, np.argsort(-expected, axis=1, kind="stable")[:, :8])
            np.testing.assert_allclose(
                reading.logits, np.take_along_axis(expected, reading.ids, 1), rtol=1e-4, atol=1e-5
            )
            if layer:
                np.testing.assert_array_equal(lens.top(llama.rows[layer - 1], layer - 1, 8).ids, reading.ids)
    origin = LensFile(tmp_path / "t.safetensors").origin
    assert (origin.model, origin.revision, origin.source) == (llama.directory, "main", llama.directory)


def test_the_hash_of_an_unembedding_is_that_of_tuned_lens(llama):
    matrix = llama.model.lm_head.weight.detach().float().numpy()
    expected = hashlib.sha256(np.array_str(matrix, precision=1).encode()).hexdigest()
    assert unembedding_hash(Unembedding(open_model(llama.directory))) == expected


def test_a_tuned_lens_of_another_unembedding_needs_a_word(llama, tmp_path):
    save_tuned(tmp_path / "tuned", llama, config={"unembed_hash": "0" * 64})
    with pytest.raises(UsageError, match=r"unembed_hash: got 000000000000…, the unembedding of .*; --other-weights"):
        run("import-tuned", tmp_path / "tuned", tmp_path / "t.safetensors")
    assert not (tmp_path / "t.safetensors").exists()
    run("import-tuned", tmp_path / "tuned", tmp_path / "t.safetensors", other_weights=True)
    assert capflow.open_lens(tmp_path / "t.safetensors").kind == "tuned"


def test_a_published_jacobian_lens_keeps_its_matrices(llama, tmp_path):
    torch.manual_seed(5)
    matrices = {0: torch.randn(64, 64).half(), 1: torch.randn(64, 64).half()}
    state = {"J": matrices, "n_prompts": 40, "d_model": 64, "source_layers": [0, 1]}
    torch.save(state, tmp_path / "lens.pt")
    run("import-jacobian", tmp_path / "lens.pt", tmp_path / "j.safetensors", model=llama.directory)
    lens = capflow.open_lens(tmp_path / "j.safetensors")
    for layer, matrix in matrices.items():
        given = llama.rows[layer].astype(np.float64) @ matrix.double().numpy().T
        expected = np.argsort(-llama.exact(given), axis=1, kind="stable")[:, :5]
        np.testing.assert_array_equal(lens.top(llama.rows[layer], layer).ids, expected)
    origin = LensFile(tmp_path / "j.safetensors").origin
    # Nothing in the file says of which weights it is.
    assert (origin.texts, origin.fingerprint) == (40, "")


@pytest.mark.parametrize(
    ("config", "state", "message"),
    [
        ({"d_model": 32}, None, "tuned: width: got 32, expected 64, as the model"),
        ({"num_hidden_layers": 4}, None, "tuned: layers: got 4, expected 3, as the model"),
        ({"lens_type": "other"}, None, "config.json: lens_type: got other, expected linear_tuned_lens"),
        ({"d_model": "x"}, None, "config.json: got Expected `int`"),
        (
            {"base_model_name_or_path": "org/nowhere"},
            None,
            "lens: the model's files: got org/nowhere, which is not here",
        ),
        ({}, {"0.weight": torch.zeros(64, 64)}, "params.pt: got 0.weight, expected 0.weight, 0.bias … for 3 layers"),
        ({}, [1, 2], "params.pt: got a list, expected tensors by name"),
    ],
)
def test_a_tuned_lens_that_does_not_fit_is_refused(llama, config, state, message, tmp_path):
    save_tuned(tmp_path / "tuned", llama, config=config, state=state)
    with pytest.raises(UsageError) as error:
        run("import-tuned", tmp_path / "tuned", tmp_path / "t.safetensors")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"n_prompts": 1}, "got n_prompts, expected J, the matrix of each layer"),
        ({"J": {0: torch.zeros(64, 32)}}, "J[0]: got torch.float32 [64, 32], expected numbers of shape [64, 64]"),
        ({"J": {0: torch.zeros(64, 64).int()}}, "J[0]: got torch.int32 [64, 64]"),
        ({"J": {7: torch.zeros(64, 64)}}, "layer: got 7, expected 0..2"),
        ({"J": {0: torch.full((64, 64), torch.nan)}}, "post_block.000.weight: got NaN or infinity"),
        ({"J": {0: torch.zeros(32, 32)}, "d_model": 32}, "width: got 32, expected 64, as the model"),
    ],
)
def test_a_jacobian_lens_that_does_not_fit_is_refused(llama, state, message, tmp_path):
    torch.save(state, tmp_path / "lens.pt")
    with pytest.raises(UsageError) as error:
        run("import-jacobian", tmp_path / "lens.pt", tmp_path / "j.safetensors", model=llama.directory)
    assert message in str(error.value)
    assert not (tmp_path / "j.safetensors").exists()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_no_code_of_a_file_is_run(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"J": Evil()}, tmp_path / "lens.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "torn.pt").write_bytes((tmp_path / "lens.pt").read_bytes()[:200])
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("lens.pt", "plain.pt", "torn.pt", "empty.pt"):
        with pytest.raises(UsageError) as error:
            run("import-jacobian", tmp_path / name, tmp_path / "j.safetensors", model=llama.directory)
        assert str(error.value).startswith(f"{tmp_path / name}: got ")
        assert str(error.value).endswith("expected a whole file of plain tensors")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "harm").exists()
