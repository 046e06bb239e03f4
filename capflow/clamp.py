"""Clamps: a bound on how much of a direction the residual stream has at a site.

With `p = x · d` for the unit vector `d`, a clamp does `x ← x + strength · (min(max(p, low), high) - p) · d`. Equal
bounds set the projection to a value; 0 removes the direction (directional ablation, Arditi et al. 2024, arXiv:2406.11717).
"""

from __future__ import annotations

import math

import msgspec

from capflow.site import Site


class Clamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One direction at one site. data: the unit vector, `[hidden_size]` float32 little-endian.

    low, high: the bounds of the projection, in the stream's units. strength: 1 moves the projection all the way
    into its bounds, 0 not at all.
    """

    layer: int
    hook: str
    data: bytes
    low: float = -math.inf
    high: float = math.inf
    strength: float = 1.0

    @property
    def site(self) -> Site:
        """The site that is clamped."""
        return Site(self.layer, self.hook)
