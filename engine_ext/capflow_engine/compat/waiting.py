"""Requests that must wait though vLLM's scheduler could take them, because the steering bank has no room for them.

From 0.31 on, vLLM asks `_handle_blocked_waiting_request` about each request that it could take. Earlier schedulers ask
nobody, so such requests are taken out of the queues for as long as a step is scheduled.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Any, Protocol

_ASKS = "_handle_blocked_waiting_request"


class Room(Protocol):
    """The interface that the scheduler asks; `Admission` implements it."""

    @property
    def needed(self) -> bool:
        """Whether any waiting request needs room."""

    def has_room(self, request: Any) -> bool:
        """Take the room that a request needs; return False if there is none."""


class _Asked:
    """A mixin of a scheduler that asks about each request."""

    capflow: Room

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Return whether a waiting request may be scheduled."""
        ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        return ready and self.capflow.has_room(request)


class _Withholding:
    """A mixin of a scheduler that asks nobody. Requests that were withheld are first in line afterwards."""

    capflow: Room

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step without the requests that have no room."""
        held = self._without_room() if self.capflow.needed else []
        for queue in self._queues if held else ():
            queue.remove_requests(held)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for request in reversed(held):
                self.skipped_waiting.prepend_request(request)  # type: ignore[attr-defined]

    @property
    def _queues(self) -> tuple[Any, Any]:
        return self.skipped_waiting, self.waiting  # type: ignore[attr-defined]

    def _without_room(self) -> list[Any]:
        """Return the requests without room. They take it in the order in which the scheduler would take them."""
        by_priority = self.policy.value == "priority"  # type: ignore[attr-defined]
        requests = list(heapq.merge(*self._queues) if by_priority else itertools.chain(*self._queues))
        return [request for request in requests if not self.capflow.has_room(request)]


def holding_back(base: type[Any]) -> type[Any]:
    """Return the mixin by which requests of a scheduler class wait for room."""
    return _Asked if hasattr(base, _ASKS) else _Withholding
