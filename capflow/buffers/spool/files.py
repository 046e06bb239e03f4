"""What a spool asks of a file system, and nothing else: tests bring another one that loses what was not synced.

Every method raises OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capflow.files import open_regular

_LOCK_TRIES = 6  # for a lock, this long after one another: who only asks whether it is held holds it for a moment
_LOCK_PAUSE_S = 0.02


class Files:
    """The file system of the machine."""

    def mkdir(self, path: Path) -> None:
        """Have a directory on the disk, made private to its owner if missing, and those above it."""
        if not path.is_dir():
            self.mkdir(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            self.fsync_dir(path.parent)

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        return [entry.name for entry in os.scandir(path)]

    def lock(self, path: Path) -> int | None:
        """Return the descriptor of a file, made if missing, that nobody else has locked; None if someone has.

        Raises FileNotFoundError when its last holder removed it meanwhile.
        """
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for tried in range(_LOCK_TRIES):
                time.sleep(_LOCK_PAUSE_S if tried else 0)
                if _flock(fd, fcntl.LOCK_EX):
                    if not os.path.samestat(os.fstat(fd), path.stat()):
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
                    return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def locked(self, path: Path) -> bool:
        """Return whether someone has a file locked; whoever tries to lock it meanwhile gets it all the same."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return not _flock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def create(self, path: Path) -> int:
        """Return the descriptor of a new, empty file to write."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def change(self, path: Path) -> int:
        """Return the descriptor of a file to read and write, made if missing."""
        return open_regular(path, os.O_CREAT | os.O_RDWR)

    def open(self, path: Path) -> int:
        """Return the descriptor of a file to read."""
        return open_regular(path)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return a file's length."""
        return os.fstat(fd).st_size

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Return up to `length` bytes; fewer only at the end of the file."""
        data = os.pread(fd, length, offset)
        while 0 < len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, fd: int, parts: Sequence[Any], offset: int) -> None:
        """Write buffers one after another, all of them."""
        total = sum(map(len, parts))
        written = os.pwritev(fd, parts, offset)
        if written < total:
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                done = os.pwrite(fd, rest, offset + total - len(rest))
                rest = rest[done:]

    def next_data(self, fd: int, offset: int) -> int | None:
        """Return where the next byte lies, from an offset on, that was written; None behind the last. A hole is skipped where the file system tells of it."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:
                return None
            return offset

    def fdatasync(self, fd: int) -> None:
        """Have the file's bytes on the disk. After an error, what they were is not known."""
        os.fdatasync(fd)

    def check(self, fd: int) -> None:
        """Raise FileNotFoundError when the file has no name any more: what is in it would be lost."""
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name, in the place of what had it."""
        path.replace(to)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove(self, path: Path, names: Sequence[str]) -> None:
        """Remove these files of a directory, in this order, and the directory. Raises OSError when it holds anything else."""
        for name in names:
            (path / name).unlink(missing_ok=True)
        path.rmdir()

    def fsync_dir(self, path: Path) -> None:
        """Have a directory's names on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _flock(fd: int, how: int) -> bool:
    """Lock a file, unless others have it; return whether it is locked."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
