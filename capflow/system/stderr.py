"""The outlet: standard error, written by a thread of its own, so that nobody waits for whoever reads it.

Writers never wait. What is not read is bounded: then whole writes are dropped and counted, and a line says how many once there is room again.
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
    """A text file over a descriptor, from its making to `close`.

    dropped: makes the line, with its end, that says how many writes were dropped.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, dropped: Callable[[int], str]) -> None:
        # Since the beginning.
        self.lines_dropped = 0
        self._descriptor = descriptor
        self._told = dropped
        # Dropped, and no line said so; guarded by `_changed`.
        self._untold = 0
        # In `_pieces`; likewise.
        self._bytes = 0
        # Likewise.
        self._pieces: deque[bytes] = deque()
        self._changed = threading.Condition()
        # Set by `close`.
        self._end_at: float | None = None
        # Set by the thread: nobody will ever read.
        self._gone = False
        self._thread = threading.Thread(target=self._run, name="capflow-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Take text, or drop it when too much waits."""
        piece = text.encode(self.encoding, self.errors)
        if self._end_at is not None and not self._thread.is_alive():  # closed: what fits goes out at once
            with contextlib.suppress(OSError):
                self._put(piece)
            return len(text)
        with self._changed:
            if self._gone or self._bytes + len(piece) > limits.LOG_UNREAD_BYTES_MAX:
                self.lines_dropped += 1
                self._untold += 1
                return len(text)
            if self._untold and self._bytes < limits.LOG_UNREAD_BYTES_MAX // 2:
                line = self._told(self._untold).encode(self.encoding, self.errors)
                self._untold = 0
                self._append(line)
            self._append(piece)
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as soon as it can."""

    def isatty(self) -> bool:
        """Return whether a person reads it."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Write what waits, for at most `limits.LOG_END_S_MAX`, and end."""
        with self._changed:
            self._end_at = time.monotonic() + limits.LOG_END_S_MAX
            if self._untold:
                self._append(self._told(self._untold).encode(self.encoding, self.errors))
                self._untold = 0
            self._changed.notify()
        self._thread.join(2 * limits.LOG_END_S_MAX)

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)
        self._changed.notify()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # whoever read it is gone
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
        """Return what is to be written next; None at the end."""
        with self._changed:
            while not self._pieces:
                if self._end_at is not None:
                    return None
                self._changed.wait()
            return self._pieces.popleft()

    def _put(self, piece: bytes) -> bool:
        """Write a piece when there is room for it; return False when the end comes before that."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while piece:
            if poll.poll(limits.IDLE_S * 1000):
                piece = piece[os.write(self._descriptor, piece[:_PIECE_BYTES]) :]
            elif self._end_at is not None and time.monotonic() >= self._end_at:
                return False
        return True
