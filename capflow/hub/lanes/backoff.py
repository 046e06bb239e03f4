"""The back-off of a consumer that cannot go on: since when it waits, for what, and when it is tried again.

The lane's thread writes it; any thread reads it, a moment late. Times are of the monotonic clock, in seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from capflow import limits
from capflow.errors import RetryError


class Backoff:
    """The waits of one consumer, from its lane's beginning to its end.

    stop: set when all waiting must end.
    """

    def __init__(self, logger: logging.Logger, consumer: str, stop: threading.Event) -> None:
        # Calls that are made again, altogether.
        self.retries = 0
        # When the first attempt failed that nothing has followed yet; None otherwise.
        self.since: float | None = None
        # Which of the consumer's methods failed then.
        self.method = ""
        # Why, naming nothing that is captured.
        self.reason = ""
        self._consumer = consumer
        self._logger = logger
        self._stop = stop
        # The last one.
        self._pause_s = 0.0
        self._logged_at = 0.0

    def wait(self, method: str, error: BaseException) -> bool:
        """Wait before a method is called again; return False when the lane is to stop instead."""
        now = time.monotonic()
        self.method, self.reason = method, reason_of(error)  # before `since`, by which others know that they hold
        if self.since is None:
            self.since = self._logged_at = now
            self._log("consumer_waits", method, f"fails and is tried again: {error}")
        elif now - self._logged_at >= limits.RETRY_LOGGED_S:
            self._logged_at = now
            self._log("consumer_waits", method, f"has failed for {now - self.since:.0f} s: {error}")
        self.retries += 1
        self._pause_s = min(max(2 * self._pause_s, limits.RETRY_S_MIN), limits.RETRY_S_MAX)
        return not self._stop.wait(self._pause_s)

    def over(self, *, works: bool = True) -> None:
        """Note that nothing is waited for any more: a call works, or will never."""
        if self.since is not None:
            took = f"after {time.monotonic() - self.since:.1f} s"
            self._log("consumer_goes_on", self.method, f"works again {took}" if works else f"is given up {took}")
            self.since, self._pause_s = None, 0.0

    def trouble(self) -> str | None:
        """Return what the consumer waits for, for anyone to read; None when it waits for nothing."""
        return None if self.since is None else f"waits and tries {self.method} again: {self.reason}"

    def status(self, now: float) -> dict[str, Any] | None:
        """Return what it waits for as plain JSON values; None when it waits for nothing."""
        since = self.since
        if since is None:
            return None
        return {"method": self.method, "reason": self.reason, "for_s": round(now - since, 3)}

    def _log(self, event: str, method: str, text: str) -> None:
        extra = {"event": event, "consumer": self._consumer, "method": method}
        self._logger.warning("consumer %s: %s %s", self._consumer, method, text, extra=extra)


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in the words of the system, without paths and names, which may be captured data."""
    if isinstance(error, RetryError) and isinstance(error.__cause__, OSError | MemoryError):
        error = error.__cause__
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return "no memory" if isinstance(error, MemoryError) else f"{type(error).__name__}; see the log"
