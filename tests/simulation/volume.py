"""Disks on a scheduler: `tests.disks.Disk`, each operation of which is a scheduling point and may fail."""

from __future__ import annotations

import errno
import os

from tests.disks import Disk


class Volume(Disk):
    """A directory's files. broken: the errno that writes and syncs fail with for now, None while the disk works."""

    def __init__(self, names=(), world=None):
        super().__init__(names)
        self.world = world
        self.broken = None
        self.owner = None  # the process that may use it

    def after(self, *, power):
        """Return the disk as the next process finds it. power: whether the machine went down with the process."""
        if power:
            left = Volume(world=self.world)
            left.__dict__.update(vars(self.crash(self.world.choose.randrange)), world=self.world)
        else:
            left = Volume(world=self.world)
            left.now, left.synced, left.changes = dict(self.now), dict(self.synced), list(self.changes)
        left.broken, left.owner, left.bytes_max = self.broken, None, self.bytes_max
        return left

    def _step(self):
        if self.owner is not None and self.owner.dead:
            self.world.point("disk of the dead")
        self.world.point("disk")
        if self.broken is not None:
            raise OSError(self.broken, os.strerror(self.broken))

    def unlink(self, path):
        """Remove a file: that works on a full disk."""
        broken, self.broken = self.broken, None if self.broken == errno.ENOSPC else self.broken
        try:
            super().unlink(path)
        finally:
            self.broken = broken

    def remove(self, path, names):
        """Remove the directory's files."""
        for name in names:
            if name in self.now:
                self.unlink(path / name)
