"""The rows of one request that are in memory and not yet in its files.

Rows are copied in, once: a view would keep a whole frame alive, with every other request's rows in it, and memory would not
be bounded by what is counted here. They lie in runs, each the rows of some sites at positions without a gap, so
that a site's rows are a few long pieces whatever the number of steps that they came in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.site import Site

Bytes = npt.NDArray[np.uint8]

_RUN_ROWS_MIN = 8
_RUN_ROWS_MAX = 256  # unless one chunk has more


class Piece(NamedTuple):
    """Rows of one site at positions `start, start+1, …`: `[length, row_bytes]`, contiguous."""

    start: int
    rows: Bytes


class _Run:
    """Rows of some sites at positions `start .. start+length`, in room for `rows.shape[1]`; before: rows in earlier runs."""

    __slots__ = ("before", "length", "rows", "sites", "start")

    def __init__(self, sites: tuple[Site, ...], start: int, before: int, room: int, row_bytes: int) -> None:
        self.sites = sites
        self.start = start
        self.before = before
        self.length = 0
        self.rows: Bytes = np.empty((len(sites), room, row_bytes), np.uint8)


class RowBuffer:
    """The runs of one request. nbytes: the memory they take, room to grow included."""

    __slots__ = ("_last", "_runs", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._runs: list[_Run] = []
        self._last: dict[tuple[Site, ...], _Run] = {}  # the run that the next rows of these sites may continue

    def add(self, sites: tuple[Site, ...], start: int, rows: npt.NDArray[Any]) -> int:
        """Copy in rows `[len(sites), length, hidden_size]`; return by how much `nbytes` grew."""
        raw = rows.view(np.uint8)
        length = raw.shape[1]
        run = self._last.get(sites)
        grown = 0
        if run is None or run.start + run.length != start or run.length + length > run.rows.shape[1]:
            # a quarter of what came before: few pieces, and most of the memory holds rows
            before = run.before + run.length if run else 0
            room = max(length, min(max(before // 4, _RUN_ROWS_MIN), _RUN_ROWS_MAX))
            run = self._last[sites] = _Run(sites, start, before, room, raw.shape[2])
            self._runs.append(run)
            grown = run.rows.nbytes
            self.nbytes += grown
        run.rows[:, run.length : run.length + length] = raw
        run.length += length
        return grown

    def take(self) -> dict[Site, list[Piece]]:
        """Return the rows of each site in the order of their positions, and forget them."""
        pieces: dict[Site, list[Piece]] = {}
        for run in sorted(self._runs, key=lambda run: run.start):
            for index, site in enumerate(run.sites):
                pieces.setdefault(site, []).append(Piece(run.start, run.rows[index, : run.length]))
        self._runs = []
        self._last = {}
        self.nbytes = 0
        return pieces
