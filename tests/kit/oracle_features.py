"""The autoencoders of the oracle, one at each site of the stream, and what steering by their features makes of rows."""

from __future__ import annotations

import functools

import numpy as np

from capflow.capture.site import STREAM_HOOKS
from tests.kit.autoencoders import saelens
from tests.kit.engines import WIDTH
from tests.kit.oracle_actions import SITES, vector

COUNT = 24
TIERS = ("", "prefill_", "decode_")


@functools.cache
def weights_of(site):
    """Return the weights at a site. The activation is a ReLU, so that a rounding error stays one."""
    rows = [vector(60 + number, site) / 3 for number in range(2 * COUNT)]
    return {
        "W_enc": np.stack(rows[:COUNT], 1) * np.float32(0.3),
        "W_dec": np.stack(rows[COUNT:]),
        "b_enc": np.full(COUNT, 0.3, np.float32),
        "b_dec": np.linspace(-0.1, 0.1, WIDTH, dtype=np.float32),
    }


def saved(root, steered=None):
    """Write the autoencoders; return them as the option `saes` takes them.

    steered: the names of the sites that can be steered; by default all.
    """
    names = [site for site in SITES if site.hook in STREAM_HOOKS and (steered is None or str(site) in steered)]
    return [f"{site}={saelens(root / str(number), weights_of(site))}@{site}" for number, site in enumerate(names)]


def field_of(site, seed, tier, how, gate):
    """Return what a request asks for: two features, others in each tier."""
    first = seed + 4 * TIERS.index(tier)
    features = {first: how, first + COUNT // 2: how}
    return {"sae": str(site), "features": features} | ({"gate": gate} if gate else {})


def uses_of(fields, site, behind):
    """Yield the features that a request steers by at a site: the number, what is done, where it holds, and the gate."""
    for tier, on in zip(TIERS, (np.ones_like(behind), ~behind, behind), strict=True):
        for entry in fields.get(f"{tier}steering_features", ()):
            if entry["sae"] == str(site):
                for number, how in entry["features"].items():
                    yield number, how, on, entry


def added(x, site, uses):
    """Add features to rows. uses: each with its factor at every row."""
    for number, how, factor in uses:
        if not isinstance(how, dict):
            x += np.outer(factor * how, weights_of(site)["W_dec"][number].astype(np.float64))


def set_at_once(x, site, uses):
    """Set features of rows, all encoded from the same rows."""
    if not uses:
        return
    tensors = {name: value.astype(np.float64) for name, value in weights_of(site).items()}
    active = np.maximum((x - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"], 0)
    for number, how, factor in uses:
        if isinstance(how, dict):
            moved = how.get("strength", 1.0) * (how["set"] - active[:, number])
            x += np.outer(factor * moved, tensors["W_dec"][number])
