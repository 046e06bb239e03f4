"""Which sites a data set has, and of what kind their rows are: what is asked before rows are read.

What always holds: a data set without rows and a site that has none are refused with what there is instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError, explain
from capflow_consumers.dataset.reader import RequestCapture

_SITES_SHOWN_MAX = 6


class SiteContents(msgspec.Struct):
    """The rows of one site: how many there are, and every width and dtype that some of them have."""

    rows: int = 0
    widths: set[int] = msgspec.field(default_factory=set)
    dtypes: set[str] = msgspec.field(default_factory=set)


class Contents:
    """The wanted sites of the captures that were added, all sites where none is named.

    Takes the sidecars' word, and opens nothing else.
    """

    def __init__(self, path: Path, wanted: Iterable[Site] = ()) -> None:
        self._path = path
        self._wanted = frozenset(wanted)
        self._seen: set[Site] = set()
        self._found: dict[Site, SiteContents] = {}

    def add(self, capture: RequestCapture) -> dict[Site, int]:
        """Take in a capture; return how many rows it has at each wanted site."""
        sidecar = capture.sidecar
        self._seen.update(capture.sites)
        counts = {}
        for entry in sidecar.sites:
            if not self._wanted or entry.site in self._wanted:
                counts[entry.site] = entry.rows
                told = self._found.setdefault(entry.site, SiteContents())
                told.rows += entry.rows
                told.widths.add(sidecar.hidden_size)
                told.dtypes.add(entry.dtype or sidecar.dtype)
        return counts

    def sites(self, field: str) -> dict[Site, SiteContents]:
        """Return the wanted sites, in order.

        Raises UsageError when there are no rows, and, with the field that names it first, for a wanted site that has none.
        """
        if not self._seen:
            do = "a request appears in it when it is over"
            raise UsageError(explain(f"{self._path}", got="no rows", expected="a data set that has some", do=do))
        for site in in_order(self._wanted - set(self._found)):
            have = [str(one) for one in in_order(self._seen)]
            more = f" and {len(have) - _SITES_SHOWN_MAX} more" if len(have) > _SITES_SHOWN_MAX else ""
            expected = f"one of {', '.join(have[:_SITES_SHOWN_MAX])}{more}"
            raise UsageError(explain(field, got=str(site), expected=expected, do="capflow inspect lists what is there"))
        return {site: self._found[site] for site in in_order(self._found)}


def one_width(sites: dict[Site, SiteContents]) -> int:
    """Return the width of all rows at these sites; raises UsageError when they have several."""
    widths = {width for told in sites.values() for width in told.widths}
    if len(widths) != 1:
        expected = "those of one model; keep each model's in a data set of its own"
        raise UsageError(explain("rows", got=f"widths {sorted(widths)}", expected=expected))
    return next(iter(widths))


def in_order(sites: Iterable[Site]) -> list[Site]:
    """Return sites hook by hook, each from its first layer to its last."""
    return sorted(sites, key=lambda site: (HOOKS.index(site.hook), site.layer))
