"""Series: the numbers that the dashboard computes from rows. A series has one value for each token of a request.

Each site has a series with the norms of its rows, and each probe a series with its scores. They are computed in float32
for every row, even while no page is open, so that a page that is opened later also shows earlier requests. They are
computed for all requests of a frame at once.

The baseline of an engine says what is usual for each series: the median, the spread, and the range without outliers of
its first `limits.BASELINE_TOKENS` values. It is computed once, so that a colour that depends on it never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import Rows
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import Scorer
from capflow_dashboard import limits

Values = npt.NDArray[np.float32]
"""`[series, tokens]` float32: NaN or infinity if the row has such numbers, `MISSING` if there is no row."""

MISSING = np.float32(-np.inf)
"""The value of a token without a row. No norm is negative, and a score that has this value is stored as NaN."""

# How many numbers are converted at a time: 1 MiB of float32, which stays in the processor's cache.
_TILE_NUMBERS = 256 * 1024


class Series(NamedTuple):
    """What one series shows.

    probe: the probe's name; empty for a norm.
    threshold: the score from which the probe fires.
    pool: which of its scores a request has: `token` (each), `mean`, `max` or `last`.
    """

    site: Site
    probe: str = ""
    threshold: float = 0.0
    pool: str = "token"

    def fields(self) -> dict[str, Any]:
        """Return the series as the page receives it."""
        return {
            "layer": self.site.layer,
            "hook": self.site.hook,
            "site": str(self.site),
            "probe": self.probe,
            "threshold": self.threshold,
            "pool": self.pool,
        }


class Measures:
    """The series of one engine: the norms of its sites, ordered by hook and layer, then the probes that fit its model.

    problems: an error for each probe that does not fit.
    """

    def __init__(self, model: ModelInfo, sites: Sequence[Site], probes: Sequence[Scorer]) -> None:
        self.model = model
        self.problems: list[str] = []
        self.series = [Series(site) for site in sorted(sites, key=lambda site: (site.hook, site.layer))]
        self.norms_count = len(self.series)
        self._rows = {series.site: row for row, series in enumerate(self.series)}
        self._probes: dict[Site, list[tuple[int, Scorer]]] = {}
        for probe in probes:
            try:
                probe.check(sites, model.width_of(probe.site))
            except UsageError as e:
                self.problems.append(str(e))
                continue
            self._probes.setdefault(probe.site, []).append((len(self.series), probe))
            self.series += [
                Series(probe.site, name, threshold, probe.pool)
                for name, threshold in zip(probe.names, probe.thresholds, strict=True)
            ]
        # Of the probes' series, float32.
        self.thresholds = np.array([series.threshold for series in self.series[self.norms_count :]], np.float32)
        self.baseline = Baseline(len(self.series))

    def __len__(self) -> int:
        return len(self.series)

    @property
    def probe_names(self) -> list[str]:
        """The names of its probes, in the order of their series."""
        return [series.probe for series in self.series[self.norms_count :]]

    def is_like(self, other: Measures) -> bool:
        """Return whether both have the same model, series and problems."""
        return (self.model, self.series, self.problems) == (other.model, other.series, other.problems)

    def row_of(self, probe: str) -> int | None:
        """Return the row of a probe's series; None if there is no such probe."""
        for row in range(self.norms_count, len(self.series)):
            if self.series[row].probe == probe:
                return row
        return None

    def of(self, sites: Sequence[Site], rows: Rows) -> tuple[list[int], Values]:
        """Return the indices and the values `[series, tokens]` of the series of rows `[sites, tokens, width]`."""
        indices, parts = [], []
        shown = [number for number, site in enumerate(sites) if site in self._rows]
        if shown:
            indices = [self._rows[sites[number]] for number in shown]
            parts = [norms(rows if len(shown) == len(sites) else rows[shown])]
        for number in shown:
            for first, probe in self._probes.get(sites[number], ()):
                with np.errstate(all="ignore"):
                    scores = probe.scores(rows[number]).T
                parts.append(np.where(scores == MISSING, np.float32(np.nan), scores))
                indices += range(first, first + len(probe.names))
        return indices, np.concatenate(parts) if parts else np.empty((0, rows.shape[1]), np.float32)


class Baseline:
    """What is usual for each series of an engine.

    count: the number of series.
    """

    def __init__(self, count: int) -> None:
        # The values until the baseline is fixed, and how many of each series there are.
        self._values: Values | None = np.full((count, limits.BASELINE_TOKENS), np.nan, np.float32)
        self._counts = np.zeros(count, np.int64)
        # The result, once it is fixed.
        self.fields: dict[str, Any] | None = None

    def add(self, indices: Sequence[int], values: Values) -> bool:
        """Take values `[len(indices), tokens]` of some series; return whether the baseline is fixed by them."""
        if self._values is None or not len(indices):
            return False
        used = int(self._counts[indices[0]])
        taken = values[:, : limits.BASELINE_TOKENS - used]
        self._values[indices, used : used + taken.shape[1]] = taken
        self._counts[indices] += taken.shape[1]
        present = self._counts[self._counts > 0]
        if present.min() < limits.BASELINE_TOKENS:
            return False
        self.fields = _usual(self._values)
        self._values = None
        return True


def _usual(values: Values) -> dict[str, Any]:
    """Return the median, the spread and the range of each series; None for one without finite values.

    The spread is 1.4826 times the median absolute deviation, which is the standard deviation of normal values. The
    range ends 1.5 interquartile ranges outside the quartiles, or at the extreme values if these are nearer.
    """
    columns: dict[str, list[float | None]] = {"median": [], "spread": [], "low": [], "high": []}
    for row in values:
        finite = row[np.isfinite(row)].astype(np.float64)
        numbers: list[float | None] = [None] * 4
        if finite.size:
            first, median, third = np.quantile(finite, (0.25, 0.5, 0.75))
            spread = 1.4826 * np.median(np.abs(finite - median))
            reach = 1.5 * (third - first)
            numbers = [median, spread, max(finite.min(), first - reach), min(finite.max(), third + reach)]
        for name, number in zip(columns, numbers, strict=True):
            columns[name].append(None if number is None else float(f"{number:.6g}"))
    return {"tokens": values.shape[1], **columns}


def norms(rows: Rows) -> Values:
    """Return the 2-norms `[sites, tokens]` of rows `[sites, tokens, width]`, computed in float32."""
    sites, tokens, width = rows.shape
    result = np.empty((sites, tokens), np.float32)
    step = max(1, _TILE_NUMBERS // max(1, sites * width))
    # NaN and infinity stay as they are.
    with np.errstate(all="ignore"):
        for start in range(0, tokens, step):
            tile = rows[:, start : start + step].astype(np.float32)
            squares = np.matmul(tile[..., None, :], tile[..., :, None])
            np.sqrt(squares[..., 0, 0], out=result[:, start : start + step])
    return result
