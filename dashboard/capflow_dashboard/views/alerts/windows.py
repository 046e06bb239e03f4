"""Windows: what came in the latest seconds.

A window keeps parts of a second, or of a 60th of the window if that is longer. So it covers its time and up to one part
more, and has at most 62 parts.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from capflow_dashboard import limits

_T = TypeVar("_T")


class CountedRequest(NamedTuple):
    """A request. Another request may use its id later, with another incarnation."""

    id: str
    incarnation: str


@dataclass
class _Part(Generic[_T]):
    """What came from one time to another."""

    first: float
    last: float
    content: _T


class LatestParts(Generic[_T]):
    """The parts of a window. Times are monotonic seconds and never go back.

    join: makes one content of two.
    """

    def __init__(self, over_s: float, join: Callable[[_T, _T], _T]) -> None:
        self._over_s = over_s
        self._width_s = max(1.0, over_s / limits.ALERT_PARTS)
        self._join = join
        self._parts: deque[_Part[_T]] = deque()

    def add(self, now: float, content: _T) -> None:
        """Add what came now."""
        self._drop(now)
        last = self._parts[-1] if self._parts else None
        if last is not None and now - last.first < self._width_s:
            last.last, last.content = now, self._join(last.content, content)
        else:
            self._parts.append(_Part(now, now, content))

    def total(self, now: float) -> _T | None:
        """Return what came within the window, joined; None if nothing did."""
        self._drop(now)
        return functools.reduce(self._join, (part.content for part in self._parts)) if self._parts else None

    def _drop(self, now: float) -> None:
        while self._parts and self._parts[0].last <= now - self._over_s:
            self._parts.popleft()


class LatestRequests:
    """Different requests of a window, at most `limits.ALERT_REQUESTS_MAX`, the latest ones."""

    def __init__(self, over_s: float) -> None:
        self._over_s = over_s
        # When each last came, the earliest first.
        self._times: OrderedDict[CountedRequest, float] = OrderedDict()

    def add(self, now: float, request: CountedRequest) -> None:
        """Add a request that came now."""
        self._times[request] = now
        self._times.move_to_end(request)
        if len(self._times) > limits.ALERT_REQUESTS_MAX:
            self._times.popitem(last=False)

    def total(self, now: float) -> tuple[int, str]:
        """Return how many there are, and the id of the latest; empty without one."""
        while self._times and next(iter(self._times.values())) <= now - self._over_s:
            self._times.popitem(last=False)
        return len(self._times), next(reversed(self._times)).id if self._times else ""
