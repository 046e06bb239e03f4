import threading

import pytest

from capflow.text import token_texts
from capflow.text.token_texts import TokenTexts
from tests.kit.waiting import eventually

WORDS = ["<pad>", "", " the", "é", "\ud800", "日本", "a\nb", *(f"w{n}" for n in range(200))]


class Tokenizer:
    """Counts how often it decodes."""

    def __init__(self):
        self.decoded = 0

    def __len__(self):
        return len(WORDS)

    def decode(self, ids):
        self.decoded += 1
        return "".join(WORDS[each] if each < len(WORDS) else "<beyond>" for each in ids)


class Loads:
    """Loads a tokenizer, and counts how often."""

    def __init__(self, tokenizer=None):
        self.count = 0
        self.tokenizer = tokenizer or Tokenizer()

    def __call__(self):
        self.count += 1
        return self.tokenizer


def kept(directory, key="key"):
    """Have a first worker write a file; return its path."""
    before = set(threading.enumerate())
    TokenTexts(Loads(), key, directory)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert (directory / key).is_file()
    return directory / key


def test_the_file_has_the_text_of_each_id(tmp_path):
    kept(tmp_path)
    loads = Loads()
    later = TokenTexts(loads, "key", tmp_path)
    assert [later(token) for token in range(len(WORDS))] == WORDS
    assert loads.count == 0


def test_an_id_beyond_the_file_is_decoded_by_the_tokenizer(tmp_path):
    kept(tmp_path)
    loads = Loads()
    later = TokenTexts(loads, "key", tmp_path)
    assert later(len(WORDS)) == "<beyond>"
    assert loads.count == 1
    assert later(len(WORDS) + 1) == "<beyond>"
    assert loads.count == 1


def test_without_a_file_the_tokenizer_is_loaded_at_once(tmp_path):
    loads = Loads()
    first = TokenTexts(loads, "key", tmp_path)
    assert loads.count == 1
    assert first(5) == "日本"


def test_without_a_key_nothing_is_written(tmp_path):
    directory = tmp_path / "texts"
    before = set(threading.enumerate())
    alone = TokenTexts(Loads(), None, directory)
    assert alone(2) == " the"
    assert not directory.exists()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "head", "directory"])
def test_a_damaged_file_is_ignored_and_written_again(tmp_path, damage):
    path = kept(tmp_path)
    whole = path.read_bytes()
    path.unlink()
    damaged = {
        "cut": whole[:-1],
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "empty": b"",
        "head": b"capflow0" + whole[8:],
    }
    if damage == "directory":
        path.mkdir()
    else:
        path.write_bytes(damaged[damage])
    loads = Loads()
    assert TokenTexts(loads, "key", tmp_path)(4) == WORDS[4]
    assert loads.count == 1
    if damage != "directory":
        eventually(lambda: path.read_bytes() == whole)


def test_a_tokenizer_that_cannot_decode_all_its_ids_has_no_file(tmp_path, caplog):
    class Partial(Tokenizer):
        def decode(self, ids):
            if ids[0] > 100:
                raise OverflowError("no such id")
            return super().decode(ids)

    caplog.set_level("INFO")
    partial = TokenTexts(Loads(Partial()), "key", tmp_path)
    eventually(lambda: "are not kept" in caplog.text)
    assert partial(2) == " the"
    assert not list(tmp_path.iterdir())


def test_close_ends_the_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(token_texts, "_PAUSE_S", 60.0)
    before = set(threading.enumerate())
    first = TokenTexts(Loads(), "key", tmp_path)
    (writing,) = set(threading.enumerate()) - before
    first.close()
    writing.join(20)
    assert not writing.is_alive()
    assert not list(tmp_path.iterdir())


def test_only_the_newest_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(token_texts, "_FILES_MAX", 2)
    for key in ("a", "b", "c"):
        kept(tmp_path, key)
    eventually(lambda: {path.name for path in tmp_path.iterdir()} == {"b", "c"})


def test_the_files_lie_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert token_texts.default_directory() == tmp_path / "capflow" / "texts"
