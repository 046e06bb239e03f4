"""Slugs: each request id has one directory name.

Invariants:

* A slug is a plain name of lower-case ASCII. It is never `.`, `..`, empty or hidden, and it holds no separator. So it
  cannot leave its directory.
* Two different ids have different slugs, also on a file system that ignores case.

An id of at most 100 characters that is a plain name already is its own slug, and holds no `~`. The slug of every other
id ends in `~` and a hash of the whole id. Later captures of one id have its slug and a number: `NAME~2`, `NAME~3`.
"""

from __future__ import annotations

import base64
import errno
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


_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
_LATER = re.compile(r"(.+)~([1-9][0-9]*)")


def split(name: str) -> tuple[str, int]:
    """Split a directory's name into the slug and the number of the capture, which is 1 if there is no number."""
    later = _LATER.fullmatch(name) if "~" in name else None
    return (later[1], int(later[2])) if later else (name, 1)


class Numbered:
    """The numbered directories under a root: those of the last look, and those added since.

    One thread may call `of` while another calls `add`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._prefix = f"{root}/"
        # The numbers from 2 on, by name.
        self._later: dict[str, tuple[int, ...]] = {}

    def look(self) -> Iterator[Path]:
        """List the root, and remember the numbers; return the entries that are not hidden, sorted by name and number.

        Raises OSError.

        The time it takes grows with the number of entries.
        """
        names = os.listdir(self._root)  # noqa: PTH208  a Path for each of a million takes ten times as long
        entries = sorted((*split(name), name) for name in names if not name.startswith("."))
        later: dict[str, tuple[int, ...]] = {}
        for name, number, _ in entries:
            if number > 1:
                later[name] = (*later.get(name, ()), number)
        self._later = later
        return (self._root / name for _, _, name in entries)

    def add(self, path: Path) -> None:
        """Remember a new directory."""
        name, number = split(path.name)
        if number > 1 and number not in self._later.get(name, ()):
            self._later[name] = (*self._later.get(name, ()), number)

    def of(self, name: str) -> list[Path]:
        """Return the paths of a name that exist, first to last. Raises OSError."""
        numbers = sorted({1, *self._later.get(name, ())})
        paths = [path for number in numbers if _exists(path := self._path(name, number))]
        number = numbers[-1] + 1
        while _exists(path := self._path(name, number)):
            paths.append(path)
            number += 1
        return [Path(path) for path in paths]

    def _path(self, name: str, number: int) -> str:
        return self._prefix + (name if number == 1 else f"{name}~{number}")


def _exists(path: str) -> bool:
    """Return whether a path exists, as `Path.exists` does. Raises OSError."""
    try:
        os.stat(path)  # noqa: PTH116  a Path takes ten times as long
    except OSError as e:
        if e.errno in _NOT_THERE:
            return False
        raise
    return True
