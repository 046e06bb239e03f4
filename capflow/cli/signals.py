"""SIGINT, SIGTERM and SIGHUP of a command: the first asks it to end, a second SIGINT or SIGTERM to end at once."""

from __future__ import annotations

import queue
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SHELL = 128  # what a shell adds to the number of the signal that ended a command


class Signals:
    """Handles SIGINT, SIGTERM and SIGHUP inside a `with` block.

    SIGHUP means that the terminal is gone. It may come more than once, and only the first counts. If SIGHUP was ignored
    before, as under `nohup`, it stays ignored.

    The first signal sets `first`, the second one sets `second`. A thread of its own sets them: a handler runs in the
    main thread between any two instructions, perhaps while that thread holds the lock of the event. Therefore the
    handler takes no lock; Python's documentation allows `SimpleQueue.put` there.
    """

    def __init__(self) -> None:
        self.first = threading.Event()
        self.second = threading.Event()
        # The number of the last signal; 0 before the first.
        self.number = 0
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._follower = threading.Thread(target=self._follow, name="capflow-signals", daemon=True)
        # The handlers to restore at the end.
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code of a command that a signal ended: 129 for SIGHUP, 130 for SIGINT, 143 for SIGTERM."""
        return _SHELL + self.number

    def __enter__(self) -> Self:
        self._follower.start()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._came.put(0)
        self._follower.join()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._came.put(number)

    def _follow(self) -> None:
        while number := self._came.get():
            if number == signal.SIGHUP and self.first.is_set():
                continue
            self.number = number
            (self.second if self.first.is_set() else self.first).set()
