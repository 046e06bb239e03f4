"""What Transformers computes in float64 for a request with steering of every kind, gates, and actions by position."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from capflow.capture.site import Site
from tests.kit.entries import clamp, patch, plain_clamp
from tests.kit.gated import GatedReference, score_of, scored_positions
from tests.kit.oracle_actions import Changes
from tests.kit.oracle_features import added, set_at_once, uses_of
from tests.kit.steered import entries


class Right(NamedTuple):
    """What is right for a request.

    rows: what each site holds before it is steered.
    logits: after each token.
    flips: how often gates flipped.
    apart: the least margin of a hard gate, or of one that ends the request.
    ends: the first position at which a gate ends the request; None if none does.
    """

    rows: dict[Site, Any]
    logits: Any
    flips: int
    apart: float
    ends: int | None


class _Holding:
    """What holds at each position, as arrays over the positions.

    own: the factor of the request's own steering.
    steers: for each `Steer` and its owner's place, its gain at each position; 0 where it does not hold.
    """

    def __init__(self, changes, count):
        states = [changes.at(position) for position in range(count)]
        self.own = np.array([state.own for state in states])
        self.gates = [state.gate for state in states]
        self.steers = {}
        for position, state in enumerate(states):
            for action, gain in state.steers:
                self.steers.setdefault(action.label, (action, np.zeros(count)))[1][position] = gain

    def parameter(self, name, value):
        """Return a parameter of the request's gate at each position."""
        values = []
        for gate in self.gates:
            changed = [getattr(action, name) for action in gate]
            values.append(next((each for each in reversed(changed) if each is not None), value))
        return np.array(values)


class OracleReference(GatedReference):
    """Steering in all tiers, with or without gates."""

    def run(self, tokens, prompt_length, fields, changes=None):
        """Return what is right for tokens under the fields of a request and the changes of its steering."""
        count = len(tokens)
        behind = np.arange(count) >= prompt_length
        gates = fields.get("steering_gates", {})
        holding = _Holding(changes or Changes(), count)
        seen, margins, values = {}, {}, {}

        def steer(site, stream):
            x = stream[0].numpy().copy()
            seen[site] = x.copy()
            for name, gate in gates.items():
                if Site(gate["layer"], gate["hook"]) == site:
                    scored = scored_positions(gate["positions"], prompt_length, count)
                    scores = score_of(gate["score"], np.asarray(gate["vector"], np.float64), x)
                    thresholds = holding.parameter("threshold", gate["threshold"])
                    margins[name] = np.where(scored, scores - thresholds, -np.inf)
                    values[name] = _value(gate, margins[name], holding)
            self._patched(x, site, prompt_length, fields, values, holding.own)
            for given, on in self._tiered(fields, "vectors", site, behind):
                factor = given.get("scale", 1.0) * on * holding.own * _factor(given, values, count)
                x += factor[:, None] * given["vector"]
            for _, (action, gain) in sorted(holding.steers.items()):  # controllers' have no label
                for vector in action.vectors:
                    if vector.site == site:
                        x += gain[:, None] * vector.array(np.float64)
            uses = [
                (number, how, on * holding.own * _factor(entry, values, count))
                for number, how, on, entry in uses_of(fields, site, behind)
            ]
            added(x, site, uses)
            set_at_once(x, site, uses)
            for given, on in self._tiered(fields, "clamps", site, behind):
                clamp(x, given, site.hook, on * holding.own * _factor(given, values, count))
            for _, (action, gain) in sorted(holding.steers.items()):
                for made in action.clamps:
                    if made.site == site:
                        clamp(x, plain_clamp(made), site.hook, gain)
            stream[0] = torch.from_numpy(x)

        logits = self._forward(tokens, steer)
        flips, apart, ends = 0, np.inf, None
        for name, margin in margins.items():
            flips += int(np.abs(np.diff(values[name] >= 0.5)).sum())
            hard = np.isinf(holding.parameter("sharpness", gates[name].get("sharpness") or np.inf))
            if gates[name].get("abort"):
                fires = np.flatnonzero((margin >= 0) & holding.parameter("enabled", True))
                ends, hard = (int(fires[0]) if len(fires) else None), np.ones(count, bool)
            decided = np.abs(margin[hard & (margin > -np.inf)])
            apart = min(apart, decided.min(initial=np.inf))
        return Right(seen, logits, flips, float(apart), ends)

    @staticmethod
    def _tiered(fields, kind, site, behind):
        """Yield the entries of all tiers at a site, each with the positions at which it holds."""
        for tier, on in (("", np.ones_like(behind)), ("prefill_", ~behind), ("decode_", behind)):
            for given in entries(fields, f"{tier}steering_{kind}", site):
                yield (given if isinstance(given, dict) else {"vector": given}), on

    @staticmethod
    def _patched(x, site, prompt_length, fields, values, own):
        for given in entries(fields, "steering_patches", site):
            patch(x, given, site.hook, prompt_length, own * _factor(given, values, len(x)))


def _value(gate, margins, holding):
    """Return a gate's value at each position."""
    if gate.get("latch"):
        margins = np.maximum.accumulate(margins)
    sharpness = holding.parameter("sharpness", gate.get("sharpness") or np.inf)
    hard = np.isinf(sharpness)
    with np.errstate(over="ignore"):
        soft = 1 / (1 + np.exp(-np.where(hard, 1.0, sharpness) * margins))
    return np.where(hard, margins >= 0, soft) * holding.parameter("enabled", True)


def _factor(given, values, count):
    return values[given["gate"]] if given.get("gate") else np.ones(count)
