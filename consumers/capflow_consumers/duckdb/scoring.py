"""Rows of one site, width and dtype: gathered from many frames, scored in a few large products.

Rows are copied out of their frames, so that a frame's memory is freed with it: a view of one row would keep the rows of
every site.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.site import Site
from capflow.probes.probe import Scorer, as_float32
from capflow.saes.sae import Sae
from capflow_consumers.duckdb.request import Stretches

_STAGE_BYTES = 8 * limits.MIB
# Multiplications of one product: few enough for one thread, because the engine needs the others.
_PRODUCT = 1 << 18

Rows = npt.NDArray[Any]
Top = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""The most active features of some rows: ids and activations, `[n, k]` each."""


class TopFeatures(NamedTuple):
    """An autoencoder whose k most active features of each row are kept."""

    name: str
    sae: Sae
    k: int


class RowStage:
    """The rows of a site with one width and dtype since `clear`, and their scores, in the order in which they came.

    rows: rows `[n, width]` of that width and dtype.
    scorers: the site's probes.
    vectors: whether the rows themselves are kept, as float32.
    features: the site's autoencoders.
    """

    def __init__(
        self,
        site: Site,
        rows: Rows,
        scorers: Sequence[Scorer],
        *,
        vectors: bool,
        features: Sequence[TopFeatures] = (),
    ) -> None:
        self.site = site
        self.scorers = tuple(scorers)
        self.features = tuple(features)
        self._active: list[list[Top]] = [[] for _ in self.features]
        # Whose rows they are, and where.
        self.stretches: list[Stretches] = []
        # Scores per row.
        self._columns = sum(len(scorer.names) for scorer in scorers)
        self._vectors = vectors
        self._kept: list[Rows] = []
        self._scores: list[list[Rows]] = [[] for _ in self.scorers]
        capacity = max(1, _STAGE_BYTES // (rows.shape[1] * rows.dtype.itemsize))
        # `[:_filled]` are gathered and not scored yet.
        self._rows: Rows = np.empty((capacity, rows.shape[1]), rows.dtype)
        self._filled = 0

    def add(self, stretches: Stretches, rows: Rows) -> None:
        """Copy rows `[n, width]`: those of the stretches."""
        at, count = 0, len(rows)
        while at < count:
            if self._filled == len(self._rows):
                self._score()
            stop = min(self._filled + count - at, len(self._rows))
            self._rows[self._filled : stop] = rows[at : at + stop - self._filled]
            at += stop - self._filled
            self._filled = stop
        self.stretches.append(stretches)

    def scored(self) -> tuple[list[Rows], Rows | None]:
        """Return each scorer's scores `[n, k]` of all rows and, if kept, the rows `[n, width]`, else None."""
        self._score()
        vectors = np.concatenate(self._kept) if self._kept else None
        return [np.concatenate(blocks) for blocks in self._scores], vectors

    def active(self) -> list[Top]:
        """Return the most active features of all rows, for each autoencoder."""
        self._score()
        return [
            (np.concatenate([ids for ids, _ in blocks]), np.concatenate([values for _, values in blocks]))
            for blocks in self._active
        ]

    def clear(self) -> None:
        """Drop all rows."""
        self.stretches, self._scores, self._kept, self._filled = [], [[] for _ in self.scorers], [], 0
        self._active = [[] for _ in self.features]

    def _score(self) -> None:
        size = max(16, _PRODUCT // max(1, self._rows.shape[1] * self._columns))
        scored: list[list[Rows]] = [[] for _ in self.scorers]
        kept: list[Rows] = []
        for at in range(0, self._filled, size):
            rows = as_float32(self._rows[at : min(at + size, self._filled)])
            for blocks, scorer in zip(scored, self.scorers, strict=True):
                blocks.append(scorer.scores(rows))
            if self._vectors:
                kept.append(rows.copy() if rows.base is not None else rows)
        for total, blocks in zip(self._scores, scored, strict=True):
            total.extend(blocks)
        # An autoencoder has far more weights than a probe: reading them for a few rows at a time would cost more.
        if self._filled:
            for blocks_of, features in zip(self._active, self.features, strict=True):
                blocks_of.append(features.sae.top(self._rows[: self._filled], features.k))
        self._kept += kept
        self._filled = 0
