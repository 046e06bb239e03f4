"""Where norms return the stream: places for the taps of sites that are not steered, and of `final`.

vLLM fuses an all-reduce at the end of attention or of an MLP with the norm that comes next. That norm adds up the
halves of the stream and returns the sum. A tap between the two keeps them apart, also while it does nothing. A site
that is not steered is tapped where the norm returns the sum; a steered one cannot be, as the norm must see the change.

The norm after a layer belongs to the next layer, or to the module that owns the layers. So the forward of that module
is run once on symbols, its submodules left whole. Only what this proves is used: where a model does something between
two layers, or where its forward cannot be followed, taps stay before the norm.

`final` is what the norm returns that is the last thing in that forward.
"""

from __future__ import annotations

import collections
import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from capflow.capture.site import Site
from capflow_engine.layer.structure import HookPlace, Structure, UnclearError, adds_residual, follow, is_norm

Places = dict[Site, tuple[nn.Module, HookPlace]]
"""By site, a module, and the place in it where a norm returns the site's value."""


def returned_places(
    model: nn.Module, layers: Mapping[int, nn.Module], structures: Mapping[int, Structure], dtype: torch.dtype
) -> Places:
    """Return the places of a model's sites at which a norm returns their value, as far as they are proved.

    layers: those that this worker owns, by their number in the whole model.
    structures: of each of these layers.
    """
    places: Places = {}
    for number, layer in layers.items():
        if (place := structures[number].returned.get("post_attn")) is not None:
            places[Site(number, "post_attn")] = layer, place
    for owner in _owners(model, set(layers.values())):
        try:
            places |= _Reading(owner, layers, structures, dtype).places()
        except UnclearError:
            continue
        break
    shared = _shared(layers)
    return {site: place for site, place in places.items() if place[0].get_submodule(place[1].module) not in shared}


def final_place(
    model: nn.Module, layers: Mapping[int, nn.Module], structures: Mapping[int, Structure], dtype: torch.dtype
) -> tuple[nn.Module, HookPlace]:
    """Return the module that owns the layers, and where in it the last norm returns what the LM head reads.

    layers: those that this worker owns, the last one of the model included.

    Raises UnclearError with the reason if there is no such norm.
    """
    reason = "no module holds the list of the layers"
    for owner in _owners(model, set(layers.values())):
        try:
            reading = _Reading(owner, layers, structures, dtype)
        except UnclearError as e:
            reason = str(e)
            place = _tried_final(owner, dtype)
        else:
            place = reading.final(max(layers))
        if place is not None:
            return owner, replace(place, scale=_factor_behind(model, owner, dtype))
    raise UnclearError(reason)


def _factor_behind(model: nn.Module, owner: nn.Module, dtype: torch.dtype) -> float:
    """Return the number by which the module that holds the owner multiplies what it returns, as MiniCPM does.

    A forward that cannot be followed is taken to return it as it is: the Transformers backend takes a dimension away.

    Raises UnclearError for a module that does something else with it.
    """
    factor = 1.0
    for holder in model.modules():
        name = next((name for name, child in holder.named_children() if child is owner), None)
        if name is None:
            continue
        setattr(holder, name, nn.Identity())
        try:
            graph = _trace(holder, dtype)
        except UnclearError:
            continue
        finally:
            setattr(holder, name, owner)
        value = next(node.args[0] for node in graph.nodes if node.op == "output")
        while isinstance(value, fx.Node) and value.target in (operator.truediv, operator.mul):
            target, (value, number) = value.target, value.args
            if not isinstance(number, int | float):
                raise UnclearError("the model multiplies what its last norm returns by more than a number")
            factor *= 1 / number if target is operator.truediv else number
        if not (isinstance(value, fx.Node) and value.op == "call_module" and _path(value) == name):
            raise UnclearError("the model changes what its last norm returns")
    return factor


def _tried_final(owner: nn.Module, dtype: torch.dtype) -> HookPlace | None:
    """Return where the norm is that returns what a model of Transformers returns; None if that does not show.

    The model runs once without its layers, on embeddings of three tokens. Its forward asks what symbols cannot answer.
    """
    lists = [name for name, child in owner.named_children() if isinstance(child, nn.ModuleList)]
    norms = {name: module for name, module in owner.named_children() if is_norm(module)}
    weight = next((weight for norm in norms.values() for weight in norm.parameters()), None)
    if len(lists) != 1 or weight is None or "inputs_embeds" not in inspect.signature(owner.forward).parameters:
        return None
    layers = owner.get_submodule(lists[0])
    outputs: dict[str, list[Any]] = {name: [] for name in norms}
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs[name].append(output))
        for name, module in norms.items()
    ]
    setattr(owner, lists[0], nn.ModuleList())
    try:
        # Of a model that is on the meta device, some tensors may not be.
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            embedded = torch.zeros(1, 3, weight.shape[-1], dtype=dtype, device=weight.device)
            positions = torch.arange(3, device=weight.device)[None]
            output = owner.forward(inputs_embeds=embedded, position_ids=positions, use_cache=False, return_dict=False)
    except Exception:  # noqa: BLE001 - a model's Python may raise anything without its layers
        return None
    finally:
        setattr(owner, lists[0], layers)
        for handle in handles:
            handle.remove()
    returned = output[0] if isinstance(output, tuple) else output
    ours = [name for name, values in outputs.items() if len(values) == 1 and values[0] is returned]
    return HookPlace(ours[0], outside=True) if len(ours) == 1 else None


def _shared(layers: Mapping[int, nn.Module]) -> set[nn.Module]:
    """Return the modules that several layers have: a tap there would be called for each."""
    owners = collections.Counter(module for layer in layers.values() for module in layer.modules())
    return {module for module, count in owners.items() if count > 1}


def _owners(model: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that hold the list of the layers."""
    for module in model.modules():
        if any(isinstance(child, nn.ModuleList) and layers <= set(child) for child in module.children()):
            yield module


def _trace(owner: nn.Module, dtype: torch.dtype) -> fx.Graph:
    """Return the graph of the owner's forward, on symbols for token ids, positions, and what a stage receives."""
    names, absent = [], []
    for name, parameter in inspect.signature(owner.forward).parameters.items():
        if name == "inputs_embeds":
            absent.append(name)
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and (
            parameter.default is parameter.empty or name == "intermediate_tensors"
        ):
            names.append(name)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owner = owner

        def forward(self, symbol: Any) -> Any:
            return self.owner.forward(**dict.fromkeys(names, symbol), **dict.fromkeys(absent))

    # Some models ask whether the stream has a row for each position. A tap refuses any other, so here it does.
    return follow(Root(), dtype, even=True)


class _Reading:
    """Reads the graph of the module that owns the layers.

    Raises UnclearError if it cannot be followed.
    """

    def __init__(
        self,
        owner: nn.Module,
        layers: Mapping[int, nn.Module],
        structures: Mapping[int, Structure],
        dtype: torch.dtype,
    ) -> None:
        self.owner, self.layers, self.structures = owner, layers, structures
        graph = _trace(owner, dtype)
        nodes = [node for node in graph.nodes if node.op == "call_module"]
        self.returned = next(node.args[0] for node in graph.nodes if node.op == "output")
        self.modules = {node: owner.get_submodule(_path(node)) for node in nodes}
        numbers = {layer: number for number, layer in layers.items()}
        self.calls: dict[int, fx.Node] = {}
        for node, module in self.modules.items():
            if module in numbers:
                if numbers[module] in self.calls:
                    raise UnclearError("a layer runs twice")
                self.calls[numbers[module]] = node

    def places(self) -> Places:
        """Return the places of the sites before and after the layers."""
        places: Places = {}
        for number, call in self.calls.items():
            structure = self.structures[number]
            if self._given(number) is not None and (place := structure.returned.get("pre_attn")) is not None:
                places[Site(number, "pre_attn")] = self.layers[number], place
            halves = _halves(call, structure.places["post_block"].items)
            if halves is None:
                continue
            given = self._given(number + 1)
            if given is not None and given == halves:
                place = self.structures[number + 1].returned.get("pre_attn")
                if place is not None and _unchanged(halves, self.calls[number + 1]):
                    places[Site(number, "post_block")] = self.layers[number + 1], place
            elif (place := self._norm_of(halves, structure.places["post_block"].scale)) is not None:
                places[Site(number, "post_block")] = self.owner, place
        return places

    def final(self, last: int) -> HookPlace:
        """Return where the norm behind the last layer returns what the model returns; raise UnclearError without one.

        last: the number of the last layer.
        """
        value = self.returned
        while isinstance(value, tuple | list) and value:  # some models return intermediate values beside it
            value = value[0]
        item: Any = 0
        if isinstance(value, fx.Node) and value.target is operator.getitem:
            value, item = value.args
        module = self.modules.get(value) if isinstance(value, fx.Node) else None
        if module is None or item != 0 or not is_norm(module):
            raise UnclearError("what the model returns is not what a norm returns")
        if sum(other is module for other in self.modules.values()) > 1:
            raise UnclearError("the model's last norm runs twice")
        if self.calls.get(last) not in _upstream(value):
            raise UnclearError("the model's last norm does not take what the last layer returns")
        return HookPlace(_path(value), outside=True)

    def _given(self, number: int) -> tuple[Any, ...] | None:
        """Return the two halves of the stream that a layer is given; None if there are not two."""
        if number not in self.calls:
            return None
        call = self.calls[number]
        halves = tuple(slot.of(call.args, call.kwargs) for slot in self.structures[number].places["pre_attn"].slots)
        return halves if len(halves) == 2 and all(isinstance(half, fx.Node) for half in halves) else None

    def _norm_of(self, halves: tuple[fx.Node, ...], scale: float) -> HookPlace | None:
        """Return where a norm of the owner returns the sum of two halves.

        scale: the value of the site is this many times the sum.
        """
        for node, module in self.modules.items():
            if (*node.args, *node.kwargs.values())[:2] != halves or not is_norm(module):
                continue
            alone = sum(other is module for other in self.modules.values()) == 1
            if alone and _unchanged(halves, node) and adds_residual(module):
                return HookPlace(_path(node), items=(1,), scale=scale, used=0)
        return None


def _upstream(node: fx.Node) -> set[fx.Node]:
    """Return the modules' calls that a node is computed from without another one in between."""
    calls: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source.op == "call_module":
            calls.add(source)
        else:
            waiting += source.all_input_nodes
    return calls


def _halves(call: fx.Node, items: tuple[int, ...]) -> tuple[fx.Node, ...] | None:
    """Return the two halves of the stream that a layer returns."""
    elements = [user for user in call.users if user.target is operator.getitem]
    halves = tuple(element for item in items for element in elements if element.args[1] == item)
    return halves if len(halves) == len(items) == 2 else None


def _unchanged(halves: tuple[fx.Node, ...], taker: fx.Node) -> bool:
    """Return whether nothing but one call can change two tensors in place."""
    users = {user for half in halves for user in half.users}
    return all(user is taker or user.op == "output" or user.target in _PURE for user in users)


_PURE = (getattr, operator.add, operator.sub, operator.mul, operator.getitem, torch.add, torch.cat, "clone", "to")


def _path(node: fx.Node) -> str:
    return str(node.target).removeprefix("owner.")
