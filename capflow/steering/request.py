"""The steering that a request asks for: three tiers of vectors, clamps and features, patches, gates, named modules.

The *base* tier applies at every position, *prefill* at prompt positions, *decode* at generated ones. At a position,
gates score first. Patches come next. Then the vectors of all its tiers are added. Then the features of sparse
autoencoders are set, all at once. Then the clamps apply, one after another. A *module* is a named `Steering`. The names
of gates are scoped to their `Steering`.

As plain values, these are the fields of `STEERING_FIELDS`: fields of an HTTP body, and keyword arguments of
`capflow.sampling_params`. `parse_steering`, `parse_clamps`, `parse_features`, `parse_patches` and `parse_gates` define
their values.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import SHAPED_HOOKS, Site, refusal_of_divided, refusal_of_fixed
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.clamp import Clamp, parse_clamps
from capflow.steering.feature import FeatureUse, SetFeature, check_count, check_tiers, parse_features
from capflow.steering.gate import SteeringGate, check_names, parse_gates
from capflow.steering.patch import Patch, parse_patches
from capflow.steering.vector import SteeringVector, all_finite, parse_steering
from capflow.text.brief import brief

_TIERS = {"base": "", "prefill": "prefill_", "decode": "decode_"}
"""The prefix of the field names of each tier."""

STEERING_FIELDS = (
    *(f"{before}steering_vectors" for before in _TIERS.values()),
    *(f"{before}steering_clamps" for before in _TIERS.values()),
    *(f"{before}steering_features" for before in _TIERS.values()),
    "steering_patches",
    "steering_gates",
    "steering_name",
    "steering_scale",
    "steering_module_ref",
)
"""The names of the plain values that steer a request."""

_NAME_EXPECTED = f"a name of 1..{limits.STEERING_NAME_LENGTH_MAX} characters"


Part = SteeringVector | Clamp | SetFeature | Patch
"""What acts at one site."""


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Vectors, at most one absolute and one relative for each site and gate, any number of clamps, and set features."""

    vectors: tuple[SteeringVector, ...] = ()
    clamps: tuple[Clamp, ...] = ()
    features: tuple[SetFeature, ...] = ()

    __repr__ = brief

    def scaled(self, scale: float) -> Tier:
        """Return the tier with its vectors and the strengths of its clamps and set features multiplied."""
        if scale == 1.0:
            return self
        return Tier(
            tuple(msgspec.structs.replace(v, scale=v.scale * scale) for v in self.vectors),
            tuple(msgspec.structs.replace(c, strength=c.strength * scale) for c in self.clamps),
            tuple(msgspec.structs.replace(f, strength=f.strength * scale) for f in self.features),
        )


class ModuleUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named module and its scale, which multiplies its vectors and the strengths of its clamps."""

    name: str
    scale: float = 1.0


class Steering(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steering of one request, of a module, or of the global state.

    base, prefill, decode: the vectors and clamps for all, prompt and generated positions.
    modules: the named modules to apply.
    gates: the gates that vectors, clamps and patches name; one that none names only reports its scores.
    features: the features of autoencoders that are not yet resolved (`capflow.saes.resolve`).
    """

    base: Tier = Tier()
    prefill: Tier = Tier()
    decode: Tier = Tier()
    patches: tuple[Patch, ...] = ()
    modules: tuple[ModuleUse, ...] = ()
    gates: tuple[SteeringGate, ...] = ()
    features: tuple[FeatureUse, ...] = ()

    __repr__ = brief

    @classmethod
    def parse(cls, fields: Any, *, where: str = "") -> Steering:
        """Return the steering that plain values describe; their names are `STEERING_FIELDS`.

        where: the name of the object that holds these fields, such as a module's.

        Raises UsageError with the full path of the field first.
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
        tiers: dict[str, Tier] = {}
        uses: list[FeatureUse] = []
        for tier, prefix in _TIERS.items():
            vectors, clamps = f"{prefix}steering_vectors", f"{prefix}steering_clamps"
            tiers[tier] = Tier(
                parse_steering(fields[vectors], where=f"{before}{vectors}") if vectors in fields else (),
                parse_clamps(fields[clamps], where=f"{before}{clamps}") if clamps in fields else (),
            )
            if (features := f"{prefix}steering_features") in fields:
                uses += parse_features(fields[features], tier, where=f"{before}{features}")
                check_count(uses, f"{before}{features}")
        check_tiers(uses)
        patches, gates = "steering_patches", "steering_gates"
        steering = cls(
            **tiers,
            patches=parse_patches(fields[patches], where=f"{before}{patches}") if patches in fields else (),
            modules=_modules(fields, before),
            gates=parse_gates(fields[gates], where=f"{before}{gates}") if gates in fields else (),
            features=tuple(uses),
        )
        steering._check_widths(before)
        steering.check_gates(before)
        return steering

    def parts(self, before: str = "") -> Iterator[tuple[str, Part]]:
        """Yield every vector, clamp, set feature and patch with the name of its field.

        before: a prefix of these names.
        """
        for name, prefix in _TIERS.items():
            tier: Tier = getattr(self, name)
            for vector in tier.vectors:
                yield f"{before}{prefix}steering_vectors", vector
            for clamp in tier.clamps:
                yield f"{before}{prefix}steering_clamps", clamp
            for feature in tier.features:
                yield f"{before}{prefix}steering_features", feature
        for patch in self.patches:
            yield f"{before}steering_patches", patch

    def check(self, info: ModelInfo, *, where: str = "") -> None:
        """Raise UsageError, with the full path of the field first, unless all parts fit the model and its taps.

        It does not check whether named modules exist.

        where: as in `parse`.
        """
        sites = frozenset(info.sites)
        finite = all_finite(part for _, part in self.parts() if isinstance(part, SteeringVector))
        for field, part in self.parts(f"{where}." if where else ""):
            if not 0 <= part.layer < info.num_layers:
                at = f"{field}.{part.hook}.{part.layer}"
                raise UsageError(explain(at, got=f"layer {part.layer}", expected=f"0..{info.num_layers - 1}"))
            row = info.shape_of(part.site)
            if isinstance(part, SteeringVector):
                part.check(sites, row, where=field, finite=finite)
            else:
                part.check(sites, row, where=field)
            _check_steerable(info, part, f"{field}.{part.hook}.{part.layer}")
        self._check_probes(info, f"{where}." if where else "")
        self.check_gates(f"{where}." if where else "")

    def _check_probes(self, info: ModelInfo, before: str) -> None:
        """Raise UsageError unless every gate fits the model and its taps."""
        where = f"{before}steering_gates"
        for gate in self.gates:
            if not 0 <= gate.layer < info.num_layers:
                at = f"{where}.{gate.name}.layer"
                raise UsageError(explain(at, got=f"layer {gate.layer}", expected=f"0..{info.num_layers - 1}"))
            gate.check(frozenset(info.sites), info.shape_of(gate.site), where=where)
            _check_steerable(info, gate, f"{where}.{gate.name}", "score")

    def check_gates(self, before: str = "") -> None:
        """Raise UsageError for a part that names no gate of this steering, or whose gate can never act there.

        before: a prefix of the names of fields.
        """
        check_names(self.gates, f"{before}steering_gates")
        gates = {gate.name: gate for gate in self.gates}
        for use in self.features:
            if use.gate and use.gate not in gates:
                names = ", ".join(sorted(gates)) or "there are none"
                expected = f"one of steering_gates beside it ({names})"
                raise UsageError(explain(f"{use.where}.gate", got=use.gate, expected=expected))
        for field, part in self.parts(before):
            if not part.gate:
                continue
            at = f"{field}.{part.hook}.{part.layer}.gate"
            gate = gates.get(part.gate)
            if gate is None:
                names = ", ".join(sorted(gates)) or "there are none"
                expected = f"one of steering_gates beside it ({names})"
                raise UsageError(explain(at, got=part.gate, expected=expected))
            if not gate.acts_at(part.site):
                got = f"{gate.name}, whose probe is at {gate.site}"
                expected = f"a probe {'before' if gate.latch else 'at or before'} {part.site}"
                do = "a latched gate acts only behind its probe's site" if gate.latch else ""
                raise UsageError(explain(at, got=got, expected=expected, do=do))
            reason = _never_acts(gate, field.removeprefix(before), part)
            if reason:
                got = f"{gate.name}, which scores {gate.positions} positions"
                raise UsageError(explain(at, got=got, expected="a gate that can act there", do=reason))

    def _check_widths(self, before: str) -> None:
        """Raise UsageError if two parts differ in width whose sites have rows of one width."""
        first: dict[Site | None, tuple[str, float]] = {}
        probes = ((f"{before}steering_gates.{gate.name}.vector", gate) for gate in self.gates)
        parts = ((f"{field}.{part.hook}.{part.layer}", part) for field, part in self.parts(before))
        for at, part in (*parts, *probes):
            if getattr(part, "index", ()):
                continue
            alike = part.site if part.hook in SHAPED_HOOKS else None
            other, width = first.setdefault(alike, (at, part.width))
            if part.width != width:
                raise UsageError(explain(at, got=f"{part.width:g} numbers", expected=f"{width:g}, as in {other}"))

    def field_at(self, site: Site, kind: str) -> str | None:
        """Return the full path of the field with the most entries at a site; None if it has none.

        kind: `vectors`, `clamps` or `features`.
        """
        fields = Counter(field for field, part in self.parts() if field.endswith(kind) and part.site == site)
        return f"{fields.most_common(1)[0][0]}.{site.hook}.{site.layer}" if fields else None

    @property
    def largest_field(self) -> str:
        """The field with the most rows; `steering_name` if only modules are named; `steering` if there is no field."""
        rows: Counter[str] = Counter(steering_gates=len(self.gates)) if self.gates else Counter()
        rows.update({"steering_features": len(self.features)} if self.features else {})
        for field, part in self.parts():
            rows[field] += len(part.positions) if isinstance(part, Patch) else 1
        if rows:
            return max(rows, key=rows.__getitem__)
        return "steering_name" if self.modules else "steering"

    @property
    def empty(self) -> bool:
        """Whether this steering asks for nothing."""
        return self == NOTHING


NOTHING = Steering()


def _check_steerable(info: ModelInfo, part: Part | SteeringGate, at: str, verb: str = "steer") -> None:
    """Raise UsageError for a site that can only be captured, and for what ranks that divide its rows cannot do.

    at: the part's field.
    """
    if part.site in info.fixed:
        raise UsageError(refusal_of_fixed(at, part.site, verb))
    parts = info.parts_of(part.site)
    if parts > 1 and (got := part.needs_row(info.width_of(part.site) // parts)):
        raise UsageError(refusal_of_divided(at, part.site, info.ranks or 1, got))


def _never_acts(gate: SteeringGate, field: str, part: Part) -> str:
    """Return what to change if a gated part can never act at a position that its field covers; else nothing."""
    latch = f"set steering_gates.{gate.name}.latch"
    if isinstance(part, Patch):
        before_end = max(part.positions) < 0
        if before_end and gate.positions == "generated":
            return "score the positions that are patched"
        if max(part.positions) < -1 and gate.positions == "last_prompt":
            return "score the positions that are patched"
    elif field.startswith("prefill_"):
        return "score the prompt" if gate.positions == "generated" else ""
    elif not gate.latch and (
        gate.positions == "last_prompt" or (field.startswith("decode_") and gate.positions == "prompt")
    ):
        return latch if field.startswith("decode_") else f"{latch}, or use prefill_{field}"
    return ""


def _modules(fields: Mapping[str, Any], before: str) -> tuple[ModuleUse, ...]:
    """Return the modules that `steering_name` and `steering_scale`, or `steering_module_ref`, name."""
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
    """Return the module that `steering_module_ref` names: `(name, scale)`."""
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
