"""Writing to files, and getting what was written onto the disk."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.errors import FatalError, RetryError, explain, kind_of
from capflow.files import open_regular

_PARTS_PER_CALL_MAX = 1024  # IOV_MAX of Linux


def write(fd: int, parts: Sequence[Any], offset: int) -> int:
    """Write the parts one after another from `offset` on; return where they end. Raises OSError."""
    views = [view for part in parts if len(view := memoryview(part).cast("B"))]
    index = 0
    while index < len(views):
        written = os.pwritev(fd, views[index : index + _PARTS_PER_CALL_MAX], offset)
        offset += written
        while index < len(views) and written >= len(views[index]):
            written -= len(views[index])
            index += 1
        if written:
            views[index] = views[index][written:]
    return offset


def mapped(path: Path) -> npt.NDArray[np.uint8]:
    """Return the bytes of a regular file, mapped to be read; raises OSError, ValueError for an empty one."""
    with os.fdopen(open_regular(path), "rb") as file:
        return np.memmap(file, np.uint8, "r").view(np.ndarray)


def found_in(directory: Path, pattern: str) -> list[Path]:
    """Return what matches a pattern in a directory; nothing when that is gone, as a writer's is when it ends."""
    try:
        return list(directory.glob(pattern))
    except FileNotFoundError:
        return []


def sync_trees(directories: Sequence[Path]) -> None:
    """Get directories of one file system, with the files in them, onto the disk; raises OSError.

    One `syncfs` does it where it reports errors (Linux 5.8): a journal commit for each of many files took 5 to 8 times
    as long. It waits for what others wrote to the same file system, too.
    """
    if _syncfs is None:
        for directory in directories:
            for path in directory.iterdir():
                sync(path)
            sync(directory)
        return
    fd = os.open(directories[0], os.O_RDONLY)
    try:
        if _syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directories[0]))
    finally:
        os.close(fd)


def refused(root: Path, error: OSError) -> str:
    """Return the message of a request whose rows the file system below a root did not take."""
    got, expected = error.strerror or str(error), "a file system that takes the request's rows"
    return explain(f"{root} cannot be written", got=got, expected=expected, do=_DO.get(error.errno or 0, _DO_ELSE))


def judged(root: Path, error: OSError) -> OSError | RetryError | FatalError:
    """Return the error that a writer raises for one of the file system below the root of its data set.

    RetryError: it may go away, or the root is away, such as a file system that is not mounted. FatalError: the root is there, and what this writer
    has made in it is not, or may not be used. The error itself: it costs one request alone.
    """
    if kind_of(error) == "retry" or (error.errno in _AWAY and is_away(root)):
        return _caused(RetryError(refused(root, error)), error)
    return _caused(FatalError(refused(root, error)), error) if error.errno in _AWAY else error


def _caused(error: RetryError | FatalError, cause: OSError) -> RetryError | FatalError:
    error.__cause__ = cause
    return error


def is_away(root: Path) -> bool:
    """Return whether the root of a data set that a writer has opened cannot be reached or not be written."""
    try:
        (root / LOCK).stat()
    except OSError:
        return True
    return not os.access(root, os.W_OK | os.X_OK)


LOCK = ".lock"
"""A file below the root of a data set that its first writer makes, and nobody removes."""

_AWAY = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ENODEV,
        errno.ENXIO,
        errno.ENOTCONN,
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EREMOTEIO,
    }
)
"""Errors of a file system that is not mounted, whose server or device is gone, or that may not be entered any more."""

_DO_ELSE = "see what the kernel says of it; it is tried again"
_DO = {
    errno.ENOSPC: "make room on it; it is tried again",
    errno.EDQUOT: "make room on it, or have a larger quota; it is tried again",
    errno.ENOENT: "mount it, or start the hub again, which makes the directory; it is tried again",
    errno.EACCES: "let the hub write to it; it is tried again",
    errno.EROFS: "mount it for writing; it is tried again",
}


def _find_syncfs() -> Any:
    if sys.platform != "linux" or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 8):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_syncfs = _find_syncfs()


def sync(path: Path) -> None:
    """Get a file, or the entries of a directory, onto the disk; raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
