"""A disk in memory that keeps its promises and no others: a crash may lose unsynced data, in any part and order.

`Disk.crash` returns what a crash left of it. A failed sync drops the writes that it should have synced, as Linux does:
they are still read, the next sync succeeds, and a crash shows that they are gone.
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from capflow.buffers.spool import Files

BLOCK = 64  # what a torn write is torn at


class Crash(BaseException):
    """The machine stopped in the middle of an operation."""


class Inode:
    def __init__(self, durable=b""):
        self.current = bytearray(durable)
        self.durable = bytearray(durable)
        # (offset, bytes), in the order of the writes.
        self.unsynced = []
        # Whether a sync failed, after which nobody can tell what is on the disk.
        self.forgot = False

    def write(self, data, offset):
        _put(self.current, data, offset)
        self.unsynced.append((offset, data))


class Disk(Files):
    """One directory's files, as a `Files`. left: operations that change the disk until it crashes; None is never.

    Errors to come: `fail_sync`, `fail_write`, `fail_read`, each an errno, for the next operation of the kind.
    """

    def __init__(self, names=()):
        # Name → inode.
        self.now = dict(names)
        self.synced = dict(names)
        # The changes of names since the directory was synced: functions of a dict.
        self.changes = []
        # Descriptor → inode.
        self.open_files = {}
        self.locked = False
        self.lock_fd = None
        self.left = None
        self.fail_sync = self.fail_write = self.fail_read = None
        # The size of all files from which on writes fail with ENOSPC.
        self.bytes_max = None

    def crash(self, choose):
        """Return the disk after a crash; choose(n) gives a number below n."""
        names = dict(self.synced)
        for change in self.changes:
            if choose(2):
                change(names)
        return Disk({name: Inode(self._left_of(inode, choose)) for name, inode in names.items()})

    def kill(self):
        """End the process that used the disk; what was not synced is still there, and still not synced."""
        self.open_files.clear()
        self.locked, self.left, self.fail_sync, self.fail_write, self.fail_read = False, None, None, None, None

    @staticmethod
    def _left_of(inode, choose):
        data = bytearray(inode.durable)
        for offset, written in inode.unsynced:
            fate = choose(3)  # none of it, all of it, some of its blocks
            if fate == 1:
                _put(data, written, offset)
            elif fate == 2:
                kept = choose(1 << 16)
                for number, begin in enumerate(range(0, len(written), BLOCK)):
                    if kept >> (number % 16) & 1:
                        _put(data, written[begin : begin + BLOCK], offset + begin)
        return bytes(data)

    # Files.

    def mkdir(self, path):
        pass

    def names(self, path):
        return list(self.now)

    def lock(self, path):
        if self.locked:
            return None
        self.locked = True
        self.lock_fd = self._descriptor(Inode())
        return self.lock_fd

    def create(self, path):
        self._step()
        if path.name in self.now:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if self.fail_write:
            self._fail("fail_write")
        inode = Inode()
        self._change(lambda names: names.__setitem__(path.name, inode))
        return self._descriptor(inode)

    def change(self, path):
        return self._descriptor(self.now[path.name]) if path.name in self.now else self.create(path)

    def open(self, path):
        if self.fail_read:
            self._fail("fail_read")
        if path.name not in self.now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._descriptor(self.now[path.name])

    def close(self, fd):
        del self.open_files[fd]
        if fd == self.lock_fd:
            self.locked, self.lock_fd = False, None

    def size(self, fd):
        return len(self.open_files[fd].current)

    def read(self, fd, length, offset):
        if self.fail_read:
            self._fail("fail_read")
        return bytes(self.open_files[fd].current[offset : offset + length])

    def next_data(self, fd, offset):
        return offset if offset < len(self.open_files[fd].current) else None

    def write(self, fd, parts, offset):
        self._step()
        data = b"".join(bytes(part) for part in parts)
        if self.fail_write:
            self.open_files[fd].write(data[: len(data) // 2], offset)  # as a full disk does
            self._fail("fail_write")
        inode = self.open_files[fd]
        grown = max(0, offset + len(data) - len(inode.current))
        if self.bytes_max is not None and sum(len(i.current) for i in self.now.values()) + grown > self.bytes_max:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inode.write(data, offset)

    def fdatasync(self, fd):
        self._step()
        inode = self.open_files[fd]
        pending, inode.unsynced = inode.unsynced, []
        if self.fail_sync:
            inode.forgot = bool(pending)
            self._fail("fail_sync")
        for offset, data in pending:
            _put(inode.durable, data, offset)

    def check(self, fd):
        if all(inode is not self.open_files[fd] for inode in self.now.values()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def rename(self, path, to):
        self._step()
        self._change(lambda names: names.__setitem__(to.name, names.pop(path.name)) if path.name in names else None)

    def unlink(self, path):
        self._step()
        if path.name not in self.now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._change(lambda names: names.pop(path.name, None))

    def fsync_dir(self, path):
        self._step()
        if self.fail_sync:
            self._fail("fail_sync")
        self.synced, self.changes = dict(self.now), []

    def _change(self, change):
        change(self.now)
        self.changes.append(change)

    def _descriptor(self, inode):
        fd = max(self.open_files, default=2) + 1
        self.open_files[fd] = inode
        return fd

    def _step(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash

    def _fail(self, which):
        code = getattr(self, which)
        setattr(self, which, None)
        raise OSError(code, os.strerror(code))


def _put(data, written, offset):
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written


DIRECTORY = Path("/spool")


_UNMOUNT = """trap '' INT TERM HUP; read _; umount -l "$0" """


class mounted:  # noqa: N801
    """A small file system, until the block or this process ends, however it ends; skips where none can be mounted."""

    def __init__(self, path, size):
        self.path, self.size = path, size

    def __enter__(self):
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "none", self.path]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no file system can be mounted here")
        # Reads until this process closes the pipe, or is gone.
        command = ["sh", "-c", _UNMOUNT, str(self.path)]
        self.unmount = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def __exit__(self, *_):
        self.unmount.communicate()
        assert self.unmount.returncode == 0, f"{self.path} is still mounted"
