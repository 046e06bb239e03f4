"""A lens on a captured request: its sites and positions, a few hundred rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.lenses.lens import Lens, LensPart, LensReading
from capflow.lenses.readout import Ids

NEXT = "next"
"""The chosen token that stands for the one which follows in the request."""


class CapturedRows(Protocol):
    """Rows of a site, as a data set gives them."""

    @property
    def rows(self) -> npt.NDArray[Any]:
        """`[n, hidden_size]`."""

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """`[n]`, rising."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """`[n]`, -1 where the engine sent none."""


class Capture(Protocol):
    """A captured request, as `capflow.open(path)[id]` gives it."""

    @property
    def id(self) -> str:
        """The request's id."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that have rows."""

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt."""

    def __getitem__(self, site: Any, /) -> CapturedRows:
        """Return a site's rows."""


class SiteReading(NamedTuple):
    """What a lens reads from some positions of a request at one site.

    positions: `[n]` int64.
    token_ids: `[n]` int64, the tokens at these positions; -1 where the engine sent none.
    reading: of these rows.
    """

    site: Site
    positions: Ids
    token_ids: Ids
    reading: LensReading


def read_capture(
    lens: Lens,
    capture: Capture,
    k: int = 5,
    *,
    sites: Sequence[Site] | None = None,
    positions: Positions = Positions.ALL,
    token: int | str | None = None,
) -> Iterator[SiteReading]:
    """Yield what a lens reads from a captured request, by positions and then by sites.

    sites: those to read; by default all that the lens reads.
    positions: those to read, of the captured ones.
    token: a token whose rank and probability are wanted: its id, its text, or `next` for the one that follows.

    Raises UsageError if the request has no such rows, or rows of another width, and for an unknown token.
    """
    chosen = wanted_sites(lens, capture, sites)
    places = positions.at(capture.prompt_length)
    followers = _tokens(capture) if token == NEXT else {}
    reference = lens.last if lens.last in capture.sites else None
    at = np.unique(np.concatenate([np.asarray(capture[site].positions) for site in chosen]))
    at = at[np.fromiter((int(position) in places for position in at), bool, len(at))]
    if not len(at):
        expected = "captured rows at these positions"
        raise UsageError(explain(f"lens: request {capture.id}: positions", got="none", expected=expected))
    one = lens.token(token) if isinstance(token, str) and token != NEXT else token
    step = min(len(at), limits.LENS_ROWS // 2)
    width = max(1, limits.LENS_ROWS // step - 1)
    for first in range(0, len(at), step):
        batch = at[first : first + step]
        ends = None if reference is None else _rows_at(capture, reference, batch)
        for group in (chosen[start : start + width] for start in range(0, len(chosen), width)):
            parts, about = [], []
            for site in group:
                rows, where, token_ids = _rows_at(capture, site, batch)
                tokens = None
                if one is not None:
                    tokens = np.array([_after(followers, each) if one == NEXT else one for each in where], np.int64)
                    tokens[tokens >= lens.vocabulary_size] = -1
                parts.append(LensPart(site, rows, tokens, None if ends is None else _indexes(ends[1], where)))
                about.append((site, where, token_ids))
            if ends is not None and reference is not None:
                # It must be the first part of its site.
                parts.insert(0, LensPart(reference, ends[0]))
            readings = lens.read(parts, k)[len(parts) - len(group) :]
            yield from (SiteReading(*each, reading) for each, reading in zip(about, readings, strict=True))


def wanted_sites(lens: Lens, capture: Capture, sites: Sequence[Site] | None = None) -> list[Site]:
    """Return the sites to read of a captured request.

    Raises UsageError if the lens does not read one that is named, or none of those that the request has.
    """
    if sites is not None:
        for site in sites:
            lens.check(site)
        chosen = [site for site in sites if site in capture.sites]
        if not chosen:
            got = ", ".join(map(str, capture.sites)) or "none"
            expected = f"rows of {', '.join(map(str, sites))}"
            raise UsageError(explain(f"lens: request {capture.id}: sites", got=got, expected=expected))
        return chosen
    chosen = [site for site in capture.sites if lens.reads(site)]
    # The same rows are read once.
    chosen = [site for site in chosen if site.hook != "pre_attn" or Site(site.layer - 1, "post_block") not in chosen]
    if not chosen:
        for site in capture.sites:
            lens.check(site)
        raise UsageError(explain(f"lens: request {capture.id}: sites", got="none", expected="rows"))
    return sorted(chosen, key=lambda site: site.depth)


def _rows_at(capture: Capture, site: Site, positions: Ids) -> tuple[npt.NDArray[Any], Ids, Ids]:
    """Return the rows of a site at these positions, those that it has; their positions and tokens."""
    rows = capture[site]
    index = np.flatnonzero(np.isin(rows.positions, positions))
    return np.asarray(rows.rows[index]), np.asarray(rows.positions[index]), rows.token_ids[index].astype(np.int64)


def _tokens(capture: Capture) -> dict[int, int]:
    """Return the token at each position whose token is known."""
    tokens: dict[int, int] = {}
    for site in capture.sites:
        rows = capture[site]
        tokens.update(zip(rows.positions.tolist(), rows.token_ids.tolist(), strict=True))
    return {position: token for position, token in tokens.items() if token >= 0}


def _after(tokens: dict[int, int], position: int) -> int:
    return tokens.get(int(position) + 1, -1)


def _indexes(of: Ids, positions: Ids) -> Ids:
    """Return the index of each position in a rising array, -1 if it is not there."""
    places = np.searchsorted(of, positions)
    clipped = np.minimum(places, max(0, len(of) - 1))
    there = (of[clipped] == positions) if len(of) else np.zeros(len(positions), bool)
    return np.where(there, clipped, -1)
