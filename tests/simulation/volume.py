"""Disks on a scheduler: directories of `tests.kit.disks.Disk`, and the machine's own file system.

Each operation on a directory is a scheduling point and may fail.
"""

from __future__ import annotations

import errno
import os

from capflow.buffers.spool import Files
from tests.kit.disks import Disk

_DESCRIPTORS = 1_000_000  # of one directory


class _Directory(Disk):
    """One directory of a volume."""

    def __init__(self, names=(), volume=None):
        super().__init__(names)
        self.volume = volume

    def _step(self):
        self.volume.step()

    def unlink(self, path):
        self.volume.step(frees=True)
        if path.name not in self.now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._change(lambda names: names.pop(path.name, None))

    def remove(self, path, names):
        for name in names:
            if name in self.now:
                self.unlink(path / name)


class Volume(Files):
    """The directories of one consumer's inbox.

    broken: the errno with which changes of the disk fail at present; None while it works.
    """

    def __init__(self, world):
        self.world = world
        self.broken = None
        # The directories, by path.
        self._directories = {}
        self._made = set()

    def step(self, *, frees=False):
        """Perhaps let another task run, or fail.

        frees: whether the operation works on a full disk too.
        """
        self.world.point("disk")
        if self.broken is not None and not (frees and self.broken == errno.ENOSPC):
            raise OSError(self.broken, os.strerror(self.broken))

    def after(self, *, power):
        """Return the disk as the next process finds it.

        power: whether the machine lost power with the process.
        """
        left = Volume(self.world)
        for path, directory in self._directories.items():
            if power:
                directory_after = _Directory(directory.crash(self.world.choose.randrange).now, left)
            else:
                directory_after = _Directory(volume=left)
                directory_after.now, directory_after.synced, directory_after.changes = (
                    dict(directory.now),
                    dict(directory.synced),
                    list(directory.changes),
                )
            left._directories[path] = directory_after
        left._made, left.broken = set(self._made), self.broken
        return left

    # Files.

    def mkdir(self, path):
        """Make a directory."""
        if path not in self._made:
            self.step()
            self._made.add(path)
            self._directories.setdefault(path, _Directory(volume=self))

    def names(self, path):
        """Return the names in a directory."""
        return self._at(path).names(path)

    def lock(self, path):
        """Lock a directory."""
        return self._number(path.parent, self._at(path.parent).lock(path))

    def create(self, path):
        """Make a file."""
        return self._number(path.parent, self._at(path.parent).create(path))

    def change(self, path):
        """Open a file to write."""
        return self._number(path.parent, self._at(path.parent).change(path))

    def open(self, path):
        """Open a file to read."""
        return self._number(path.parent, self._at(path.parent).open(path))

    def close(self, fd):
        """Close a descriptor."""
        directory, number = self._of(fd)
        directory.close(number)

    def size(self, fd):
        """Return a file's length."""
        directory, number = self._of(fd)
        return directory.size(number)

    def read(self, fd, length, offset):
        """Read."""
        directory, number = self._of(fd)
        return directory.read(number, length, offset)

    def write(self, fd, parts, offset):
        """Write."""
        directory, number = self._of(fd)
        directory.write(number, parts, offset)

    def fdatasync(self, fd):
        """Have a file on the disk."""
        directory, number = self._of(fd)
        directory.fdatasync(number)

    def check(self, fd):
        """Raise OSError when a file has no name."""
        directory, number = self._of(fd)
        directory.check(number)

    def rename(self, path, to):
        """Give a file another name."""
        self._at(path.parent).rename(path, to)

    def unlink(self, path):
        """Remove a file."""
        self._at(path.parent).unlink(path)

    def remove(self, path, names):
        """Remove a directory."""
        self._at(path).remove(path, names)
        self._made.discard(path)

    def fsync_dir(self, path):
        """Have a directory's names on the disk."""
        self._at(path).fsync_dir(path)

    def _at(self, path):
        if path not in self._made:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._directories[path]

    def _number(self, path, number):
        return None if number is None else list(self._directories).index(path) * _DESCRIPTORS + number

    def _of(self, fd):
        index, number = divmod(fd, _DESCRIPTORS)
        return list(self._directories.values())[index], number


class Kept(Files):
    """The machine's own file system, for one process; writes outlive its kill. Nothing is synced: no power is lost."""

    def __init__(self, process):
        self._process = process
        self._fds = set()
        process.on_kill.append(self._end)

    def _end(self):
        """Close what the process had open, which lets go of its locks."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _opened(self, fd):
        if fd is not None:
            self._fds.add(fd)
        return fd

    def lock(self, path):
        """Lock a directory."""
        return self._opened(super().lock(path))

    def create(self, path):
        """Make a file."""
        self._process.world.point("disk")
        return self._opened(super().create(path))

    def change(self, path):
        """Open a file to write."""
        self._process.world.point("disk")
        return self._opened(super().change(path))

    def open(self, path):
        """Open a file to read."""
        self._process.world.point("disk")
        return self._opened(super().open(path))

    def close(self, fd):
        """Close a descriptor, unless the kill did."""
        if fd in self._fds:
            self._fds.discard(fd)
            super().close(fd)

    def write(self, fd, parts, offset):
        """Write."""
        self._process.world.point("disk")
        super().write(fd, parts, offset)

    def fdatasync(self, fd):
        """Take it for synced."""
        self._process.world.point("disk")

    def fsync_dir(self, path):
        """Take it for synced."""
        self._process.world.point("disk")
