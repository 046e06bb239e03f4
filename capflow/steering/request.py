"""What steers a request, as it is asked for: three tiers of vectors and clamps, patches, and named modules.

The *base* tier holds at every position, *prefill* at the prompt's positions, *decode* at generated ones. Vectors of all tiers that
hold at a position are added; then clamps hold, one after another. Patches come before both. A *module* is a
`Steering` that is known by a name.

As plain values, these are the fields of `STEERING_FIELDS`: those of an HTTP body, and the keyword arguments of
`capflow.sampling_params`. `parse_steering`, `parse_clamps` and `parse_patches` say what each holds.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site, refusal_of_fixed
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.clamp import Clamp, parse_clamps
from capflow.steering.patch import Patch, parse_patches
from capflow.steering.vector import SteeringVector, parse_steering
from capflow.text.brief import brief

_TIERS = {"base": "", "prefill": "prefill_", "decode": "decode_"}
"""What stands before the names of a tier's fields."""

STEERING_FIELDS = (
    *(f"{before}steering_vectors" for before in _TIERS.values()),
    *(f"{before}steering_clamps" for before in _TIERS.values()),
    "steering_patches",
    "steering_name",
    "steering_scale",
    "steering_module_ref",
)
"""The names of the plain values that say what steers a request."""

_NAME_EXPECTED = f"a name of 1..{limits.STEERING_NAME_LENGTH_MAX} characters"


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Vectors, at most one for each site, and clamps, of which a site may have several."""

    vectors: tuple[SteeringVector, ...] = ()
    clamps: tuple[Clamp, ...] = ()

    __repr__ = brief

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

    __repr__ = brief

    @classmethod
    def parse(cls, fields: Any, *, where: str = "") -> Steering:
        """Return the steering that plain values, by the names of `STEERING_FIELDS`, describe.

        where: what holds these fields, such as a module's name. Raises UsageError with the full path of the field
            first.
        """
        if isinstance(fields, Steering):
            return fields
        before = f"{where}." if where else ""
        if not isinstance(fields, Mapping):
            expected = 'a mapping like {"steering_vectors": …}'
            raise UsageError(explain(where or "steering", got=reprlib.repr(fields), expected=expected))
        for name in fields:
            if name not in STEERING_FIELDS:
                expected = f"one of {', '.join(STEERING_FIELDS)}"
                raise UsageError(explain(f"{before}{name}: unknown", expected=expected))
        tiers = {}
        for tier, start in _TIERS.items():
            vectors, clamps = f"{start}steering_vectors", f"{start}steering_clamps"
            tiers[tier] = Tier(
                parse_steering(fields[vectors], where=f"{before}{vectors}") if vectors in fields else (),
                parse_clamps(fields[clamps], where=f"{before}{clamps}") if clamps in fields else (),
            )
        patches = "steering_patches"
        steering = cls(
            **tiers,
            patches=parse_patches(fields[patches], where=f"{before}{patches}") if patches in fields else (),
            modules=_modules(fields, before),
        )
        steering._check_widths(before)
        return steering

    def parts(self, before: str = "") -> Iterator[tuple[str, SteeringVector | Clamp | Patch]]:
        """Yield every vector, clamp and patch with the name of its field.

        before: what stands before that.
        """
        for tier, start in _TIERS.items():
            held: Tier = getattr(self, tier)
            for vector in held.vectors:
                yield f"{before}{start}steering_vectors", vector
            for clamp in held.clamps:
                yield f"{before}{start}steering_clamps", clamp
        for patch in self.patches:
            yield f"{before}steering_patches", patch

    def check(self, info: ModelInfo, *, where: str = "") -> None:
        """Raise UsageError, with the full path of the field first, unless everything fits the model and its taps.

        Whether modules are known is not looked at.

        where: as in `parse`.
        """
        sites = frozenset(info.sites)
        for field, part in self.parts(f"{where}." if where else ""):
            if not 0 <= part.layer < info.num_layers:
                at = f"{field}.{part.hook}.{part.layer}"
                raise UsageError(explain(at, got=f"layer {part.layer}", expected=f"0..{info.num_layers - 1}"))
            part.check(sites, info.hidden_size, where=field)
            if part.site in info.fixed:
                raise UsageError(refusal_of_fixed(f"{field}.{part.hook}.{part.layer}", part.site))

    def _check_widths(self, before: str) -> None:
        """Raise UsageError when two entries differ in width."""
        first: tuple[str, float] | None = None
        for field, part in self.parts(before):
            at, width = f"{field}.{part.hook}.{part.layer}", part.width
            first = first or (at, width)
            if width != first[1]:
                expected = f"{first[1]:g}, as in {first[0]}"
                raise UsageError(explain(at, got=f"{width:g} numbers", expected=expected))

    def field_at(self, site: Site, kind: str) -> str | None:
        """Return the full path of the field with the most entries at a site; None where it has none.

        kind: `vectors` or `clamps`.
        """
        fields = Counter(field for field, part in self.parts() if field.endswith(kind) and part.site == site)
        return f"{fields.most_common(1)[0][0]}.{site.hook}.{site.layer}" if fields else None

    @property
    def largest_field(self) -> str:
        """The field that brings the most rows; `steering_name` where modules bring all, `steering` where nothing is said."""
        rows: Counter[str] = Counter()
        for field, part in self.parts():
            rows[field] += len(part.positions) if isinstance(part, Patch) else 1
        if rows:
            return max(rows, key=rows.__getitem__)
        return "steering_name" if self.modules else "steering"

    @property
    def empty(self) -> bool:
        """Whether nothing is asked for."""
        return self == NOTHING


NOTHING = Steering()


def _modules(fields: Mapping[str, Any], before: str) -> tuple[ModuleUse, ...]:
    """Return the modules that `steering_name` and `steering_scale` name, or the one of `steering_module_ref`."""
    named, scaled = f"{before}steering_name", f"{before}steering_scale"
    if "steering_module_ref" in fields:
        return (_module_ref(fields, before),)
    if "steering_name" not in fields:
        if "steering_scale" in fields:
            raise UsageError(explain(f"{scaled}: given without a name", expected="steering_name beside it"))
        return ()
    value = fields["steering_name"]
    if isinstance(value, Mapping) and "steering_scale" in fields:
        raise UsageError(explain(f"{scaled}: given beside scales by name", expected="one or the other"))
    scale = plain.number(fields.get("steering_scale", 1.0), scaled)
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Mapping | list | tuple) or not 0 < len(value) <= limits.STEERING_MODULES_MAX:
        expected = f"a name, a list of names or a mapping of name to scale, 1..{limits.STEERING_MODULES_MAX} of them"
        raise UsageError(explain(named, got=reprlib.repr(value), expected=expected))
    uses: dict[str, ModuleUse] = {}
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= limits.STEERING_NAME_LENGTH_MAX:
            raise UsageError(explain(named, got=reprlib.repr(name), expected=_NAME_EXPECTED))
        if name in uses:
            raise UsageError(explain(named, got=f"{name} twice", expected="each name once"))
        own = plain.number(value[name], f"{named}.{name}") if isinstance(value, Mapping) else scale
        uses[name] = ModuleUse(name, own)
    return tuple(uses.values())


def _module_ref(fields: Mapping[str, Any], before: str) -> ModuleUse:
    """Return the module that `steering_module_ref` names, `(name, scale)`."""
    field, value = f"{before}steering_module_ref", fields["steering_module_ref"]
    for other in ("steering_name", "steering_scale"):
        if other in fields:
            raise UsageError(explain(f"{field}: given beside {other}", expected="one or the other"))
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UsageError(explain(field, got=reprlib.repr(value), expected="a pair of name and scale"))
    name, scale = value
    if not isinstance(name, str) or not 0 < len(name) <= limits.STEERING_NAME_LENGTH_MAX:
        raise UsageError(explain(field, got=reprlib.repr(name), expected=_NAME_EXPECTED))
    return ModuleUse(name, plain.number(scale, field))
