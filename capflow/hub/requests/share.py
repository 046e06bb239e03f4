"""What one consumer wants of the requests of a model that brought the same spec.

Invariant: a share takes few bytes, whatever the spec says: sites are bits of a number, and sets of positions are shared
between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from capflow.buffers.memo import Memo
from capflow.capture.places import Places
from capflow.capture.positions import Positions
from capflow.capture.site import Site, sites_in
from capflow.capture.spec import CaptureSpec, Want

# The memory of a share, besides its masks and positions.
_SHARE_BYTES = 512
# The memory of a site of a block.
_SITE_BYTES = 128

Groups = tuple[tuple[Positions, int], ...]


class WantedAt(Mapping[Site, Want]):
    """What is wanted at each site, as `capflow.capture.spec.Wanted`.

    groups: masks of different sites, and what is wanted at these.
    """

    __slots__ = ("groups",)

    def __init__(self, groups: Iterable[tuple[int, Want]]) -> None:
        self.groups = tuple(groups)

    @classmethod
    def joined(cls, specs: Iterable[tuple[int, Want]]) -> WantedAt:
        """Return what satisfies all of some specs, each the mask of its sites and what it wants there."""
        groups: dict[Want, int] = {}
        for mask, want in specs:
            rest = mask
            for other, others in list(groups.items()):
                both = others & mask
                if both and want.joined(other) != other:
                    groups[other] = others & ~both
                    groups[want.joined(other)] = groups.get(want.joined(other), 0) | both
                rest &= ~others
            groups[want] = groups.get(want, 0) | rest
        return cls((mask, want) for want, mask in groups.items() if mask)

    def __getitem__(self, site: Site) -> Want:
        want: Want | None = self.get(site)
        if want is None:
            raise KeyError(site)
        return want

    def get(self, site: Site, default: Any = None) -> Any:
        """Return what is wanted at a site, `default` where nothing is."""
        number = site.number
        for mask, want in self.groups:
            if mask >> number & 1:
                return want
        return default

    def __iter__(self) -> Iterator[Site]:
        return (site for mask, _ in self.groups for site in sites_in(mask))

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask, _ in self.groups)


class Share:
    """What a consumer wants of such requests.

    memo: keeps what `groups` returned, of many shares.
    """

    __slots__ = ("_memo", "nbytes", "wanted")

    def __init__(self, wanted: WantedAt, memo: Memo[tuple[Share, tuple[Site, ...]], Groups]) -> None:
        self.wanted = wanted
        self.nbytes = _SHARE_BYTES + sum(mask.bit_length() // 8 + want.positions.nbytes for mask, want in wanted.groups)
        self._memo = memo

    @classmethod
    def of(
        cls,
        specs: Iterable[CaptureSpec],
        tapped: int,
        num_layers: int,
        memo: Memo[tuple[Share, tuple[Site, ...]], Groups],
    ) -> Share | None:
        """Return what some specs want of a model, given the mask of its tapped sites; None when that is nothing.

        Raises UsageError.
        """
        wants = [(s.mask(tapped, num_layers=num_layers), Want(s.set_of_positions(), s.dtype)) for s in specs]
        return cls(WantedAt.joined(wants), memo) if wants else None

    def groups(self, sites: tuple[Site, ...]) -> Groups:
        """Return, for a block's sites, the sets of positions wanted and at how many sites each."""
        groups = self._memo.get((self, sites))
        if groups is None:
            wants = map(self.wanted.get, sites)
            groups = tuple(Counter(want.positions for want in wants if want is not None).items())
            self._memo.put((self, sites), groups, self.nbytes + _SITE_BYTES * len(sites))
        return groups

    def wants_all(self, sites: tuple[Site, ...]) -> bool:
        """Return whether every position at each of a block's sites is wanted."""
        groups = self.groups(sites)
        return len(groups) == 1 and groups[0] == (Positions.ALL, len(sites))

    def places(self, prompt_length: int, site: str) -> Places | None:
        """Return the wanted positions at a site (`HOOK:LAYER`) for a prompt of this length; None if there are none."""
        want = self.wanted.get(Site.parse(site))
        return None if want is None else want.positions.at(prompt_length)

    def cut(self, prompt_length: int, computed_length: int) -> bool:
        """Return whether a budget of rows left out some of such a request."""
        return any(want.positions.cut(prompt_length, computed_length) for _, want in self.wanted.groups)
