"""When a gate fires by the scores that were captured, and at which positions its arm's vector therefore acts.

Invariant: the rules are those of the tiers. A gate in the graph acts at the position that it scores. A sync gate acts
from the next position on, a prompt's last decision from the first generated position on. When an async gate acts
depends on time, so its positions come from the engine's report of its actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow_models.experiment.arms import Setting
from capflow_models.experiment.file import ArmOptions, GateOptions

Values = npt.NDArray[np.float64]


def first_firing(positions: Sequence[int], scores: Values, threshold: float, prompt_tokens: int) -> int | None:
    """Return the position of the first score at or above a threshold, from the first generated position; or None."""
    fires = np.flatnonzero(scores >= threshold)
    return int(positions[fires[0]]) - prompt_tokens if len(fires) else None


def steered_positions(
    setting: Setting,
    arm: ArmOptions,
    gate: GateOptions,
    positions: Sequence[int],
    scores: Values,
    prompt_tokens: int,
    generated: int,
    actions: Sequence[Mapping[str, Any]] = (),
) -> Values:
    """Return how strongly the vector acts at each generated position that is an input, `[generated]`, 0..1.

    positions, scores: of the scored positions.
    generated: the number of generated positions that are inputs.
    actions: those that the engine applied, as it reports them.
    """
    steered = np.zeros(generated)
    if setting.kind in ("always_on", "random"):
        steered[:] = arm.at != "prompt"
    elif setting.kind == "in_graph" and arm.at != "prompt":
        steered = _in_graph(setting, gate, positions, scores, prompt_tokens, generated)
    elif setting.kind == "gated_sync":
        assert setting.threshold is not None
        fires = scores >= setting.threshold
        for position, is_open in zip(positions, fires, strict=True):
            if is_open or not gate.latch:
                steered[max(0, position + 1 - prompt_tokens) :] = is_open
    elif setting.kind == "gated_async":
        for action in actions:
            if action.get("kind") in ("steer", "unsteer") and action.get("position") is not None:
                steered[max(0, int(action["position"]) - prompt_tokens) :] = action["kind"] == "steer"
    return steered


def _in_graph(
    setting: Setting, gate: GateOptions, positions: Sequence[int], scores: Values, prompt_tokens: int, generated: int
) -> Values:
    assert setting.threshold is not None
    assert setting.sharpness is not None
    margins = np.full(prompt_tokens + generated, -np.inf)
    inside = [number for number, position in enumerate(positions) if position < len(margins)]
    margins[[positions[number] for number in inside]] = scores[inside] - setting.threshold
    if gate.latch:
        margins = np.maximum.accumulate(margins)
    if np.isinf(setting.sharpness):
        values = (margins >= 0).astype(np.float64)
    else:
        values = 1 / (1 + np.exp(-np.clip(setting.sharpness * margins, -700, 700)))
    return values[prompt_tokens:]
