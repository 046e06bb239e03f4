"""What the modules of a decoder layer are in a dry run: projections, attention's core, experts, norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


class Slot(NamedTuple):
    """An argument of a module's forward: its position, None if it is given by name, and its name."""

    position: int | None
    name: str | None

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument of a call; None if the call leaves it out."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        return args[self.position] if self.position is not None and self.position < len(args) else None


@dataclass(frozen=True)
class Core:
    """What compares queries with keys; its forward takes `query`, `key` and `value`.

    heads, kv_heads: of this rank.
    head_dim: the length of a head's query.
    v_dim: the length of a head's result.
    lacks: the reason why none of `q`, `k` and `v` can be captured here, by hook.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    lacks: Mapping[str, str]


@dataclass(frozen=True)
class Linear:
    """A projection.

    inputs: how many numbers it reads of a token, over all ranks.
    outputs: how many numbers it returns, on this rank.
    down: whether each rank reads a part of the inputs.
    pair: whether it returns a bias besides.
    kv_heads: over all ranks, if it makes queries, keys and values.
    dtype: of what it returns; None for that of its input.
    """

    inputs: int
    outputs: int
    down: bool = False
    pair: bool = True
    kv_heads: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture; its forward takes `hidden_states` and `router_logits`.

    gate: the projection that makes the logits, if the experts call it themselves.
    lacks: the reason why its output cannot be captured, or empty.
    """

    gate: nn.Module | None = None
    lacks: str = ""


@dataclass(frozen=True)
class Mixer:
    """What mixes tokens and is no attention; it takes and returns the stream's width."""


@dataclass(frozen=True)
class Norm:
    """A norm, which is run; what it does inside is no event."""


Part = Core | Linear | Experts | Mixer | Norm
Parts = Callable[[nn.Module], Part | None]
"""Returns what a module is, None if it is to be run."""
