"""Rates: tokens, rows and bytes in each of the latest seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from capflow_dashboard import limits


class RateSeries:
    """Counts for each whole second of a clock. A second is reported once it has passed.

    clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The current second; `_past` has those before it.
        self._second = int(clock())
        self._now = [0, 0, 0]
        self._past: deque[list[int]] = deque(maxlen=limits.RATES_S)

    def add(self, tokens: int, rows: int, nbytes: int) -> None:
        """Add to the current second."""
        self._advance()
        self._now[0] += tokens
        self._now[1] += rows
        self._now[2] += nbytes

    def since(self, second: int) -> dict[str, Any] | None:
        """Return the counts of the seconds after `second`, at most `limits.RATES_S`; None if none has passed."""
        self._advance()
        new = list(self._past)[-(self._second - 1 - second) :] if second < self._second - 1 else []
        if not new:
            return None
        tokens, rows, nbytes = zip(*new, strict=True)
        return {"last": self._second - 1, "tokens": tokens, "rows": rows, "bytes": nbytes}

    def _advance(self) -> None:
        second = int(self._clock())
        passed = second - self._second
        if passed > 0:
            self._past.append(self._now)
            self._past.extend([0, 0, 0] for _ in range(min(passed - 1, limits.RATES_S)))
            self._now = [0, 0, 0]
            self._second = second
