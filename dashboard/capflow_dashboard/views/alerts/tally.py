"""Tallies: counts of one engine what its rules are about.

Scores wait until they are counted, all at once: a rule costs a few operations of numpy a second, however many steps
there are. Rows of rejected drafts belong to no request and are not counted.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import Block, RequestRows
from capflow.capture.losses import MEANT
from capflow.capture.result import RequestDone
from capflow_dashboard import limits
from capflow_dashboard.board.series import MISSING, Series, Values
from capflow_dashboard.views.alerts.rules import COMPARE, AlertRule
from capflow_dashboard.views.alerts.windows import CountedRequest, LatestParts, LatestRequests

_Rated = tuple[float, str]


class Reading(NamedTuple):
    """The value of a rule now, in its unit; None without one. request: the request that it names; empty for none."""

    value: float | None = None
    request: str = ""


class _Scores(NamedTuple):
    """Scores that are counted together.

    values: `[probes, tokens]`, minus infinity without a row.
    owners: `[tokens]`: the index of each token's request in `requests`.
    generated: `[tokens]`.
    """

    values: Values
    owners: npt.NDArray[np.int64]
    generated: npt.NDArray[np.bool_]
    requests: Sequence[CountedRequest]


class EngineTally:
    """What one engine's rules count.

    rules: those of probes that the engine does not have are left out.
    probes: the series of its probes.
    first: the index of the first of them among the engine's series.
    """

    def __init__(self, rules: Sequence[AlertRule], probes: Sequence[Series], first: int) -> None:
        self._first = first
        self._count = len(probes)
        names = [series.probe for series in probes]
        self._of_probes = [
            _ProbeRule(rule, names.index(rule.probe), probes[names.index(rule.probe)])
            for rule in rules
            if rule.probe in names
        ]
        self._sums = {rule: LatestParts[float](rule.over_s, operator.add) for rule in rules if rule.quantity in _LOSSES}
        self._lags = {rule: LatestParts[float](rule.over_s, max) for rule in rules if rule.quantity == "lag"}
        # The highest lag since the last count; minus infinity if no row came.
        self._lag_s = -np.inf
        # Lost and skipped rows since then.
        self._lost = dict.fromkeys(_LOSSES, 0)
        self._empty()

    @property
    def rules(self) -> list[AlertRule]:
        """The rules that it counts for."""
        return [*(each.rule for each in self._of_probes), *self._sums, *self._lags]

    def take(self, requests: Sequence[RequestRows], block: Block, indices: Sequence[int], values: Values) -> None:
        """Take the values `[len(indices), rows]` of some of the engine's series in a block."""
        columns = [column for column, index in enumerate(indices) if index >= self._first]
        if not columns or not self._of_probes:
            return
        part = np.full((self._count, block.rows), MISSING, np.float32)
        part[[indices[column] - self._first for column in columns]] = values[columns]
        self._values.append(part)
        self._blocks.append((len(block.spans), self._rows, len(self._prompts)))
        self._spans.extend(chain.from_iterable(block.spans))
        self._prompts.extend([request.prompt_length for request in requests])
        owners = self._owners
        names = [(request.id, request.incarnation) for request in requests]
        self._named.extend([owners.setdefault(name, len(owners)) for name in names])
        self._rows += block.rows

    def late(self, lag_s: float) -> None:
        """Take the age of rows when they came."""
        self._lag_s = max(self._lag_s, lag_s)

    def finish(self, done: RequestDone, request: CountedRequest, scores: Sequence[float | None], now: float) -> None:
        """Take the end of a request, and its score of each probe, which counts for probes with pooling."""
        for each in self._of_probes:
            score = scores[each.probe] if scores else None
            if each.series.pool != "token" and score is not None:
                each.add(now, np.array([score]), np.zeros(1, np.int64), [request])
        for dropped in done.dropped:
            self._lost["skipped" if dropped.reason in MEANT else "lost"] += dropped.rows

    @property
    def full(self) -> bool:
        """Whether what waits should be counted now."""
        return self._rows >= limits.ALERT_ROWS_MAX

    def count(self, now: float) -> None:
        """Count what waits."""
        for lags in self._lags.values() if self._lag_s >= 0 else ():
            lags.add(now, self._lag_s)
        self._lag_s = -np.inf
        for rule, sums in self._sums.items():
            if self._lost[rule.quantity]:
                sums.add(now, self._lost[rule.quantity])
        self._lost = dict.fromkeys(_LOSSES, 0)
        if self._rows:
            self._count_scores(self._waiting(), now)
        self._empty()

    def readings(self, now: float) -> list[Reading]:
        """Return the value of each of `rules`."""
        result = [each.reading(now) for each in self._of_probes]
        result += [Reading(float(sums.total(now) or 0)) for sums in self._sums.values()]
        return result + [Reading(lags.total(now)) for lags in self._lags.values()]

    def _empty(self) -> None:
        # What waits, block after block: scores; spans, four numbers each; and of each block the number of its spans and
        # where its rows and its requests begin among all.
        self._values: list[Values] = []
        self._spans = array("q")
        self._blocks: list[tuple[int, int, int]] = []
        # The requests of each block: the length of the prompt, and the index among the different ones.
        self._prompts = array("q")
        self._named = array("q")
        self._owners: dict[tuple[str, str], int] = {}
        self._rows = 0

    def _waiting(self) -> _Scores:
        """Return the scores that wait, without rows that belong to no request."""
        counts, first_rows, first_requests = np.array(self._blocks, np.int64).T
        numbers, starts, lengths, rows = np.array(self._spans, np.int64).reshape(-1, 4).T
        numbers = numbers + np.repeat(first_requests, counts)
        # Of each token its place in its span.
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = np.concatenate(self._values, axis=1)
        values = values[:, places + np.repeat(rows + np.repeat(first_rows, counts), lengths)]
        generated = places >= np.repeat(np.array(self._prompts)[numbers] - starts, lengths)
        owners = np.repeat(np.array(self._named)[numbers], lengths)
        return _Scores(values, owners, generated, [CountedRequest(*name) for name in self._owners])

    def _count_scores(self, scores: _Scores, now: float) -> None:
        # The scores of each probe and part, with their requests; rules share them.
        chosen: dict[tuple[int, str], tuple[Values, npt.NDArray[np.int64]]] = {}
        for each in self._of_probes:
            if each.series.pool != "token":
                continue
            key = each.probe, each.rule.part
            if key not in chosen:
                row = scores.values[each.probe]
                mask = np.isfinite(row)
                if each.rule.part:
                    mask &= scores.generated == (each.rule.part == "generated")
                chosen[key] = row[mask], scores.owners[mask]
            each.add(now, *chosen[key], scores.requests)


_LOSSES = ("lost", "skipped")


class _ProbeRule:
    """A rule of a probe, and its window.

    probe: the index of its probe.
    """

    def __init__(self, rule: AlertRule, probe: int, series: Series) -> None:
        self.rule = rule
        self.probe = probe
        self.series = series
        # The probe's own threshold fires at what is equal to it, as on the page.
        self._fires = COMPARE[rule.compare or ">="]
        self._threshold = np.float32(rule.threshold if rule.compare else series.threshold)
        # Scores and those that fire; requests that fired; or the highest score and its request.
        self._shares = LatestParts[tuple[int, int]](rule.over_s, lambda a, b: (a[0] + b[0], a[1] + b[1]))
        self._requests = LatestRequests(rule.over_s)
        self._highest = LatestParts[_Rated](rule.over_s, max)

    def add(
        self, now: float, scores: Values, owners: npt.NDArray[np.int64], requests: Sequence[CountedRequest]
    ) -> None:
        """Count finite scores `[tokens]` of requests."""
        if not scores.size:
            return
        if self.rule.quantity == "max":
            place = int(np.argmax(scores))
            self._highest.add(now, (float(scores[place]), requests[owners[place]].id))
            return
        fired = self._fires(scores, self._threshold)
        if self.rule.quantity == "share":
            self._shares.add(now, (scores.size, int(np.count_nonzero(fired))))
            return
        for owner in np.flatnonzero(np.bincount(owners[fired], minlength=1)):
            self._requests.add(now, requests[owner])

    def reading(self, now: float) -> Reading:
        if self.rule.quantity == "max":
            highest = self._highest.total(now)
            return Reading() if highest is None else Reading(*highest)
        if self.rule.quantity == "requests":
            count, newest = self._requests.total(now)
            return Reading(float(count), newest)
        counted, fired = self._shares.total(now) or (0, 0)
        return Reading(100.0 * fired / counted if counted >= self.rule.count_min else None)
