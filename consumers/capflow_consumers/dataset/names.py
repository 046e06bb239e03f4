"""Slugs: the one directory name of a request id.

What always holds: a slug is a plain name of lower-case ASCII (never `.`, `..`, empty, hidden or with a separator), so it
cannot leave the directory it is put in; two different ids have different slugs, also where a file system ignores case.
An id that is such a name already is its own slug. Every other id ends in `~` and a hash of the whole id; no id that is its
own slug holds a `~`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

LENGTH_MAX = 100

_READABLE_LENGTH_MAX = 60
_HASH_BYTES = 15  # 24 characters of base32, without padding
_OWN_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_OTHER = re.compile(r"[^a-z0-9]+")


def slug(request_id: str) -> str:
    """Return the directory name of a request id, at most `LENGTH_MAX` characters."""
    if len(request_id) <= LENGTH_MAX and _OWN_SLUG.fullmatch(request_id):
        return request_id
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    readable = _OTHER.sub("-", request_id[:_READABLE_LENGTH_MAX].lower()).strip("-")
    return f"{readable or 'request'}~{base64.b32encode(digest).decode().lower()}"


_LATER = re.compile(r"(.+)~([1-9][0-9]*)")


def split(name: str) -> tuple[str, int]:
    """Return a directory's name without its number, and the number, 1 where it has none."""
    later = _LATER.fullmatch(name) if "~" in name else None
    return (later[1], int(later[2])) if later else (name, 1)


class Numbered:
    """Those under a root: what was there when it was last looked at, and what was numbered on since.

    One thread may call `of`, another `add`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        # By name, the numbers from 2 on.
        self._later: dict[str, tuple[int, ...]] = {}

    def look(self) -> Iterator[Path]:
        """List the root, which takes time with the number of its entries; return what is not hidden, by name and number. Raises OSError."""
        names = os.listdir(self._root)  # noqa: PTH208  there may be a million, and a Path of each takes ten times as long
        found = sorted((*split(name), name) for name in names if not name.startswith("."))
        later: dict[str, tuple[int, ...]] = {}
        for name, number, _ in found:
            if number > 1:
                later[name] = (*later.get(name, ()), number)
        self._later = later
        return (self._root / name for _, _, name in found)

    def add(self, path: Path) -> None:
        """Remember a directory that was made."""
        name, number = split(path.name)
        if number > 1 and number not in self._later.get(name, ()):
            self._later[name] = (*self._later.get(name, ()), number)

    def of(self, name: str) -> list[Path]:
        """Return what there is of a name, first to last."""
        numbers = sorted({1, *self._later.get(name, ())})
        found = [path for number in numbers if (path := self._path(name, number)).exists()]
        number = numbers[-1] + 1
        while (path := self._path(name, number)).exists():
            found.append(path)
            number += 1
        return found

    def _path(self, name: str, number: int) -> Path:
        return self._root / (name if number == 1 else f"{name}~{number}")
