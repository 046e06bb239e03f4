"""The gate with tier=in-graph: steering that the hub gives to its requests, decided in the forward pass itself."""

from __future__ import annotations

from typing import Any

import msgspec

from capflow.errors import UsageError, explain
from capflow.probes.probe import Probe, load_vector
from capflow.steering.gate import POSITION_NAMES, SteeringGate
from capflow.steering.request import Steering, Tier

TIERS = ("sync", "in-graph")
GATE_NAME = "gate"

# The options of a gate that it has with either tier, or with tier=in-graph only.
_SHARED = ("probe", "vector", "threshold", "scale", "positions", "score", "label", "requests", "tier")
_OWN = ("sharpness", "latch")
_POSITIONS = {**{name: name for name in POSITION_NAMES}, "all_generated": "generated", "all_prompt": "prompt"}


def in_graph(config: Any) -> bool:
    """Return whether the options are of tier=in-graph; raise UsageError for one that its tier does not have.

    config: a `GateConfig`.
    """
    if config.tier not in TIERS:
        raise UsageError(explain("consumers.gate.tier", got=config.tier, expected=f"one of {', '.join(TIERS)}"))
    chosen = bool(config.tier == "in-graph")
    for field in msgspec.structs.fields(config):
        name = field.name
        wrong = name not in (*_SHARED, *_OWN) if chosen else name in _OWN
        if wrong and getattr(config, name) != field.default:
            expected = f"none, with tier={config.tier}"
            do = f"use tier={TIERS[not chosen]}, or leave it out"
            raise UsageError(explain(f"consumers.gate.{name}", got=getattr(config, name), expected=expected, do=do))
    return chosen


def steering_of(config: Any, probe: Probe, threshold: float) -> Steering:
    """Return the gate of the options with its vector; raise UsageError if they cannot work."""
    where = "consumers.gate"
    if not config.vector:
        raise UsageError(explain(f"{where}.vector", got="none", expected="a file, with tier=in-graph"))
    if config.positions not in _POSITIONS:
        expected = f"one of {', '.join(_POSITIONS)}, with tier=in-graph"
        raise UsageError(explain(f"{where}.positions", got=config.positions, expected=expected))
    if config.positions == "last_prompt" and not config.latch:
        expected = "true, with positions=last_prompt: otherwise no other token is steered"
        raise UsageError(explain(f"{where}.latch", got=config.latch, expected=expected))
    vector = load_vector(config.vector, config.scale)
    vector.site.check_stream(f"{config.vector}: site")
    if vector.array().size != probe.hidden_size:
        expected = f"{probe.hidden_size}, the probe's width"
        raise UsageError(explain(f"{config.vector}: vector", got=f"{vector.array().size} numbers", expected=expected))
    gate = SteeringGate(
        GATE_NAME,
        probe.site.layer,
        probe.site.hook,
        probe.weight[0].tobytes(),
        bias=float(probe.bias[0]),
        threshold=float(threshold),
        score=config.score,
        sharpness=config.sharpness,
        latch=config.latch,
        positions=_POSITIONS[config.positions],
        label=config.label,
    )
    gate.check_values(where)
    if not gate.acts_at(vector.site):
        order = "after" if gate.latch else "at or after"
        expected = f"a vector {order} the probe's site, {probe.site}"
        raise UsageError(explain(f"{where}.vector", got=f"one at {vector.site}", expected=expected))
    steering = Steering(Tier((msgspec.structs.replace(vector, gate=GATE_NAME),)), gates=(gate,))
    steering.check_gates(f"{where}.")
    return steering
