"""The texts of tokens: those of the library `tokenizers`, without it."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from capflow import limits
from capflow.errors import UsageError
from capflow.lenses.vocabulary import Vocabulary

TEXTS = ["the cat sat on the mat", "naïve café — 東京", "tabs\tand\nlines", "emoji 🙂🙂"] * 3


def byte_level(directory):
    """Save a byte-level BPE tokenizer as GPT-2 has it; return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("Ġ plain", normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def pieces(directory):
    """Save a BPE tokenizer with byte fallback, as Gemma and Mistral have it; return it."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<s>", "</s>", *byte_tokens, "▁the", "cat", "▁", "▁▁▁", "é", "東京", "a▁b", "<0x4>"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_text_is_that_of_the_tokenizers_library(make, tmp_path):
    tokenizer = make(tmp_path)
    vocabulary = Vocabulary(tmp_path)
    size = tokenizer.get_vocab_size()
    for token in range(size):
        added = tokenizer.get_added_tokens_decoder().get(token)
        text = added.content if added is not None else tokenizer.decode([token], skip_special_tokens=False)
        assert vocabulary.text(token) == text, token
    assert vocabulary.text(size) is None
    assert vocabulary.text(-1) is None


def test_a_list_of_words_has_their_places_as_ids(tmp_path):
    words = [["<unk>", 0.0], ["▁the", -1.5], ["<0x0A>", -2.0]]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": words}}))
    assert [Vocabulary(tmp_path).text(token) for token in range(4)] == ["<unk>", " the", "\n", None]


def test_a_model_without_a_tokenizer_has_no_texts(tmp_path):
    assert Vocabulary(tmp_path).text(0) is None


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_text_has_the_ids_of_its_tokens(make, tmp_path):
    make(tmp_path)
    vocabulary = Vocabulary(tmp_path)
    texts = {token: vocabulary.text(token) for token in range(300)}
    for text in (" the", "é", "no token"):
        assert vocabulary.ids(text) == [token for token, of_token in texts.items() if of_token == text]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"model": 1}', '{"model": {"vocab": {"a": "b"}}}', "\ud800", "[" * 5000, '{"x": 1}']
)
def test_a_damaged_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(UsageError, match=r"tokenizer\.json: got"):
        Vocabulary(tmp_path)


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MODEL_JSON_BYTES_MAX", 10)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(UsageError, match="expected at most 10 bytes"):
        Vocabulary(tmp_path)
