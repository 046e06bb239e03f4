"""Writing to the files of a data set, syncing them to disk, and judging the errors of the file system."""

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

from capflow import limits
from capflow.errors import FatalError, RetryError, explain, kind_of
from capflow.files import open_regular

# IOV_MAX of Linux.
_PARTS_PER_CALL_MAX = 1024
_BYTES_PER_CALL_MAX = 8 * limits.MIB
_SYNC_FILE_RANGE_WRITE = 2


class Ahead:
    """Lets the kernel begin to write a file's bytes to the disk, without waiting for it, while more are written.

    The sync that follows has less to wait for, and reports what goes wrong. Each call takes processor time, some 0.1 ms
    beside that of the bytes.

    bytes_min: how many bytes are worth a call.
    """

    def __init__(self, bytes_min: int) -> None:
        self.bytes_min = bytes_min
        # Where the bytes begin that the kernel was not asked for.
        self._begun = 0

    def written(self, fd: int, end: int) -> None:
        """Begin with the bytes before `end` where they are enough."""
        if end - self._begun >= self.bytes_min and _sync_file_range is not None:
            _sync_file_range(fd, self._begun, end - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = end


def write(fd: int, parts: Sequence[Any], offset: int, ahead: Ahead | None = None) -> int:
    """Write parts one after another, the first at `offset`; return the offset after the last. Raises OSError.

    ahead: of the file, which is synced later; None where it is not synced.
    """
    views = [
        view[begin : begin + _BYTES_PER_CALL_MAX]
        for view in (memoryview(part).cast("B") for part in parts)
        for begin in range(0, len(view), _BYTES_PER_CALL_MAX)
    ]
    index = 0
    while index < len(views):
        written = os.pwritev(fd, views[index : _end_of_call(views, index)], offset)
        offset += written
        if ahead is not None:
            ahead.written(fd, offset)
        while index < len(views) and written >= len(views[index]):
            written -= len(views[index])
            index += 1
        if written:
            views[index] = views[index][written:]
    return offset


def _end_of_call(views: Sequence[memoryview], begin: int) -> int:
    """Return the index after the last view that one call writes."""
    nbytes = 0
    for index in range(begin, min(len(views), begin + _PARTS_PER_CALL_MAX)):
        nbytes += len(views[index])
        if nbytes >= _BYTES_PER_CALL_MAX:
            return index + 1
    return begin + _PARTS_PER_CALL_MAX


def mapped(path: Path) -> npt.NDArray[np.uint8]:
    """Map a regular file for reading; return its bytes. Raises OSError, and ValueError for an empty file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return np.memmap(file, np.uint8, "r").view(np.ndarray)


def found_in(directory: Path, pattern: str) -> list[Path]:
    """Return the paths in a directory that match a pattern; none when the directory is gone, as after its writer."""
    try:
        return list(directory.glob(pattern))
    except FileNotFoundError:
        return []


def sync_trees(directories: Sequence[Path], on_it: int | None = None) -> None:
    """Sync directories of one file system, with the files in them, to disk. Raises OSError.

    on_it: a descriptor of any file on that file system, opened before the files were written. With it, no error since
        then is missed, although the kernel reports an error to a new descriptor only if nobody has seen it yet.

    One `syncfs` call does it where it reports errors (Linux 5.8 and newer). A journal commit for each of many files
    took 5 to 8 times as long. `syncfs` also waits for what others wrote to the same file system.
    """
    if _syncfs is None:
        for directory in directories:
            for path in directory.iterdir():
                sync(path)
            sync(directory)
        return
    fd = os.open(directories[0], os.O_RDONLY) if on_it is None else on_it
    try:
        if _syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directories[0]))
    finally:
        if on_it is None:
            os.close(fd)


def refused(root: Path, error: OSError) -> str:
    """Return the message of a request whose rows the file system at a root did not take."""
    got, expected = error.strerror or str(error), "a file system that takes the request's rows"
    return explain(f"{root} cannot be written", got=got, expected=expected, do=_DO.get(error.errno or 0, _DO_ELSE))


def judged(root: Path, error: OSError) -> OSError | RetryError | FatalError:
    """Return the error to raise for an error of the file system below a data set's root.

    RetryError: the error may pass, or the root is unreachable, such as on a file system that is not mounted.
    FatalError: the root is reachable, but a file or directory that this writer made below it is missing or may not be
        used.
    The error itself: it affects one request only.
    """
    away = error.errno in _AWAY
    retry = kind_of(error) == "retry" or (away and is_away(root))
    if not retry and not away:
        return error
    judgement = (RetryError if retry else FatalError)(refused(root, error))
    judgement.__cause__ = error
    return judgement


def is_away(root: Path) -> bool:
    """Return whether the root of an open data set is unreachable or cannot be written."""
    try:
        (root / LOCK).stat()
    except OSError:
        return True
    return not os.access(root, os.W_OK | os.X_OK)


LOCK = ".lock"
"""The file below the root of a data set that its first writer makes. Nobody removes it."""

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
"""Errors of a file system that is unmounted, whose server or device is gone, or that denies access."""

_DO_ELSE = "see the kernel's log; it is tried again"
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


def _find_sync_file_range() -> Any:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_sync_file_range = _find_sync_file_range()


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
