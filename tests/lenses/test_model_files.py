"""Where a model's files are found, and what is refused."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

pytest.importorskip("torch")

from safetensors.numpy import load_file, save_file

from capflow.errors import UsageError
from capflow.lenses.model_files import open_model
from capflow.lenses.unembedding import Unembedding
from tests.kit.lenses import save_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("saved"), "llama")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def snapshot(cache, saved, revision, repository="models--org--tiny-1b"):
    directory = cache / repository / "snapshots" / revision
    directory.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(saved.directory, directory)
    return directory


def test_a_name_in_the_cache_is_its_main_revision(cache, saved):
    snapshot(cache, saved, "aaa")
    main = snapshot(cache, saved, "bbb")
    (cache / "models--org--tiny-1b" / "refs").mkdir()
    (cache / "models--org--tiny-1b" / "refs" / "main").write_text("bbb")
    assert open_model("org/tiny-1b").directory == main


def test_a_name_in_the_cache_without_a_main_revision_is_its_only_one(cache, saved):
    only = snapshot(cache, saved, "aaa")
    assert open_model("org/tiny-1b").directory == only
    snapshot(cache, saved, "bbb")
    with pytest.raises(UsageError, match="org/tiny-1b, which is not here"):
        open_model("org/tiny-1b")


def test_the_cache_is_where_its_variables_say(tmp_path, monkeypatch, saved):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = snapshot(tmp_path / "cache" / "huggingface" / "hub", saved, "aaa")
    assert open_model("org/tiny-1b").directory == directory
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    directory = snapshot(tmp_path / "home" / "hub", saved, "aaa")
    assert open_model("org/tiny-1b").directory == directory


def test_demo_is_the_prepared_demo_model(tmp_path, monkeypatch, saved):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="lens: the demo model: got none"):
        open_model("demo")
    directory = tmp_path / "capflow" / "models" / "gemma-3-270m-0123456789"
    shutil.copytree(saved.directory, directory)
    (directory.parent / ".gemma-3-270m-0123456789-partial").mkdir()
    assert open_model("demo").directory == directory
    newer = directory.with_name("gemma-3-270m-00aa")
    shutil.copytree(saved.directory, newer)
    os.utime(directory / "config.json", (1, 1))
    assert open_model("demo").directory == newer


@pytest.mark.parametrize(
    "name",
    ["", "org/none", "../../etc", "org/../../x", "/", "org/a/b", "http://x/y", "-org/x", "org\n/x", "\0", "a" * 5000],
)
def test_a_name_without_files_is_refused(name, cache):
    with pytest.raises(UsageError, match="lens: the model's files: got"):
        open_model(name)


def test_a_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="GGUF, expected safetensors"):
        open_model(str(tmp_path / "model.gguf"))


def test_weights_in_several_files_are_found_by_their_index(tmp_path, saved):
    shutil.copytree(saved.directory, tmp_path, dirs_exist_ok=True)
    whole = tmp_path / "model.safetensors"
    weights = load_file(whole)
    whole.unlink()
    head = {"lm_head.weight": weights.pop("lm_head.weight")}
    save_file(weights, tmp_path / "model-00001-of-00002.safetensors")
    save_file(head, tmp_path / "model-00002-of-00002.safetensors")
    places = dict.fromkeys(weights, "model-00001-of-00002.safetensors")
    places |= dict.fromkeys(head, "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    expected = Unembedding(open_model(saved.directory)).top(saved.rows[1], 8)
    top = Unembedding(open_model(str(tmp_path))).top(saved.rows[1], 8)
    np.testing.assert_array_equal(top.ids, expected.ids)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model-00002-of-00002\.safetensors: got"):
        Unembedding(open_model(str(tmp_path)))
    places["lm_head.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UsageError, match="got a path, expected names of files beside it"):
        open_model(str(tmp_path))
    index.write_text("{}")
    with pytest.raises(UsageError, match="expected an index of tensors"):
        open_model(str(tmp_path))


def test_weights_of_another_kind_are_refused(tmp_path, saved):
    shutil.copy(f"{saved.directory}/config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"got no model\.safetensors, expected weights as safetensors"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 5000, '"llama"'])
def test_a_damaged_configuration_is_refused(content, tmp_path, saved):
    shutil.copytree(saved.directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json: got .*, expected a configuration"):
        open_model(str(tmp_path))


def test_integer_weights_are_refused(tmp_path, saved):
    shutil.copytree(saved.directory, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].astype(np.int8)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"lm_head\.weight: got I8, expected one of F32, F16, BF16"):
        Unembedding(open_model(str(tmp_path)))


def test_a_signature_changes_with_any_file_that_is_read(tmp_path, saved):
    shutil.copytree(saved.directory, tmp_path, dirs_exist_ok=True)
    before = open_model(str(tmp_path)).signature
    assert open_model(str(tmp_path)).signature == before
    (tmp_path / "tokenizer.json").write_text("{}")
    with_tokenizer = open_model(str(tmp_path)).signature
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "new").write_bytes(content)
    (tmp_path / "new").rename(tmp_path / "model.safetensors")
    assert len({before, with_tokenizer, open_model(str(tmp_path)).signature}) == 3
