"""The rows of one request that are in memory and not yet in its files.

Rows are copied once. A view would keep the whole frame alive, with the rows of every other request, and `nbytes` would
no longer bound the memory.
Rows stay in the frame only where they are most of it, and then the whole frame is counted.

Rows lie in runs. A run holds the rows of some sites at the same positions. So a site's rows are a few long pieces,
however many steps they came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site

Bytes = npt.NDArray[np.uint8]

_RUN_ROWS_MIN = 8
# Unless one chunk has more.
_RUN_ROWS_MAX = 256
# Fewer rows are copied, so that runs stay few.
_KEPT_ROWS_MIN = 32
_RUNS_SHOWN_MAX = 8


class Piece(NamedTuple):
    """Rows of one site, `[n, row_bytes]`, contiguous.

    spans: `(start, stop)` of their positions.
    """

    spans: list[tuple[int, int]]
    rows: Bytes


class _Run:
    """Rows of some sites at the positions of `spans`; `length` of them are filled in.

    sites: the sites of `rows`, in their order.
    before: the number of rows in earlier runs.
    rows: `[len(sites), capacity, row_bytes]`.
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
    """The runs of one request.

    nbytes: the memory that they take. It includes unused capacity, and the whole of each frame that is kept.
    """

    __slots__ = ("_last", "_runs", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._runs: list[_Run] = []
        # The run that the next rows of the same sites may continue, by sites.
        self._last: dict[tuple[Site, ...], _Run] = {}

    def add(self, sites: tuple[Site, ...], start: int, rows: npt.NDArray[Any], held_bytes: int | None = None) -> int:
        """Take rows `[len(sites), length, width]`; return by how much `nbytes` grew.

        held_bytes: the size of the memory that holds the rows, to keep them there; nobody may write to it any more.
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
            # A quarter of the rows before: so pieces are few, and most of the memory holds rows.
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
        """Return the rows of each site in the order of their positions, and drop them from the buffer."""
        pieces = self.pieces()
        self.clear()
        return pieces

    def clear(self) -> None:
        """Drop the rows."""
        self._runs = []
        self._last = {}
        self.nbytes = 0

    def pieces(self) -> dict[Site, list[Piece]]:
        """Return the rows of each site in the order of their positions."""
        runs_of: dict[Site, list[tuple[_Run, int]]] = {}
        for run in self._runs:
            for index, site in enumerate(run.sites):
                runs_of.setdefault(site, []).append((run, index))
        # Sites mostly share their runs, and so the order of their parts.
        orders: dict[tuple[int, ...], list[_Part]] = {}
        pieces: dict[Site, list[Piece]] = {}
        for site, runs in runs_of.items():
            key = tuple(id(run) for run, _ in runs)
            if key not in orders:
                orders[key] = _in_order([run for run, _ in runs])
            pieces[site] = []
            for part in orders[key]:
                run, index = runs[part.run]
                rows = run.rows[index, part.offset : part.offset + part.length]
                pieces[site].append(Piece(part.spans, rows))
        return pieces


class _Part(NamedTuple):
    """Rows `offset .. offset + length` of the run with index `run`."""

    run: int
    offset: int
    length: int
    spans: list[tuple[int, int]]


def _in_order(runs: Sequence[_Run]) -> list[_Part]:
    """Return the parts of runs in the order of their positions; each part is as long as possible."""
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
    """The tokens of one request, as runs of positions without a gap; nearly always one run."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[int, list[int], list[str]]] = []

    def add(self, start: int, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Take the tokens at positions `start`, `start + 1` and so on.

        texts: empty, or as long as token_ids.
        """
        if self._runs:
            first, ids, words = self._runs[-1]
            overlap = first + len(ids) - start
            if start >= first and overlap >= 0:
                ids.extend(token_ids[overlap:])
                words.extend(texts[overlap:])
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


def shown(positions: npt.NDArray[np.int64]) -> str:
    """Format positions for a message: `0..3 7 9..12`."""
    if not len(positions):
        return "none"
    ends = np.flatnonzero(np.diff(positions) != 1)
    firsts, lasts = positions[np.r_[0, ends + 1]], positions[np.r_[ends, len(positions) - 1]]
    runs = zip(firsts[:_RUNS_SHOWN_MAX].tolist(), lasts[:_RUNS_SHOWN_MAX].tolist(), strict=True)
    more = len(firsts) - _RUNS_SHOWN_MAX
    text = " ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
    return text + (f" and {more} more" if more > 0 else "")
