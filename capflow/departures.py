"""The departures: what is to be done once a part of an engine is gone, in slices, so that other peers have their turn meanwhile.

An engine may have some hundred thousand open requests, and each of them ends. What follows for one engine is done in the order in which
it was added: first the ends of what is gone, then what is told of its return. Until then frames of the engine are to wait.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator


class Departures:
    """What is to be done for each engine, by its name. It belongs to the hub's thread. post: has something called there, soon."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: dict[str, deque[Iterator[None]]] = {}  # the first of each is begun; removed when empty

    def __contains__(self, engine: object) -> bool:
        """Return whether something is left to do for an engine."""
        return engine in self._waiting

    def add(self, engine: str, slices: Iterator[None]) -> None:
        """Have something done for an engine behind what waits: at once up to its first yield if nothing does."""
        if engine in self._waiting:
            self._waiting[engine].append(slices)
            return
        self._waiting[engine] = deque([slices])
        self._go_on(engine)

    def call(self, engine: str, function: Callable[[], None]) -> None:
        """Have something called behind what waits for an engine; at once if nothing does."""
        if engine in self._waiting:
            self._waiting[engine].append(_called(function))
        else:
            function()

    def step(self, engine: str) -> None:
        """Do the next slice for an engine for which something is left to do."""
        waiting = self._waiting[engine]
        over = True  # also when it fails
        try:
            over = next(waiting[0], self) is self
        finally:
            if over:
                waiting.popleft()
                if not waiting:
                    del self._waiting[engine]

    def finish(self) -> None:
        """Do all that is left."""
        for engine in list(self._waiting):
            while engine in self._waiting:
                self.step(engine)

    def _go_on(self, engine: str) -> None:
        try:
            if engine in self._waiting:
                self.step(engine)
        finally:
            if engine in self._waiting:
                self._post(functools.partial(self._go_on, engine))


def _called(function: Callable[[], None]) -> Iterator[None]:
    function()
    yield from ()
