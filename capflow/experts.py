"""The experts that a router chooses, and their weights, computed from its captured logits.

The top-k routing of mixtures of experts (Shazeer et al., https://arxiv.org/abs/1701.06538), with limited groups of
experts (DeepSeek-V2, https://arxiv.org/abs/2405.04434), and with a bias of the choice alone (DeepSeek-V3,
https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.router import RouterForm
from capflow.errors import UsageError, explain
from capflow.probes.probe import as_float32
from capflow.weights import numbers_of


class ChosenExperts(NamedTuple):
    """The experts of some tokens, by weight, the largest first.

    ids: `[tokens, top_k]` int64. Experts are numbered as the entries of the logits are.
    weights: `[tokens, top_k]`.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[Any]


def chosen_experts(logits: npt.NDArray[Any], form: RouterForm, *, bias: npt.ArrayLike | None = None) -> ChosenExperts:
    """Return the experts that a router chooses by these logits, and their weights, each `[tokens, top_k]`.

    Weights are float64 if `logits` are, else float32. Of equal scores, that of the lower number is taken.

    logits: rows at `router`, `[tokens, experts]`, of any captured dtype.
    form: `ModelInfo.router_of(layer)`.
    bias: of a biased router, the number for each expert, `[experts]`: a weight of the model, such as
        `e_score_correction_bias`.

    Raises UsageError for arrays that do not fit each other or the form, and a form that says why there is no choice.
    """
    _check(logits, form)
    added = numbers_of(
        "bias", bias, logits.shape[1], needed=form.biased, each="expert", parameter="e_score_correction_bias"
    )
    rows = logits if logits.dtype == np.float64 else as_float32(logits)
    scores = _scores(rows, form)
    # Both functions rise, so that logits choose as scores do, without their rounding.
    ranked = rows if added is None else scores + added.astype(scores.dtype)
    ids = _highest(_of_groups(ranked, form), form.top_k)
    weights = np.take_along_axis(scores, ids, axis=1)
    if form.renormalised:
        total = weights.sum(axis=1, keepdims=True)
        weights /= np.where(total == 0, 1, total)
    weights *= form.scale
    order = np.argsort(-weights, axis=1, kind="stable")
    return ChosenExperts(np.take_along_axis(ids, order, axis=1), np.take_along_axis(weights, order, axis=1))


def _scores(rows: npt.NDArray[Any], form: RouterForm) -> npt.NDArray[Any]:
    """Return the score of each expert."""
    with np.errstate(invalid="ignore", over="ignore"):  # rows that overflowed give NaN
        if form.scores == "sigmoid":
            scores: npt.NDArray[Any] = 1 / (1 + np.exp(-rows))
            return scores
        scores = np.exp(rows - rows.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        return scores


def _of_groups(ranked: npt.NDArray[Any], form: RouterForm) -> npt.NDArray[Any]:
    """Return what experts are ranked by, minus infinity outside of the groups that can be chosen."""
    if form.n_group == 1:
        return ranked
    groups = ranked.reshape(len(ranked), form.n_group, -1)
    best = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2) if form.biased else groups.max(axis=2)
    chosen = _highest(best, form.topk_group)
    result = np.full_like(groups, -np.inf)
    np.put_along_axis(result, chosen[:, :, None], np.take_along_axis(groups, chosen[:, :, None], axis=1), axis=1)
    return result.reshape(ranked.shape)


def _highest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Return the columns of the highest values of each row, the highest first."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count].astype(np.int64)


def _check(logits: npt.NDArray[Any], form: RouterForm) -> None:
    if form.lacks:
        raise UsageError(explain("experts", got=form.lacks, expected="a choice by the router's logits alone"))
    if logits.ndim != 2:
        raise UsageError(explain("logits", got=f"an array {list(logits.shape)}", expected="[tokens, experts]"))
    size, rest = divmod(logits.shape[1], form.n_group)
    if rest or size * form.topk_group < form.top_k:
        expected = f"experts in {form.n_group} groups, and {form.top_k} of them in {form.topk_group}"
        raise UsageError(explain("logits", got=f"{logits.shape[1]} experts", expected=expected))
