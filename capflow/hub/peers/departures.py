"""The departures: what is to be done once a part of an engine is gone, in slices, so that other peers have their turn meanwhile.

An engine may have some hundred thousand open requests, and each of them ends. What follows for the starts of one engine is done in the
order in which it was added: first the ends of what is gone, then what is told of its return. Until then frames of the engine are to wait,
and so is who says that it is back: an engine that comes and goes adds no more than is done.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator

from capflow.text.engine_name import name_of

logger = logging.getLogger("capflow.hub")


class Departures:
    """What is to be done for each engine. It belongs to the hub's thread. post: has something called there, soon."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        # By the engine's name; the first of each is begun; removed when empty.
        self._waiting: dict[str, deque[Iterator[None]]] = {}

    def __contains__(self, engine: str) -> bool:
        """Return whether something is left to do for an engine."""
        return name_of(engine) in self._waiting

    @property
    def engines(self) -> set[str]:
        """The names of the engines for which something is left to do."""
        return set(self._waiting)

    def add(self, engine: str, slices: Iterator[None]) -> None:
        """Have something done for an engine behind what waits: at once up to its first yield if nothing does."""
        name = name_of(engine)
        if name in self._waiting:
            self._waiting[name].append(slices)
            return
        self._waiting[name] = deque([slices])
        self._go_on(name)

    def call(self, engine: str, function: Callable[[], None]) -> None:
        """Have something called behind what waits for an engine; at once if nothing does."""
        if engine in self:
            self._waiting[name_of(engine)].append(_called(function))
        else:
            function()

    def done(self, engine: str) -> Iterator[None]:
        """Do what is left to do for an engine, and yield between its slices: none is left at the end."""
        name = name_of(engine)
        while name in self._waiting:
            self._step(name)
            if name in self._waiting:
                yield

    def finish(self) -> None:
        """Do all that is left."""
        for name in self.engines:
            for _ in self.done(name):
                pass

    def _step(self, name: str) -> None:
        """Do the next slice for an engine."""
        waiting = self._waiting[name]
        over = True  # also when it fails
        try:
            over = next(waiting[0], self) is self
        except Exception:
            logger.exception("the hub failed at something and goes on", extra={"event": "hub_failed"})
        if over:
            waiting.popleft()
            if not waiting:
                del self._waiting[name]

    def _go_on(self, name: str) -> None:
        if name in self._waiting:
            self._step(name)
        if name in self._waiting:
            self._post(functools.partial(self._go_on, name))


def _called(function: Callable[[], None]) -> Iterator[None]:
    function()
    yield from ()
