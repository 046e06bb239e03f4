"""Steps that were computed and are not settled, until it is known which of their rows are anybody's.

A step is settled when the scheduler has taken its output in: then it is known which drafts were accepted and which requests
ended in it. With async scheduling and with pipeline stages a worker begins further steps before that. What always
holds: steps leave in order; a request's end leaves with its last step, or with a later one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from capflow_engine.scheduler.orders import Ended
from capflow_engine.taps.plan import Plan, Tracked
from capflow_engine.worker.sender import Computed

EMPTY_PLAN = Plan((), (), 0, 0, (), 0)
READY: Callable[[], None] = lambda: None  # noqa: E731


class Pending:
    """The unsettled steps of one worker, oldest first, and the requests that are over but have rows in them."""

    def __init__(self) -> None:
        self._steps: deque[Computed] = deque()
        self._over: list[tuple[Tracked, Ended]] = []

    def add(self, step: Computed) -> None:
        """Keep a step that was just launched."""
        self._steps.append(step)

    def cut(self, key: str, limit: int) -> None:
        """Drop a request's rows at position `limit` and behind it from every step."""
        for step in self._steps:
            step.cut(key, limit)

    def end(self, request: Tracked, ended: Ended) -> None:
        """Note that a request is over; its end leaves with the last step that holds rows of it."""
        self.cut(request.key, ended.limit)
        self._over.append((request, ended))

    def settle(self, settled: int) -> list[Computed]:
        """Return the steps up to number `settled`, and ends that wait for none of the others, in order."""
        steps = []
        while self._steps and self._steps[0].number <= settled:
            steps.append(self._steps.popleft())
        if self._over:
            waiting = [(r, e) for r, e in self._over if any(step.holds(r.key) for step in self._steps)]
            told = [pair for pair in self._over if pair not in waiting]
            self._over = waiting
            if told and not steps:
                steps.append(Computed(settled, time.time_ns(), EMPTY_PLAN, None, np.empty(0), READY))
            if told:
                steps[-1].ended = told
        return steps

    @property
    def bytes_held(self) -> int:
        """Bytes that no waiting for the sender gives back."""
        return sum(step.lent for step in self._steps)
