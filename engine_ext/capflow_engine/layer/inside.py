"""The hook points inside attention and the MLP: `heads`, `q`, `k`, `v`, `neurons` and `router`.

They are read from a dry run of the layer. `q`, `k` and `v` are what the attention core is given. `heads` is what the
projection is given that alone reads the core's result, whose layout nothing in between changes. `neurons` is what the
only down projection outside of attention is given. `router` is what the gate returns and the experts are given. What
the run does not prove is left out, with the reason.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from capflow import limits
from capflow_engine.layer import flow
from capflow_engine.layer.dryrun import TOKENS, Call, DryRunError, overlap, run, width_of
from capflow_engine.layer.parts import Core, Experts, Linear, Mixer, Parts, Slot

ATTENTION_HOOKS = ("q", "k", "v", "heads")
INSIDE_HOOKS = (*ATTENTION_HOOKS, "neurons", "router")

_QKV = {"q": "query", "k": "key", "v": "value"}


class Place(NamedTuple):
    """Where a dry run shows a hook point.

    module: its path in the layer.
    slot: the argument that holds the value; None for what the module returns.
    alone: whether the module's forward is called alone.
    """

    module: str
    slot: Slot | None
    alone: bool = False


@dataclass(frozen=True)
class Inside:
    """What a dry run proves: `places` by hook, and `missing`, `fixed` and `shapes` as in `Structure`."""

    places: dict[str, Place] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def lack(self, hooks: tuple[str, ...], reason: str) -> None:
        """Note that hooks without a place are missing."""
        self.missing.update({hook: reason for hook in hooks if hook not in self.places and hook not in self.missing})


def find(layer: nn.Module, dtype: torch.dtype, stream: tuple[str, ...], parts: Parts) -> Inside:
    """Return the hook points inside a layer.

    stream: the names of the arguments of the layer's forward that are the stream, or parts of it.
    """
    inside = Inside()
    try:
        events = run(layer, parts, _values(layer, dtype, stream, parts))
    except DryRunError as e:
        inside.lack(INSIDE_HOOKS, str(e))
        return inside
    reader = _Reader(layer, parts, events, inside)
    reader.attention()
    reader.mlp()
    return inside


def _values(layer: nn.Module, dtype: torch.dtype, stream: tuple[str, ...], parts: Parts) -> dict[str, Any]:
    """Return the arguments of a layer's forward for a dry run."""
    width = width_of(layer, parts)
    if width is None:
        raise DryRunError("the width of its stream is unknown")
    values: dict[str, Any] = {}
    parameters = inspect.signature(layer.forward).parameters
    batch = (1,) if _OF_TRANSFORMERS & set(parameters) else ()
    for name, parameter in parameters.items():
        if name in stream:
            values[name] = torch.empty(*batch, TOKENS, width, dtype=dtype, device="meta")
        elif name == _ROTATION:
            head_dim = next((part.head_dim for part in map(parts, layer.modules()) if isinstance(part, Core)), width)
            values[name] = tuple(torch.empty(1, TOKENS, head_dim, dtype=dtype, device="meta") for _ in range(2))
        elif name in _POSITIONS:
            values[name] = torch.empty(*batch, TOKENS, dtype=torch.int64, device="meta")
        elif name == _KEPT:
            values[name] = {}
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            values[name] = None
    return values


_POSITIONS = ("positions", "position_ids")
_ROTATION = "position_embeddings"
_KEPT = "shared_kv_states"
"""A layer of Transformers puts the keys and values there that later layers read; steered in place, they read these."""
_OF_TRANSFORMERS = {_ROTATION, "attention_mask", "past_key_values", "layer_past"}
"""Arguments of Transformers' own layers, whose stream has a dimension of prompts."""


def _is_rows(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has one row for each token."""
    return tensor.numel() == TOKENS * tensor.shape[-1]


class _Reader:
    """Reads the events of one layer."""

    def __init__(self, layer: nn.Module, parts: Parts, events: list[Call], inside: Inside) -> None:
        self.layer, self.parts, self.events, self.inside = layer, parts, events, inside
        self.cores = [n for n, event in enumerate(events) if isinstance(event.part, Core)]
        self.experts = [n for n, event in enumerate(events) if isinstance(event.part, Experts)]

    # Attention.

    def attention(self) -> None:
        """Find `q`, `k`, `v` and `heads`."""
        if len(self.cores) != 1:
            mixers = any(isinstance(event.part, Mixer) for event in self.events)
            none = "its mixer is no attention" if mixers else "it calls no attention of vLLM as a module"
            self.inside.lack(ATTENTION_HOOKS, "the layer has several attention cores" if self.cores else none)
            return
        number = self.cores[0]
        event = self.events[number]
        assert isinstance(event.part, Core)
        heads, v_dim = self._heads(number, event.part)
        if event.path is None:
            self.inside.lack(tuple(_QKV), "attention's core is no module of the layer")
            return
        self.inside.missing.update({h: reason for h, reason in event.part.lacks.items() if h != "heads"})
        if heads is None:
            self.inside.lack(tuple(_QKV), "how many heads there are over all ranks is unknown")
            return
        kv_heads = self._kv_heads(event, heads)
        shapes = {"q": (heads, event.part.head_dim), "k": (kv_heads, event.part.head_dim)}
        if v_dim == event.part.v_dim:
            shapes["v"] = (kv_heads, v_dim)
        for hook, shape in shapes.items():
            if hook not in self.inside.missing:
                self._argument(number, hook, shape)
        self.inside.lack(("v",), "values are padded to the length of a key")

    def _argument(self, number: int, hook: str, shape: tuple[int, int]) -> None:
        """Find what the core is given as its query, key or value."""
        event = self.events[number]
        assert isinstance(event.part, Core)
        assert event.path is not None
        argument = event.argument(_QKV[hook])
        local = (event.part.heads if hook == "q" else event.part.kv_heads) * shape[1]
        if argument is None:
            self.inside.lack((hook,), f"attention is given no {_QKV[hook]}")
            return
        slot, tensor = argument
        if tensor.shape[0] != TOKENS or tensor.numel() != TOKENS * local:
            self.inside.lack((hook,), f"attention is given a {_QKV[hook]} of the shape {list(tensor.shape)}")
            return
        self._place(hook, Place(event.path, slot, alone=not event.hooked), shape)
        others = [name for name in _QKV.values() if (o := event.argument(name)) and name != slot.name
                  and overlap(o[1], tensor)]  # fmt: skip
        if others:
            self.inside.fixed[hook] = f"attention is given the same tensor as its {others[0]}"
        else:
            self._fix(hook, number, tensor)

    def _heads(self, number: int, core: Core) -> tuple[int | None, int | None]:
        """Find the projection that reads attention's result.

        Returns how many heads there are over all ranks, and the length of each one's result; None if unknown.
        """
        _, readers = flow.carried(self.events, self.events[number].returned, number, core.heads)
        if len(readers) != 1 or not isinstance(self.events[readers[0]].part, Linear):
            names = ", ".join(sorted({self._name(n) for n in readers})) or "nothing"
            self.inside.lack(("heads",), f"no projection alone reads attention's result, but {names}")
            return None, None
        event = self.events[readers[0]]
        slot, tensor = event.given[0]
        assert isinstance(event.part, Linear)
        v_dim, rest = divmod(tensor.shape[-1], core.heads)
        total, uneven = divmod(event.part.inputs, v_dim or 1)
        if rest or uneven or event.path is None or not _is_rows(tensor):
            self.inside.lack(("heads",), f"{self._name(readers[0])} reads a tensor of the shape {list(tensor.shape)}")
            return None, None
        if reason := core.lacks.get("heads"):
            self.inside.missing["heads"] = reason
        else:
            self._place("heads", Place(event.path, slot), (total, v_dim))
            self._fix("heads", readers[0], tensor)
        return total, v_dim

    def _kv_heads(self, event: Call, heads: int) -> int:
        """Return how many heads keys have over all ranks."""
        assert isinstance(event.part, Core)
        makers = [e.part.kv_heads for e in self.events if isinstance(e.part, Linear) and e.part.kv_heads is not None]
        # Projections of another kind divide their heads evenly among the ranks.
        return makers[0] if len(makers) == 1 else event.part.kv_heads * (heads // event.part.heads)

    # The MLP.

    def mlp(self) -> None:
        """Find `neurons` and `router`."""
        if self.experts:
            self.inside.lack(("neurons",), "the layer's MLP is a mixture of experts")
            self._router()
            return
        self.inside.lack(("router",), "the layer's MLP is no mixture of experts")
        part = next((self._owner(n) for n in self.cores), None)
        downs = [
            n for n, event in enumerate(self.events)
            if isinstance(event.part, Linear) and event.part.down and (part is None or self._owner(n) != part)
        ]  # fmt: skip
        if len(downs) != 1:
            reason = "the MLP has several down projections" if downs else "the layer has no MLP with a down projection"
            self.inside.lack(("neurons",), reason)
            return
        event = self.events[downs[0]]
        assert isinstance(event.part, Linear)
        slot, tensor = event.given[0]
        if event.path is None or not _is_rows(tensor) or event.part.inputs % tensor.shape[-1]:
            reason = f"the down projection reads a tensor of the shape {list(tensor.shape)}"
            self.inside.lack(("neurons",), reason)
            return
        self._place("neurons", Place(event.path, slot), (event.part.inputs,))
        self._fix("neurons", downs[0], tensor)

    def _router(self) -> None:
        if len(self.experts) != 1:
            self.inside.lack(("router",), "the layer has several mixtures of experts")
            return
        number = self.experts[0]
        event = self.events[number]
        assert isinstance(event.part, Experts)
        if event.part.lacks:
            self.inside.lack(("router",), event.part.lacks)
            return
        if event.part.gate is not None:
            self._inner_gate(event.part.gate)
            return
        logits = event.argument("router_logits")
        for gate in range(number - 1, -1, -1):
            if logits is None or not isinstance(self.events[gate].part, Linear):
                continue
            same, readers = flow.carried(self.events, self.events[gate].returned[:1], gate)
            if id(logits[1]) in same:
                path, part = self.events[gate].path, self.events[gate].part
                assert isinstance(part, Linear)
                if path is None or logits[1].shape[-1] != part.outputs:
                    break
                self._place("router", Place(path, None), (part.outputs,))
                if others := [self._name(n) for n in readers if n != number]:
                    self.inside.fixed["router"] = f"{others[0]} reads the router's logits, too"
                return
        self.inside.lack(("router",), "the experts are not given what a gate returns")

    def _inner_gate(self, gate: nn.Module) -> None:
        """Find the gate that the experts call themselves, and give its output to nothing else."""
        path = next((path for path, module in self.layer.named_modules() if module is gate), None)
        part = self.parts(gate)
        if path is None or not isinstance(part, Linear):
            self.inside.lack(("router",), f"its gate is a {type(gate).__name__}")
            return
        self._place("router", Place(path, None), (part.outputs,))

    def _fix(self, hook: str, number: int, tensor: torch.Tensor) -> None:
        """Note whether anything reads a tensor after the event that it is steered for."""
        if (reader := flow.later_reader(self.events, number, tensor)) is not None:
            self.inside.fixed[hook] = f"{self._name(reader)} reads the same tensor"

    def _place(self, hook: str, place: Place, shape: tuple[int, ...]) -> None:
        if max(shape) > limits.HIDDEN_SIZE_MAX:
            self.inside.lack((hook,), f"a row has {max(shape):,} numbers, above {limits.HIDDEN_SIZE_MAX:,}")
            return
        self.inside.places[hook] = place
        self.inside.shapes[hook] = shape

    def _owner(self, number: int) -> str:
        """Return the layer's own module that an event lies in."""
        return (self.events[number].path or "").partition(".")[0]

    def _name(self, number: int) -> str:
        event = self.events[number]
        return event.path or "a module of another layer" if event.part is not None else str(event.path)
