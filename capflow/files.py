"""Files: replaced as a whole, private to their owner, and opened for reading only if they are regular.

A file with captured data is private whatever the umask, unless an option shares it. An existing directory keeps its
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
    """Write a private file in the place of `path`, complete and on the disk or not at all; raises OSError.

    An existing file stays if the block raises. A killed process leaves at most a hidden file `.NAME.….new` beside it.
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
    """Write a file that a user named, as `replacing` does. Raises CapflowError if it cannot be written."""
    try:
        with replacing(path) as stream:
            yield stream
    except OSError as e:
        expected = "a directory that can be written, with room"
        raise CapflowError(explain(f"{path} cannot be written", got=e.strerror or str(e), expected=expected)) from e


def create_private(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """Open a file with `O_CREAT` and this mode; return its descriptor, which child processes do not inherit.

    Raises OSError.

    flags: further flags of `os.open`.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
    # The umask may have removed bits of a shared mode.
    if mode != FILE_MODE:
        os.fchmod(fd, mode)
    return fd


def make_directory(path: Path, mode: int = FILE_MODE, *, parents: bool = True) -> None:
    """Make a directory unless it exists; raises OSError.

    mode: the mode of the files in it; whoever may read these may enter the directory.
    parents: make missing parent directories too.
    """
    if parents:
        if path.is_dir():
            return
        make_directory(path.parent, mode)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        share_directory(path, mode)


def share_directory(path: Path, mode: int) -> None:
    """Let everybody who may read files of this mode enter a private directory. Raises OSError.

    The group of its files stays inherited.
    """
    if mode != FILE_MODE:
        path.chmod(mode | (mode & 0o444) >> 2 | path.stat().st_mode & 0o7000)


@contextlib.contextmanager
def private_umask() -> Iterator[int]:
    """Make files private that libraries and plugins create without a mode, such as DuckDB's log; yield the old umask.

    The umask is the whole process's.
    """
    before = os.umask(_UMASK)
    try:
        yield before
    finally:
        os.umask(before)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file; return its descriptor, which child processes do not inherit.

    flags, mode: as in `os.open`.

    Raises OSError; its errno is EINVAL for anything but a regular file.
    """
    # With O_NONBLOCK a FIFO without a writer opens at once.
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return fd


def read_regular(path: Path, bytes_max: int) -> bytes:
    """Return the content of a regular file of at most `bytes_max` bytes; raises OSError, EFBIG for a larger one."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= bytes_max:
            return file.read(size)
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
