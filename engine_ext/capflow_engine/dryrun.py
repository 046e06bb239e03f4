"""A dry run of a decoder layer: its forward, on tensors that have shapes and no values.

Projections, attention cores and experts are not run: they return empty tensors of their shapes. All else is Python that
runs on PyTorch's meta device, so that the layer may lie on any device. What comes out is the list of events: each
module that was not run and each operation of PyTorch, with the tensors that it read and returned.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

TOKENS = 5


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


@dataclass(frozen=True)
class Event:
    """A call of a part, or of an operation of PyTorch.

    part: None for an operation.
    path: that of the module in the layer, None if it lies elsewhere; or the name of the operation.
    given: the tensors that it reads, with the arguments that hold them.
    returned: the tensors that it returns.
    writes: whether it changes a tensor that it is given.
    """

    part: Part | None
    path: str | None
    given: tuple[tuple[Slot, torch.Tensor], ...]
    returned: tuple[torch.Tensor, ...]
    writes: bool = False
    func: Any = None

    def argument(self, name: str) -> tuple[Slot, torch.Tensor] | None:
        """Return an argument by its name; None if it is no tensor, or not given."""
        return next(((slot, tensor) for slot, tensor in self.given if slot.name == name), None)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Return whether it only looks at the memory of a tensor in another way."""
        return self.part is None and not self.writes and all(_memory(tensor) == _memory(r) for r in self.returned)


def run(layer: nn.Module, parts: Parts, values: Mapping[str, Any]) -> list[Event]:
    """Return the events of a layer's forward on the given arguments, in order.

    parts: those that are not run, and norms.
    Raises whatever the layer's Python raises when it meets a tensor without values.
    """
    recorder = _Recorder(layer, parts)
    with torch.no_grad(), _unchanged(layer), recorder, mock.patch.object(nn.Module, "__call__", recorder.call()):
        layer.forward(**values)
    return recorder.events


@contextlib.contextmanager
def _unchanged(layer: nn.Module) -> Iterator[None]:
    """Give the modules of a layer their attributes back: a forward may keep a tensor, which has no values here."""
    before = [
        (owner, dict(owner))
        for module in layer.modules()
        for owner in (module.__dict__, module._parameters, module._buffers)  # noqa: SLF001 - setattr has side effects
    ]
    try:
        yield
    finally:
        for owner, values in before:
            owner.clear()
            owner.update(values)


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have a number of their memory in common."""
    if _memory(first) != _memory(second):
        return False
    both = []
    for tensor in (first, second):
        size = (
            tensor.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        cells = torch.zeros(size, dtype=torch.bool, device="cpu")
        cells.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(value=True)
        both.append(cells)
    size = min(map(len, both))
    return bool((both[0][:size] & both[1][:size]).any())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - the storage's identity has no public name


class _Recorder(TorchDispatchMode):
    """Records the events of a run, in which it is every module's `__call__`."""

    def __init__(self, layer: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.parts, self.events, self.silent = parts, [], False
        self.paths = {id(module): path for path, module in reversed(list(layer.named_modules(remove_duplicate=False)))}
        self.moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    events: list[Event]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        args, kwargs = tree_map(self._without_values, (args, kwargs or {}))
        if isinstance(kwargs.get("device"), torch.device | str):
            kwargs["device"] = torch.device("meta")
        returned = func(*args, **kwargs)
        given = tuple((Slot(n, None), t) for n, t in enumerate(_tensors((args, kwargs))))
        writes = bool(func._schema.is_mutable)  # noqa: SLF001 - an operation's schema has no public name
        if not self.silent:
            self.events.append(Event(None, str(func), given, _tensors(returned), writes, func.overloadpacket))
        return returned

    def _without_values(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return value
        if id(value) not in self.moved:
            shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            self.moved[id(value)] = (value, shape)
        return self.moved[id(value)][1]

    def call(self) -> Callable[..., Any]:
        """Return what replaces the `__call__` of modules."""
        recorder = self

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is one
            part = recorder.parts(module)
            forward = getattr(module, "forward_native", module.forward)
            if part is None:
                return forward(*args, **kwargs)
            if isinstance(part, Norm):
                silent, recorder.silent = recorder.silent, True
                returned = forward(*args, **kwargs)
                recorder.silent = silent
            else:
                returned = _returned(part, args, kwargs)
            given = tuple(_slots(module, args, kwargs))
            event = Event(part, recorder.paths.get(id(module)), given, _tensors(returned))
            recorder.events.append(event)
            return returned

        return __call__


def _tensors(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))


def _slots(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Slot, torch.Tensor]]:
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    for number, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            yield Slot(number, names[number] if number < len(names) else None), value
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            yield Slot(names.index(name) if name in names else None, name), value


def _returned(part: Part, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return empty tensors of the shapes that a part returns."""
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if isinstance(part, Core):
        shape = kwargs.get("output_shape") or (first.shape[0], part.heads * part.v_dim)
        return torch.empty(shape, dtype=first.dtype, device="meta")
    if isinstance(part, Linear):
        rows = torch.empty((*first.shape[:-1], part.outputs), dtype=part.dtype or first.dtype, device="meta")
        return (rows, None) if part.pair else rows
    if isinstance(part, Mixer) and "output" in kwargs:
        return None
    return torch.empty(first.shape, dtype=first.dtype, device="meta")


def width_of(layer: nn.Module, parts: Parts) -> int | None:
    """Return the width of the stream: that of a norm of the layer, or of what a projection adds; None if unknown."""
    norms = (child for child in layer.children() if isinstance(parts(child), Norm))
    for weight in (weight for norm in norms for weight in norm.parameters()):
        return weight.numel()
    linears = (part for part in map(parts, layer.modules()) if isinstance(part, Linear) and part.down)
    return next((part.outputs for part in linears), None)
