"""The processor time of capflow's own code on the thread of an engine's steps.

Reading the clock of a thread is a system call. So one step of `STEPS_EACH` is measured, in the scheduler and in each
worker.
"""

from __future__ import annotations

import time

from capflow.protocol.message import CpuTime

STEPS_EACH = 16


class StepClock:
    """The time of the scheduler or of a worker. It belongs to the thread of the steps; any thread reads `time`.

    on: whether the step that began last is measured.
    """

    __slots__ = ("_ns", "_steps", "on")

    def __init__(self) -> None:
        self.on = False
        self._ns = self._steps = 0

    def begin_step(self, number: int) -> int:
        """Begin a step and a part of it; return what `end` takes."""
        self.on = number % STEPS_EACH == 0
        self._steps += self.on
        return time.thread_time_ns() if self.on else 0

    def begin(self) -> int:
        """Begin a part of the step; return what `end` takes."""
        return time.thread_time_ns() if self.on else 0

    def end(self, begun: int) -> None:
        """End a part of the step."""
        if begun:
            self._ns += time.thread_time_ns() - begun

    @property
    def time(self) -> CpuTime:
        """The time so far, of the measured steps."""
        return CpuTime(self._ns, self._steps)


SCHEDULER = StepClock()
"""That of the scheduler in this process. Where a worker is in the same process, the worker reports it."""
