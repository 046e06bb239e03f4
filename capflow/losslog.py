"""The loss log: a line for each request of which rows were lost, and not too many."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
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
        if not dropped:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._since >= 1:
                self._since, self._said = now, 0
            if self._said >= limits.LOSSES_LOGGED_MAX:
                self._left_out += 1
                return
            self._said += 1
            left_out, self._left_out = self._left_out, 0
        level = logging.INFO if {each.reason for each in dropped} <= MEANT else logging.WARNING
        text = "; ".join(map(described, dropped))
        if left_out:
            text += f" ({left_out} requests before it are not told here)"
        told = {"event": "rows_lost", "request": request, "dropped": msgspec.to_builtins(dropped), **fields}
        told |= self._fields
        self._logger.log(level, "%s: request %s: %s", self._who, request, text, extra=told)
