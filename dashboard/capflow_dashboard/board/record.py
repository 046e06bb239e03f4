"""The record of one request: its latest tokens, the values of every series at them, and the events of its steering.

Each token has a column; column c is position `base + c`. A record without room drops its oldest quarter and moves
`base`. Each column has the board's version at which it last changed, so that a page receives only the columns that it
lacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import runs_of
from capflow.capture.site import Site
from capflow.steering.action import Answered
from capflow_dashboard import limits
from capflow_dashboard.board.series import MISSING, Measures, Series, Values

LIVE = "live"
# Columns of a new record; they double up to `tokens_max`.
_COLUMNS_FIRST = 64


class RecordCopy(NamedTuple):
    """The kept tokens of one request, to be exported.

    base: the position of the first token.
    ids, texts, steered: of each token; -1 and None for a token that is not known.
    values: `[series, tokens]`.
    """

    id: str
    engine: str
    model: str
    status: str
    prompt_length: int
    base: int
    series: Sequence[Series]
    ids: npt.NDArray[np.int64]
    texts: list[str | None]
    steered: npt.NDArray[np.bool_]
    values: Values


class RequestRecord:
    """One request.

    key: its number on the board. Request ids may return, keys never do.
    incarnation: differs between requests that use the same id one after another.
    base: the position of the first column.
    started_s, ended_s: the times of its first and last rows, seconds since 1970; None if rows have no time.
    status: `live`, or how the request ended.
    rows_lost: dropped rows.
    version: the board's version at its last change.
    grow: asks for memory, in bytes; returns whether there is room.
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
        started_s: float | None,
        incarnation: str = "",
        grow: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.key = key
        self.engine = engine
        self.id = request
        self.incarnation = incarnation
        self.measures = measures
        self.prompt_length = prompt_length
        self.started_s = started_s
        # The time of its last rows.
        self.last_s = started_s
        self.ended_s: float | None = None
        self.status = LIVE
        self.rows_lost = 0
        self.version = 0
        self.base = base
        # Columns in use.
        self.count = 0
        # The latest events of its steering, each with the board's version.
        self.events: deque[tuple[int, Answered]] = deque(maxlen=limits.EVENTS_MAX)
        # The memory of one column.
        self._column_bytes = 4 * len(measures) + limits.TOKEN_BYTES
        self._tokens_max = tokens_max
        self._grow = grow
        columns = min(_COLUMNS_FIRST, tokens_max)
        self._ids = np.full(columns, -1, np.int64)
        self._texts: list[str | None] = [None] * columns
        self._changed = np.zeros(columns, np.int64)
        self._steered = np.zeros(columns, np.bool_)
        self._values: Values = np.full((len(measures), columns), MISSING, np.float32)
        # The start of the prompt's text, kept when its columns are dropped.
        self._preview = ""
        # What the columns that were dropped had: the number of steered ones, and of each probe the maximum, the sum,
        # the count and the number of scores at which it fires.
        self._steered_before = 0
        self._scores_before = np.zeros((4, len(measures) - measures.norms_count), np.float64)
        self._scores_before[0] = -np.inf

    @property
    def nbytes(self) -> int:
        """The memory of its columns."""
        return self._ids.size * self._column_bytes

    def put(
        self,
        version: int,
        start: int,
        token_ids: Sequence[int],
        texts: Sequence[str],
        indices: Sequence[int],
        values: Values,
        steered: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Set the tokens from position `start` on; tokens before `base` are skipped.

        version: the board's new version.
        indices: the series that have values.
        values: `[len(indices), tokens]`.
        steered: `[tokens]`.
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
        if steered is not None:
            self._steered[first:end] |= steered[skip:]
        if len(indices):
            self._values[indices, first:end] = values[:, skip:]
        self.count = max(self.count, end)

    def note(self, version: int, answered: Answered) -> None:
        """Add an event of its steering."""
        if any(event.id == answered.id for _, event in self.events):
            return
        self.version = version
        self.events.append((version, answered))

    def end(self, version: int, status: str, prompt_length: int, rows_lost: int) -> None:
        """Mark the request as finished."""
        self.version = version
        self.status = status
        self.prompt_length = prompt_length or self.prompt_length
        self.rows_lost = rows_lost
        self.ended_s = self.last_s

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
            "ended_s": self.ended_s,
            "rows_lost": self.rows_lost,
            "steered": self._steered_before + int(np.count_nonzero(self._steered[: self.count])),
            "text": self._preview or self._start_of_text(),
            "probes": self._probes(),
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
            "steered": runs_of(self._steered[first:end], self.base + first),
        }
        return columns, self._values[:, first:end].copy()

    def norms_at(self, position: int) -> dict[Site, float]:
        """Return the norm at each site that has a row of a position; empty if the position is not kept."""
        column = position - self.base
        if not 0 <= column < self.count:
            return {}
        values = self._values[: self.measures.norms_count, column].tolist()
        series = self.measures.series[: self.measures.norms_count]
        return {one.site: value for one, value in zip(series, values, strict=True) if value != MISSING}

    def copy(self) -> RecordCopy:
        """Return a copy of all columns."""
        count = self.count
        return RecordCopy(
            self.id,
            self.engine,
            self.measures.model.name,
            self.status,
            self.prompt_length,
            self.base,
            tuple(self.measures.series),
            self._ids[:count].copy(),
            self._texts[:count],
            self._steered[:count].copy(),
            self._values[:, :count].copy(),
        )

    def prompt_ids(self) -> list[int] | None:
        """Return the token ids of the prompt; None if it is not kept whole."""
        ids = self._ids[: min(self.count, self.prompt_length)]
        whole = self.base == 0 and 0 < self.prompt_length == ids.size and bool((ids >= 0).all())
        return ids.tolist() if whole else None

    def spark(self, probe: str) -> list[float | None]:
        """Return the maxima of a probe's scores in equal parts of the request, at most `limits.SPARK_LENGTH`."""
        row = self.measures.row_of(probe)
        if row is None or not self.count:
            return []
        scores = self._values[row, : self.count]
        scores = np.where(np.isfinite(scores), scores, -np.inf)
        edges = np.linspace(0, self.count, min(limits.SPARK_LENGTH, self.count) + 1).astype(int)[:-1]
        return [_number(value) for value in np.maximum.reduceat(scores, edges)]

    def pooled(self) -> list[float | None]:
        """Return the score of the request of each probe: what its pooling makes of all tokens, by default the highest.

        None for a probe without finite scores.
        """
        first = self.measures.norms_count
        scores = self._values[first:, : self.count]
        highest, total, counted, _ = _folded(scores, self._scores_before, self.measures.thresholds)
        result: list[float | None] = []
        for number, series in enumerate(self.measures.series[first:]):
            finite = np.flatnonzero(np.isfinite(scores[number]))
            if not counted[number]:
                result.append(None)
            elif series.pool == "mean":
                result.append(float(total[number] / counted[number]))
            elif series.pool == "last":
                result.append(float(scores[number, finite[-1]]) if finite.size else None)
            else:
                result.append(float(highest[number]))
        return result

    def _probes(self) -> list[list[float | int | None]]:
        """Return of each probe the highest, the mean and the last score, and at how many tokens it fires."""
        first = self.measures.norms_count
        if first == len(self.measures):
            return []
        scores = self._values[first:, : self.count]
        highest, total, counted, fired = np.array(_folded(scores, self._scores_before, self.measures.thresholds))
        result: list[list[float | int | None]] = []
        for number in range(len(scores)):
            finite = np.flatnonzero(np.isfinite(scores[number]))
            mean = total[number] / counted[number] if counted[number] else np.nan
            last = scores[number, finite[-1]] if finite.size else np.nan
            result.append([_number(highest[number]), _number(mean), _number(last), int(fired[number])])
        return result

    def _start_of_text(self) -> str:
        """Return the start of the prompt's text; empty if its first tokens are not kept or have no texts."""
        if self.base:
            return ""
        text = ""
        for part in self._texts[: min(self.count, self.prompt_length, limits.PREVIEW_LENGTH_MAX)]:
            text += part or ""
            if len(text) >= limits.PREVIEW_LENGTH_MAX:
                break
        return text[: limits.PREVIEW_LENGTH_MAX]

    def _reach(self, stop: int) -> None:
        """Make room for positions below `stop`; drop old ones above `tokens_max` and if there is no memory."""
        needed = stop - self.base
        if needed > self._tokens_max:
            self._forget(max(needed - self._tokens_max, self._tokens_max // 4))
            needed = stop - self.base
        columns = self._ids.size
        if needed <= columns:
            return
        grown = min(max(needed, 2 * columns), self._tokens_max)
        if not self._grow((grown - columns) * self._column_bytes):
            self._forget(max(needed - columns, columns // 4))
            return
        extra = grown - columns
        self._ids = np.concatenate([self._ids, np.full(extra, -1, np.int64)])
        self._texts += [None] * extra
        self._changed = np.concatenate([self._changed, np.zeros(extra, np.int64)])
        self._steered = np.concatenate([self._steered, np.zeros(extra, np.bool_)])
        room = np.full((len(self._values), extra), MISSING, np.float32)
        self._values = np.concatenate([self._values, room], axis=1)

    def _forget(self, columns: int) -> None:
        """Drop the oldest columns; what the list shows of them is kept."""
        self._preview = self._preview or self._start_of_text()
        dropped = min(columns, self.count)
        self._steered_before += int(np.count_nonzero(self._steered[:dropped]))
        scores = self._values[self.measures.norms_count :, :dropped]
        self._scores_before = np.array(_folded(scores, self._scores_before, self.measures.thresholds))
        kept = self.count - dropped
        self._ids[:kept] = self._ids[columns : columns + kept]
        self._ids[kept:] = -1
        self._texts[:kept] = self._texts[columns : columns + kept]
        self._texts[kept:] = [None] * (len(self._texts) - kept)
        self._changed[:kept] = self._changed[columns : columns + kept]
        self._changed[kept:] = 0
        self._steered[:kept] = self._steered[columns : columns + kept]
        self._steered[kept:] = False
        self._values[:, :kept] = self._values[:, columns : columns + kept].copy()
        self._values[:, kept:] = MISSING
        self.base += columns
        self.count = kept


def _folded(scores: Values, before: npt.NDArray[np.float64], thresholds: Values) -> tuple[npt.NDArray[np.float64], ...]:
    """Return the maximum, the sum, the count and the fired scores of each probe, with those of earlier columns.

    scores: `[probes, tokens]`; those that are not finite do not count.
    """
    finite = np.isfinite(scores)
    highest = np.where(finite, scores, -np.inf).max(axis=1, initial=-np.inf)
    total = np.where(finite, scores, 0).sum(axis=1, dtype=np.float64)
    fired = np.count_nonzero(finite & (scores >= thresholds[:, None]), axis=1)
    counted = np.count_nonzero(finite, axis=1)
    return np.maximum(before[0], highest), before[1] + total, before[2] + counted, before[3] + fired


def _number(value: float) -> float | None:
    """Return a number for JSON with six digits; None if it is not finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
