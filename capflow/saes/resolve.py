"""The features that a request steers by, resolved: each becomes a steering vector or a feature that is set."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from capflow.capture.model import ModelInfo
from capflow.capture.site import refusal_of_fixed
from capflow.errors import UsageError, explain
from capflow.saes.sae import Sae
from capflow.steering.feature import FeatureUse, SetFeature
from capflow.steering.plain import NUMBER_MAX
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector


def check_steers(saes: Mapping[str, Sae], info: ModelInfo) -> None:
    """Raise UsageError unless requests can be steered by the features of all these autoencoders in this model."""
    for sae in saes.values():
        sae.check_writes(info)
        if sae.target in info.fixed:
            raise UsageError(refusal_of_fixed(f"{sae.where}: site", sae.target))


def resolved(steering: Steering, saes: Mapping[str, Sae]) -> Steering:
    """Return a steering whose features are vectors and set features of its tiers.

    saes: by name.

    Raises UsageError, with the field first, for an unknown autoencoder, a feature that it does not have, a coefficient
    that is too large, and for setting a feature of a TopK autoencoder or of a transcoder.
    """
    if not steering.features:
        return steering
    vectors: dict[str, list[SteeringVector]] = {}
    features: dict[str, list[SetFeature]] = {}
    for use in steering.features:
        sae = saes.get(use.sae)
        if sae is None:
            names = ", ".join(sorted(saes)) or "none is named"
            do = "name it at the engine's start: --sae NAME=PATH"
            raise UsageError(explain(use.where, got=f"autoencoder {use.sae}", expected=f"a known one ({names})", do=do))
        if use.sets:
            features.setdefault(use.tier, []).append(_set(use, sae))
        else:
            vectors.setdefault(use.tier, []).append(_added(use, sae))
    tiers = {}
    for name in ("base", "prefill", "decode"):
        tier: Tier = getattr(steering, name)
        tiers[name] = Tier(
            (*tier.vectors, *vectors.get(name, ())), tier.clamps, (*tier.features, *features.get(name, ()))
        )
    made = msgspec.structs.replace(steering, features=(), **tiers)
    made.check_gates()
    return made


def _added(use: FeatureUse, sae: Sae) -> SteeringVector:
    direction = sae.feature(use.number, use.where).direction
    if abs(use.value) * float(np.abs(direction).max()) > NUMBER_MAX:
        got = f"{use.value:g} times a row of numbers up to {np.abs(direction).max():g}"
        raise UsageError(explain(use.where, got=got, expected="a product of float32's range"))
    return SteeringVector(*sae.target, direction.tobytes(), scale=use.value, gate=use.gate)


def _set(use: FeatureUse, sae: Sae) -> SetFeature:
    if sae.k:
        got = f"set with {use.sae}, a TopK autoencoder"
        expected = "add: whether its feature is active depends on all others"
        raise UsageError(explain(use.where, got=got, expected=expected))
    if sae.transcodes:
        got = f"set with {use.sae}, a transcoder from {sae.site} to {sae.target}"
        raise UsageError(explain(use.where, got=got, expected="add, or an autoencoder"))
    encoder, bias, threshold, direction = sae.feature(use.number, use.where)
    rows = encoder.tobytes(), direction.tobytes()
    return SetFeature(*sae.target, *rows, bias, threshold, use.value, use.strength, use.gate)
