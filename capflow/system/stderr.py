"""The outlet: standard error, written by a thread of its own.

Invariant: a writer never waits for the reader of standard error. Unread text is bounded: beyond the bound whole writes
are dropped and counted, and a line reports their number when there is room again.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from capflow import limits

_PIECE_BYTES = 4096  # a pipe that is ready takes as many at once


class Outlet:
    """A text file that writes to a descriptor until `close`.

    dropped: returns the line, with its line break, that reports a number of dropped writes.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, dropped: Callable[[int], str]) -> None:
        # Lines dropped since the start.
        self.lines_dropped = 0
        self._descriptor = descriptor
        self._dropped_line = dropped
        # Guards the three fields below.
        self._changed = threading.Condition()
        # Lines dropped since the last report.
        self._unreported = 0
        # The bytes in `_pieces`.
        self._bytes = 0
        self._pieces: deque[bytes] = deque()
        # Set by `close`.
        self._end_at: float | None = None
        # Set by the thread when the descriptor is broken.
        self._gone = False
        self._thread = threading.Thread(target=self._run, name="capflow-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a text, or drop it if too much waits."""
        piece = text.encode(self.encoding, self.errors)
        if self._end_at is not None and not self._thread.is_alive():  # closed: written here, as far as there is room
            with contextlib.suppress(OSError):
                self._put(piece)
            return len(text)
        with self._changed:
            if self._gone or self._bytes + len(piece) > limits.LOG_UNREAD_BYTES_MAX:
                self.lines_dropped += 1
                self._unreported += 1
                return len(text)
            if self._unreported and self._bytes < limits.LOG_UNREAD_BYTES_MAX // 2:
                line = self._dropped_line(self._unreported).encode(self.encoding, self.errors)
                self._unreported = 0
                self._append(line)
            self._append(piece)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as it can."""

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Write the waiting pieces for at most `limits.LOG_END_S_MAX`, and end the thread."""
        with self._changed:
            self._end_at = time.monotonic() + limits.LOG_END_S_MAX
            if self._unreported:
                self._append(self._dropped_line(self._unreported).encode(self.encoding, self.errors))
                self._unreported = 0
            self._changed.notify()
        self._thread.join(2 * limits.LOG_END_S_MAX)

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)
        self._changed.notify()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the reader closed the pipe
            while (piece := self._next()) is not None:
                if not self._put(piece):
                    return
                with self._changed:
                    self._bytes -= len(piece)
            return
        with self._changed:
            self._gone = True
            self._pieces.clear()
            self._bytes = 0

    def _next(self) -> bytes | None:
        """Wait for the next piece and return it; None at the end."""
        with self._changed:
            while not self._pieces:
                if self._end_at is not None:
                    return None
                self._changed.wait()
            return self._pieces.popleft()

    def _put(self, piece: bytes) -> bool:
        """Write a piece as the descriptor has room; return False if the time after `close` is over first."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while piece:
            if poll.poll(limits.IDLE_S * 1000):
                piece = piece[os.write(self._descriptor, piece[:_PIECE_BYTES]) :]
            elif self._end_at is not None and time.monotonic() >= self._end_at:
                return False
        return True
