"""The departures: what follows when a part of an engine is gone, in slices between the turns of other peers.

An engine may have a hundred thousand open requests, and each of them ends. What follows for one engine is done in
order: first the ends of the requests, then the news of its return. Until then, frames of the engine and a Hello of it
wait, so an engine that comes and goes adds no more than is done.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from capflow.hub.effects import Continue, Effects, Log
from capflow.text.engine_name import name_of

FAILED = "the hub failed at something and goes on"


class Departures:
    """What is left to do for each engine.

    effects: get a `Continue` while something is left.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        # By the engine's name; the first of each is begun. Removed when empty.
        self._waiting: dict[str, deque[Iterator[None]]] = {}

    def __contains__(self, engine: str) -> bool:
        """Return whether something is left to do for an engine."""
        return name_of(engine) in self._waiting

    @property
    def engines(self) -> set[str]:
        """The names of the engines for which something is left to do."""
        return set(self._waiting)

    def add(self, engine: str, slices: Iterator[None]) -> None:
        """Do something for an engine after what waits; if nothing waits, do it now up to its first yield."""
        name = name_of(engine)
        if name in self._waiting:
            self._waiting[name].append(slices)
            return
        self._waiting[name] = deque([slices])
        self.proceed(name)

    def call(self, engine: str, function: Callable[[], None]) -> None:
        """Call something for an engine after what waits; if nothing waits, call it now."""
        if engine in self:
            self._waiting[name_of(engine)].append(_called(function))
        else:
            function()

    def done(self, engine: str) -> Iterator[None]:
        """Do all that is left to do for an engine; yields between slices."""
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
        except Exception as e:  # noqa: BLE001  it is logged, with its traceback
            self._effects.add(Log(logging.ERROR, FAILED, (), {"event": "hub_failed"}, error=e))
        if over:
            waiting.popleft()
            if not waiting:
                del self._waiting[name]

    def proceed(self, name: str) -> None:
        """Do the next slice for an engine, given by its name."""
        if name in self._waiting:
            self._step(name)
        if name in self._waiting:
            self._effects.add(Continue(name))


def _called(function: Callable[[], None]) -> Iterator[None]:
    function()
    yield from ()
