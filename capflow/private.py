"""Files and directories that hold captured data: only their owner can enter them, whatever the umask, unless an option shares them.

A directory that exists keeps its mode: whoever made it chose it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FILE_MODE = 0o600

_UMASK = 0o077


def create(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """Return the descriptor of a file that `O_CREAT` makes with this mode; raises OSError.

    flags: as of `os.open`. The descriptor is not inherited.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
    if mode != FILE_MODE:  # of which the umask may have taken something away
        os.fchmod(fd, mode)
    return fd


def write(path: Path, content: bytes) -> None:
    """Write a private file, over one that is there, and have it on the disk; raises OSError."""
    with os.fdopen(create(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_directory(path: Path, mode: int = FILE_MODE, *, parents: bool = True) -> None:
    """Make a directory unless it is there; raises OSError.

    mode: that of the files in it; whoever may read these may enter the directory.
    parents: whether to make those above it too; else they are to be there.
    """
    if path.is_dir():
        return
    if parents:
        make_directory(path.parent, mode)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        share_directory(path, mode)


def share_directory(path: Path, mode: int) -> None:
    """Let those enter a private directory who may read files of this mode; the group of its files stays inherited. Raises OSError."""
    if mode != FILE_MODE:
        path.chmod(mode | (mode & 0o444) >> 2 | path.stat().st_mode & 0o7000)


@contextlib.contextmanager
def private_umask() -> Iterator[int]:
    """Make files private that libraries and plugins create without a mode of their own, such as DuckDB's log; yield the umask before.

    The umask is the whole process's.
    """
    before = os.umask(_UMASK)
    try:
        yield before
    finally:
        os.umask(before)
