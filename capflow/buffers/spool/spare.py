"""The spare of a spool: a file that reserves room for the records without which a full disk cannot be emptied."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from capflow.buffers.spool.files import Files

SPARE = "spare"
_RETRY_S = 0.5  # the pause after there was no room


class Spare:
    """A file of `nbytes` on the disk between `keep` and `give`. The spool calls it under its lock.

    nbytes: its size; 0 for no spare.
    """

    def __init__(self, files: Files, directory: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._files = files
        self._path = directory / SPARE
        self._is_there = False
        # When to try to make the file again.
        self._again_at = 0.0

    @property
    def is_missing(self) -> bool:
        """Whether the spare is wanted and does not exist."""
        return bool(self.nbytes) and not self._is_there

    def keep(self) -> None:
        """Write the spare if it is missing and there is room, at most every `_RETRY_S`.

        Its bytes are random, so that no file system compresses them.
        """
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
        """Remove the spare; return whether that freed room."""
        if not self._is_there:
            return False
        self._is_there = False
        with contextlib.suppress(OSError):
            self._files.unlink(self._path)
            return True
        return False

    def freed(self) -> None:
        """Try again at once, because there is more room now."""
        self._again_at = 0.0
        self.keep()
