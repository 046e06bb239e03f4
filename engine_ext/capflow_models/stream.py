"""The residual stream of a Transformers model: forward hooks capture and steer it at the layers' hook points.

`capflow_engine.layer.structure` finds the hook points from how a layer's output is summed, as for vLLM. Operations are
computed in float32 and rounded to the model's dtype once, as in `capflow.steering.program`.

One prompt is computed at a time. A site sees each position once and in order, so the number of positions that it has
seen is the next position.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError, explain
from capflow.steering.program import ADD, CLAMP, ENCODE, RELATIVE, SET, Op, SiteOps, SteeringProgram
from capflow_engine.layer.parts import Slot
from capflow_engine.layer.structure import HookPlace, Structure, UnclearError, resolve

_CACHES = frozenset({"past_key_values", "past_key_value", "layer_past", "cache_params"})
"""The names of the cache argument in Transformers, for modules that mix tokens."""


class Layer(NamedTuple):
    """A decoder layer and its hook points.

    model: the whole model.
    """

    module: torch.nn.Module
    structure: Structure
    model: torch.nn.Module


def layers_of(model: torch.nn.Module, count: int, dtype: torch.dtype) -> list[Layer]:
    """Return a model's decoder layers in order. Raises UsageError unless exactly one list of modules has `count`."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    lists = [m for m in lists if not any(m is not other and _holds(other, m) for other in lists)]
    if len(lists) != 1:
        got = f"{len(lists)} lists of {count} modules in {type(model).__name__}"
        raise UsageError(explain("the model's layers", got=got, expected="one", do="use the vLLM back end"))
    layers = [Layer(layer, structure_of(layer, dtype), model) for layer in lists[0]]
    _find_final(layers[-1])
    return layers


def _find_final(last: Layer) -> None:
    """Add `final`, what the LM head takes, to the hook points of the last layer."""
    head = getattr(last.model, "get_output_embeddings", lambda: None)()
    path = next((name for name, module in last.model.named_modules() if module is head), None)
    last.structure.missing.pop("final", None)
    if path is None:
        last.structure.missing["final"] = "the model names no LM head"
    else:
        last.structure.places["final"] = HookPlace(path, (Slot(0, "input"),), outside=True)


def structure_of(layer: torch.nn.Module, dtype: torch.dtype) -> Structure:
    """Return the hook points of a decoder layer; only its input and its output if its structure is unclear."""
    reason = "no module of the layer takes a cache, so attention cannot be told from the MLP"
    if any(_mixes_tokens(module) for module in layer.modules() if module is not layer):
        try:
            return resolve(layer, dtype, _mixes_tokens)
        except UnclearError as e:
            reason = str(e)
    ends = {"pre_attn": HookPlace("", (Slot(0, "hidden_states"),)), "post_block": HookPlace("")}
    return Structure(type(layer).__name__, ends, {hook: reason for hook in HOOKS if hook not in (*ends, "final")})


def _mixes_tokens(module: torch.nn.Module) -> bool:
    """Return whether a module mixes tokens: attention, or a state space."""
    return not _CACHES.isdisjoint(inspect.signature(module.forward).parameters)


def _holds(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


class Stream:
    """The stream of one prompt and its answer, while `hooked` runs.

    program: the operations on the stream; None for none.
    sites: the steered sites.
    caught: the rows of the last pass at each captured site, `[tokens, hidden_size]` float32 on the CPU, before the site
        is steered.

    Raises UsageError for a program with gates.
    """

    def __init__(self, program: SteeringProgram | None, prompt_length: int, device: torch.device) -> None:
        if program is not None and program.gates:
            do = "use the vLLM back end"
            raise UsageError(explain("steering_gates", got=f"{len(program.gates)} gates", expected="none", do=do))
        self.caught: dict[Site, torch.Tensor] = {}
        self.sites = frozenset[Site]() if program is None else program.sites
        self._prompt_length = prompt_length
        if program is not None:
            self._rows = torch.tensor(program.array(), device=device)
            self._phases = _by_site(program.prefill), _by_site(program.decode)
            self._single = {at: _by_site(ops) for at, ops in program.patches(prompt_length).items()}

    @contextmanager
    def hooked(self, layers: Sequence[Layer], catch: Collection[Site] = ()) -> Iterator[None]:
        """Capture and steer the output of these layers while a block runs.

        catch: the sites to capture.
        """
        handles = []
        try:
            for site in {*self.sites, *catch}:
                layer = layers[site.layer]
                place = layer.structure.places[site.hook]
                at = _AtSite(self, site, place, site in catch)
                module = (layer.model if place.outside else layer.module).get_submodule(place.module)
                if place.slots:
                    handles.append(module.register_forward_pre_hook(at.before, with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(at.after))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def steered(self, hidden: torch.Tensor, site: Site, start: int) -> torch.Tensor:
        """Return the stream at a site with the site's operations applied.

        hidden: `[n, hidden_size]`, the positions from `start` on.
        """
        stop = start + len(hidden)
        border = min(max(self._prompt_length, start), stop)
        single = {at: ops.get(site, ()) for at, ops in self._single.items() if start <= at < stop}
        steered = hidden.clone()
        for phase, (first, end) in zip(self._phases, ((start, border), (border, stop)), strict=True):
            ops = phase.get(site, ())
            index = [at - start for at in range(first, end) if at not in single]
            if ops and index:
                steered[index] = self._apply(hidden[index], ops)
        for at, ops in single.items():
            steered[at - start] = self._apply(hidden[at - start], ops)
        return steered

    def _apply(self, rows: torch.Tensor, ops: Sequence[Op]) -> torch.Tensor:
        """Return rows `[n, hidden_size]` or `[hidden_size]` with operations applied."""
        x = rows.float()
        norms, active = None, []
        for op in ops:
            row = self._rows[op.row]
            if op.kind == ADD:
                x = x + op.amount * row
            elif op.kind == RELATIVE:
                norms = x.norm(dim=-1, keepdim=True) if norms is None else norms
                x = x + op.amount * norms * row
            elif op.kind == ENCODE:
                encoded = (x * row).sum(-1, keepdim=True) + op.low
                active.append(torch.where(encoded > op.high, encoded, 0.0))
            elif op.kind == SET:
                x = x + op.amount * (op.low - active.pop(0)) * row
            elif op.kind == CLAMP:
                projection = (x * row).sum(-1, keepdim=True)
                x = x + op.amount * (projection.clamp(op.low, op.high) - projection) * row
            else:
                # NaN in a row leaves the model's number.
                x = x + op.amount * torch.where(row.isnan(), 0.0, row - x)
        return x.to(rows.dtype)


class _AtSite:
    """A module's forward hook at a site.

    The tensor is changed in place: a residual connection beside the module uses the same tensor.

    catch: whether to capture the site.
    start: how many positions the site has seen.
    """

    def __init__(self, stream: Stream, site: Site, place: HookPlace, catch: bool) -> None:
        self.stream, self.site, self.place, self.catch, self.start = stream, site, place, catch, 0

    def before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._pass(self.place.slots[0].of(args, kwargs))

    def after(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._pass(output if isinstance(output, torch.Tensor) else output[self.place.items[0]])

    def _pass(self, tensor: torch.Tensor) -> None:
        scale = self.place.scale
        hidden = tensor.reshape(-1, tensor.shape[-1])
        value = hidden if scale == 1.0 else hidden * scale
        if self.catch:
            self.stream.caught[self.site] = value.detach().clone().float().cpu()
        start, self.start = self.start, self.start + len(hidden)
        if self.site in self.stream.sites:
            steered = self.stream.steered(value, self.site, start)
            tensor.copy_((steered if scale == 1.0 else hidden + (steered - value) / scale).view(tensor.shape))


def _by_site(ops: Sequence[SiteOps]) -> dict[Site, tuple[Op, ...]]:
    return {Site(layer, hook): each for layer, hook, each in ops}
