"""Series: the numbers that the dashboard computes from rows. A series has one value for each token of a request.

Each site has a series with the norms of its rows, and each probe a series with its scores. They are computed in float32
for every row, even while no page is open, so that a page that is opened later also shows earlier requests. This costs
about 0.2 ms for each MiB of bfloat16 rows, and 45 µs for each request in a frame.
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
    """

    site: Site
    probe: str = ""
    threshold: float = 0.0

    def fields(self) -> dict[str, Any]:
        """Return the series as the page receives it."""
        return {
            "layer": self.site.layer,
            "hook": self.site.hook,
            "site": str(self.site),
            "probe": self.probe,
            "threshold": self.threshold,
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
                probe.check(sites, model.hidden_size)
            except UsageError as e:
                self.problems.append(str(e))
                continue
            self._probes.setdefault(probe.site, []).append((len(self.series), probe))
            self.series += [
                Series(probe.site, name, threshold)
                for name, threshold in zip(probe.names, probe.thresholds, strict=True)
            ]

    def __len__(self) -> int:
        return len(self.series)

    def is_like(self, other: Measures) -> bool:
        """Return whether both have the same model, series and problems."""
        return (self.model, self.series, self.problems) == (other.model, other.series, other.problems)

    def of(self, sites: Sequence[Site], rows: Rows) -> tuple[list[int], Values]:
        """Return the indices and the values `[series, tokens]` of the series of rows `[sites, tokens, hidden_size]`."""
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


def norms(rows: Rows) -> Values:
    """Return the 2-norms `[sites, tokens]` of rows `[sites, tokens, hidden_size]`, computed in float32."""
    sites, tokens, hidden_size = rows.shape
    result = np.empty((sites, tokens), np.float32)
    step = max(1, _TILE_NUMBERS // max(1, sites * hidden_size))
    # NaN and infinity stay as they are.
    with np.errstate(all="ignore"):
        for start in range(0, tokens, step):
            tile = rows[:, start : start + step].astype(np.float32)
            squares = np.matmul(tile[..., None, :], tile[..., :, None])
            np.sqrt(squares[..., 0, 0], out=result[:, start : start + step])
    return result
