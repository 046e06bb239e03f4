"""The file system calls of a spool. Tests replace them with a file system that loses unsynced writes.

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

_LOCK_TRIES = 26  # a process that only asks whether the lock is held holds it for a moment
_LOCK_PAUSE_S = 0.02  # between two tries


class Files:
    """The file system of the machine."""

    def mkdir(self, path: Path) -> None:
        """Make a directory and its parents, private to the owner, and sync their names."""
        if not path.is_dir():
            self.mkdir(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            self.fsync_dir(path.parent)

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        return [entry.name for entry in os.scandir(path)]

    def lock(self, path: Path) -> int | None:
        """Lock a file, made if missing, and return its descriptor; None if another process holds the lock.

        Raises FileNotFoundError if the last holder removed the file meanwhile.
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
        """Return whether a process holds the lock of a file. The test does not keep others from locking it."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return not _flock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def create(self, path: Path) -> int:
        """Make an empty file and return its descriptor, for writing."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def change(self, path: Path) -> int:
        """Open a file for reading and writing, made if missing; return its descriptor."""
        return open_regular(path, os.O_CREAT | os.O_RDWR)

    def open(self, path: Path) -> int:
        """Open a file for reading; return its descriptor."""
        return open_regular(path)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return a file's length."""
        return os.fstat(fd).st_size

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Return `length` bytes at an offset, or fewer at the end of the file."""
        data = os.pread(fd, length, offset)
        while 0 < len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, fd: int, parts: Sequence[Any], offset: int) -> None:
        """Write all buffers one after another at an offset."""
        total = sum(map(len, parts))
        written = os.pwritev(fd, parts, offset)
        if written < total:
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                done = os.pwrite(fd, rest, offset + total - len(rest))
                rest = rest[done:]

    def next_data(self, fd: int, offset: int) -> int | None:
        """Return the offset of the next written byte; None after the last one.

        Holes are skipped if the file system reports them.
        """
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:
                return None
            return offset

    def fdatasync(self, fd: int) -> None:
        """Sync the file's bytes to the disk. After an error the bytes on the disk are undefined."""
        os.fdatasync(fd)

    def check(self, fd: int) -> None:
        """Raise FileNotFoundError if the file was removed: further writes would be lost."""
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file, replacing the one that has the name."""
        path.replace(to)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove(self, path: Path, names: Sequence[str]) -> None:
        """Remove files of a directory in this order, then the directory. Raises OSError if it holds other files."""
        for name in names:
            (path / name).unlink(missing_ok=True)
        path.rmdir()

    def fsync_dir(self, path: Path) -> None:
        """Sync the names in a directory to the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _flock(fd: int, how: int) -> bool:
    """Try to lock a file; return whether it is locked now."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
