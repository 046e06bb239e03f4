"""A dry run of a decoder layer: its forward, on tensors that have shapes and no values.

Projections, attention cores and experts are not run: they return empty tensors of their shapes. All else is Python that
runs on PyTorch's meta device, so that the layer may lie on any device. What comes out is the list of events: each
module that was not run and each operation of PyTorch, with the tensors that it read and returned.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from capflow_engine.layer.parts import Core, Linear, Mixer, Norm, Part, Parts, Slot

TOKENS = 5
"""The rows of a dry run."""
_REASON_LENGTH_MAX = 200


class DryRunError(Exception):
    """A layer cannot be run without values; the message says why."""


@dataclass(frozen=True)
class Call:
    """A call of a part, or of an operation of PyTorch.

    part: None for an operation.
    path: that of the module in the layer, None if it lies elsewhere; or the name of the operation.
    given: the tensors that it reads, with the arguments that hold them.
    returned: the tensors that it returns.
    writes: whether it changes a tensor that it is given.
    func: the operation.
    hooked: whether the module is called as one, so that its hooks run; its forward may be called alone.
    """

    part: Part | None
    path: str | None
    given: tuple[tuple[Slot, torch.Tensor], ...]
    returned: tuple[torch.Tensor, ...]
    writes: bool = False
    func: Any = None
    hooked: bool = True

    def argument(self, name: str) -> tuple[Slot, torch.Tensor] | None:
        """Return an argument by its name; None if it is no tensor, or not given."""
        return next(((slot, tensor) for slot, tensor in self.given if slot.name == name), None)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Return whether it only looks at the memory of a tensor in another way."""
        return self.part is None and not self.writes and all(_memory(tensor) == _memory(r) for r in self.returned)


def run(layer: nn.Module, parts: Parts, values: Mapping[str, Any]) -> list[Call]:
    """Return the events of a layer's forward on the given arguments, in order.

    parts: those that are not run, and norms.
    Raises DryRunError if the layer's Python needs values.
    """
    recorder = _Recorder(layer, parts)
    with torch.no_grad(), _unchanged(layer), recorder, mock.patch.object(nn.Module, "__call__", recorder.call()):
        for module in layer.modules():
            if isinstance(parts(module), Core):  # some code calls its forward alone
                module.__dict__["forward"] = functools.partial(recorder.called, module)
        try:
            layer.forward(**values)
        except Exception as e:  # a model's Python may raise anything when it meets tensors without values
            first = next(iter(str(e).splitlines()), "")
            text = f"its forward cannot be run without values: {type(e).__name__}: {first}"
            raise DryRunError(text[:_REASON_LENGTH_MAX]) from e
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
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity has no public name


class _Recorder(TorchDispatchMode):
    """Records the events of a run, in which it is every module's `__call__`."""

    def __init__(self, layer: nn.Module, parts: Parts) -> None:
        super().__init__()
        self.parts, self.events, self.silent = parts, [], False
        self.paths = {id(module): path for path, module in reversed(list(layer.named_modules(remove_duplicate=False)))}
        self.moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    events: list[Call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        args, kwargs = tree_map(self._without_values, (args, kwargs or {}))
        if isinstance(kwargs.get("device"), torch.device | str):
            kwargs["device"] = torch.device("meta")
        returned = func(*args, **kwargs)
        given = tuple((Slot(n, None), t) for n, t in enumerate(_tensors((args, kwargs))))
        writes = bool(func._schema.is_mutable)  # noqa: SLF001 - an operation's schema has no public name
        if not self.silent:
            self.events.append(Call(None, str(func), given, _tensors(returned), writes, func.overloadpacket))
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
        recorder, replaced, thread = self, nn.Module.__call__, threading.get_ident()

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is one
            if threading.get_ident() != thread:  # another model of this process runs there
                return replaced(module, *args, **kwargs)
            part = recorder.parts(module)
            forward = getattr(module, "forward_native", module.forward)
            if part is None:
                return forward(*args, **kwargs)
            if not isinstance(part, Norm):
                return recorder.called(module, *args, hooked=True, **kwargs)
            silent, recorder.silent = recorder.silent, True
            try:
                returned = forward(*args, **kwargs)
            except Exception:  # noqa: BLE001 - what a norm returns is known without its Python
                returned = tuple(torch.empty_like(given) for given in _tensors((args, kwargs)))
                returned = returned if len(returned) > 1 else returned[0]
            finally:
                recorder.silent = silent
            recorder.note(part, module, _slots(module, args, kwargs), returned)
            return returned

        return __call__

    def called(self, module: nn.Module, *args: Any, hooked: bool = False, **kwargs: Any) -> Any:
        """Return what a module that is not run returns, and record the call."""
        part = self.parts(module)
        assert part is not None
        returned = _returned(part, args, kwargs)
        self.note(part, module, _slots(module, args, kwargs), returned, hooked=hooked)
        return returned

    def note(
        self,
        part: Part,
        module: nn.Module,
        given: Iterator[tuple[Slot, torch.Tensor]],
        returned: Any,
        *,
        hooked: bool = True,
    ) -> None:
        """Record the call of a module."""
        path = self.paths.get(id(module))
        self.events.append(Call(part, path, tuple(given), _tensors(returned), hooked=hooked))


def _tensors(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor))


def _slots(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Slot, torch.Tensor]]:
    parameters = inspect.signature(type(module).forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
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
