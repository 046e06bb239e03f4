"""Files: whole ones in the place of old ones, private ones that only their owner reads, and regular ones opened to read.

A file with captured data is private whatever the umask is, unless an option shares it. A directory that exists keeps its
mode. A FIFO or a device in the place of a file is an error, not an endless wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from capflow.errors import CapflowError, explain

FILE_MODE = 0o600

_UMASK = 0o077


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[IO[bytes]]:
    """Write a private file in the place of one that is there, which stays when the block raises. Raises CapflowError when it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=file.absolute().parent, suffix=".new", delete=False) as stream:
            try:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                Path(stream.name).replace(file)
            except BaseException:
                os.unlink(stream.name)  # noqa: PTH108
                raise
    except OSError as e:
        raise CapflowError(explain(f"{file} cannot be written", got=e.strerror or str(e))) from e


def create_private(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """Return the descriptor of a file that `O_CREAT` makes with this mode; raises OSError.

    flags: as of `os.open`. The descriptor is not inherited.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
    if mode != FILE_MODE:  # of which the umask may have taken something away
        os.fchmod(fd, mode)
    return fd


def write_private(path: Path, content: bytes) -> None:
    """Write a private file, over one that is there, and have it on the disk; raises OSError."""
    with os.fdopen(create_private(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
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
