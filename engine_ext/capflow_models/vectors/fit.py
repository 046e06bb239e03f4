"""Fits vectors from contrastive pairs: a prompt that shows a concept, and one that shows its opposite.

The residual streams at the prompts' last tokens are compared. `mean` is the difference of the means (as in contrastive
activation addition, Rimsky et al. 2024, arXiv:2312.06681). `pca` is the first principal direction of the pairs'
differences (Zou et al. 2023, arXiv:2310.01405). The differences are not centred, because their common part is the
concept. The direction points from the negatives to the positives; its length is the mean difference along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.site import HOOK_DEFAULT
from capflow.errors import UsageError, explain
from capflow_models.model import Prompt, SteerableModel
from capflow_models.spec import Vector, site_of

Method = Literal["mean", "pca"]
METHODS: tuple[str, ...] = get_args(Method)


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of pairs: `{"positive": text, "negative": text}`."""

    positive: str
    negative: str


def fit_vectors(
    model: SteerableModel,
    pairs: Sequence[tuple[Prompt, Prompt]],
    method: Method = "mean",
    layers: Sequence[int] | None = None,
    *,
    hook: str = HOOK_DEFAULT,
) -> dict[int, Vector]:
    """Return a vector for each layer, `[hidden_size]` float32. Added with scale 1, it moves negatives to positives.

    The model's present steering applies to the prompts.

    pairs: (positive, negative).
    layers: all layers by default.

    Raises UsageError for an unknown method, no pairs, a layer or hook that the model lacks, and pairs without a
    difference.
    """
    if method not in METHODS:
        raise UsageError(explain("method", got=method, expected=f"one of {', '.join(METHODS)}"))
    if not pairs:
        raise UsageError(explain("pairs", got="none", expected="one or more of (positive, negative)"))
    sites = [site_of(layer, hook) for layer in (range(model.info.num_layers) if layers is None else layers)]
    prompts = [prompt for pair in pairs for prompt in pair]
    rows = model.last_rows(prompts, sites)
    return {site.layer: _fitted(rows[site].astype(np.float64), method, f"layer {site.layer}") for site in sites}


def _fitted(rows: npt.NDArray[np.float64], method: Method, where: str) -> Vector:
    """Return the vector for rows `[2 · pairs, hidden_size]`, positive and negative alternately."""
    differences = rows[::2] - rows[1::2]
    vector = differences.mean(0)
    if method == "pca":
        direction = np.linalg.svd(differences, full_matrices=False)[2][0]
        vector = direction * (vector @ direction)
    fitted: Vector = vector.astype(np.float32)
    if not fitted.any():
        expected = "pairs with different streams at their last tokens"
        raise UsageError(explain(f"{where}: the pairs have no difference", expected=expected))
    return fitted
