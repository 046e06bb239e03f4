"""The spare of a spool: room on its disk that a file takes up, to be given back for the one record without which a full disk cannot be emptied."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from capflow.buffers.spool.files import Files

SPARE = "spare"
_RETRY_S = 0.5  # after there was no room for it


class Spare:
    """A file of so many bytes, from `keep` to `give`. Nothing locks: the spool calls it under its lock.

    nbytes: 0 for none at all.
    """

    def __init__(self, files: Files, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._files = files
        self._path = directory / SPARE
        self._is_there = False
        # When it is tried again to keep it.
        self._again_at = 0.0

    @property
    def is_missing(self) -> bool:
        """Whether there is to be one, and is none."""
        return bool(self.nbytes) and not self._is_there

    def keep(self) -> None:
        """Take up the room, if there is so much, and if that was not tried a moment ago. What is in the file is random, so that no file system makes little of it."""
        if not self.is_missing or time.monotonic() < self._again_at:
            return
        self._again_at = time.monotonic() + _RETRY_S
        try:
            fd = self._files.change(self._path)
            try:
                self._files.write(fd, [os.urandom(self.nbytes)], 0)
            finally:
                self._files.close(fd)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.unlink(self._path)
        else:
            self._is_there = True

    def give(self) -> bool:
        """Give the room back; return whether there was any."""
        if not self._is_there:
            return False
        self._is_there = False
        with contextlib.suppress(OSError):
            self._files.unlink(self._path)
            return True
        return False

    def freed(self) -> None:
        """Note that there is more room now."""
        self._again_at = 0.0
        self.keep()
