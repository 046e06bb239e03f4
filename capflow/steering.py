"""What steers a request, as it is asked for: three tiers of vectors and clamps, patches, and named modules.

The *base* tier holds at every position, *prefill* at the prompt's positions, *decode* at generated ones. Vectors of all tiers that
hold at a position are added; then clamps hold, one after another. Patches come before both. A *module* is a
`Steering` that is known by a name.
"""

from __future__ import annotations

import msgspec

from capflow.clamp import Clamp
from capflow.patch import Patch
from capflow.vector import SteeringVector


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Vectors, at most one for each site, and clamps, of which a site may have several."""

    vectors: tuple[SteeringVector, ...] = ()
    clamps: tuple[Clamp, ...] = ()

    def scaled(self, scale: float) -> Tier:
        """Return the tier with its vectors and its clamps' strengths multiplied."""
        if scale == 1.0:
            return self
        return Tier(
            tuple(msgspec.structs.replace(v, scale=v.scale * scale) for v in self.vectors),
            tuple(msgspec.structs.replace(c, strength=c.strength * scale) for c in self.clamps),
        )


class ModuleUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named module and how much of it: its vectors and its clamps' strengths are multiplied by `scale`."""

    name: str
    scale: float = 1.0


class Steering(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one request asks for, or that a module or the global state holds."""

    base: Tier = Tier()
    prefill: Tier = Tier()
    decode: Tier = Tier()
    patches: tuple[Patch, ...] = ()
    modules: tuple[ModuleUse, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is asked for."""
        return self == NOTHING


NOTHING = Steering()
