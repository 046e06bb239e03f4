"""The rows of one request that are in memory and not yet in its files.

Rows are copied in, once: a view would keep a whole frame alive, with every other request's rows in it, and memory would not
be bounded by what is counted here. Only where a frame is mostly theirs they stay in it, and all of it is counted. They lie in runs, each the rows of some sites at the same positions, so
that a site's rows are a few long pieces whatever the number of steps that they came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site

Bytes = npt.NDArray[np.uint8]

_RUN_ROWS_MIN = 8
_RUN_ROWS_MAX = 256  # unless one chunk has more
_KEPT_ROWS_MIN = 32  # fewer are copied, so that runs stay few


class Piece(NamedTuple):
    """Rows of one site, `[n, row_bytes]`, contiguous.

    spans: `(start, stop)` of their positions.
    """

    spans: list[tuple[int, int]]
    rows: Bytes


class _Run:
    """Rows of some sites at the positions of `spans`, in room for `rows.shape[1]`.

    before: rows in earlier runs.
    """

    __slots__ = ("before", "length", "rows", "sites", "spans")

    def __init__(self, sites: tuple[Site, ...], before: int, rows: Bytes) -> None:
        self.sites = sites
        self.spans: list[tuple[int, int]] = []
        self.before = before
        self.length = 0
        self.rows = rows

    def add(self, start: int, raw: Bytes) -> None:
        """Copy in the rows at positions `start, start+1, …`."""
        length = raw.shape[1]
        if self.spans and self.spans[-1][1] == start:
            self.spans[-1] = (self.spans[-1][0], start + length)
        else:
            self.spans.append((start, start + length))
        self.rows[:, self.length : self.length + length] = raw
        self.length += length


class RowBuffer:
    """The runs of one request. nbytes: the memory they take, room to grow and what else is in frames that are kept included."""

    __slots__ = ("_last", "_runs", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._runs: list[_Run] = []
        # The run that the next rows of these sites may continue.
        self._last: dict[tuple[Site, ...], _Run] = {}

    def add(self, sites: tuple[Site, ...], start: int, rows: npt.NDArray[Any], held_bytes: int | None = None) -> int:
        """Take rows `[len(sites), length, hidden_size]`; return by how much `nbytes` grew.

        held_bytes: how much memory stays taken when they are kept where they are, which nobody may write to any more;
            None to copy them.
        """
        raw = rows.view(np.uint8)
        length = raw.shape[1]
        run = self._last.get(sites)
        before = run.before + run.length if run else 0
        if held_bytes is not None and length >= _KEPT_ROWS_MIN:
            run = self._begin(_Run(sites, before, raw), held_bytes)
            run.spans, run.length = [(start, start + length)], length
            return held_bytes
        grown = 0
        if run is None or run.length + length > run.rows.shape[1]:
            # a quarter of what came before: few pieces, and most of the memory holds rows
            room = max(length, min(max(before // 4, _RUN_ROWS_MIN), _RUN_ROWS_MAX))
            new: Bytes = np.empty((len(sites), room, raw.shape[2]), np.uint8)
            grown = new.nbytes
            run = self._begin(_Run(sites, before, new), grown)
        run.add(start, raw)
        return grown

    def _begin(self, run: _Run, nbytes: int) -> _Run:
        self._last[run.sites] = run
        self._runs.append(run)
        self.nbytes += nbytes
        return run

    def take(self) -> dict[Site, list[Piece]]:
        """Return the rows of each site in the order of their positions, and forget them."""
        pieces = self.pieces()
        self._runs = []
        self._last = {}
        self.nbytes = 0
        return pieces

    def pieces(self) -> dict[Site, list[Piece]]:
        """Return the rows of each site in the order of their positions."""
        runs_of: dict[Site, list[tuple[_Run, int]]] = {}
        for run in self._runs:
            for index, site in enumerate(run.sites):
                runs_of.setdefault(site, []).append((run, index))
        orders: dict[tuple[int, ...], list[_Part]] = {}  # sites mostly share their runs
        pieces: dict[Site, list[Piece]] = {}
        for site, found in runs_of.items():
            key = tuple(id(run) for run, _ in found)
            if key not in orders:
                orders[key] = _in_order([run for run, _ in found])
            pieces[site] = [
                Piece(part.spans, found[part.run][0].rows[found[part.run][1], part.offset : part.offset + part.length])
                for part in orders[key]
            ]
        return pieces


class _Part(NamedTuple):
    """Rows `offset .. offset+length` of run number `run`."""

    run: int
    offset: int
    length: int
    spans: list[tuple[int, int]]


def _in_order(runs: Sequence[_Run]) -> list[_Part]:
    """Return the parts of runs in the order of their positions, as long as they can be."""
    parts: list[_Part] = []
    for (start, stop), number, offset in sorted(_spans(runs)):
        last = parts[-1] if parts else None
        if last is not None and last.run == number and last.offset + last.length == offset:
            last.spans.append((start, stop))
            parts[-1] = last._replace(length=last.length + stop - start)
        else:
            parts.append(_Part(number, offset, stop - start, [(start, stop)]))
    return parts


def _spans(runs: Sequence[_Run]) -> Iterable[tuple[tuple[int, int], int, int]]:
    for number, run in enumerate(runs):
        offset = 0
        for start, stop in run.spans:
            yield (start, stop), number, offset
            offset += stop - start


class TokenLog:
    """Runs of positions without a gap; nearly always one."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[int, list[int], list[str]]] = []

    def add(self, start: int, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Take the tokens at positions `start, start+1, …`; texts is empty or as long as token_ids."""
        if self._runs:
            first, ids, words = self._runs[-1]
            known = first + len(ids) - start
            if start >= first and known >= 0:
                ids.extend(token_ids[known:])
                words.extend(texts[known:])
                return
        self._runs.append((start, list(token_ids), list(texts)))

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the token ids of positions `start..stop`, -1 where unknown."""
        ids = np.full(stop - start, -1, np.int32)
        for first, run, _ in self._runs:
            low, high = max(start, first), min(stop, first + len(run))
            if low < high:
                ids[low - start : high - start] = run[low - first : high - first]
        return ids

    def texts(self) -> list[tuple[int, list[str]]]:
        """Return `(start, texts)` for each run whose texts are known."""
        return [(first, words) for first, ids, words in self._runs if words and len(words) == len(ids)]
