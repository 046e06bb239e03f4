"""Which sites a data set has, and the widths and dtypes of their rows: asked before rows are read.

Invariant: a data set without rows is refused. A wanted site without rows is refused with a list of the sites that have
some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import PurePath

import msgspec

from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError, explain
from capflow_consumers.dataset.reader import RequestCapture

_SITES_SHOWN_MAX = 6
_WIDTHS_SHOWN_MAX = 4


class SiteContents(msgspec.Struct):
    """The rows of one site.

    rows: how many there are.
    shapes, dtypes: every shape of a row and every dtype that some rows have.
    """

    rows: int = 0
    shapes: set[tuple[int, ...]] = msgspec.field(default_factory=set)
    dtypes: set[str] = msgspec.field(default_factory=set)

    @property
    def widths(self) -> set[int]:
        """Every width that some rows have."""
        return {math.prod(shape) for shape in self.shapes}


class Contents:
    """The wanted sites of the captures that were added.

    wanted: the sites; all where there are none.

    It reads the sidecars, and opens no other file.
    """

    def __init__(self, path: PurePath, wanted: Iterable[Site] = ()) -> None:
        self._path = path
        self._wanted = frozenset(wanted)
        self._seen: set[Site] = set()
        self._sites: dict[Site, SiteContents] = {}

    def add(self, capture: RequestCapture) -> dict[Site, int]:
        """Add a capture; return how many rows it has at each wanted site."""
        sidecar = capture.sidecar
        self._seen.update(capture.sites)
        counts = {}
        for entry in sidecar.sites:
            if not self._wanted or entry.site in self._wanted:
                counts[entry.site] = entry.rows
                contents = self._sites.setdefault(entry.site, SiteContents())
                contents.rows += entry.rows
                contents.shapes.add(entry.row_shape(sidecar.hidden_size))
                contents.dtypes.add(entry.dtype or sidecar.dtype)
        return counts

    def sites(self, field: str) -> dict[Site, SiteContents]:
        """Return the wanted sites, in order.

        field: the option or argument that named the sites; an error begins with it.

        Raises UsageError when there are no rows, and for a wanted site that has none.
        """
        if not self._seen:
            do = "a request appears when it has ended"
            raise UsageError(explain(f"{self._path}", got="no rows", expected="a data set that has some", do=do))
        for site in in_order(self._wanted - set(self._sites)):
            seen = [str(site) for site in in_order(self._seen)]
            more = f" and {len(seen) - _SITES_SHOWN_MAX} more" if len(seen) > _SITES_SHOWN_MAX else ""
            expected = f"one of {', '.join(seen[:_SITES_SHOWN_MAX])}{more}"
            raise UsageError(explain(field, got=str(site), expected=expected, do="capflow inspect lists the sites"))
        return {site: self._sites[site] for site in in_order(self._sites)}


def one_width(sites: dict[Site, SiteContents]) -> int:
    """Return the width of all rows at these sites; raises UsageError when they have different widths."""
    first_of: dict[int, Site] = {}
    for site, contents in sites.items():
        if len(contents.widths) != 1:
            expected = "rows of one model; keep each model in a data set of its own"
            raise UsageError(explain(f"rows at {site}", got=f"widths {sorted(contents.widths)}", expected=expected))
        first_of.setdefault(next(iter(contents.widths)), site)
    if len(first_of) != 1:
        shown = [f"{site} of {width}" for width, site in first_of.items()]
        more = f" and {len(shown) - _WIDTHS_SHOWN_MAX} more" if len(shown) > _WIDTHS_SHOWN_MAX else ""
        got = f"{', '.join(shown[:_WIDTHS_SHOWN_MAX])}{more}"
        raise UsageError(explain("sites", got=got, expected="rows of one width", do="choose sites of one width"))
    return next(iter(first_of))


def in_order(sites: Iterable[Site]) -> list[Site]:
    """Return sites hook by hook, each from its first layer to its last."""
    return sorted(sites, key=lambda site: (HOOKS.index(site.hook), site.layer))
