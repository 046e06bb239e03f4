"""How attention of a layer makes its weights of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec

from capflow import limits
from capflow.limits import Text

_Layer = Annotated[int, msgspec.Meta(ge=0, lt=limits.LAYERS_MAX)]

Layers = Annotated[tuple[_Layer, ...], msgspec.Meta(max_length=limits.LAYERS_MAX)]

_Form = TypeVar("_Form")


class AttentionForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """How attention makes its weights of the rows at `q` and `k`.

    The query of position p sees the keys of positions 0 to p. Its logits are `scale * q·k`, or with a soft cap
    `soft_cap * tanh(scale * q·k / soft_cap)`; their softmax is the weights. With sinks, each head has one logit more
    there, whose weight no key has.

    scale: what products of queries and keys are multiplied by.
    window: a query sees only the last so many keys, that of its own position included; None for all.
    soft_cap: the bound of the logits; None for none.
    sinks: whether heads have a sink, a weight of the model.
    lacks: why the weights do not follow from `q` and `k`; empty if they do.

    Raises ValueError for numbers that are not finite, and for a window or a soft cap that is not positive.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    lacks: Text = ""

    def __post_init__(self) -> None:
        """Check the numbers."""
        window, cap = (1.0 if bound is None else bound for bound in (self.window, self.soft_cap))
        if not (math.isfinite(self.scale) and math.isfinite(cap) and window >= 1 and cap > 0):
            raise ValueError("expected finite numbers, and a window and a soft cap above 0")


AttentionForms = Annotated[tuple[tuple[AttentionForm, Layers], ...], msgspec.Meta(max_length=limits.LAYERS_MAX)]
"""Each form, with the layers whose attention has it."""


def form_of(groups: Iterable[tuple[_Form, Layers]] | msgspec.UnsetType, layer: int) -> _Form | None:
    """Return the form of a layer, of forms with their layers; None if it has none."""
    return None if groups is msgspec.UNSET else next((form for form, layers in groups if layer in layers), None)


def grouped_forms(forms: Mapping[int, _Form]) -> tuple[tuple[_Form, Layers], ...] | msgspec.UnsetType:
    """Return the forms of layers as `ModelInfo.attention` and `ModelInfo.router` have them."""
    groups: dict[_Form, list[int]] = {}
    for layer in sorted(forms):
        groups.setdefault(forms[layer], []).append(layer)
    return tuple((form, tuple(layers)) for form, layers in groups.items()) or msgspec.UNSET
