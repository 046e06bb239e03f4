"""The fitted Jacobian lens is the mean of Jacobians that autograd computes one by one, in float64."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import transformers

import capflow
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.lenses.file import LensFile
from capflow_models.jobs.lensjob import LensJob, work
from capflow_models.lenses.jacobian import CountedPositions, JacobianFit
from capflow_models.stream import layers_of
from tests.architectures import table
from tests.kit.engines import save_tiny, save_words
from tests.kit.lenses import save_model

TEXTS = ([17, 5, 211, 88, 9, 140, 33], [3, 99, 7, 250, 41], [8, 9])
SKIPPED = 1


def blocks_after(model, layer, start):
    """Return the last block's output `[length, hidden]` as a function of that of a layer, with the rest as it was."""
    layers = list(table.layers_of(model, model.config))

    def last(stream):
        kept = {}

        def replace(module, args, output):
            return (stream[None], *output[1:]) if isinstance(output, tuple) else stream[None]

        def keep(module, args, output):
            kept["last"] = output[0] if isinstance(output, tuple) else output

        handles = [layers[layer].register_forward_hook(replace), layers[-1].register_forward_hook(keep)]
        try:
            model(input_ids=torch.tensor([start]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return kept["last"].reshape(len(start), -1)

    return last


def streams_of(model, ids):
    """Return the stream after each layer, `[layers, length, hidden]`."""
    kept = []
    handles = [
        layer.register_forward_hook(
            lambda m, a, output: kept.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in table.layers_of(model, model.config)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([stream.reshape(len(ids), -1) for stream in kept])


def expected_jacobian(model, layer, texts, skipped):
    """Return the mean over texts and positions of the Jacobians, each whole: `[q, i, p, j]`."""
    means = []
    for ids in texts:
        whole = torch.autograd.functional.jacobian(
            blocks_after(model, layer, ids), streams_of(model, ids)[layer], vectorize=True
        )
        at = range(skipped, len(ids) - 1)
        parts = [sum(whole[q, :, p] for q in at if q >= p) for p in at]
        if parts:
            means.append(torch.stack(parts).mean(dim=0))
    return torch.stack(means).mean(dim=0).numpy()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "granite"])
@pytest.mark.parametrize("batch", [5, 64])
def test_it_is_the_mean_of_jacobians(model_type, batch, tmp_path):
    model = save_model(tmp_path, model_type).model.double()
    count = len(table.layers_of(model, model.config))
    layers = layers_of(model, count, torch.float64)
    fit = JacobianFit(model, layers, range(count - 1), skipped=SKIPPED, batch=batch)
    assert [fit.add(ids) for ids in TEXTS] == [True, True, False]
    assert (fit.texts, fit.tokens, fit.positions) == (2, 12, 8)
    for layer, matrix in fit.jacobians().items():
        expected = expected_jacobian(model, layer, TEXTS, SKIPPED)
        # The norms of Transformers round to float32 in a float64 model, too.
        np.testing.assert_allclose(matrix, expected, atol=3e-7)
        # The test must tell apart J, its transpose and the identity.
        assert not np.allclose(matrix, expected.T, atol=1e-3)
        assert not np.allclose(matrix, np.eye(len(matrix)), atol=1e-2)


def test_one_layer_is_fitted_as_with_the_others(tmp_path):
    model = save_model(tmp_path, "llama").model
    layers = layers_of(model, 3, torch.float32)
    every, one = (JacobianFit(model, layers, wanted, skipped=0) for wanted in ([0, 1], [1]))
    for fit in (every, one):
        fit.add(TEXTS[0])
        assert all(matrix.dtype == np.float32 for matrix in fit.jacobians().values())
    np.testing.assert_allclose(every.jacobians()[1], one.jacobians()[1], rtol=1e-5, atol=1e-6)
    assert list(one.jacobians()) == [1]


def test_the_first_positions_and_the_last_do_not_count():
    assert CountedPositions.of(20, 16) == (16, 19)
    assert CountedPositions.of(18, 16) == (16, 17)
    assert CountedPositions.of(17, 16) is None
    assert CountedPositions.of(1, 0) is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(directory)
    save_words(directory)
    return directory


def test_the_command_writes_a_lens_with_its_origin(tiny, tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    lines = ["w5 w6 w7 w8 w9 w5 w200", "w9", "w80 w81 w82 w83 w84 w85 w86 w87 w88 w89 w90 w91"]
    texts.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    out = tmp_path / "j.safetensors"
    work(LensJob("fit-jacobian", str(tiny), str(texts), str(out), skipped=2, tokens_max=9, batch=16))
    expected = "a Jacobian lens of 3 layers, fitted on 2 texts, 10 positions"
    lines_printed = f"capflow: 1 of 3 texts are too short and do not count\ncapflow: {out}, {expected}\n"
    assert capsys.readouterr().err.endswith(lines_printed)
    origin = LensFile(out).origin
    assert (origin.model, origin.texts, origin.tokens, origin.positions) == (str(tiny), 2, 16, 10)
    assert (origin.skipped, origin.tokens_max, origin.dtype) == (2, 9, "float32")
    assert origin.texts_sha256 == hashlib.sha256(texts.read_bytes()).hexdigest()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    ids = [[int(word[1:]) for word in line.split()][:9] for line in lines]
    lens = capflow.open_lens(out)
    rows = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    for layer in range(3):
        matrix = expected_jacobian(model, layer, ids, 2)
        translated = lens._file.translated(rows, layer + 1)
        np.testing.assert_allclose(translated, rows @ matrix.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ({"layers": "3"}, "w5 w6 w7\n", "--layers: got layer 3, the last one, expected layers below it"),
        ({"layers": "9"}, "w5 w6 w7\n", "--layers: got layer 9, expected 0..3"),
        ({"dtype": "int8"}, "w5 w6 w7\n", "--dtype: got int8, expected one of float32"),
        ({"out": "j.pt"}, "w5 w6 w7\n", "--out: got j.pt, expected a .safetensors file in a directory that exists"),
        ({}, "w5 w6\n", "texts.txt: got texts of at most 2 tokens, expected one of 18 tokens or more; lower --skip-f"),
        ({}, "\n", "--texts texts.txt: got no lines, expected one text a line"),
        ({}, "\xff", "--texts texts.txt: got 'utf-8' codec"),
        ({"source": "none.txt"}, "w5\n", "--texts none.txt: got No such file or directory"),
        ({"source": "a.jsonl"}, "w5\n", "--texts a.jsonl: got No such file or directory"),
        ({"device": "tpu:9"}, "w5\n", "--device: got tpu:9: "),
    ],
)
def test_a_wrong_fit_is_refused_in_one_line(tiny, options, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text(content, encoding="latin-1")
    given = {"model": str(tiny), "source": "texts.txt", "out": "j.safetensors"} | options
    with pytest.raises(UsageError) as error:
        work(LensJob("fit-jacobian", **given))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "j.safetensors").exists()


def test_a_lens_that_was_fitted_is_nearer_to_the_models_prediction(tmp_path):
    """Near the rows on which it was fitted, J · h is a first-order change of the last block's output."""
    saved = save_model(tmp_path, "llama")
    model = saved.model.double()
    layers = layers_of(model, 3, torch.float64)
    ids = TEXTS[0]
    fit = JacobianFit(model, layers, [1], skipped=5, batch=64)
    assert fit.add(ids)
    # One position counts, so J is its own Jacobian.
    stream = streams_of(model, ids)[1]
    step = torch.zeros_like(stream)
    step[5] = torch.randn(stream.shape[1], dtype=torch.float64) * 1e-3
    with torch.no_grad():
        last = blocks_after(model, 1, ids)
        change = (last(stream + step) - last(stream))[5]
    np.testing.assert_allclose(fit.jacobians()[1] @ step[5].numpy(), change.numpy(), atol=1e-5)


def test_sites_of_the_file_are_those_that_engines_capture(tmp_path):
    saved = save_model(tmp_path, "llama")
    streams = streams_of(saved.model, saved.tokens).numpy()
    np.testing.assert_allclose(streams, saved.rows, rtol=1e-5, atol=1e-6)
    assert Site(0, "post_block") in saved.info.sites
