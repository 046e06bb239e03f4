"""Rows of one site, width and dtype: gathered from many frames, scored in a few large products.

Rows are copied out of their frames, so that a frame's memory is freed with it: a view of one row would keep the rows of
every site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.site import Site
from capflow.probes.probe import Scorer, as_float32
from capflow_consumers.duckdb.request import ScoredRequest

_STAGE_BYTES = 8 * limits.MIB
# Multiplications of one product: few enough for one thread, because the engine needs the others.
_PRODUCT = 1 << 18

Rows = npt.NDArray[Any]
Part = tuple[ScoredRequest, int, int]
"""Rows of a request at positions `start, start + 1, …`: `(request, start, count)`."""


class RowStage:
    """The rows of a site with one width and dtype since `clear`, and their scores, in the order in which they came.

    rows: rows `[n, hidden_size]` of that width and dtype.
    scorers: the site's probes.
    vectors: whether the rows themselves are kept, as float32.
    """

    def __init__(self, site: Site, rows: Rows, scorers: Sequence[Scorer], *, vectors: bool) -> None:
        self.site = site
        self.scorers = tuple(scorers)
        self.parts: list[Part] = []
        # Scores per row.
        self._columns = sum(len(scorer.names) for scorer in scorers)
        self._vectors = vectors
        self._kept: list[Rows] = []
        self._scores: list[list[Rows]] = [[] for _ in self.scorers]
        capacity = max(1, _STAGE_BYTES // (rows.shape[1] * rows.dtype.itemsize))
        # `[:_filled]` are gathered and not scored yet.
        self._rows: Rows = np.empty((capacity, rows.shape[1]), rows.dtype)
        self._filled = 0

    def add(self, parts: Iterable[Part], rows: Rows) -> None:
        """Copy rows `[n, hidden_size]`: those of the parts, one part after another."""
        at, count = 0, len(rows)
        while at < count:
            if self._filled == len(self._rows):
                self._score()
            stop = min(self._filled + count - at, len(self._rows))
            self._rows[self._filled : stop] = rows[at : at + stop - self._filled]
            at += stop - self._filled
            self._filled = stop
        self.parts += parts

    def scored(self) -> tuple[list[Rows], Rows | None]:
        """Return each scorer's scores `[n, k]` of all parts and, if kept, the rows `[n, hidden_size]`, else None."""
        self._score()
        vectors = np.concatenate(self._kept) if self._kept else None
        return [np.concatenate(blocks) for blocks in self._scores], vectors

    def clear(self) -> None:
        """Drop all parts."""
        self.parts, self._scores, self._kept, self._filled = [], [[] for _ in self.scorers], [], 0

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
        self._kept += kept
        self._filled = 0
