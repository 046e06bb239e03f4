"""Lenses: tokens, ranks and divergences are those of float64, and whatever does not fit is refused in one line."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import capflow
from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError
from tests.kit.lenses import log_softmax, save_model, save_translators

K = 6


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), request.param, tied=request.param == "gemma2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def assert_reading(reading, logits, *, k=K):
    """Fail unless a reading is that of logits `[n, vocabulary]` float64."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(reading.ids, order)
    np.testing.assert_allclose(reading.logits, np.take_along_axis(logits, order, 1), rtol=2e-5, atol=2e-6)
    expected = np.exp(np.take_along_axis(log_softmax(logits), order, 1))
    np.testing.assert_allclose(reading.probabilities, expected, rtol=1e-5)


def test_a_logit_lens_is_the_models_norm_and_head(model):
    lens = capflow.open_lens(model.directory)
    for layer, rows in enumerate(model.rows):
        assert_reading(lens.top(rows, layer, K), model.exact(rows))
        assert_reading(lens.top(rows, f"post_block:{layer}", K), model.exact(rows))
    assert_reading(lens.top(model.rows[0], Site(1, "pre_attn"), K), model.exact(model.rows[0]))
    assert_reading(lens.top(model.rows[-1], -1 + len(model.rows), K), model.logits())


def test_a_tuned_lens_adds_an_affine_map_to_the_row(model, tmp_path):
    parts = save_translators(tmp_path / "tuned.safetensors", model, "tuned", hook="pre_attn", layers=[0, 1, 2])
    lens = capflow.open_lens(model.directory, tmp_path / "tuned.safetensors")
    assert (lens.name, lens.kind, lens.title) == ("tuned", "tuned", "Tuned lens")
    for layer in (0, 1):
        weight, bias = parts[layer + 1]
        rows = model.rows[layer].astype(np.float64)
        translated = rows + np.einsum("nj,ij->ni", rows, weight) + bias
        assert_reading(lens.top(model.rows[layer], layer, K), model.exact(translated))
        assert_reading(lens.top(model.rows[layer], f"pre_attn:{layer + 1}", K), model.exact(translated))
    assert_reading(lens.top(model.rows[-1], lens.last, K), model.exact(model.rows[-1]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_jacobian_lens_multiplies_the_row(model, dtype, tmp_path):
    parts = save_translators(tmp_path / "j.safetensors", model, "jacobian", dtype=dtype)
    lens = capflow.open_lens(model.directory, tmp_path / "j.safetensors")
    for layer, (weight, _) in parts.items():
        translated = np.einsum("nj,ij->ni", model.rows[layer].astype(np.float64), weight)
        assert_reading(lens.top(model.rows[layer], layer, K), model.exact(translated))
    assert_reading(lens.top(model.rows[-1], lens.last, K), model.exact(model.rows[-1]))


def test_a_chosen_token_has_its_rank_and_probability(model, monkeypatch):
    monkeypatch.setattr(limits, "LENS_TILE_BYTES", 4 * model.rows.shape[2] * 37)
    lens = capflow.open_lens(model.directory)
    logits = model.exact(model.rows[0])
    for token in (0, 36, 37, 319):
        reading = lens.top(model.rows[0], 0, K, token=token)
        np.testing.assert_array_equal(reading.token_ranks, 1 + (logits > logits[:, [token]]).sum(axis=1))
        np.testing.assert_allclose(reading.token_probabilities, np.exp(log_softmax(logits)[:, token]), rtol=1e-5)
        np.testing.assert_allclose(reading.token_logits, logits[:, token], rtol=2e-5, atol=2e-6)
    tokens = reading.ids[np.arange(6), np.arange(6)]
    each = lens.top(model.rows[0], 0, K, token=tokens)
    assert each.token_ids.tolist() == tokens.tolist()
    assert each.token_ranks.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(each.token_logits, np.diagonal(each.logits))
    some = lens.top(model.rows[0], 0, K, token=np.where(np.arange(6) == 2, -1, tokens))
    assert (some.token_ranks[2], some.token_ranks[3]) == (0, 4)
    assert np.isnan(some.token_probabilities).tolist() == [False, False, True, False, False, False]
    assert (lens.top(model.rows[0], 0).token_ranks == 0).all()


def test_a_rank_counts_equal_tokens_with_lower_ids(llama, tmp_path):
    from safetensors.numpy import load_file, save_file

    own = save_model(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][:] = 0
    save_file(weights, tmp_path / "model.safetensors")
    reading = capflow.open_lens(own.directory).top(own.rows[0][:1], 0, token=200)
    assert reading.token_ranks.tolist() == [201]


def test_the_divergence_is_that_from_the_last_layer(model, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LENS_TILE_BYTES", 4 * model.rows.shape[2] * 51)
    parts = save_translators(tmp_path / "j.safetensors", model, "jacobian")
    own = log_softmax(model.exact(model.rows[-1]))
    for file in (None, tmp_path / "j.safetensors"):
        lens = capflow.open_lens(model.directory, file)
        by_site = lens.by_site(dict(enumerate(model.rows)), K)
        for layer, rows in enumerate(model.rows):
            weight = parts[layer][0] if file and layer in parts else np.eye(rows.shape[1])
            q = log_softmax(model.exact(rows.astype(np.float64) @ weight.T))
            expected = (np.exp(own) * (own - q)).sum(axis=1)
            reading = by_site[Site(layer, "post_block")]
            np.testing.assert_allclose(reading.divergences, expected, rtol=2e-5, atol=2e-6)
            alone = lens.top(rows, layer, K, last=model.rows[-1])
            np.testing.assert_allclose(alone.divergences, expected, rtol=2e-5, atol=2e-6)
        assert (by_site[lens.last].divergences < 1e-9).all()
    assert np.isnan(lens.top(model.rows[0], 0).divergences).all()
    assert np.isnan(lens.by_site({0: model.rows[0]})[Site(0, "post_block")].divergences).all()


def test_passes_and_tiles_do_not_change_a_reading(llama, monkeypatch):
    lens = capflow.open_lens(llama.directory)
    rows = np.concatenate([llama.rows[0]] * 5)
    last = np.concatenate([llama.rows[-1]] * 5)
    whole = lens.top(rows, 0, K, token=7, last=last)
    both = lens.by_site({0: rows, 2: last}, K, token=7)
    for at_once in (1, 2, 7):
        monkeypatch.setattr(limits, "LENS_ROWS", max(2, at_once))
        monkeypatch.setattr(limits, "LENS_LOGITS_BYTES", 64)
        parted = lens.top(rows, 0, K, token=7, last=last)
        np.testing.assert_array_equal(parted.ids, whole.ids)
        np.testing.assert_array_equal(parted.token_ranks, whole.token_ranks)
        np.testing.assert_allclose(parted.divergences, whole.divergences, rtol=1e-5, atol=1e-6)
        assert parted.texts == whole.texts
        again = lens.by_site({0: rows, 2: last}, K, token=7)
        for site, reading in both.items():
            np.testing.assert_array_equal(again[site].ids, reading.ids)
            np.testing.assert_allclose(again[site].divergences, reading.divergences, rtol=1e-5, atol=1e-6)


def test_a_row_with_nan_has_no_tokens(llama, tmp_path):
    rows = llama.rows[0].copy()
    rows[1, 2] = np.nan
    save_translators(tmp_path / "j.safetensors", llama, "jacobian")
    for file in (None, tmp_path / "j.safetensors"):
        lens = capflow.open_lens(llama.directory, file)
        reading = lens.top(rows, 0, token=3, last=llama.rows[-1])
        assert (reading.ids[:, 0] < 0).tolist() == [False, True, False, False, False, False]
        assert reading.texts[1] == [None] * 5
        assert reading.token_ranks[1] == 0
        for values in (reading.divergences, reading.token_probabilities, reading.logits[:, 0]):
            assert np.isnan(values).tolist() == [False, True, False, False, False, False]
    # The last layer's row may be the broken one.
    assert np.isnan(lens.top(llama.rows[0], 0, last=rows).divergences).tolist() == [False, True] + [False] * 4


def test_one_row_and_no_rows_are_read(llama):
    lens = capflow.open_lens(llama.directory)
    assert_reading(lens.top(llama.rows[0][2], 0, K), llama.exact(llama.rows[0][2:3]))
    assert lens.top(np.zeros((0, 64), np.float32), 0, K).ids.shape == (0, K)
    assert_reading(lens.top(llama.rows[0], (np.int64(0), "post_block"), K), llama.exact(llama.rows[0]))
    bf16 = llama.rows[0].astype(ml_dtypes.bfloat16)
    assert_reading(lens.top(bf16, 0, K), llama.exact(bf16.astype(np.float64)))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda lens, rows: lens.top(rows[:, :32], 0),
            r"lens: rows: got shape [6, 32], expected [n, 64], as the model",
        ),
        (lambda lens, rows: lens.top(torch.zeros(2, 64).bfloat16(), 0), "lens: rows: got Tensor: Got unsupported"),
        (lambda lens, rows: lens.top([["a"] * 64], 0), "lens: rows: got dtype <U1, expected numbers"),
        (lambda lens, rows: lens.top([[1], [2, 3]], 0), "lens: rows: got list: "),
        (lambda lens, rows: lens.top(rows, 3), "lens: layer: got 3, expected 0..2"),
        (lambda lens, rows: lens.top(rows, "mlp_out:1"), "lens: rows: got mlp_out:1, expected the stream between two"),
        (lambda lens, rows: lens.top(rows, "post_attn:1"), "lens: rows: got post_attn:1, expected the stream between"),
        (lambda lens, rows: lens.top(rows, (1, "nowhere")), "site: got nowhere:1"),
        (lambda lens, rows: lens.top(rows, -1), "lens: layer: got -1, expected 0..2"),
        (lambda lens, rows: lens.top(rows, 1.5), "lens: site: got 1.5"),
        (lambda lens, rows: lens.top(rows, 0, 0), "k: got 0, expected 1..1024"),
        (lambda lens, rows: lens.top(rows, 0, token=320), "token: got 320, expected 0..319"),
        (lambda lens, rows: lens.top(rows, 0, token=[1, 2]), "token: got [1, 2], expected a text, an id, or 6 ids"),
        (lambda lens, rows: lens.top(rows, 0, token=" Paris"), "token: got ' Paris', which is no token"),
        (lambda lens, rows: lens.top(rows, 0, last=rows[:2]), "lens: last: got 2 rows, expected 6"),
        (lambda lens, rows: lens.by_site({0: rows, 1: rows[:1]}), "lens: rows: got 1 and 6 rows, expected as many"),
        (lambda lens, rows: lens.by_site({}), "lens: rows: got no rows"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(llama, ask, message):
    with pytest.raises(UsageError) as error:
        ask(capflow.open_lens(llama.directory), llama.rows[0])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 4, "model": "org/m"}, "got a lens with num_layers 4 of org/m, expected 3, as "),
        ({"vocabulary_size": 321}, "got a lens with vocabulary_size 321, expected 320, as "),
        (
            {"fingerprint": "0" * 16, "model": "org/m"},
            "got a lens of other weights of org/m, 0000000000000000, expected ",
        ),
    ],
)
def test_a_lens_of_another_model_is_refused(llama, fields, message, tmp_path):
    path = tmp_path / "other.safetensors"
    save_translators(path, llama, "jacobian", **fields)
    with pytest.raises(UsageError, match=re.escape(f"{path}: {message}")):
        capflow.open_lens(llama.directory, path)


def test_a_lens_of_another_width_is_refused(llama, tmp_path):
    narrow = save_model(tmp_path / "narrow", "llama", hidden_size=32, head_dim=16)
    save_translators(tmp_path / "j.safetensors", narrow, "jacobian")
    with pytest.raises(UsageError, match="got a lens with hidden_size 32, expected 64, as "):
        capflow.open_lens(llama.directory, tmp_path / "j.safetensors")


def test_the_fingerprint_tells_weights_apart_and_other_weights_can_be_accepted(llama, tmp_path):
    from safetensors.numpy import load_file, save_file

    from capflow.lenses.model_files import open_model
    from capflow.lenses.unembedding import Unembedding

    own = Unembedding(open_model(llama.directory)).fingerprint
    path = tmp_path / "j.safetensors"
    save_translators(path, llama, "jacobian", fingerprint=own, model=llama.directory)
    # The file names its model.
    assert capflow.open_lens(path).num_layers == 3
    other = save_model(tmp_path / "other", "llama")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, tmp_path / "other" / "model.safetensors")
    with pytest.raises(UsageError, match=r"got a lens of other weights of .*; accept them with other_weights"):
        capflow.open_lens(other.directory, path)
    assert capflow.open_lens(other.directory, path, other_weights=True).kind == "jacobian"
    # Weights in a coarser dtype are the same if nothing was rounded.
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in weights.items()}
    save_file(rounded, tmp_path / "other" / "model.safetensors")
    coarse = Unembedding(open_model(other.directory)).fingerprint
    save_file({name: value.astype(np.float32) for name, value in rounded.items()}, tmp_path / "other/model.safetensors")
    assert Unembedding(open_model(other.directory)).fingerprint == coarse != own


def test_a_lens_without_a_layer_says_which_it_has(llama, tmp_path):
    path = tmp_path / "j.safetensors"
    save_translators(path, llama, "jacobian", layers=[1])
    lens = capflow.open_lens(llama.directory, path)
    assert [lens.reads(layer) for layer in range(3)] == [False, True, True]
    with pytest.raises(UsageError, match=r"rows: got post_block:0, expected one of post_block:1$"):
        lens.top(llama.rows[0], 0)


def test_a_lens_file_without_a_model_needs_one(llama, tmp_path):
    path = tmp_path / "j.safetensors"
    save_translators(path, llama, "jacobian")
    with pytest.raises(UsageError, match=r"model: got none; name the model: open_lens\(model, file\)"):
        capflow.open_lens(path)
