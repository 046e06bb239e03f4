"""What Transformers computes in float64 for a request with steering of every kind and gates."""

import numpy as np
import torch

from capflow.capture.site import Site
from tests.kit.gated import GatedReference, score_of, scored_positions
from tests.kit.steered import entries


class OracleReference(GatedReference):
    """Steering in all tiers, with or without gates."""

    def run(self, tokens, prompt_length, fields):
        """Return what each site holds before it is steered, how often gates flipped, and the least hard margin."""
        behind = np.arange(len(tokens)) >= prompt_length
        gates = fields.get("steering_gates", {})
        seen, margins = {}, {}

        def steer(site, stream):
            x = stream[0].numpy().copy()
            seen[site] = x.copy()
            for name, gate in gates.items():
                if Site(gate["layer"], gate["hook"]) == site:
                    scored = scored_positions(gate["positions"], prompt_length, len(x))
                    scores = score_of(gate["score"], np.asarray(gate["vector"], np.float64), x)
                    margins[name] = np.where(scored, scores - gate["threshold"], -np.inf)
            values = {name: self._value(gates[name], margin) for name, margin in margins.items()}
            self._patched(x, site, prompt_length, fields, values)
            for given, on in self._tiered(fields, "vectors", site, behind):
                x += (given.get("scale", 1.0) * on * _factor(given, values, len(x)))[:, None] * given["vector"]
            for given, on in self._tiered(fields, "clamps", site, behind):
                direction = np.asarray(given["vector"], np.float64)
                direction = direction / np.linalg.norm(direction)
                low, high = (
                    given.get("value", given.get(end, none)) for end, none in (("min", -np.inf), ("max", np.inf))
                )
                along = x @ direction
                x += np.outer(on * _factor(given, values, len(x)) * (np.clip(along, low, high) - along), direction)
            stream[0] = torch.from_numpy(x)

        self._forward(tokens, steer)
        hard = [margin[margin > -np.inf] for name, margin in margins.items() if gates[name].get("sharpness") is None]
        flips = sum(np.abs(np.diff(self._value(gates[n], m) >= 0.5)).sum() for n, m in margins.items())
        return seen, int(flips), min((np.abs(each).min() for each in hard if len(each)), default=np.inf)

    @staticmethod
    def _tiered(fields, kind, site, behind):
        """Yield the entries of all tiers at a site, each with the positions at which it holds."""
        for tier, on in (("", np.ones_like(behind)), ("prefill_", ~behind), ("decode_", behind)):
            for given in entries(fields, f"{tier}steering_{kind}", site):
                yield (given if isinstance(given, dict) else {"vector": given}), on

    @staticmethod
    def _patched(x, site, prompt_length, fields, values):
        for patch in entries(fields, "steering_patches", site):
            rows = np.broadcast_to(patch["vector"], (len(patch["positions"]), x.shape[1]))
            factor = _factor(patch, values, len(x))
            for position, row in zip(patch["positions"], rows, strict=True):
                at = position if position >= 0 else prompt_length + position
                if 0 <= at < len(x):
                    x[at] += factor[at] * patch.get("amount", 1.0) * (row - x[at])


def _factor(given, values, count):
    return values[given["gate"]] if given.get("gate") else np.ones(count)
