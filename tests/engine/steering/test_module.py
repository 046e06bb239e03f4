"""Modules in files: the forms that are read, and how wrong ones are refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import save_vector
from capflow.steering.request import Steering
from capflow_engine.steering.module import load_module, parse_module

VECTOR = [0.5] * 8
VECTORS = {"post_block": {"1": VECTOR}}
INFO = ModelInfo("tiny", 4, 8, "float32", (Site(1, "post_block"),))


def test_fields_are_those_of_a_request_with_or_without_the_word_steering():
    long = {
        "steering_vectors": VECTORS,
        "decode_steering_clamps": {"post_block": {"1": {"vector": VECTOR, "value": 0}}},
    }
    short = {name.replace("steering_", ""): value for name, value in long.items()}
    assert parse_module({**short, "prefill_vectors": None}) == parse_module(long) == Steering.parse(long)


def test_files_of_either_kind_hold_the_same(tmp_path):
    fields = {"vectors": VECTORS, "prefill_vectors": VECTORS, "decode_vectors": {"mlp_out": {"2": VECTOR}}}
    (tmp_path / "module.json").write_text(json.dumps(fields))
    row = np.array(VECTOR, np.float16)
    tensors = {"post_block:1": row, "prefill.post_block:1": row, "decode.mlp_out:2": row}
    save_file(tensors, tmp_path / "module.safetensors")
    assert load_module(tmp_path / "module.json") == load_module(tmp_path / "module.safetensors")


def test_the_file_of_one_vector_is_a_module(tmp_path):
    save_vector(tmp_path / "kind.safetensors", Site(1, "post_block"), VECTOR)
    assert load_module(tmp_path / "kind.safetensors") == parse_module({"vectors": VECTORS})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vectors": {"post_block": {"1": [0.5] * 7}}}, "vectors.post_block.1: got 7 numbers"),
        ({"steering_vectors": {"post_block": {"1": [0.5] * 7}}}, "steering_vectors.post_block.1: got 7 numbers"),
        ({"decode_vectors": {"post_block": {"2": VECTOR}}}, "decode_vectors.post_block.2: got no tap"),
        ({"vectors": VECTORS, "steering_vectors": VECTORS}, "steering_vectors: given twice"),
        ({"steering_patches": {}}, "steering_patches: unknown"),
        ({"steering_name": "other"}, "steering_name: unknown"),
        ([], "module: got"),
    ],
)
def test_a_wrong_field_is_named_as_it_was_written(fields, words):
    with pytest.raises(UsageError) as caught:
        parse_module(fields, info=INFO)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("module.json", b"{", "module.json: got"),
        ("module.json", b"[1]", "module.json: got"),
        ("module.json", b'{"vector": {}}', "module.json: vector: unknown"),
        ("module.json", b'{"vectors": {"post_block": {"1": []}}}', "module.json: vectors.post_block.1"),
        ("module.safetensors", b"nothing", "module.safetensors: got"),
        ("module.npz", b"nothing", "module.npz: got"),
        ("nowhere", None, "nowhere: got no such file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_module(tmp_path / name)
    assert f"/{words}" in str(caught.value)


@pytest.mark.parametrize("tensor", ["nowhere:1", "both.post_block:1", "prefill.1", "decode.post_block.1"])
def test_a_tensor_of_another_name_is_named(tmp_path, tensor):
    save_file({tensor: np.ones(8, np.float32)}, tmp_path / "module.safetensors")
    with pytest.raises(UsageError, match=f"module.safetensors: tensor: got {tensor}"):
        load_module(tmp_path / "module.safetensors")


def test_a_tensor_of_a_tier_among_those_of_layers_is_refused(tmp_path):
    tensors = {"layer.1": np.ones(8, np.float32), "prefill.post_block:1": np.ones(8, np.float32)}
    save_file(tensors, tmp_path / "module.safetensors")
    with pytest.raises(UsageError, match=r"module.safetensors: tensor: got layer\.1"):
        load_module(tmp_path / "module.safetensors")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("module.safetensors", lambda path: save_file({"post_block": np.ones(8, np.float32)}, path)),
        ("module.npy", lambda path: np.save(path, np.ones(8))),
        ("module.npz", lambda path: np.savez(path, mood=np.ones(8))),
    ],
)
def test_a_vector_that_tells_no_layer_is_refused(tmp_path, name, write):
    write(tmp_path / name)
    with pytest.raises(UsageError, match=rf"{name}: .*got no layer, expected NAME\.LAYER"):
        load_module(tmp_path / name)


def test_a_file_without_tensors_and_one_of_matrices_are_refused(tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    save_file({"post_block:1": np.ones((2, 8), np.float32)}, tmp_path / "matrix.safetensors")
    for name in ("none", "matrix"):
        with pytest.raises(UsageError, match=name):
            load_module(tmp_path / f"{name}.safetensors")
