"""Specifications: the steering of a model at each of its layers, as an immutable value.

At a layer the vector is added first, then the projection is capped, then the ablation is applied. A specification is
converted to a `capflow.steering.request.Steering`, which defines the operations on the stream.
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
from capflow.text.notebook import html_table

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
    """Bounds on the stream's projection on a direction.

    vector: the direction, `[hidden_size]`, not zero.
    cap_below: the minimum of `x · d` for the unit vector `d`, in the stream's units; None for no bound.
    cap_above: the maximum of it; None for no bound.

    Raises UsageError that names the invalid field, and when there is no bound.
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
        present = {name: value for name, value in bounds.items() if value is not None}
        return Clamp.make(site, self.vector, present, where=f"projection_cap.{site}")


@dataclass(frozen=True, eq=False)
class AblationSpec:
    """A direction on which the stream's projection is multiplied by `scale`.

    vector: the direction, `[hidden_size]`, not zero.
    scale: 0 removes the direction, 1 changes nothing.

    Raises UsageError that names the invalid field.
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
    """The steering of one layer, in this order: `scale · vector` is added, then the cap applies, then the ablation.

    A field that is None does nothing.

    vector: `[hidden_size]`, any numbers; stored as float32.
    relative: whether the vector is scaled to length 1, and `scale` is relative to the stream's norm at each token.

    Raises UsageError that names the invalid field.
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
        """Whether this does nothing."""
        return self.vector is None and self.projection_cap is None and self.ablation is None

    def described(self) -> tuple[str, str, str]:
        """Return the vector, the cap and the ablation in words, each empty without one."""
        vector = cap = ablation = ""
        if self.vector is not None:
            length = float(np.linalg.norm(self.vector.astype(np.float64)))
            vector = f"{self.scale:g} x the stream's norm" if self.relative else f"{self.scale:g} x length {length:.4g}"
        if self.projection_cap is not None:
            bounds = self.projection_cap.cap_below, self.projection_cap.cap_above
            cap = " to ".join("any" if bound is None else f"{bound:g}" for bound in bounds)
        if self.ablation is not None:
            ablation = f"x {self.ablation.scale:g}"
        return vector, cap, ablation

    def tier(self, site: Site) -> Tier:
        """Return the same steering as a tier of one site."""
        vectors = () if self.vector is None else (SteeringVector.make(site, self.vector, self.scale, self.relative),)
        clamps = tuple(each.clamp(site) for each in (self.projection_cap, self.ablation) if each is not None)
        return Tier(vectors, clamps)


@dataclass(frozen=True, eq=False)
class SteeringSpec:
    """The steering of a model. Two specifications are equal if they have the same effect.

    layers: by a layer's number, which means the stream that leaves that layer, or by `Site`. Entries that do nothing
        are left out.

    Raises UsageError for a key that is neither, and for a layer that comes twice.
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

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a line for each site."""
        return html_table(
            ["site", "vector", "projection cap", "ablation"],
            [(str(site), *layer.described()) for site, layer in self.sites()],
            "SteeringSpec" if self.layers else "SteeringSpec: nothing is steered",
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringSpec) and self.steering() == other.steering()

    def __hash__(self) -> int:
        return hash(self.steering())

    def sites(self) -> Iterator[tuple[Site, LayerSteeringSpec]]:
        """Yield each steered site with its steering, in order."""
        named = ((key if isinstance(key, Site) else site_of(key), layer) for key, layer in self.layers.items())
        yield from sorted(named, key=lambda pair: pair[0])

    def at(self, site: Site) -> LayerSteeringSpec:
        """Return the steering of a site."""
        return self.layers.get(key_of(site), _NOTHING)

    def with_layer(self, site: Site, layer: LayerSteeringSpec) -> SteeringSpec:
        """Return the specification with the steering of one site replaced."""
        return SteeringSpec({**self.layers, key_of(site): layer})

    def steering(self) -> Steering:
        """Return the equal `Steering`; it applies at every position."""
        tiers = [layer.tier(site) for site, layer in self.sites()]
        return Steering(Tier(tuple(v for t in tiers for v in t.vectors), tuple(c for t in tiers for c in t.clamps)))


_NOTHING = LayerSteeringSpec()


def site_of(layer: Any, hook: str = HOOK_DEFAULT) -> Site:
    """Return the site of a layer's number and a hook. Raises UsageError for invalid ones."""
    named = hook_named(hook)
    if named is None:
        raise UsageError(explain("hook", got=hook, expected=f"one of {', '.join(HOOKS)}"))
    return Site(plain.layer_number(layer, "layer"), named)


def key_of(site: Site) -> int | Site:
    """Return the key of a site in `SteeringSpec.layers`."""
    return site.layer if site.hook == HOOK_DEFAULT else site


def join(*parts: Steering | None) -> Steering:
    """Return one steering with the effect of all parts; vectors of one tier, site and gate are added up."""
    present = [part for part in parts if part is not None]

    def tier(name: str) -> Tier:
        tiers: list[Tier] = [getattr(part, name) for part in present]
        return Tier(_added(v for t in tiers for v in t.vectors), tuple(c for t in tiers for c in t.clamps))

    return Steering(
        tier("base"),
        tier("prefill"),
        tier("decode"),
        tuple(patch for part in present for patch in part.patches),
        tuple(use for part in present for use in part.modules),
        tuple(dict.fromkeys(gate for part in present for gate in part.gates)),
        tuple(use for part in present for use in part.features),
    )


def _added(vectors: Iterable[SteeringVector]) -> tuple[SteeringVector, ...]:
    """Return one vector for each site, kind and gate; several are summed in float64."""
    groups: dict[tuple[Site, bool, str], list[SteeringVector]] = {}
    for vector in vectors:
        groups.setdefault((vector.site, vector.relative, vector.gate), []).append(vector)
    added = (group[0] if len(group) == 1 else _sum(*kind, group) for kind, group in groups.items())
    return tuple(vector for vector in added if vector is not None)


def _sum(site: Site, relative: bool, gate: str, vectors: Sequence[SteeringVector]) -> SteeringVector | None:
    """Return the sum of vectors of a site; None for relative ones whose sum is zero: they have no direction."""
    total = np.sum([vector.array(np.float64) for vector in vectors], axis=0)
    scale = float(np.linalg.norm(total)) if relative else 1.0
    return SteeringVector(site.layer, site.hook, total.tobytes(), "float64", scale, relative, gate) if scale else None
