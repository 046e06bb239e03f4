from types import SimpleNamespace

import pytest

from capflow_engine.compat import engine as compat


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: ("vllm", "1"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return SimpleNamespace(
        tokenizer=str(directory),
        tokenizer_mode="auto",
        tokenizer_revision=None,
        runner_type="generate",
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type="llama"),
    )


def key_of(model):
    return compat.tokenizer_key(SimpleNamespace(model_config=model))


def test_the_key_holds_while_nothing_changes(model):
    assert key_of(model) == key_of(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: (model.directory / "tokenizer.json").write_text("[]"),
        lambda model, _: (model.directory / "added_tokens.json").write_text("{}"),
        lambda model, _: (model.directory / "tokenizer.json").rename(model.directory / "vocab.json"),
        lambda model, _: (model.directory / "model.safetensors").write_bytes(b"other weights"),
        lambda model, _: setattr(model, "tokenizer_mode", "mistral"),
        lambda model, _: setattr(model.hf_config, "model_type", "gemma"),
        lambda _, patch: patch.setattr(compat, "vllm_version", lambda: ("vllm", "2")),
        lambda _, patch: patch.setattr(compat, "_version", lambda name: f"{name} 2"),
        lambda _, patch: patch.setenv("VLLM_USE_FASTOKENS", "1"),
    ],
)
def test_the_key_changes_with_all_that_texts_depend_on(model, monkeypatch, tmp_path, change):
    model.directory = tmp_path / "model"
    before = key_of(model)
    change(model, monkeypatch)
    assert key_of(model) not in (None, before)


def test_a_tokenizer_with_code_of_its_own_has_no_key(model):
    model.trust_remote_code = True
    assert key_of(model) is None


def test_a_tokenizer_that_is_not_on_this_machine_has_no_key(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model.tokenizer = "nobody/nothing-of-this-name"
    assert key_of(model) is None


def test_a_directory_with_more_files_than_a_tokenizer_has_is_not_read(model, monkeypatch):
    monkeypatch.setattr(compat, "_TOKENIZER_FILES_MAX", 2)
    assert key_of(model) is not None
    monkeypatch.setattr(compat, "_TOKENIZER_FILES_MAX", 1)
    assert key_of(model) is None
