"""The record of one request: its latest tokens, and the values of every series at them.

Each token has a column; column c is position `base + c`. A full record drops its oldest quarter and moves `base`. Each
column has the board's version at which it last changed, so that a page receives only the columns that it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from capflow_dashboard import limits
from capflow_dashboard.series import MISSING, Measures, Values

LIVE = "live"
# Columns of a new record; they double up to `tokens_max`.
_COLUMNS_FIRST = 64


class RequestRecord:
    """One request.

    key: its number on the board. Request ids may return, keys never do.
    base: the position of the first column.
    started_s: wall clock, seconds since 1970.
    status: `live`, or how the request ended.
    rows_lost: dropped rows.
    """

    def __init__(
        self,
        key: int,
        engine: str,
        request: str,
        measures: Measures,
        *,
        prompt_length: int,
        base: int,
        tokens_max: int,
        started_s: float,
    ) -> None:
        self.key = key
        self.engine = engine
        self.id = request
        self.measures = measures
        self.prompt_length = prompt_length
        self.started_s = started_s
        self.status = LIVE
        self.rows_lost = 0
        self.version = 0
        self.base = base
        # Columns in use.
        self.count = 0
        self._tokens_max = tokens_max
        columns = min(_COLUMNS_FIRST, tokens_max)
        self._ids = np.full(columns, -1, np.int64)
        self._texts: list[str | None] = [None] * columns
        self._changed = np.zeros(columns, np.int64)
        self._values: Values = np.full((len(measures), columns), MISSING, np.float32)

    def put(
        self,
        version: int,
        start: int,
        token_ids: Sequence[int],
        texts: Sequence[str],
        indices: Sequence[int],
        values: Values,
    ) -> None:
        """Set the tokens from position `start` on; tokens before `base` are skipped.

        version: the board's new version.
        indices: the series that have values.
        values: `[len(indices), tokens]`.
        """
        self.version = version
        stop = start + len(token_ids)
        self._reach(stop)
        skip = max(0, self.base - start)
        if skip >= len(token_ids):
            return
        first, end = start + skip - self.base, stop - self.base
        self._ids[first:end] = token_ids[skip:]
        if texts:
            self._texts[first:end] = [text[: limits.TEXT_LENGTH_MAX] for text in texts[skip:]]
        self._changed[first:end] = version
        if len(indices):
            self._values[indices, first:end] = values[:, skip:]
        self.count = max(self.count, end)

    def end(self, version: int, status: str, prompt_length: int, rows_lost: int) -> None:
        """Mark the request as finished."""
        self.version = version
        self.status = status
        self.prompt_length = prompt_length or self.prompt_length
        self.rows_lost = rows_lost

    def summary(self) -> dict[str, Any]:
        """Return the request's fields for the list of requests."""
        return {
            "key": self.key,
            "id": self.id,
            "engine": self.engine,
            "status": self.status,
            "prompt_length": self.prompt_length,
            "tokens": self.base + self.count,
            "started_s": self.started_s,
            "rows_lost": self.rows_lost,
        }

    def since(self, version: int) -> tuple[dict[str, Any], Values] | None:
        """Return the columns from the first to the last that changed after a version, and their values.

        The values are float32 `[series, count]`. None if no column changed.
        """
        changed = np.flatnonzero(self._changed[: self.count] > version)
        if not changed.size:
            return None
        first, end = int(changed[0]), int(changed[-1]) + 1
        columns = {
            "key": self.key,
            "base": self.base,
            "first": first,
            "count": end - first,
            "ids": self._ids[first:end].tolist(),
            "texts": self._texts[first:end],
        }
        return columns, self._values[:, first:end].copy()

    def _reach(self, stop: int) -> None:
        """Make room for positions below `stop`; drop old ones above `tokens_max`."""
        needed = stop - self.base
        if needed > self._tokens_max:
            self._forget(max(needed - self._tokens_max, self._tokens_max // 4))
            needed = stop - self.base
        columns = self._ids.size
        if needed > columns:
            grown = min(max(needed, 2 * columns), self._tokens_max)
            extra = grown - columns
            self._ids = np.concatenate([self._ids, np.full(extra, -1, np.int64)])
            self._texts += [None] * extra
            self._changed = np.concatenate([self._changed, np.zeros(extra, np.int64)])
            room = np.full((len(self._values), extra), MISSING, np.float32)
            self._values = np.concatenate([self._values, room], axis=1)

    def _forget(self, columns: int) -> None:
        kept = max(0, self.count - columns)
        self._ids[:kept] = self._ids[columns : columns + kept]
        self._ids[kept:] = -1
        self._texts[:kept] = self._texts[columns : columns + kept]
        self._texts[kept:] = [None] * (len(self._texts) - kept)
        self._changed[:kept] = self._changed[columns : columns + kept]
        self._changed[kept:] = 0
        self._values[:, :kept] = self._values[:, columns : columns + kept].copy()
        self._values[:, kept:] = MISSING
        self.base += columns
        self.count = kept
