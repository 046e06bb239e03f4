"""The loss log: a line for each request of which rows were lost, or for several, and not too many."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from capflow import limits
from capflow.frame import Dropped
from capflow.losses import MEANT, described


class LossLog:
    """Says which rows of a request were lost, and why; for any number of threads.

    who: begins each line, such as `consumer log`; fields: of each record, beside `event`, `request` and `dropped`. Of one second `limits.LOSSES_LOGGED_MAX`
    lines are said; how many were left out stands in the next.
    """

    def __init__(self, logger: logging.Logger, who: str, **fields: Any) -> None:
        self._logger, self._who, self._fields = logger, who, fields
        self._lock = threading.Lock()  # guards the next
        self._since = 0.0  # when the second began in which lines are counted
        self._said = 0  # in it
        self._left_out = 0  # since a line was said

    def tell(self, request: str, dropped: Sequence[Dropped], **fields: Any) -> None:
        """Say what was lost of a request that is over; nothing when nothing was. fields: of this record."""
        if dropped:
            told = {"event": "rows_lost", "request": request, "dropped": msgspec.to_builtins(dropped), **fields}
            self._say({request: dropped}, "", told)

    def tell_late(self, lost: Mapping[str, Sequence[Dropped]], engine: str) -> None:
        """Say in one line what was lost of requests of an engine that had their results before, by request; nothing when nothing was."""
        if lost:
            told = {"event": "rows_lost_late", "engine": engine, "requests": msgspec.to_builtins(lost)}
            self._say(lost, f"engine {engine}, after the results: ", told)

    def _say(self, lost: Mapping[str, Sequence[Dropped]], before: str, told: dict[str, Any]) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._since >= 1:
                self._since, self._said = now, 0
            if self._said >= limits.LOSSES_LOGGED_MAX:
                self._left_out += len(lost)
                return
            self._said += 1
            left_out, self._left_out = self._left_out, 0
        meant = {each.reason for dropped in lost.values() for each in dropped} <= MEANT
        text = "; ".join(f"request {name}: {'; '.join(map(described, dropped))}" for name, dropped in lost.items())
        if left_out:
            text += f" ({left_out} requests before it are not told here)"
        level = logging.INFO if meant else logging.WARNING
        self._logger.log(level, "%s: %s%s", self._who, before, text, extra=told | self._fields)
