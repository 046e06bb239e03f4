"""Populations: how the scores of an engine's probes are distributed, since the engine was first met.

Each probe has a histogram of the scores of all tokens and one of the scores of finished requests: what its pooling
makes of a request's tokens, the highest for a probe that scores tokens. The range of the bins is that of the first
`limits.BASELINE_TOKENS` scores without outliers, widened to the threshold, which is the edge of a bin. So counts at
every edge are exact, as long as scores come: what is outside the range is counted below or above it.

Invariant: the memory of a population depends on its probes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow_dashboard import limits
from capflow_dashboard.board.series import Series, Values

_Numbers = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]


class Population:
    """The scores of one engine's probes.

    probes: their series.
    first: the index of the first of them among the engine's series.
    labels: whether each request has the positive label, by its id.
    clock: returns monotonic seconds.
    """

    def __init__(
        self, probes: Sequence[Series], first: int, labels: Mapping[str, bool], clock: Callable[[], float]
    ) -> None:
        self._probes = [_Probe(series) for series in probes]
        self._first = first
        self._labels = labels
        self._rates = _Rates(len(probes), clock)

    def add(self, indices: Sequence[int], values: Values) -> None:
        """Take the values `[len(indices), tokens]` of some of the engine's series."""
        for index, row in zip(indices, values, strict=True):
            if index >= self._first:
                number = index - self._first
                counted, fired = self._probes[number].add_tokens(row)
                self._rates.add(number, counted, fired)

    def finish(self, request: str, scores: Sequence[float | None]) -> None:
        """Take the scores of a finished request; None for a probe that has none."""
        for number, (probe, score) in enumerate(zip(self._probes, scores, strict=True)):
            if score is not None:
                counted, fired = probe.add_request(score, self._labels.get(request))
                self._rates.add(number, counted, fired)

    def fields(self, name: str) -> dict[str, Any] | None:
        """Return the population of a probe as the page receives it; None if there is no such probe."""
        for number, probe in enumerate(self._probes):
            if probe.series.probe == name:
                return probe.fields() | self._rates.fields(number) | {"labels": len(self._labels)}
        return None


class _Probe:
    """The histograms of one probe."""

    def __init__(self, series: Series) -> None:
        self.series = series
        self._threshold = float(np.float32(series.threshold))
        # The scores until the bins are fixed; None afterwards.
        self._pending: list[Values] | None = []
        # The scores and labels of requests until then; each request has one of the pending tokens, or more.
        self._pending_requests: list[tuple[float, bool | None]] = []
        self._edges = np.empty(0, np.float64)
        # Tokens below the bins, in each, above them.
        self._tokens = np.zeros(limits.POPULATION_BINS + 2, np.int64)
        # The same of requests without a label, with the negative and the positive one.
        self._requests = np.zeros((3, limits.POPULATION_BINS + 2), np.int64)
        # Scores that are not finite.
        self._odd = 0

    def add_tokens(self, row: Values) -> tuple[int, int]:
        """Count scores; return how many, and how many fire. A probe with pooling does not fire for tokens."""
        scores = row[np.isfinite(row)]
        # A token without a row has no score.
        self._odd += int(np.count_nonzero(row != -np.inf)) - scores.size
        if self._pending is None:
            self._tokens += _counted(scores, self._edges)
        else:
            self._pending.append(scores.copy())
            if sum(map(len, self._pending)) >= limits.BASELINE_TOKENS:
                self._fix()
        if self.series.pool != "token":
            return 0, 0
        return scores.size, int(np.count_nonzero(scores >= np.float32(self._threshold)))

    def add_request(self, score: float, label: bool | None) -> tuple[int, int]:
        """Count the score of a request; return whether its score fires, as `add_tokens`."""
        if self._pending is None:
            self._requests[_place(label)] += _counted(np.array([score]), self._edges)
        else:
            self._pending_requests.append((score, label))
        return (0, 0) if self.series.pool == "token" else (1, int(score >= self._threshold))

    def fields(self) -> dict[str, Any]:
        edges, tokens, requests = self._edges, self._tokens, self._requests
        if self._pending is not None:
            edges, tokens, requests = self._binned()
        return {
            "probe": self.series.probe,
            "site": str(self.series.site),
            "pool": self.series.pool,
            "threshold": self._threshold,
            "fixed": self._pending is None,
            "edges": edges.tolist(),
            "tokens": tokens.tolist(),
            "requests": requests.tolist(),
            "odd": self._odd,
        }

    def _binned(self) -> tuple[_Numbers, _Counts, _Counts]:
        """Return the bins of the pending scores, and how many of these are in each."""
        assert self._pending is not None
        scores = np.concatenate([np.empty(0, np.float32), *self._pending])
        edges = _edges(scores[: limits.BASELINE_TOKENS], self._threshold)
        requests = np.zeros_like(self._requests)
        for score, label in self._pending_requests:
            requests[_place(label)] += _counted(np.array([score]), edges)
        return edges, _counted(scores, edges), requests

    def _fix(self) -> None:
        self._edges, self._tokens, self._requests = self._binned()
        self._pending = None
        self._pending_requests = []


class _Rates:
    """How many scores there were, and how many fired, in each of the latest seconds and minutes."""

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._second = int(clock())
        self._minute = self._second // 60
        self._now = np.zeros((count, 2), np.int64)
        self._now_minute = np.zeros((count, 2), np.int64)
        self._seconds: deque[_Counts] = deque(maxlen=limits.RATES_S)
        self._minutes: deque[_Counts] = deque(maxlen=limits.RATES_MINUTES)

    def add(self, number: int, counted: int, fired: int) -> None:
        self._advance()
        for now in (self._now, self._now_minute):
            now[number] += (counted, fired)

    def fields(self, number: int) -> dict[str, Any]:
        """Return the counts of the whole seconds and minutes that have passed, oldest first."""
        self._advance()
        return {
            "seconds": [counts[number].tolist() for counts in self._seconds],
            "minutes": [counts[number].tolist() for counts in self._minutes],
        }

    def _advance(self) -> None:
        second = int(self._clock())
        if second == self._second:
            return
        _pass(self._seconds, self._now, second - self._second)
        self._now, self._second = np.zeros_like(self._now), second
        if second // 60 != self._minute:
            _pass(self._minutes, self._now_minute, second // 60 - self._minute)
            self._now_minute, self._minute = np.zeros_like(self._now), second // 60


def _pass(past: deque[_Counts], now: _Counts, passed: int) -> None:
    """Add what is over, and zeros for the time in which nothing came."""
    past.append(now)
    past.extend(np.zeros_like(now) for _ in range(min(passed - 1, limits.RATES_S)))


def _place(label: bool | None) -> int:
    return 0 if label is None else 1 + label


def _counted(scores: npt.NDArray[Any], edges: _Numbers) -> _Counts:
    """Return how many scores are below the first edge, in each bin, and at or above the last edge."""
    places = np.searchsorted(edges, scores.astype(np.float64), side="right")
    return np.bincount(places, minlength=limits.POPULATION_BINS + 2)


def _edges(scores: Values, threshold: float) -> _Numbers:
    """Return the edges of the bins: of equal width, one of them the threshold."""
    low = high = threshold
    if scores.size:
        first, third = np.quantile(scores.astype(np.float64), (0.25, 0.75))
        reach = 1.5 * (third - first)
        low = min(threshold, max(float(scores.min()), first - reach))
        high = max(threshold, min(float(scores.max()), third + reach))
    pad = limits.POPULATION_PAD * (high - low) or abs(threshold) * limits.POPULATION_PAD or 1.0
    # One bin more than the range needs, so that the edges can be moved onto the threshold.
    width = (high - low + 2 * pad) / (limits.POPULATION_BINS - 1)
    before = int(np.ceil((threshold - (low - pad)) / width))
    edges: _Numbers = threshold + width * (np.arange(limits.POPULATION_BINS + 1, dtype=np.float64) - before)
    return edges
