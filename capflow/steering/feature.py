"""Features of sparse autoencoders: what a request asks for by number, and what setting one is made of.

A `FeatureUse` names a feature of an autoencoder that the engine knows by name. Added, it is a steering vector: the
coefficient times the decoder's row, at the site that the autoencoder reconstructs. Set, it is a `SetFeature`: with the
feature's activation `f(x)`, its decoder row `d` and the value `v`,

    x ← x + strength · (v - f(x)) · d

so the activation becomes `v` (0 ablates the feature) and the rest of `x` stays: the other features, and what the
autoencoder does not reconstruct. All features that are set at a site are encoded from the same `x`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.vector import AtSite

_EXAMPLE = '{"sae": "mood", "features": {"123": 4.0, "7": {"set": 0}}}'
_KEYS = ("add", "set", "strength", "gate")


class FeatureUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One feature of an autoencoder, before its weights are known.

    sae: the autoencoder's name.
    number: the feature's.
    value: the coefficient of the decoder's row, or the activation that is set.
    sets: whether the activation is set.
    strength: how far a set activation moves to the value; 1 is all the way.
    gate: the name of the gate that multiplies it; empty without one.
    tier: `base`, `prefill` or `decode`.
    where: the field that holds it, for messages.
    """

    sae: str
    number: int
    value: float
    sets: bool = False
    strength: float = 1.0
    gate: str = ""
    tier: str = "base"
    where: str = "steering_features"

    def scaled(self, scale: float) -> FeatureUse:
        """Return the use with its coefficient multiplied, or with its strength if it is set."""
        if self.sets:
            return msgspec.structs.replace(self, strength=self.strength * scale)
        return msgspec.structs.replace(self, value=self.value * scale)


class SetFeature(AtSite, frozen=True, forbid_unknown_fields=True):
    """One feature whose activation is set at one site.

    encoder: the encoder's row, `[hidden_size]` float32 little-endian.
    data: the decoder's row, `[hidden_size]` float32 little-endian.
    bias: the activation is `a = x · encoder + bias` where that is above the threshold, else 0.
    value: what the activation becomes.
    strength: 1 moves the activation all the way to the value, 0 not at all.
    gate: the name of the gate that multiplies the strength; empty without one.
    """

    layer: int
    hook: str
    encoder: bytes
    data: bytes
    bias: float
    threshold: float
    value: float
    strength: float = 1.0
    gate: str = ""

    def needs_row(self, part: int) -> str:
        """Return what it is, as `AtSite.needs_row` does: its activation is of whole rows."""
        del part
        return "a feature that is set"

    def check(self, sites: Collection[Site], row: int | tuple[int, ...], *, where: str = "steering_features") -> None:
        """Raise UsageError unless the feature fits a model with these tapped sites and rows of this width or shape.

        where: the field that holds the features.
        """
        field = f"{where}.{self.hook}.{self.layer}"
        self.site.check_tapped(sites, field)
        plain.check_width(self.width, row, field)
        plain.check_width(len(self.encoder) / 4, row, field)
        for each in (self.encoder, self.data):
            plain.check_finite(np.frombuffer(each, np.float32), field)
        numbers = (self.bias, self.threshold, self.value, self.strength)
        if not all(math.isfinite(number) and abs(number) <= plain.NUMBER_MAX for number in numbers):
            got = f"bias, threshold, value and strength {', '.join(f'{number:g}' for number in numbers)}"
            raise UsageError(explain(field, got=got, expected="finite numbers of float32's range"))


def parse_features(value: Any, tier: str = "base", *, where: str = "steering_features") -> tuple[FeatureUse, ...]:
    """Return the features that a plain value describes: `{"sae": name, "features": {number: what}}`, or a list of such.

    `what` is the coefficient of the decoder's row, `{"add": coefficient}`, or `{"set": value, "strength": 1.0}`; both
    mappings may have `"gate": name`. A gate beside `features` is for all of them that name none.

    Raises UsageError with the field first. Parsed features of this tier are returned unchanged.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(each, FeatureUse) for each in value):
        for use in value:
            if use.tier != tier:
                got = f"feature {use.number} of the tier {use.tier}"
                raise UsageError(explain(where, got=got, expected=f"features of the tier {tier}"))
        check_count(value, where)
        return tuple(value)
    if not isinstance(value, Mapping | list | tuple):
        raise UsageError(explain(where, got=reprlib.repr(value), expected=f"a mapping like {_EXAMPLE}"))
    uses: list[FeatureUse] = []
    for field, entry in plain.one_or_several(value, where, "features of an autoencoder"):
        uses += _of_sae(entry, tier, field)
        check_count(uses, where)
    seen: set[tuple[str, int]] = set()
    for use in uses:
        if (use.sae, use.number) in seen:
            raise UsageError(explain(use.where, got=f"feature {use.number} twice", expected="each feature once"))
        seen.add((use.sae, use.number))
    return tuple(uses)


def check_count(uses: Sequence[FeatureUse], where: str = "steering_features") -> None:
    """Raise UsageError if there are too many features. where: the field that holds them."""
    if len(uses) > limits.FEATURES_STEERED_MAX:
        got = f"{len(uses):,} features"
        expected = f"at most {limits.FEATURES_STEERED_MAX:,}, with those of all autoencoders and of all tiers"
        raise UsageError(explain(where, got=got, expected=expected))


def check_tiers(uses: Sequence[FeatureUse]) -> None:
    """Raise UsageError if a feature is set at every position, and at the prompt's or at generated ones too."""
    everywhere = {(use.sae, use.number) for use in uses if use.sets and use.tier == "base"}
    for use in uses:
        if use.sets and use.tier != "base" and (use.sae, use.number) in everywhere:
            expected = "a feature that steering_features does not set"
            raise UsageError(explain(use.where, got=f"feature {use.number}", expected=expected))


def _of_sae(entry: Mapping[Any, Any], tier: str, where: str) -> Iterator[FeatureUse]:
    plain.check_keys(entry, where, ("sae", "features", "gate"), ("sae", "features"))
    sae, features = entry["sae"], entry["features"]
    if not isinstance(sae, str) or not 0 < len(sae) <= limits.STEERING_NAME_LENGTH_MAX:
        raise UsageError(explain(f"{where}.sae", got=reprlib.repr(sae), expected="the name of an autoencoder"))
    if not isinstance(features, Mapping) or not 0 < len(features) <= limits.FEATURES_STEERED_MAX:
        got = f"{len(features)} features" if isinstance(features, Mapping) else reprlib.repr(features)
        expected = f"a mapping of feature to coefficient, 1..{limits.FEATURES_STEERED_MAX} of them"
        raise UsageError(explain(f"{where}.features", got=got, expected=expected))
    shared = plain.gate_name(entry, where)
    numbered = [(_number(key, f"{where}.features"), how) for key, how in features.items()]
    # Messages of protobuf have no order, and equal requests have equal keys.
    for number, how in sorted(numbered, key=itemgetter(0)):
        field = f"{where}.features.{number}"
        given = how if isinstance(how, Mapping) else {"add": how}
        plain.check_keys(given, field, _KEYS)
        if ("add" in given) == ("set" in given):
            raise UsageError(explain(field, got=reprlib.repr(how), expected="a coefficient, or one of add and set"))
        if "strength" in given and "set" not in given:
            raise UsageError(explain(f"{field}.strength", got="given beside add", expected="set beside it"))
        name = "set" if "set" in given else "add"
        value = plain.number(given[name], f"{field}.{name}" if isinstance(how, Mapping) else field)
        strength = plain.number(given.get("strength", 1.0), f"{field}.strength")
        gate = plain.gate_name(given, field) or shared
        yield FeatureUse(sae, number, value, name == "set", strength, gate, tier, field)


def _number(key: Any, field: str) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
        key = int(key)
    return plain.whole(key, field, 0, 10**9 - 1, "the number of a feature")
