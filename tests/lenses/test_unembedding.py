"""The unembedding: its lens is that of Transformers, for every architecture in the table and every layer."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import transformers
from safetensors.numpy import load_file, save_file

from capflow import limits
from capflow.errors import UsageError
from capflow.lenses.forms import FORMS, NESTED
from capflow.lenses.model_files import open_model
from capflow.lenses.unembedding import Unembedding
from tests.kit.lenses import assert_tokens, change_config, save_architecture, save_model
from tests.kit.sources import ROOT

K = 8


def opened(model):
    return Unembedding(open_model(model.directory))


def assert_like_transformers(model, rows):
    """Fail unless the lens of rows `[rows, hidden]` is that of Transformers."""
    top = opened(model).top(np.ascontiguousarray(rows, np.float32), K)
    for ids, probabilities, expected in zip(top.ids.tolist(), top.probabilities, model.lens(rows), strict=True):
        assert_tokens(list(zip(ids, probabilities, strict=True)), expected)


def assert_layers_are_like_transformers(model):
    for layer in model.rows:
        assert_like_transformers(model, layer)
    # At this scale the norm's ε counts as much as the row.
    assert_like_transformers(model, model.rows[0] * 1e-3)
    top = opened(model).top(model.rows[-1], K)
    logits = model.logits()
    own = np.exp(logits - logits.max(1, keepdims=True))
    own /= own.sum(1, keepdims=True)
    for ids, probabilities, expected in zip(top.ids.tolist(), top.probabilities, own, strict=True):
        assert_tokens(list(zip(ids, probabilities, strict=True)), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gemma3_text", "gpt2"])
def test_a_lens_is_that_of_transformers_at_every_layer(model_type, tied, tmp_path):
    assert_layers_are_like_transformers(save_model(tmp_path, model_type, tied=tied))


@pytest.mark.parametrize("model_type", sorted(FORMS))
def test_every_architecture_in_the_table_is_proven(model_type, tmp_path):
    assert_layers_are_like_transformers(save_architecture(tmp_path, model_type))


@pytest.mark.parametrize("model_type", sorted(FORMS))
def test_defaults_are_those_of_transformers(model_type):
    form = FORMS[model_type]
    config = transformers.AutoConfig.for_model(model_type)
    text = config.get_text_config()
    # vLLM makes the text model from the text model's own configuration.
    own = type(text)() if model_type in NESTED else text
    assert form.eps_default == getattr(own, form.eps)
    assert form.tied == own.tie_word_embeddings
    for field in (form.multiplied, form.divided, form.capped):
        assert field is None or field[1] == getattr(own, field[0])
    fields = {"logit_scale", "logits_scaling", "final_logit_softcapping"} & set(own.to_dict())
    assert fields == {field[0] for field in (form.multiplied, form.divided, form.capped) if field is not None}


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [("gemma2", "final_logit_softcapping", 0.5), ("granite", "logits_scaling", 7.0), ("cohere", "logit_scale", 3.0)],
)
def test_scales_of_logits_count(model_type, field, value, tmp_path):
    model = save_model(tmp_path, model_type, **{field: value})
    assert_like_transformers(model, model.rows[1])
    change_config(tmp_path, **{field: 2 * value})
    with pytest.raises(AssertionError):
        assert_like_transformers(model, model.rows[1])


def test_a_row_of_bfloat16_is_taken_as_it_is(tmp_path):
    model = save_model(tmp_path, "llama")
    assert_like_transformers(model, model.rows[1].astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_coarser_dtypes_are_computed_with_in_float32(dtype, tmp_path):
    model = save_architecture(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    weights = {name: tensor.astype(np.dtype(dtype)) for name, tensor in load_file(path).items()}
    save_file(weights, path)
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    model.model.load_state_dict(exact.state_dict())
    assert_like_transformers(model, model.rows[1])


@pytest.mark.parametrize("tokens", [1, 3, 7, 100, 319, 320])
def test_tiles_do_not_change_the_answer(tokens, tmp_path, monkeypatch):
    model = save_model(tmp_path, "llama")
    monkeypatch.setattr(limits, "LENS_TILE_BYTES", 4 * model.rows.shape[2] * tokens)
    assert_like_transformers(model, model.rows[1])


def test_of_equally_likely_tokens_the_lower_ids_come_first(tmp_path, monkeypatch):
    model = save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    # One product for each token: sums of several differ by the order in which a library adds them.
    weights["lm_head.weight"][:] = 0
    weights["lm_head.weight"][:, 5] = 1
    save_file(weights, path)
    for tokens in (3, 50, 400):
        monkeypatch.setattr(limits, "LENS_TILE_BYTES", 4 * model.rows.shape[2] * tokens)
        top = opened(model).top(model.rows[0], K)
        assert top.ids.tolist() == [list(range(K))] * len(model.rows[0])
        np.testing.assert_allclose(top.probabilities, 1 / 320, rtol=1e-6)


def test_a_row_with_nan_or_infinity_has_no_tokens_and_others_have(tmp_path):
    model = save_model(tmp_path, "llama")
    rows = model.rows[1].copy()
    rows[0, 3], rows[2, 0] = np.nan, np.inf
    top = opened(model).top(rows, K)
    assert (top.ids == -1).all(axis=1).tolist() == [True, False, True, False, False, False]
    assert_tokens(list(zip(top.ids[1].tolist(), top.probabilities[1], strict=True)), model.lens(model.rows[1])[1])


def test_weights_with_nan_are_refused(tmp_path):
    model = save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][100, 2] = np.nan
    save_file(weights, path)
    with pytest.raises(UsageError, match="the weights: got NaN"):
        opened(model).top(model.rows[0], K)


def test_an_unknown_architecture_is_refused(tmp_path):
    model = save_model(tmp_path, "llama")
    change_config(tmp_path, model_type="mamba9")
    with pytest.raises(UsageError, match="got the architecture mamba9, expected one of apertus"):
        opened(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 321}, r"the unembedding: got shape \[320, 64\], expected \[321, hidden_size\]"),
        ({"rms_norm_eps": "small"}, "config.json: rms_norm_eps: got small"),
        ({"rms_norm_eps": True}, "config.json: rms_norm_eps: got True"),
        ({"rms_norm_eps": -1}, "config.json: rms_norm_eps: got -1"),
        ({"num_hidden_layers": "3"}, "config.json: num_hidden_layers: got 3, expected a number"),
        ({"model_type": 3}, "the architecture 3"),
        ({"model_type": "mistral3"}, "no text_config"),
        ({"model_type": "gpt2"}, "no final norm"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(fields, message, tmp_path):
    model = save_model(tmp_path, "llama")
    change_config(tmp_path, **fields)
    with pytest.raises(UsageError, match=message):
        _ = opened(model).num_layers


def test_two_different_ties_are_refused(tmp_path):
    model = save_architecture(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"] | {"tie_word_embeddings": True}
    change_config(tmp_path, tie_word_embeddings=False, text_config=text)
    with pytest.raises(UsageError, match="tie_word_embeddings: got both values"):
        opened(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm_head.weight", "no unembedding, expected a tensor lm_head.weight"),
        ("model.norm.weight", "no final norm"),
    ],
)
def test_a_missing_tensor_is_refused(name, message, tmp_path):
    model = save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path)
    with pytest.raises(UsageError, match=message):
        opened(model)


def test_a_norm_of_another_width_is_refused(tmp_path):
    model = save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = np.ones(63, np.float32)
    save_file(weights, path)
    with pytest.raises(UsageError, match=r"model.norm.weight: got shape \[63\], expected \[64\]"):
        opened(model)


def test_the_documentation_names_every_architecture():
    section = (ROOT / "docs" / "lenses.md").read_text(encoding="utf-8").partition("## Which models")[2]
    names = re.search(r"Any other architecture is refused\.\n\n((?:`.*\n)+)", section)[1]
    assert re.findall(r"`(\w+)`", names) == list(FORMS)
