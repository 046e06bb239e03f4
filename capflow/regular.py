"""Opening data to read: only a regular file is opened, so a FIFO or a device in its place is an error and not an endless wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return the descriptor of a regular file; raises OSError, EINVAL for anything else.

    flags, mode: as of `os.open`. The descriptor is not inherited.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)  # a FIFO without a writer opens at once
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return fd


def read_regular(path: Path, bytes_max: int) -> bytes:
    """Return what is in a regular file of at most so many bytes; raises OSError, EFBIG for a larger one."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= bytes_max:
            return file.read(size)
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
