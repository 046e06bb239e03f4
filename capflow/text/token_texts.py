"""The text of each token id, from a table on the disk where there is one.

A tokenizer with a large vocabulary takes seconds to load, and a worker wants nothing of it but the text of single
tokens. So the first worker with a tokenizer loads it, and then writes all texts to a file, in small slices beside its
work. Later workers read the file, in milliseconds, and load the tokenizer only for an id that the file lacks.

The file is `$XDG_CACHE_HOME/capflow/texts/KEY`, by default below `~/.cache`. KEY is a digest of all that the texts
depend on. A file holds `capflow1`, the XXH3 64-bit hash of the rest, the number of ids n,
n + 1 offsets, and the texts in UTF-8 one after another; all numbers are little-endian, of 64 bits.

Invariant: a text equals `tokenizer.decode([id])`. A file that is damaged is ignored, and written again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from capflow import files

logger = logging.getLogger("capflow.text")

_MAGIC = b"capflow1"
_FILES_MAX = 32
# The ids that are decoded at once, about a millisecond, and the pause before the next ones.
_SLICE, _PAUSE_S = 128, 0.002


def default_directory() -> Path:
    """Return where the files are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "capflow" / "texts"


class TokenTexts:
    """The texts of one tokenizer; calling it with an id returns the text. Any thread may call it.

    It begins with the constructor, which reads the file or loads the tokenizer. `close` ends the writing of a file.

    load: returns the tokenizer, with `decode` and `__len__`.
    key: names the file: a digest of all that decides the texts; None for a tokenizer whose texts cannot be kept.
    """

    def __init__(self, load: Callable[[], Any], key: str | None, directory: Path | None = None) -> None:
        self._load = load
        self._tokenizer: Any = None
        # Held while the tokenizer is loaded.
        self._loading = threading.Lock()
        self._closed = threading.Event()
        self._table = None
        path = None if key is None else (directory or default_directory()) / key
        if path is not None:
            self._table = _read(path)
        if self._table is not None:
            return
        tokenizer = self._loaded()
        if path is not None:
            name = "capflow-texts"
            threading.Thread(target=self._write, args=(path, tokenizer), name=name, daemon=True).start()

    def __call__(self, token: int) -> str:
        """Return the text of an id."""
        if self._table is not None and 0 <= token < len(self._table):
            return self._table[token]
        return str(self._loaded().decode([token]))

    def close(self) -> None:
        """End the writing of the file; a part of it is not kept."""
        self._closed.set()

    def _loaded(self) -> Any:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def _write(self, path: Path, tokenizer: Any) -> None:
        """Write the file. What goes wrong costs no more than the file."""
        try:
            texts: list[bytes] = []
            count = len(tokenizer)
            for first in range(0, count, _SLICE):
                if self._closed.wait(_PAUSE_S):
                    return
                ids = range(first, min(first + _SLICE, count))
                texts += [str(tokenizer.decode([token])).encode("utf-8", "surrogatepass") for token in ids]
            files.make_directory(path.parent)
            files.write_whole(path, _encoded(texts))
            for old in _oldest(path.parent):
                old.unlink(missing_ok=True)
        except Exception as e:  # noqa: BLE001  a tokenizer may raise anything for an id that is none
            logger.info("capflow: the texts of tokens are not kept: %s: %s", type(e).__name__, e)


class _Table:
    """The texts of the ids from 0.

    offsets: where each text begins in `texts`, and the end of the last one.
    """

    def __init__(self, offsets: npt.NDArray[np.uint64], texts: memoryview) -> None:
        self._offsets = offsets
        self._texts = texts

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, token: int) -> str:
        return str(self._texts[self._offsets[token] : self._offsets[token + 1]], "utf-8", "surrogatepass")


def _encoded(texts: list[bytes]) -> bytes:
    ends = np.cumsum([0, *map(len, texts)], dtype="<u8")
    rest = np.uint64(len(texts)).tobytes() + ends.tobytes() + b"".join(texts)
    return _MAGIC + np.uint64(xxhash.xxh3_64_intdigest(rest)).tobytes() + rest


def _read(path: Path) -> _Table | None:
    """Return the table of a file; None if it is missing, damaged or unreadable."""
    try:
        content = memoryview(path.read_bytes())
    except OSError:
        return None
    digest, rest = bytes(content[8:16]), content[16:]
    if bytes(content[:8]) != _MAGIC or np.uint64(xxhash.xxh3_64_intdigest(rest)).tobytes() != digest:
        return None
    count = int(np.frombuffer(rest, "<u8", 1)[0])
    return _Table(np.frombuffer(rest, "<u8", count + 1, 8), rest[8 * (count + 2) :])


def _oldest(directory: Path) -> Iterator[Path]:
    """Yield the files beyond the newest `_FILES_MAX`."""
    dated: list[tuple[float, Path]] = []
    for path in directory.iterdir():
        with contextlib.suppress(OSError):  # another worker removed it
            dated.append((path.stat().st_mtime, path))
    for _, path in sorted(dated, reverse=True)[_FILES_MAX:]:
        yield path
