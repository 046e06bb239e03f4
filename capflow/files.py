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
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a private file in the place of `path`, whole and on the disk or not at all; raises OSError.

    What is there stays when the block raises. A kill leaves at most a hidden file `.NAME.….new` beside it.
    """
    directory, prefix = path.absolute().parent, f".{path.name[:40]}."
    with tempfile.NamedTemporaryFile(dir=directory, prefix=prefix, suffix=".new", delete=False) as stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            Path(stream.name).replace(path)
        except BaseException:
            os.unlink(stream.name)  # noqa: PTH108
            raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a private file as `replacing` does; raises OSError."""
    with replacing(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that a user named as `replacing` does. Raises CapflowError when it cannot be written."""
    try:
        with replacing(path) as stream:
            yield stream
    except OSError as e:
        expected = "a directory that can be written, with room"
        raise CapflowError(explain(f"{path} cannot be written", got=e.strerror or str(e), expected=expected)) from e


def create_private(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """Return the descriptor of a file that `O_CREAT` makes with this mode; raises OSError.

    flags: as of `os.open`. The descriptor is not inherited.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
    if mode != FILE_MODE:  # of which the umask may have taken something away
        os.fchmod(fd, mode)
    return fd


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
