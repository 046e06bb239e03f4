"""Writing to files, and getting what was written onto the disk."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(fd)


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
