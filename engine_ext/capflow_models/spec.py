"""Specifications: what steers a model at each of its layers, as a value that can be kept, changed and applied again.

At a layer the vector is added first; then the projection is capped; then the ablation holds. A specification becomes
a `capflow.steering.request.Steering`, which says what that does to the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.capture.site import HOOK_DEFAULT, HOOKS, Site, hook_named
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.clamp import Clamp
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow.text.brief import brief

Vector = npt.NDArray[np.float32]


def _read_only(value: Any, name: str) -> Vector:
    numbers = plain.vector(value, name).astype(np.float32)
    numbers.flags.writeable = False
    return numbers


def _direction(value: Any, name: str) -> Vector:
    numbers = _read_only(value, name)
    if not numbers.any():
        raise UsageError(explain(name, got="a zero vector", expected="a direction"))
    return numbers


@dataclass(frozen=True, eq=False)
class ProjectionCapSpec:
    """Bounds on how much of a direction the stream has.

    vector: the direction, `[hidden_size]` of any length but 0.
    cap_below, cap_above: the least and the most that `x · d` may be, for the unit vector `d`, in the stream's units;
        one of them may be None. Raises UsageError naming the field.
    """

    vector: Any
    cap_below: float | None = None
    cap_above: float | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "vector", _direction(self.vector, "projection_cap.vector"))
        if self.cap_below is None and self.cap_above is None:
            raise UsageError(explain("projection_cap: no bound", expected="cap_below, cap_above or both"))
        for name in ("cap_below", "cap_above"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, plain.number(value, f"projection_cap.{name}"))
        if self.cap_below is not None and self.cap_above is not None and self.cap_below > self.cap_above:
            expected = f"at most cap_above, {self.cap_above}"
            raise UsageError(explain("projection_cap.cap_below", got=self.cap_below, expected=expected))

    def clamp(self, site: Site) -> Clamp:
        """Return the cap as a clamp at a site."""
        bounds = {"min": self.cap_below, "max": self.cap_above}
        given = {name: value for name, value in bounds.items() if value is not None}
        return Clamp.make(site, self.vector, given, where=f"projection_cap.{site}")


@dataclass(frozen=True, eq=False)
class AblationSpec:
    """A direction of which the stream keeps `scale` times what it has: 0 removes it, 1 changes nothing.

    vector: the direction, `[hidden_size]` of any length but 0. Raises UsageError naming the field.
    """

    vector: Any
    scale: float = 0.0

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "vector", _direction(self.vector, "ablation.vector"))
        object.__setattr__(self, "scale", plain.number(self.scale, "ablation.scale"))

    def clamp(self, site: Site) -> Clamp:
        """Return the ablation as a clamp at a site."""
        bounds = {"value": 0.0, "strength": 1.0 - self.scale}
        return Clamp.make(site, self.vector, bounds, where=f"ablation.{site}")


@dataclass(frozen=True, eq=False)
class LayerSteeringSpec:
    """What is done at one layer, in this order: `scale · vector` is added, the cap holds, the ablation holds.

    vector: `[hidden_size]`, any numbers; kept as float32.
    relative: whether the vector is brought to length 1 and the scale is of the stream's norm at each token. What is
        None is not done. Raises UsageError naming the field.
    """

    vector: Any = None
    scale: float = 1.0
    projection_cap: ProjectionCapSpec | None = None
    ablation: AblationSpec | None = None
    relative: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.vector is not None:
            object.__setattr__(self, "vector", (_direction if self.relative else _read_only)(self.vector, "vector"))
        object.__setattr__(self, "scale", plain.number(self.scale, "scale"))

    @property
    def empty(self) -> bool:
        """Whether nothing is done."""
        return self.vector is None and self.projection_cap is None and self.ablation is None

    def tier(self, site: Site) -> Tier:
        """Return what is done as a tier of this one site."""
        vectors = () if self.vector is None else (SteeringVector.make(site, self.vector, self.scale, self.relative),)
        clamps = tuple(each.clamp(site) for each in (self.projection_cap, self.ablation) if each is not None)
        return Tier(vectors, clamps)


@dataclass(frozen=True, eq=False)
class SteeringSpec:
    """What steers a model: `layers` says what is done at each layer.

    A key is a layer's number, which means the stream as it leaves that layer, or a `Site`. Layers at which nothing is done are
    left out. Two specifications are equal when they do the same. Raises UsageError for a key that is no layer.
    """

    layers: Mapping[int | Site, LayerSteeringSpec] = field(default_factory=dict)

    __repr__ = brief

    def __post_init__(self) -> None:
        kept: dict[int | Site, LayerSteeringSpec] = {}
        for key, layer in self.layers.items():
            site = site_of(*key) if isinstance(key, Site) else site_of(key)
            if key_of(site) in kept:
                raise UsageError(explain(f"layers.{site}", got="the layer twice", expected="each layer once"))
            if not layer.empty:
                kept[key_of(site)] = layer
        object.__setattr__(self, "layers", MappingProxyType(kept))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringSpec) and self.steering() == other.steering()

    def __hash__(self) -> int:
        return hash(self.steering())

    def sites(self) -> Iterator[tuple[Site, LayerSteeringSpec]]:
        """Yield each site at which something is done with what is done there, in order."""
        named = ((key if isinstance(key, Site) else site_of(key), layer) for key, layer in self.layers.items())
        yield from sorted(named, key=lambda pair: pair[0])

    def at(self, site: Site) -> LayerSteeringSpec:
        """Return what is done at a site."""
        return self.layers.get(key_of(site), _NOTHING)

    def with_layer(self, site: Site, layer: LayerSteeringSpec) -> SteeringSpec:
        """Return the specification with what is done at one site exchanged."""
        return SteeringSpec({**self.layers, key_of(site): layer})

    def steering(self) -> Steering:
        """Return the same as what capflow steers by; it holds at every position."""
        tiers = [layer.tier(site) for site, layer in self.sites()]
        return Steering(Tier(tuple(v for t in tiers for v in t.vectors), tuple(c for t in tiers for c in t.clamps)))


_NOTHING = LayerSteeringSpec()


def site_of(layer: Any, hook: str = HOOK_DEFAULT) -> Site:
    """Return the site of a layer's number and a hook; raise UsageError for what is neither."""
    named = hook_named(hook)
    if named is None:
        raise UsageError(explain("hook", got=hook, expected=f"one of {', '.join(HOOKS)}"))
    return Site(plain.layer_number(layer, "layer"), named)


def key_of(site: Site) -> int | Site:
    """Return what a site is called in `SteeringSpec.layers`."""
    return site.layer if site.hook == HOOK_DEFAULT else site


def join(*parts: Steering | None) -> Steering:
    """Return one steering that does what all of these do: vectors of one tier and site are added up."""
    given = [part for part in parts if part is not None]

    def tier(name: str) -> Tier:
        tiers: list[Tier] = [getattr(part, name) for part in given]
        return Tier(_added(v for t in tiers for v in t.vectors), tuple(c for t in tiers for c in t.clamps))

    return Steering(
        tier("base"),
        tier("prefill"),
        tier("decode"),
        tuple(patch for part in given for patch in part.patches),
        tuple(use for part in given for use in part.modules),
    )


def _added(vectors: Iterable[SteeringVector]) -> tuple[SteeringVector, ...]:
    """Return one vector for each site and kind: where there are several, their sum in float64."""
    at: dict[tuple[Site, bool], list[SteeringVector]] = {}
    for vector in vectors:
        at.setdefault((vector.site, vector.relative), []).append(vector)
    added = (some[0] if len(some) == 1 else _sum(*kind, some) for kind, some in at.items())
    return tuple(vector for vector in added if vector is not None)


def _sum(site: Site, relative: bool, vectors: Sequence[SteeringVector]) -> SteeringVector | None:
    """Return one vector that adds what several do; None for relative ones that cancel out, which have no direction."""
    total = np.sum([vector.array(np.float64) for vector in vectors], axis=0)
    scale = float(np.linalg.norm(total)) if relative else 1.0
    return SteeringVector(site.layer, site.hook, total.tobytes(), "float64", scale, relative) if scale else None
