"""How the router of a mixture of experts chooses by its logits."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from capflow import limits
from capflow.capture.attention import Layers
from capflow.limits import Text

_Count = Annotated[int, msgspec.Meta(ge=1, le=limits.HIDDEN_SIZE_MAX)]


class RouterForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a router chooses experts, and weighs them, by the rows at `router`.

    Scores are the softmax of a token's logits, or the sigmoid of each. The `top_k` experts of the highest scores are
    chosen. Their weights are their scores, divided by the sum of the chosen ones if `renormalised`, times `scale`.

    With groups, experts `0, 1, …` are `n_group` groups of equal size, and only those of `topk_group` groups can be
    chosen. These are the groups with the highest score of an expert, or if the router is biased, with the highest sum
    of two.

    top_k: how many experts a token has.
    scores: the function that makes scores of logits.
    renormalised: whether the weights of the chosen experts are divided by their sum.
    n_group: the number of groups.
    topk_group: the number of groups whose experts can be chosen.
    biased: whether the choice is by the scores plus a number for each expert, a weight of the model. The weights of
        the chosen experts are made of the scores without it.
    scale: what weights are multiplied by.
    on_input: whether the weight multiplies what the expert reads, instead of what it returns.
    rounded: whether the model chooses by logits of more digits than the rows have. Of experts with nearly equal scores,
        it may then take another one.
    lacks: why the experts do not follow from the logits; empty if they do.

    Raises ValueError for numbers that do not fit each other.
    """

    top_k: _Count
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = False
    n_group: _Count = 1
    topk_group: _Count = 1
    biased: bool = False
    scale: float = 1.0
    on_input: bool = False
    rounded: bool = False
    lacks: Text = ""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not math.isfinite(self.scale) or not 1 <= self.topk_group <= self.n_group or self.top_k < 1:
            raise ValueError("expected a finite scale, at most n_group chosen groups, and an expert at least")


RouterForms = Annotated[tuple[tuple[RouterForm, Layers], ...], msgspec.Meta(max_length=limits.LAYERS_MAX)]
"""Each form, with the layers whose routers have it."""
