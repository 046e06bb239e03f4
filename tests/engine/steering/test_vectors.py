"""Vectors in files, of every format, and vectors fitted from pairs of prompts."""

import json
import subprocess
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError
from capflow.probes.probe import save_vector
from capflow.steering.request import Steering
from capflow_engine.steering.module import load_module
from capflow_models import TransformersSteerableModel, fit_vectors, load_vector, load_vectors, save_vectors
from capflow_models.vectors.file import load_sites
from tests.kit.engines import LAYERS, WIDTH, engine, save_tiny, save_words

VECTORS = {n: np.random.default_rng(n).standard_normal(8).astype(np.float32) for n in (2, 11, 30)}


def write_gguf(path, tensors):
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WRITERS = {
    "v.safetensors": lambda path: save_vectors(path, VECTORS),
    "layer.safetensors": lambda path: save_file({f"layer.{n}": v for n, v in VECTORS.items()}, path),
    "bare.safetensors": lambda path: save_file({str(n): v for n, v in VECTORS.items()}, path),
    "numbers.pt": lambda path: torch.save({n: torch.tensor(v) for n, v in VECTORS.items()}, path),
    "names.pth": lambda path: torch.save({f"layers.{n}": torch.tensor(v) for n, v in VECTORS.items()}, path),
    "v.gguf": lambda path: write_gguf(path, {f"direction.{n}": v for n, v in VECTORS.items()}),
    "v.npz": lambda path: np.savez(path, **{f"layer_{n}": v for n, v in VECTORS.items()}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_vectors_back(tmp_path, name):
    WRITERS[name](tmp_path / name)
    loaded = load_vectors(tmp_path / name)
    assert list(loaded) == sorted(VECTORS)
    for layer, vector in VECTORS.items():
        assert loaded[layer].dtype == np.float32
        assert np.array_equal(loaded[layer], vector)
        assert np.array_equal(load_vector(tmp_path / name, layer), vector)


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_is_a_module_of_every_position(tmp_path, name):
    WRITERS[name](tmp_path / name)
    module = load_module(tmp_path / name)
    assert [(vector.site, vector.array().tolist()) for vector in module.base.vectors] == [
        (Site(n, "post_block"), vector.tolist()) for n, vector in sorted(VECTORS.items())
    ]
    assert module == Steering(base=module.base)


MATRIX = np.stack(list(VECTORS.values()))


@pytest.mark.parametrize(
    ("name", "write"),
    [("v.npy", lambda path: np.save(path, MATRIX)), ("v.pt", lambda path: torch.save(torch.tensor(MATRIX), path))],
)
def test_the_rows_of_a_matrix_are_layers(tmp_path, name, write):
    write(tmp_path / name)
    assert np.array_equal(np.stack(list(load_vectors(tmp_path / name).values())), MATRIX)
    assert list(load_vectors(tmp_path / name)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("v.npy", lambda path: np.save(path, VECTORS[2])),
        ("v.pt", lambda path: torch.save(torch.tensor(VECTORS[2]), path)),
        ("v.safetensors", lambda path: save_vector(path, Site(12, "post_attn"), VECTORS[2])),
        ("w.safetensors", lambda path: save_file({"mood": VECTORS[2]}, path)),
    ],
)
def test_a_single_vector_is_loaded(tmp_path, name, write):
    write(tmp_path / name)
    assert np.array_equal(load_vector(tmp_path / name), VECTORS[2])


def test_names_and_metadata_tell_hooks(tmp_path):
    save_vectors(tmp_path / "v.safetensors", {3: VECTORS[2]}, hook="pre_attn")
    assert list(load_sites(tmp_path / "v.safetensors")) == [Site(3, "pre_attn")]
    save_vector(tmp_path / "w.safetensors", Site(12, "post_attn"), VECTORS[2])
    assert list(load_sites(tmp_path / "w.safetensors")) == [Site(12, "post_attn")]
    save_file({"pre_attn.1": VECTORS[2], "post_block.1": VECTORS[2]}, tmp_path / "x.safetensors")
    assert len(load_sites(tmp_path / "x.safetensors")) == 2
    with pytest.raises(UsageError, match="two vectors for layer 1"):
        load_vectors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_become_float32(tmp_path, dtype):
    torch.save({4: torch.tensor(VECTORS[2]).to(dtype)}, tmp_path / "v.pt")
    assert np.array_equal(load_vectors(tmp_path / "v.pt")[4], torch.tensor(VECTORS[2]).to(dtype).float().numpy())


def test_bfloat16_in_safetensors_is_read(tmp_path):
    half = VECTORS[2].astype(ml_dtypes.bfloat16)
    save_file({"layer.1": half}, tmp_path / "v.safetensors")
    assert np.array_equal(load_vectors(tmp_path / "v.safetensors")[1], half.astype(np.float32))


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("v.txt", lambda p: p.write_text("1 2 3"), "got .txt, expected one of .safetensors"),
        ("v.safetensors", lambda p: p.write_bytes(b"nonsense"), "expected a .safetensors file of vectors"),
        ("v.pt", lambda p: p.write_bytes(b"nonsense"), "expected a .pt file of vectors"),
        ("v.pt", lambda p: torch.save({1: Evil()}, p), "expected a .pt file of vectors"),
        ("v.pt", lambda p: torch.save({1: "words"}, p), "v.pt: 1: got "),
        ("v.pt", lambda p: torch.save([1, 2], p), "got list, expected"),
        ("v.npy", lambda p: np.save(p, np.array([object()]), allow_pickle=True), "expected a .npy file of vectors"),
        ("v.npy", lambda p: np.save(p, np.zeros((1, 2, 3))), r"got shape \[1, 2, 3\]"),
        ("v.npy", lambda p: np.save(p, VECTORS[2]), "the array: got no layer"),
        ("v.npz", lambda p: p.write_bytes(b"PK nonsense"), "expected a .npz file of vectors"),
        ("v.npz", lambda p: np.savez(p, layer_1=np.array([1.0, np.nan])), "got nan at index 1"),
        ("v.npz", lambda p: np.savez(p, layer_1=np.ones(3), layer_2=np.ones(4)), "widths 3, 4"),
        ("v.npz", lambda p: np.savez(p, mood=np.ones(3)), "mood: got no layer"),
        ("v.npz", lambda p: np.savez(p, a_1=np.ones(3), b_1=np.ones(3)), "post_block:1: got two vectors"),
        ("v.npz", np.savez, "no vectors"),
        ("v.gguf", lambda p: p.write_bytes(b"nonsense" * 9), "expected a .gguf file of vectors"),
        ("v.gguf", lambda p: write_gguf(p, {"token_embd.weight": VECTORS[2]}), "token_embd.weight: expected a control"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, capsys, name, write, message):
    write(tmp_path / name)
    with pytest.raises(UsageError, match=message) as caught:
        load_vectors(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "run" not in capsys.readouterr().out.split()


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_vectors(tmp_path / "v.npz")
    save_vectors(tmp_path / "v.safetensors", VECTORS)
    with pytest.raises(UsageError, match="layer: got 3, expected one of 2, 11, 30"):
        load_vector(tmp_path / "v.safetensors", 3)
    with pytest.raises(UsageError, match="got 3 vectors, expected one; name its layer"):
        load_vector(tmp_path / "v.safetensors")
    with pytest.raises(UsageError, match="vectors: got none"):
        save_vectors(tmp_path / "v.safetensors", {})
    with pytest.raises(CapflowError, match="cannot be written: got No such file"):
        save_vectors(tmp_path / "nowhere" / "v.safetensors", VECTORS)


# fitting

PAIRS = [(f"w{n} w{n + 7} w40", f"w{n} w{n + 9} w80 w90") for n in range(10, 16)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_words(directory)
    return save_tiny(directory)


@pytest.fixture(scope="module")
def model(tiny):
    return TransformersSteerableModel(tiny, dtype="float32")


def last_rows(model, texts, layer):
    """Return the stream after a layer at the last token, as Transformers computes it."""
    with torch.no_grad():
        every = [
            model.model(torch.tensor([model.tokenizer(t).input_ids]), output_hidden_states=True).hidden_states
            for t in texts
        ]
    return np.stack([states[layer + 1][0, -1].double().numpy() for states in every])


@pytest.mark.parametrize("layer", range(LAYERS - 1))  # the last hidden state is taken after the final norm
def test_the_mean_is_the_difference_of_the_means(model, layer):
    vectors = fit_vectors(model, PAIRS, "mean", [layer])
    positive, negative = (last_rows(model, [pair[side] for pair in PAIRS], layer) for side in (0, 1))
    assert np.allclose(vectors[layer], positive.mean(0) - negative.mean(0), atol=1e-5)


def test_pca_finds_the_direction_and_its_sign(model):
    vectors = fit_vectors(model, PAIRS, "pca")
    assert list(vectors) == list(range(LAYERS))
    for layer in range(LAYERS - 1):
        positive, negative = (last_rows(model, [pair[side] for pair in PAIRS], layer) for side in (0, 1))
        differences = positive - negative
        directions = np.linalg.eigh(differences.T @ differences).eigenvectors
        unit = vectors[layer] / np.linalg.norm(vectors[layer])
        assert abs(unit @ directions[:, -1]) == pytest.approx(1.0, abs=1e-5)
        assert (positive @ unit).mean() > (negative @ unit).mean()
        assert np.linalg.norm(vectors[layer]) == pytest.approx((differences @ unit).mean(), rel=1e-5)


def test_swapping_the_sides_turns_the_vectors(model):
    swapped = [(negative, positive) for positive, negative in PAIRS]
    for method in ("mean", "pca"):
        one, other = fit_vectors(model, PAIRS, method, [1]), fit_vectors(model, swapped, method, [1])
        assert np.allclose(one[1], -other[1], atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAIRS, "median"), "method: got median, expected one of mean, pca"),
        (([],), "pairs: got none"),
        ((PAIRS, "mean", [LAYERS]), f"layer: got {LAYERS}"),
        (([("w5 w6", "w5 w6")],), "layer 0: the pairs have no difference"),
    ],
)
def test_what_cannot_be_fitted_is_refused(model, arguments, message):
    with pytest.raises(UsageError, match=message):
        fit_vectors(model, *arguments)


def run_fit(directory, *more, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "capflow", "vectors", "fit", *map(str, more)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def write_pairs(path):
    path.write_text("".join(json.dumps({"positive": p, "negative": n}) + "\n" for p, n in PAIRS))
    return path


def test_the_command_fits_a_file(model, tiny, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    common = ("--model", tiny, "--backend", "transformers", "--model-arg", "dtype=float32")
    output = run_fit(
        tmp_path, *common, "--pairs", pairs, "--out", "v.safetensors", "--method", "pca", "--layers", "1-2",
        "--hook", "pre_attn",
    )  # fmt: skip
    assert "2 vectors from 6 pairs" in output
    expected = fit_vectors(model, PAIRS, "pca", [1, 2], hook="pre_attn")
    loaded = load_sites(tmp_path / "v.safetensors")
    assert set(loaded) == {Site(1, "pre_attn"), Site(2, "pre_attn")}
    assert all(np.allclose(vector, expected[site.layer], atol=1e-6) for site, vector in loaded.items())
    module = load_module(tmp_path / "v.safetensors")
    assert {vector.site: vector.array().tolist() for vector in module.base.vectors} == {
        site: vector.tolist() for site, vector in loaded.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--layers", "9"), "--layers"),
        (("--out", "v.txt"), "--out: got v.txt, expected a .safetensors file"),
        (("--pairs", "missing.jsonl"), "--pairs missing.jsonl: got No such file"),
        pytest.param(("--model-arg", "colour=red"), "colour", marks=pytest.mark.long),
        (("--model", "nowhere/at/all"), "nowhere/at/all"),
    ],
)
def test_the_command_names_what_is_wrong(tiny, tmp_path, change, message):
    write_pairs(tmp_path / "pairs.jsonl")
    options = {"--model": tiny, "--backend": "transformers", "--pairs": "pairs.jsonl", "--out": "v.safetensors"}
    options[change[0]] = change[1]
    output = run_fit(tmp_path, *(each for pair in options.items() for each in pair), code=2)
    (line,) = [line for line in output.splitlines() if line.startswith("capflow: ")]
    assert message in line
    assert not (tmp_path / "v.safetensors").exists()


@pytest.mark.engine
def test_both_back_ends_fit_the_same(tiny, model, tmp_path):
    from capflow_models import VLLMSteerableModel

    consumer = f"filesystem:root={tmp_path},capture=requests"
    with engine(tiny, consumers=[consumer], skip_tokenizer_init=False) as llm:
        served = VLLMSteerableModel(llm, rows=tmp_path)
        for method in ("mean", "pca"):
            ours, theirs = (fit_vectors(each, PAIRS, method) for each in (served, model))
            for layer in range(LAYERS):
                assert ours[layer].shape == (WIDTH,)
                assert np.allclose(ours[layer], theirs[layer], atol=1e-4)
        with pytest.raises(UsageError, match="no captured rows to read"):
            VLLMSteerableModel(llm).last_rows(["w5"], [Site(0, "post_block")])
