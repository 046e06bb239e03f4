"""Statistics of the norms of rows, for each site and position, added up in one pass.

Norms are Euclidean: of the stored numbers as float32, summed in float64, in the units of the activations. A row with a
number that is not finite has no norm; such rows are counted.

Invariant: memory is bounded, however many rows and positions are added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_COLUMNS = 1024
_BINS_PER_OCTAVE = 64
_OCTAVE_MIN = -64
# The largest float32 is below 2**128; a row's norm may be slightly above and counts as that.
_OCTAVE_MAX = 128
_BINS = (_OCTAVE_MAX - _OCTAVE_MIN) * _BINS_PER_OCTAVE
_PART_BYTES = 8 << 20


class NormStats:
    """The norms of one site.

    mean, min and max are exact. median is exact within 1 %: it comes from a histogram of `_BINS_PER_OCTAVE` bins per
    octave. `column_norms` has a column for every `column_width` positions from 0; the width doubles when a position
    lies beyond the last column.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.rows_not_finite = 0
        self.min = np.inf
        self.max = 0.0
        self.column_width = 1
        self._sums = np.zeros(_COLUMNS)
        self._counts = np.zeros(_COLUMNS, np.int64)
        self._bins = np.zeros(_BINS, np.int64)

    def add(self, rows: npt.NDArray[Any], positions: npt.NDArray[np.int64]) -> None:
        """Add rows `[n, width]` and their positions `[n]`; at most `_PART_BYTES` are converted at a time."""
        step = max(1, _PART_BYTES // max(1, rows.shape[1] * 4))
        for start in range(0, len(rows), step):
            self._add(norms_of(rows[start : start + step]), positions[start : start + step])

    def widen(self, width: int) -> None:
        """Double the width of the columns until it is `width`: a power of 2, at least the present width."""
        while self.column_width < width:
            self.column_width *= 2
            for sums in (self._sums, self._counts):
                sums[: _COLUMNS // 2] = sums[::2] + sums[1::2]
                sums[_COLUMNS // 2 :] = 0

    @property
    def mean(self) -> float:
        """The mean norm; NaN if no row has a norm."""
        finite = self.rows - self.rows_not_finite
        return float(self._sums.sum() / finite) if finite else np.nan

    @property
    def median(self) -> float:
        """The median norm, within 1 %; NaN if no row has a norm."""
        finite = self.rows - self.rows_not_finite
        if not finite:
            return np.nan
        index = int(np.searchsorted(np.cumsum(self._bins), (finite + 1) // 2))
        middle = 2.0 ** (_OCTAVE_MIN + (index + 0.5) / _BINS_PER_OCTAVE)
        return float(np.clip(middle, self.min, self.max))

    @property
    def column_norms(self) -> npt.NDArray[np.float64]:
        """The mean norm of each column, up to the last with a norm; NaN for a column without one."""
        (filled,) = np.nonzero(self._counts)
        stop = int(filled[-1]) + 1 if len(filled) else 0
        with np.errstate(invalid="ignore"):
            return np.asarray(self._sums[:stop] / self._counts[:stop])

    def _add(self, norms: npt.NDArray[np.float64], positions: npt.NDArray[np.int64]) -> None:
        self.rows += len(norms)
        finite = np.isfinite(norms)
        if not finite.all():
            self.rows_not_finite += int((~finite).sum())
            norms, positions = norms[finite], positions[finite]
        if not len(norms):
            return
        self.min = min(self.min, float(norms.min()))
        self.max = max(self.max, float(norms.max()))
        width = self.column_width
        while int(positions.max()) >= _COLUMNS * width:
            width *= 2
        self.widen(width)
        columns = positions // self.column_width
        self._sums += np.bincount(columns, norms, _COLUMNS)
        self._counts += np.bincount(columns, minlength=_COLUMNS)
        with np.errstate(divide="ignore"):
            octaves = np.log2(norms)
        bins = np.clip((octaves - _OCTAVE_MIN) * _BINS_PER_OCTAVE, 0, _BINS - 1).astype(np.int64)
        self._bins += np.bincount(bins, minlength=_BINS)


def norms_of(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the Euclidean norms, float64 `[n]`, of rows `[n, width]`; not finite if a number is not."""
    wide = np.asarray(rows, np.float32)
    squares: npt.NDArray[np.float64] = np.einsum("ij,ij->i", wide, wide, dtype=np.float64)
    return np.sqrt(squares)
