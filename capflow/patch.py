"""Patches: rows of the residual stream replaced by, or moved towards, given ones (activation patching)."""

from __future__ import annotations

import msgspec

from capflow.site import Site


class Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows for positions of one site: `x ← x + amount · (row - x)`; an amount of 1 replaces `x`.

    positions: counted from the prompt's start, or from its end where negative (-1 is its last token). data: `[positions,
    hidden_size]` float32 little-endian, a row for each position.
    """

    layer: int
    hook: str
    positions: tuple[int, ...]
    data: bytes
    amount: float = 1.0

    @property
    def site(self) -> Site:
        """The site that is patched."""
        return Site(self.layer, self.hook)
