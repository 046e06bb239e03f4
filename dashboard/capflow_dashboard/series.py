"""Series: the numbers that a row becomes. Each series has one value for each token of a request.

The norm of the row at each site is a series, and so is the score of each probe. They are computed in float32, for
every row, whether or not anyone looks: that costs about 0.2 ms for each MiB of bfloat16 rows and 45 µs for each request in a
frame, and so a page that is opened late shows the requests that are kept as a page opened early does.
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
"""`[series, tokens]` float32; NaN and infinity where rows hold them, `MISSING` where there is no row."""

MISSING = np.float32(-np.inf)
"""The value of a token whose row did not come. No norm is negative; a score that is becomes NaN."""

_TILE_NUMBERS = 256 * 1024  # converted at a time: 1 MiB as float32, which stays in the cache


class Series(NamedTuple):
    """One number for each token. probe is empty for a norm; threshold is where the probe fires."""

    site: Site
    probe: str = ""
    threshold: float = 0.0

    def told(self) -> dict[str, Any]:
        """Return the series as the page is told of it."""
        return {
            "layer": self.site.layer,
            "hook": self.site.hook,
            "site": str(self.site),
            "probe": self.probe,
            "threshold": self.threshold,
        }


class Measures:
    """The series of one engine: the norms of its sites, by layer, and then the probes that fit its model."""

    def __init__(self, model: ModelInfo, sites: Sequence[Site], probes: Sequence[Scorer]) -> None:
        self.model = model
        # Probes that do not fit.
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
        """Return whether the other's values can stand beside these."""
        return (self.model, self.series, self.problems) == (other.model, other.series, other.problems)

    def of(self, sites: Sequence[Site], rows: Rows) -> tuple[list[int], Values]:
        """Return which series rows `[sites, tokens, hidden_size]` give, and their values `[series, tokens]`."""
        indices, parts = [], []
        known = [number for number, site in enumerate(sites) if site in self._rows]
        if known:
            indices = [self._rows[sites[number]] for number in known]
            parts = [norms(rows if len(known) == len(sites) else rows[known])]
        for number in known:
            for first, probe in self._probes.get(sites[number], ()):
                with np.errstate(all="ignore"):
                    scores = probe.scores(rows[number]).T
                parts.append(np.where(scores == MISSING, np.float32(np.nan), scores))
                indices += range(first, first + len(probe.names))
        return indices, np.concatenate(parts) if parts else np.empty((0, rows.shape[1]), np.float32)


def norms(rows: Rows) -> Values:
    """Return the 2-norm `[sites, tokens]`, computed in float32, of rows `[sites, tokens, hidden_size]`."""
    sites, tokens, hidden_size = rows.shape
    result = np.empty((sites, tokens), np.float32)
    step = max(1, _TILE_NUMBERS // max(1, sites * hidden_size))
    with np.errstate(all="ignore"):  # what comes of NaN and infinity is shown
        for start in range(0, tokens, step):
            tile = rows[:, start : start + step].astype(np.float32)
            squares = np.matmul(tile[..., None, :], tile[..., :, None])
            np.sqrt(squares[..., 0, 0], out=result[:, start : start + step])
    return result
