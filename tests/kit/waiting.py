"""Waiting for a condition, with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Return when the condition holds; fail when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold in time"
        pause.wait(0.005)


def never(condition: Callable[[], object], for_s: float = 1.0) -> None:
    """Return when the condition has not held for a while; fail when it does."""
    deadline = time.monotonic() + for_s
    pause = threading.Event()
    while time.monotonic() < deadline:
        assert not condition(), "the condition came to hold"
        pause.wait(0.005)
