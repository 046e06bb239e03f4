"""Steps that were computed but are not settled: it is not yet decided which of their rows belong to a request.

A step is settled when the scheduler has processed its output, which decides the accepted drafts and the requests that
ended. With async scheduling or pipeline stages, a worker begins further steps before that.
Invariant: steps leave in order. The end of a request leaves with its last step, or with a later one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from capflow_engine.scheduler.orders import Ended, Marked, Rejection
from capflow_engine.taps.plan import EMPTY_PLAN
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.marks import merged
from capflow_engine.worker.sender import Computed

READY: Callable[[], None] = lambda: None  # noqa: E731


def bare(number: int) -> Computed:
    """Return a step without rows."""
    return Computed(number, time.time_ns(), EMPTY_PLAN, None, np.empty(0), READY)


class Pending:
    """The unsettled steps of one worker, and the finished requests that have a part in them.

    steps: oldest first.
    finished: each with its end.
    """

    def __init__(self) -> None:
        self.steps: deque[Computed] = deque()
        self.finished: list[tuple[Tracked, Ended]] = []

    def add(self, step: Computed) -> None:
        """Add a step that was just launched."""
        self.steps.append(step)

    def step(self, number: int) -> Computed | None:
        """Return an unsettled step; None if it is settled or was not added."""
        return next((step for step in self.steps if step.number == number), None)

    def last_step_of(self, key: str) -> int | None:
        """Return the number of the last step that holds a request, with which its end leaves; None if there is none."""
        return next((step.number for step in reversed(self.steps) if step.holds(key)), None)

    def cut(self, key: str, limit: int) -> None:
        """Drop a request's rows at position `limit` and later from every step."""
        for step in self.steps:
            step.cut(key, limit)

    def reject(self, rejection: Rejection) -> None:
        """Drop the rows of rejected drafts from their step, and lower the positions of the request's later steps."""
        for step in self.steps:
            if step.number <= rejection.step:
                step.cut(rejection.key, rejection.limit)
            elif step.holds(rejection.key):
                step.shift(rejection.key, rejection.drafts)

    def mark(self, marked: Sequence[Marked]) -> None:
        """Note what controllers and gates of other pipeline stages steered."""
        for number, key, runs in marked:
            if (step := self.step(number)) is not None:
                step.marks[key] = merged(step.marks.get(key, ()), runs)

    def end(self, request: Tracked, ended: Ended) -> None:
        """Add the end of a request; it leaves with the request's last step, or with a later one."""
        self.cut(request.key, ended.limit)
        self.finished.append((request, ended))

    def settle(self, settled: int) -> list[Computed]:
        """Return the steps up to number `settled`, in order, with the ends of requests that no later step holds."""
        steps = []
        while self.steps and self.steps[0].number <= settled:
            steps.append(self.steps.popleft())
        ended = [end for end in self.finished if not any(step.holds(end[0].key) for step in self.steps)]
        if ended:
            self.finished = [end for end in self.finished if end not in ended]
            if not steps:
                steps.append(bare(settled))
            steps[-1].ended = ended
        return steps

    @property
    def bytes_held(self) -> int:
        """The bytes that unsettled steps hold in the ring; waiting for the sender does not free them."""
        return sum(step.lent for step in self.steps)
