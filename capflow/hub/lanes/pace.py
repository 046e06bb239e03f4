"""The pace of a consumer: how far behind it is, how much of its time it is busy, and whether it still makes progress.

Written by the one thread that calls the consumer; read by anyone, a moment late. Times are of the monotonic clock.
"""

from __future__ import annotations

import time

from capflow import limits


class ConsumerPace:
    """The times of one consumer, from its first call to its last."""

    def __init__(self) -> None:
        # When the frame in hand was delivered; None between frames.
        self.waited_since: float | None = None
        # When the call that is running began; None between calls.
        self.called_at: float | None = None
        # When that call last made progress, as far as the consumer says it.
        self._worked_at = 0.0
        # The seconds that all finished calls took.
        self.busy_s = 0.0
        # How many frames in a row it raised on.
        self.failed_in_a_row = 0

    def begin(self) -> float:
        """Note that a call begins; return when."""
        self.called_at = now = time.monotonic()
        return now

    def end(self, since: float) -> None:
        """Note that the call that began at `since` is over."""
        self.called_at = None
        self.busy_s += time.monotonic() - since

    def lag_s(self, now: float) -> float:
        """Return how long the frame in hand has been with the hub, in seconds; 0 when there is none."""
        since = self.waited_since
        return 0.0 if since is None else max(0.0, now - since)

    def busy_so_far_s(self, now: float) -> float:
        """Return the seconds spent in calls, the one under way included."""
        since, busy_s = self.called_at, self.busy_s
        return busy_s if since is None else busy_s + max(0.0, now - since)

    def call_s(self, now: float) -> float:
        """Return for how long the call under way has made no progress, in seconds; 0 between calls."""
        since = self.called_at
        return 0.0 if since is None else max(0.0, now - max(since, self._worked_at))

    def working(self) -> None:
        """Note that the call under way makes progress."""
        self._worked_at = time.monotonic()

    def trouble(self, now: float) -> str | None:
        """Return why the consumer is taken to have failed; None when it has not."""
        if self.call_s(now) > limits.CALL_S_MAX:
            return f"in one call for more than {limits.CALL_S_MAX:g} s"
        if self.failed_in_a_row >= limits.FRAMES_FAILED_MAX:
            return f"failed at each of its last {limits.FRAMES_FAILED_MAX} frames or more; see the log"
        return None
