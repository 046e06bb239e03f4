"""The structure of a decoder layer: at which of its modules each hook point lies.

A layer's forward is run once on symbols, its submodules left whole (`torch.fx`). What comes out is how the layer's
output is summed from its input and from what its modules return. From that sum follows where the stream is, what
attention adds to it and what the MLP adds, whatever the modules are called. A hook point is found only when the sum
proves it: the stream before the MLP, plus what the MLP adds, must be the layer's output. What cannot be
proved is left out, with the reason; a layer whose stream cannot be followed is refused.

A layer may multiply the stream by a number in one dtype only, so that it does not overflow. The stream is what the
layer computes in float32: the forward is run on symbols of the model's dtype and of float32, and the ratio of both sums
is taken out of every place.

No tensor of the model is read, except that a norm is copied and tried on random numbers to learn whether it adds
the residual that it is given. So the model may lie on the meta device.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from capflow.capture.attention import AttentionForm
from capflow.capture.router import RouterForm
from capflow_engine.layer import inside
from capflow_engine.layer.parts import Norm, Part, Parts, Slot

Mixes = Callable[[nn.Module], bool]
"""Returns whether a module mixes tokens: an attention or state-space core of vLLM."""

Divisor = Callable[[nn.Module], float]
"""Returns the number by which a module divides its output in the model's dtype and not in float32."""


@dataclass(frozen=True)
class HookPlace:
    """Where a hook point lies: before or after a module of the layer, or of what owns the layers.

    module: its path in the layer, empty for the layer itself.
    outside: whether the path is in the module that owns the layers, and not in the layer.
    slots: the arguments of the module that hold the value. Without slots the module returns the value.
    items: without slots, the elements of the returned tuple that hold the value; a tensor alone is element 0. Two slots
        or items are the halves of a split stream; their sum is the value.
    scale: the value is this many times what is there.
    used: if nothing reads the value later, an element of the returned tuple that is read. A compiler drops a tap of a
        value alone that nothing reads.
    alone: whether the module's forward is called alone, so that the module's hooks do not run.
    """

    module: str
    slots: tuple[Slot, ...] = ()
    items: tuple[int, ...] = (0,)
    scale: float = 1.0
    used: int | None = None
    outside: bool = False
    alone: bool = False


_WHOLE = HookPlace("")


@dataclass(frozen=True)
class Structure:
    """The hook points of one decoder layer.

    layer: the name of its class.
    places: by hook.
    missing: the reason for every other hook.
    fixed: the reason for hooks that can be captured and not steered: what else takes the same tensor.
    taken: the factor by which the layer's input is larger than the stream.
    given: the factor by which its output is larger than the stream.
    returned: by hook, where a norm that adds up a split stream returns the value, for sites that are not steered: a
        change there would miss the norm. That of `pre_attn` holds only where the layer is given a split stream.
    shapes: by hook, the shape of a row over all tensor-parallel ranks, where it is not that of the stream.
    attention: how the layer's attention makes its weights; None without `q` and `k`.
    router: how the layer's experts are chosen; None without `router`.
    """

    layer: str
    places: dict[str, HookPlace] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    taken: float = 1.0
    given: float = 1.0
    returned: dict[str, HookPlace] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attention: AttentionForm | None = None
    router: RouterForm | None = None

    def why_not(self, hook: str) -> str:
        """Return why the layer does not have a hook."""
        return self.missing.get(hook, "final belongs to the last layer")


class UnclearError(Exception):
    """A layer does something that symbols cannot follow; the message names it."""


class _NoSumError(UnclearError):
    """A layer returns something else than its input plus what its modules add."""


def resolve(
    layer: nn.Module,
    dtype: torch.dtype,
    mixes: Mixes,
    divisor: Divisor = lambda _: 1.0,
    parts: Parts | None = None,
) -> Structure:
    """Return the structure of a decoder layer of a model that computes in `dtype`.

    A layer that returns something else than its input plus what its modules add has only what it takes and returns.

    parts: what the layer's modules are, for hooks inside attention and the MLP; without it there are none.
    Raises UnclearError if the layer's residual stream cannot be located.
    """
    reading = _read(layer, dtype, mixes)
    structure = _resolve(reading, dtype, mixes, divisor)
    if parts is not None:
        stream = (reading.stream_name, _RESIDUAL)
        _look_inside(structure, inside.find(layer, dtype, stream, functools.partial(_part_or_norm, parts)))
    return structure


def _part_or_norm(parts: Parts, module: nn.Module) -> Part | None:
    return parts(module) or (Norm() if is_norm(module) else None)


def _look_inside(structure: Structure, proof: inside.Inside) -> None:
    """Add the hook points inside attention and the MLP to a structure."""
    for hook, (module, slot, alone) in proof.places.items():
        structure.places[hook] = HookPlace(module, () if slot is None else (slot,), alone=alone)
    structure.missing.update(proof.missing)
    structure.fixed.update(proof.fixed)
    structure.shapes.update(proof.shapes)


def _resolve(reading: _Reading, dtype: torch.dtype, mixes: Mixes, divisor: Divisor) -> Structure:
    try:
        if dtype == torch.float32:
            return reading.structure()
        taken, gain = reading.scales(_read(reading.layer, torch.float32, mixes), divisor)
        return _unscaled(reading.structure(gain), taken, gain)
    except _NoSumError as e:
        return reading.ends(str(e))


def _read(layer: nn.Module, dtype: torch.dtype, mixes: Mixes) -> _Reading:
    parameters = inspect.signature(layer.forward).parameters
    stream = next((name for name in _STREAM_NAMES if name in parameters), None)
    if stream is None:
        raise UnclearError(f"its forward takes {', '.join(parameters)}, none of which is the stream")
    try:
        graph = _trace(layer, dtype, stream, optional=True)
    except UnclearError:
        graph = _trace(layer, dtype, stream, optional=False)
    return _Reading(layer, graph, dtype, stream, parameters, mixes)


def _unscaled(structure: Structure, taken: float, gain: float) -> Structure:
    """Return a structure whose places give the stream itself.

    taken: the factor by which the layer's input is larger than the stream.
    gain: the factor between the stream in its input and in its output.
    """
    if taken == gain == 1.0:
        return structure
    factors = dict.fromkeys(("pre_attn", "attn_out", "post_attn", "mlp_out"), 1 / taken)
    factors["post_block"] = 1 / (taken * gain)
    places, returned = (
        {hook: replace(place, scale=place.scale * factors.get(hook, 1.0)) for hook, place in some.items()}
        for some in (structure.places, structure.returned)
    )
    missing = dict(structure.missing)
    for hook in ("attn_in", "mlp_in"):
        if places.get(hook, _WHOLE).slots:
            del places[hook]
            missing[hook] = f"{_READERS[hook]} takes a stream that is scaled in this dtype alone"
    return replace(structure, places=places, missing=missing, taken=taken, given=taken * gain, returned=returned)


_INSIDE = ("attn_in", "attn_out", "post_attn", "mlp_in", "mlp_out")
_READERS = {"attn_in": "attention", "mlp_in": "the MLP"}

_STREAM_NAMES = ("hidden_states", "x")
_RESIDUAL = "residual"


# --- the trace ---


class _Symbol(fx.Proxy):
    """A tensor as the layer's Python sees it: its values are unknown, its dtype is known."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tracer.dtype  # type: ignore[no-any-return,attr-defined]

    @property
    def shape(self) -> Any:
        shape = fx.proxy.Attribute(self, "shape")
        return _Shape(shape) if self.tracer.even else shape  # type: ignore[attr-defined]


class _Shape:
    """The shape of a symbol that has as many rows as every other one."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getitem__(self, dimension: Any) -> Any:
        part = self.whole[dimension]
        return _Rows(part.node, part.tracer) if dimension == 0 else part

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("how many dimensions a symbol has is unknown")


class _Rows(fx.Proxy):
    """A number of rows, which is unknown, and that of every other symbol."""

    __hash__ = fx.Proxy.__hash__

    def __eq__(self, other: object) -> Any:
        return True if isinstance(other, _Rows) else operator.eq(fx.Proxy(self.node, self.tracer), other)

    def __ne__(self, other: object) -> Any:
        return False if isinstance(other, _Rows) else operator.ne(fx.Proxy(self.node, self.tracer), other)


class _Tracer(fx.Tracer):
    """Traces a forward whose submodules are leaves."""

    def __init__(self, dtype: torch.dtype, *, even: bool = False) -> None:
        super().__init__()
        self.dtype, self.even = dtype, even

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True: submodules are not traced."""
        del m, module_qualified_name
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the symbol of a node."""
        return _Symbol(node, self)


def _trace(layer: nn.Module, dtype: torch.dtype, stream: str, *, optional: bool) -> fx.Graph:
    """Return the graph of a layer's forward on a stream, a residual if it takes one, and symbols for the rest.

    optional: symbols stand for the arguments that default to None as well.
    """
    parameters = inspect.signature(layer.forward).parameters
    takes_residual = _RESIDUAL in parameters
    filled = [
        name
        for name, parameter in parameters.items()
        if name not in (stream, _RESIDUAL)
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and (parameter.default is parameter.empty or (optional and parameter.default is None))
    ]

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, h: Any, r: Any, rest: Any) -> Any:
            values = {stream: h, **({_RESIDUAL: r} if takes_residual else {}), **dict.fromkeys(filled, rest)}
            return self.layer.forward(**values)

    return follow(Root(), dtype)


def follow(root: nn.Module, dtype: torch.dtype, *, even: bool = False) -> fx.Graph:
    """Return the graph of a module's forward on symbols of a dtype, its submodules left whole; raise UnclearError.

    even: all symbols have the same number of rows.
    """
    try:
        return _Tracer(dtype, even=even).trace(root)
    except Exception as e:  # a model's Python may raise anything when it meets a symbol
        first = next(iter(str(e).splitlines()), "")
        raise UnclearError(f"its forward cannot be followed: {type(e).__name__}: {first}") from e


# --- the reading of the trace ---


class _Term(NamedTuple):
    """A term of a sum: what a node of the graph returns, or one element of it."""

    node: fx.Node
    item: int | None = None


class _Sum(dict[_Term, float]):
    """A linear combination of terms.

    factor: the unknown numbers that all of it is multiplied by.
    """

    factor: tuple[fx.Node, ...] = ()

    def plus(self, other: _Sum, sign: float = 1.0) -> _Sum | None:
        """Return the sum of two; None if their unknown factors differ."""
        if self.factor != other.factor:
            return None
        total = _Sum(self)
        total.factor = self.factor
        for term, number in other.items():
            total[term] = total.get(term, 0.0) + sign * number
        return total

    def times(self, number: float) -> _Sum:
        """Return a multiple."""
        product = _Sum({term: number * n for term, n in self.items()})
        product.factor = self.factor
        return product

    def without(self, terms: set[_Term]) -> _Sum:
        """Return the sum without some terms."""
        return _Sum({term: number for term, number in self.items() if term not in terms})

    def equals(self, other: _Sum) -> bool:
        """Return whether two are the same sum, unknown factors aside."""
        return self.keys() == other.keys() and all(abs(n - other[term]) < 1e-6 for term, n in self.items())


_ADD = (operator.add, operator.iadd, torch.add)
_SUBTRACT = (operator.sub, operator.isub, torch.sub)
_MULTIPLY = (operator.mul, operator.imul, torch.mul)
_SAME_METHODS = ("clone", "contiguous", "to", "type_as")
_SAME_FUNCTIONS = (nn.functional.dropout,)
_SAME_MODULES = (nn.Dropout, nn.Identity)


class _Reading:
    """Reads one layer's graph."""

    def __init__(
        self,
        layer: nn.Module,
        graph: fx.Graph,
        dtype: torch.dtype,
        stream: str,
        parameters: Mapping[str, inspect.Parameter],
        mixes: Mixes,
    ) -> None:
        self.layer, self.dtype, self.mixes = layer, dtype, mixes
        self.nodes = list(graph.nodes)
        self.places = {place.name: place for place in self.nodes if place.op == "placeholder"}
        self.h, self.r = _Term(self.places["h"]), _Term(self.places["r"])
        self.names, self.stream_name = list(parameters), stream
        self.values: dict[fx.Node, Any] = {}
        # The result of `adds_residual`, by the norm's path.
        self._adding: dict[str, bool] = {}
        for node in self.nodes:
            self.values[node] = self._value(node)

    def scales(self, plain: _Reading, divisor: Divisor) -> tuple[float, float]:
        """Return the factors `taken` and `gain` of `_unscaled`.

        plain: the same layer in float32, where both are 1.
        Raises UnclearError if the layer scales what it adds otherwise than the stream: then it does not compute what it
        computes in float32.
        """
        out, gain, *_ = self._output()
        reference, plain_gain, *_ = plain._output()
        numbers = {(term.node.name, term.item): number for term, number in reference.items()}
        scales = {}
        for term, number in out.items():
            if term not in (self.h, self.r):
                divided = divisor(self._module(term.node)) if term.node.op == "call_module" else 1.0
                scales[term.node.name] = number / divided / numbers.get((term.node.name, term.item), math.nan)
        taken = next(iter(scales.values()), 1.0)
        if not all(abs(scale / taken - 1) < 1e-6 for scale in scales.values()):
            dtype = str(self.dtype).removeprefix("torch.")
            each = ", ".join(f"{name.removeprefix('layer_')} {scale:g} times" for name, scale in scales.items())
            raise UnclearError(f"in {dtype} alone it adds {each}: use another dtype")
        return taken, gain / plain_gain

    def structure(self, gain: float = 1.0) -> Structure:
        """Return the layer's hook points.

        gain: the layer multiplies the stream by this number before the MLP takes it, in this dtype alone.
        """
        out, _, split, items = self._output()
        structure = Structure(type(self.layer).__name__)
        names = [self.stream_name, *([_RESIDUAL] if split else [])]
        structure.places["pre_attn"] = HookPlace("", tuple(Slot(self.names.index(n), n) for n in names))
        structure.places["post_block"] = HookPlace("", items=items)
        if split:
            # What takes the stream first: nothing has changed it in place.
            halves = {self.h.node, self.r.node}
            first = next(node for node in self.nodes if halves & set(node.all_input_nodes))
            pair = self._fused(first)
            if pair is not None and pair.equals(_Sum({self.h: 1.0, self.r: 1.0})) and self._is_once(first):
                structure.returned["pre_attn"] = HookPlace(_path(first), items=(1,))
        added = {term for term in out if term not in (self.h, self.r)}
        later = {t for t in added if any(o.node in self._upstream(t.node) for o in added if o.node is not t.node)}
        parallel = not later
        mlp = later or {t for t in added if not self._is_mixed(t.node)}
        if mlp == added or not mlp:
            reason = (
                "the layer has no MLP beside attention" if len(added) < 2 else "attention cannot be told from the MLP"
            )
            structure.missing.update(dict.fromkeys(("post_attn", "mlp_in", "mlp_out"), reason))
            if len(added) == 1 and not mlp:
                self._find_part(structure, "attn", added, out)
            else:
                structure.missing.update(dict.fromkeys(("attn_in", "attn_out"), reason))
            return structure
        before = out.without(mlp)
        if any(self._is_mixed(node) for term in mlp for node in self._body(term.node, set())):
            structure.missing.update(dict.fromkeys(_INSIDE, "the layer has several attention blocks"))
            return structure
        self._find_post_attn(structure, before, gain, parallel=parallel)
        self._find_part(structure, "attn", added - mlp, out)
        self._find_part(structure, "mlp", mlp, out)
        return structure

    def ends(self, reason: str) -> Structure:
        """Return the structure of a layer whose stream is whole: what it takes, and what it returns.

        reason: why it has no other hook point.

        Raises UnclearError with the reason unless one tensor alone of what it returns depends on what it takes.
        """
        returned = next(node for node in self.nodes if node.op == "output").args[0]
        parts = list(returned) if isinstance(returned, tuple | list) else [returned]
        streams = [isinstance(part, fx.Node) and self.h.node in self._upstream(part) for part in parts]
        if sum(streams) > 1:
            raise UnclearError(f"{reason}, and {sum(streams)} of the tensors that it returns depend on its input")
        if _RESIDUAL in self.names or streams[:1] != [True]:
            raise UnclearError(reason)
        places = {
            "pre_attn": HookPlace("", (Slot(self.names.index(self.stream_name), self.stream_name),)),
            "post_block": HookPlace(""),
        }
        return Structure(type(self.layer).__name__, places, dict.fromkeys(_INSIDE, reason))

    def _output(self) -> tuple[_Sum, float, bool, tuple[int, ...]]:
        """Return the stream that leaves the layer, and where.

        Returns its sum, with the layer's input once; how many times it really holds the input; whether it is split; and
        the elements of the output that hold it.
        """
        returned = next(node for node in self.nodes if node.op == "output").args[0]
        parts = list(returned) if isinstance(returned, tuple | list) else [returned]
        sums = [self.values.get(part) if isinstance(part, fx.Node) else None for part in parts]
        first = sums[0]
        if not isinstance(first, _Sum):
            raise UnclearError("its output is no tensor")
        second = sums[1] if len(sums) > 1 and isinstance(sums[1], _Sum) else None
        split = self.r in first or (second is not None and self.r in second)
        out = first
        items: tuple[int, ...] = (0,)
        if split and second is not None:
            total = first.plus(second)
            if total is None:
                raise UnclearError("the halves of its stream are multiplied by different numbers")
            out, items = total, (0, 1)
        scale = out.get(self.h, 0.0)
        if not scale or (split and out.get(self.r) != scale):
            raise _NoSumError("its output is not its input plus what its modules add")
        return out.times(1 / scale), scale, split, items

    def _find_post_attn(self, structure: Structure, before: _Sum, gain: float, *, parallel: bool) -> None:
        """Find the module that is given the stream to which the MLP's output is added, `gain` times."""
        if parallel:
            structure.missing["post_attn"] = "attention and the MLP stand side by side"
            return
        before = before.times(gain)
        for node in self.nodes:
            if node.op != "call_module":
                continue
            if self._is_norm(node) and (pair := self._fused(node)) is not None and pair.equals(before):
                structure.places["post_attn"] = HookPlace(_path(node), self._slots(node, 2), scale=1 / gain)
                if self._is_once(node):
                    structure.returned["post_attn"] = HookPlace(_path(node), items=(1,), scale=1 / gain)
                return
            for number, value in enumerate(self._arguments(node)):
                if isinstance(value, _Sum) and value.equals(before) and not value.factor:
                    slots = (self._slots(node, number + 1)[number],)
                    structure.places["post_attn"] = HookPlace(_path(node), slots, scale=1 / gain)
                    return
        structure.missing["post_attn"] = "no module is given the stream after attention"

    def _find_part(self, structure: Structure, part: str, terms: set[_Term], out: _Sum) -> None:
        """Find what attention, or the MLP, takes and what it adds.

        part: `attn` or `mlp`, with which the names of its hooks begin.
        terms: the terms of `out` that it adds.
        """
        taken, added = f"{part}_in", f"{part}_out"
        name, other = ("attention", "the MLP") if part == "attn" else ("the MLP", "attention")
        sources = {source for term in terms for source in self._sources(term.node, set())}
        if len(sources) == 1:
            place = structure.places[taken] = next(iter(sources))
            body = {node for term in terms for node in self._body(term.node, set())}
            if place.slots:
                structure.fixed[taken] = f"{name} takes the residual stream itself"
            elif any(
                self._goes_elsewhere(n, body) for n in self.nodes if n.op == "call_module" and _path(n) == place.module
            ):
                structure.fixed[taken] = f"{other} takes what {name} takes"
        else:
            structure.missing[taken] = f"the modules of {name} take different inputs"
        term = next(iter(terms))
        if len(terms) == 1 and term.node.op == "call_module":
            structure.places[added] = HookPlace(_path(term.node), items=(term.item or 0,), scale=out[term])
        else:
            structure.missing[added] = f"what {name} adds is no one module's output"

    # The walk backwards from what the MLP adds.

    def _sources(self, node: fx.Node, seen: set[fx.Node]) -> Iterator[HookPlace]:
        """Yield the places of the values that a part of the MLP is computed from."""
        if node in seen:
            return
        seen.add(node)
        if self._is_norm(node) and self._streams(node):
            yield HookPlace(_path(node), items=(0,))
            return
        inputs = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, fx.Node)]
        for number, arg in enumerate(inputs):
            value = self.values.get(arg)
            if isinstance(value, _Sum) and self.h in value:
                if node.op == "call_module":
                    yield HookPlace(_path(node), (self._slots(node, number + 1)[number],))
            else:
                yield from self._sources(arg, seen)

    def _body(self, node: fx.Node, seen: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes between the MLP's input and a node."""
        if node in seen or (self._is_norm(node) and self._streams(node)):
            return seen
        value = self.values.get(node)
        if isinstance(value, _Sum) and self.h in value:
            return seen
        seen.add(node)
        for arg in node.all_input_nodes:
            self._body(arg, seen)
        return seen

    def _goes_elsewhere(self, node: fx.Node, body: set[fx.Node]) -> bool:
        """Return whether anything outside of a body takes the first element that a norm returns."""
        for user in node.users:
            if user.target is operator.getitem:
                if user.args[1] == 0 and self._goes_elsewhere(user, body):
                    return True
            elif user not in body:
                return True
        return False

    def _streams(self, node: fx.Node) -> bool:
        """Return whether a call is given the stream, or both its halves."""
        fused = self._fused(node)
        if fused is not None:
            return self.h in fused
        return any(isinstance(value, _Sum) and self.h in value for value in self._arguments(node))

    def _upstream(self, node: fx.Node) -> set[fx.Node]:
        """Return every node that a node is computed from."""
        seen: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            for arg in waiting.pop().all_input_nodes:
                if arg not in seen:
                    seen.add(arg)
                    waiting.append(arg)
        return seen

    def _is_mixed(self, node: fx.Node) -> bool:
        """Return whether a node, or what it is computed from since the stream, mixes tokens."""
        nodes = self._body(node, set()) | {node}
        return any(n.op == "call_module" and any(map(self.mixes, self._module(n).modules())) for n in nodes)

    # Values.

    def _value(self, node: fx.Node) -> Any:
        """Return the value of a node: a sum, or None if it is no tensor of interest."""
        if node.op == "placeholder":
            return _Sum({_Term(node): 1.0}) if node.name in ("h", "r") else None
        if node.op == "call_function":
            return self._function(node)
        if node.op == "call_method" and node.target in _SAME_METHODS:
            return self.values.get(node.args[0])  # type: ignore[arg-type]
        if node.op == "call_module" and isinstance(self._module(node), _SAME_MODULES):
            return self.values.get(node.args[0])  # type: ignore[arg-type]
        return _Sum({_Term(node): 1.0})

    def _function(self, node: fx.Node) -> Any:
        opaque = _Sum({_Term(node): 1.0})
        values = [self.values.get(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._element(node.args[0], node.args[1], opaque)
        if node.target in _SAME_FUNCTIONS:
            return values[0]
        if len(values) != 2 or node.kwargs:
            return opaque
        first, second = values
        if node.target in (*_ADD, *_SUBTRACT) and isinstance(first, _Sum) and isinstance(second, _Sum):
            total = first.plus(second, -1.0 if node.target in _SUBTRACT else 1.0)
            return opaque if total is None else total
        if node.target in _MULTIPLY:
            return self._product(node, first, second) or opaque
        if node.target is operator.truediv and isinstance(first, _Sum) and isinstance(second, int | float):
            return first.times(1 / second)
        return opaque

    def _product(self, node: fx.Node, first: Any, second: Any) -> _Sum | None:
        if isinstance(second, _Sum) and not isinstance(first, _Sum):
            first, second = second, first
        if not isinstance(first, _Sum):
            return None
        if isinstance(second, int | float):
            return first.times(second)
        number = next((n for n in node.all_input_nodes if n.op == "get_attr" and self._numel(n) == 1), None)
        if number is None:
            return None
        product = first.times(1.0) if len(node.all_input_nodes) == 2 else None
        if product is not None:
            product.factor = (*first.factor, number)
        return product

    def _element(self, source: fx.Node, item: Any, opaque: _Sum) -> _Sum:
        """Return one element of what a module returns."""
        if source.op != "call_module" or not isinstance(item, int):
            return opaque
        if item == 1 and self._is_norm(source):
            carried = self._carried(source)
            if carried is not None:
                return carried
        return _Sum({_Term(source, item): 1.0})

    def _carried(self, node: fx.Node) -> _Sum | None:
        """Return the residual that a norm hands on: added up, or unchanged."""
        arguments = self._arguments(node)
        if len(arguments) < 2 or not isinstance(arguments[1], _Sum):
            return None
        return self._fused(node) or arguments[1]

    def _fused(self, node: fx.Node) -> _Sum | None:
        """Return the sum that a norm adds up before it normalises; None if it adds nothing."""
        if not self._is_norm(node):
            return None
        values = self._arguments(node)
        if len(values) < 2 or not isinstance(values[0], _Sum) or not isinstance(values[1], _Sum):
            return None
        path = _path(node)
        if path not in self._adding:
            self._adding[path] = adds_residual(self._module(node))
        return values[0].plus(values[1]) if self._adding[path] else None

    # Modules.

    def _module(self, node: fx.Node) -> nn.Module:
        return self.layer.get_submodule(_path(node))

    def _arguments(self, node: fx.Node) -> list[Any]:
        return [self.values.get(a) if isinstance(a, fx.Node) else a for a in (*node.args, *node.kwargs.values())]

    def _slots(self, node: fx.Node, count: int) -> tuple[Slot, ...]:
        """Return the slots of a module's first arguments."""
        parameters = inspect.signature(self._module(node).forward).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        positional = [Slot(n, names[n] if n < len(names) else None) for n in range(len(node.args))]
        named = [Slot(names.index(name) if name in names else None, name) for name in node.kwargs]
        return tuple((positional + named)[:count])

    def _is_norm(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        return is_norm(self._module(node))

    def _is_once(self, node: fx.Node) -> bool:
        """Return whether a module is called once only."""
        modules = [self._module(other) for other in self.nodes if other.op == "call_module"]
        return sum(module is self._module(node) for module in modules) == 1

    def _numel(self, node: fx.Node) -> int:
        value = operator.attrgetter(str(node.target).removeprefix("layer."))(self.layer)
        return value.numel() if isinstance(value, torch.Tensor) else 1


def _path(node: fx.Node) -> str:
    return str(node.target).removeprefix("layer.")


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm over the width of the stream."""
    return "norm" in type(module).__name__.lower() and all(p.dim() <= 1 for p in module.parameters())


def adds_residual(norm: nn.Module) -> bool:
    """Return whether a norm adds the residual that it takes, normalises the sum and hands it on.

    A copy is tried on random numbers. Raises UnclearError if the norm neither does that nor hands the residual on
    unchanged.
    """
    trial = copy.deepcopy(norm).to_empty(device="cpu").float()
    width = max((p.shape[-1] for p in trial.parameters() if p.dim()), default=64)
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 3, width, generator=generator)
    with torch.no_grad():
        for parameter in (*trial.parameters(), *trial.buffers()):
            if parameter.is_floating_point():
                parameter.fill_(1.0)
        call = getattr(trial, "forward_native", trial.forward)
        try:
            _, carried = call(x.clone(), residual.clone())
        except Exception as e:
            raise UnclearError(f"its norm {type(norm).__name__} cannot be tried: {e}") from e
    if torch.allclose(carried.float(), x + residual, atol=1e-5):
        return True
    if torch.equal(carried.float(), residual):
        return False
    raise UnclearError(f"its norm {type(norm).__name__} neither adds the residual nor hands it on")


class _LargeOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            size = args[0] if args and not isinstance(args[0], int) else args
            if math.prod(kwargs.get("size", size)) > _SMALL_ELEMENTS_MAX:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


_SMALL_ELEMENTS_MAX = 65536


def large_on_meta() -> TorchFunctionMode:
    """Return a context in which `torch.empty` makes large tensors, such as weights, on the meta device."""
    return _LargeOnMeta()
