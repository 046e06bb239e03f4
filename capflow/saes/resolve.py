"""The features that a request steers by, resolved: each becomes a steering vector or a feature that is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site, refusal_of_fixed
from capflow.errors import UsageError, explain
from capflow.saes.sae import Sae
from capflow.steering.feature import FeatureUse, SetFeature, check_count
from capflow.steering.plain import NUMBER_MAX
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector

# Decoder rows that are in memory at once, in float64.
_ROWS = 256


def check_steers(saes: Mapping[str, Sae], info: ModelInfo) -> None:
    """Raise UsageError unless requests can be steered by the features of all these autoencoders in this model."""
    for sae in saes.values():
        sae.check_writes(info)
        if sae.target in info.fixed:
            raise UsageError(refusal_of_fixed(f"{sae.where}: site", sae.target))


def resolved(steering: Steering, saes: Mapping[str, Sae]) -> Steering:
    """Return a steering whose features are vectors and set features of its tiers.

    The features that a tier adds at a site with one gate become one vector, together with the tier's own vector there.

    saes: by name.

    Raises UsageError, with the field first, for too many features, an unknown autoencoder, a feature that it does not
    have, coefficients that are too large, and for setting a feature of a TopK autoencoder or of a transcoder.
    """
    if not steering.features:
        return steering
    check_count(steering.features)
    added: dict[str, list[FeatureUse]] = {}
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
            sae.check_feature(use.number, use.where)
            added.setdefault(use.tier, []).append(use)
    tiers = {}
    for name in ("base", "prefill", "decode"):
        tier: Tier = getattr(steering, name)
        vectors = _with_added(tier.vectors, added.get(name, ()), saes)
        tiers[name] = Tier(vectors, tier.clamps, (*tier.features, *features.get(name, ())))
    made = msgspec.structs.replace(steering, features=(), **tiers)
    made.check_gates()
    return made


def _with_added(
    vectors: Sequence[SteeringVector], uses: Sequence[FeatureUse], saes: Mapping[str, Sae]
) -> tuple[SteeringVector, ...]:
    """Return the vectors of a tier with the features that it adds, at most one absolute vector for a site and gate."""
    groups: dict[tuple[Site, str], list[FeatureUse]] = {}
    for use in uses:
        groups.setdefault((saes[use.sae].target, use.gate), []).append(use)
    made = list(vectors)
    for (site, gate), group in groups.items():
        total = _sum(group, saes)
        own = [v for v in made if (v.site, v.gate, v.relative) == (site, gate, False) and v.width == len(total)]
        made = [vector for vector in made if not any(vector is one for one in own)]
        for vector in own:
            total = total + vector.array(np.float64)
        # A scale of 0 removes a vector from the global state.
        made.append(SteeringVector(*site, total.tobytes(), "float64", float(total.any()), gate=gate))
    return tuple(made)


def _sum(uses: Sequence[FeatureUse], saes: Mapping[str, Sae]) -> npt.NDArray[np.float64]:
    """Return the sum of features that are added at one site, `[width of the target]`; each is its coefficient's.

    Raises UsageError, with the field of the largest coefficient first, if it is beyond float32.
    """
    total = np.zeros(saes[uses[0].sae].decoder.shape[1])
    for name in dict.fromkeys(use.sae for use in uses):
        some = [use for use in uses if use.sae == name]
        for first in range(0, len(some), _ROWS):
            part = some[first : first + _ROWS]
            rows = saes[name].decoder[[use.number for use in part]]
            total += np.array([use.value for use in part]) @ rows.astype(np.float64)
    if (largest := float(np.abs(total).max())) > NUMBER_MAX:
        use = max(uses, key=lambda use: abs(use.value))
        got = f"{use.value:g}, so that a sum of {len(uses)} features has {largest:g}"
        raise UsageError(explain(use.where, got=got, expected=f"a sum of at most {NUMBER_MAX:.3g}"))
    return total


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
