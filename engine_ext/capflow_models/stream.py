"""The residual stream of a Transformers model: caught and steered at the hook points of its layers by forward hooks.

Where a layer's hook points lie is found from how its output is summed, as in vLLM (`capflow_engine.structure`). Operations are done in
float32 and rounded to the model's dtype once, as in `capflow.steering.program`. One prompt is computed at a time: a site sees positions in
order, each once, so how many it saw is the position of the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError, explain
from capflow.steering.program import ADD, CLAMP, RELATIVE, Op, SiteOps, SteeringProgram
from capflow_engine.structure import HookPlace, Slot, Structure, UnclearError, resolve

_CACHES = frozenset({"past_key_values", "past_key_value", "layer_past", "cache_params"})
"""What Transformers calls the cache that whatever mixes tokens is given."""


class Layer(NamedTuple):
    """A decoder layer and where its hook points lie."""

    module: torch.nn.Module
    structure: Structure


def layers_of(model: torch.nn.Module, count: int, dtype: torch.dtype) -> list[Layer]:
    """Return a model's decoder layers in order; raises UsageError unless exactly one list of modules has `count`."""
    found = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    found = [m for m in found if not any(m is not other and _holds(other, m) for other in found)]
    if len(found) != 1:
        got = f"{len(found)} lists of {count} modules in {type(model).__name__}"
        raise UsageError(explain("the model's layers", got=got, expected="one", do="use the vLLM back end"))
    return [Layer(layer, structure_of(layer, dtype)) for layer in found[0]]


def structure_of(layer: torch.nn.Module, dtype: torch.dtype) -> Structure:
    """Return the structure of a decoder layer: what it is given and what it returns, where no more can be proved."""
    reason = "no module of the layer takes a cache, so attention cannot be told from the MLP"
    if any(_mixes_tokens(module) for module in layer.modules() if module is not layer):
        try:
            return resolve(layer, dtype, _mixes_tokens)
        except UnclearError as e:
            reason = str(e)
    outside = {"pre_attn": HookPlace("", (Slot(0, "hidden_states"),)), "post_block": HookPlace("")}
    return Structure(type(layer).__name__, outside, {hook: reason for hook in HOOKS if hook not in outside})


def _mixes_tokens(module: torch.nn.Module) -> bool:
    """Return whether a module mixes tokens: attention, or a state space."""
    return not _CACHES.isdisjoint(inspect.signature(module.forward).parameters)


def _holds(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


class Stream:
    """The stream of one prompt and its answer, for as long as `hooked` runs.

    program: what is done to it; None for nothing. sites: where that is. caught: for each site that was asked for, the
        row of the position that was computed last, `[hidden_size]` float32 on the CPU, as it came to the site.
    """

    def __init__(self, program: SteeringProgram | None, prompt_length: int, device: torch.device) -> None:
        self.caught: dict[Site, torch.Tensor] = {}
        self.sites = frozenset[Site]() if program is None else program.sites
        self._prompt_length = prompt_length
        if program is not None:
            self._rows = torch.tensor(program.array(), device=device)
            self._phases = _by_site(program.prefill), _by_site(program.decode)
            self._single = {at: _by_site(ops) for at, ops in program.patches(prompt_length).items()}

    @contextmanager
    def hooked(self, layers: Sequence[Layer], catch: Collection[Site] = ()) -> Iterator[None]:
        """Catch and steer what these layers compute for as long as a block runs."""
        handles = []
        try:
            for site in {*self.sites, *catch}:
                layer, structure = layers[site.layer]
                place = structure.places[site.hook]
                at = _AtSite(self, site, place, site in catch)
                module = layer.get_submodule(place.module)
                if place.slots:
                    handles.append(module.register_forward_pre_hook(at.before, with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(at.after))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def steered(self, hidden: torch.Tensor, site: Site, start: int) -> torch.Tensor:
        """Return what is at a site, `[n, hidden_size]` of the positions from `start` on, with what is done to it there."""
        stop = start + len(hidden)
        border = min(max(self._prompt_length, start), stop)
        single = {at: ops.get(site, ()) for at, ops in self._single.items() if start <= at < stop}
        steered = hidden.clone()
        for phase, (first, end) in zip(self._phases, ((start, border), (border, stop)), strict=True):
            ops = phase.get(site, ())
            index = [at - start for at in range(first, end) if at not in single]
            if ops and index:
                steered[index] = self._done(hidden[index], ops)
        for at, ops in single.items():
            steered[at - start] = self._done(hidden[at - start], ops)
        return steered

    def _done(self, rows: torch.Tensor, ops: Sequence[Op]) -> torch.Tensor:
        """Return rows, `[n, hidden_size]` or `[hidden_size]`, with operations done."""
        x = rows.float()
        for op in ops:
            row = self._rows[op.row]
            if op.kind == ADD:
                x = x + op.amount * row
            elif op.kind == RELATIVE:
                x = x + op.amount * x.norm(dim=-1, keepdim=True) * row
            elif op.kind == CLAMP:
                projection = (x * row).sum(-1, keepdim=True)
                x = x + op.amount * (projection.clamp(op.low, op.high) - projection) * row
            else:
                x = x + op.amount * (row - x)
        return x.to(rows.dtype)


class _AtSite:
    """A module's forward hook at a site. start: how many positions it has seen.

    The tensor that stands there is changed in place, as a stream that goes on beside the module is the same tensor.
    """

    def __init__(self, stream: Stream, site: Site, place: HookPlace, catch: bool) -> None:
        self.stream, self.site, self.place, self.catch, self.start = stream, site, place, catch, 0

    def before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._passed(self.place.slots[0].of(args, kwargs))

    def after(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._passed(output if isinstance(output, torch.Tensor) else output[self.place.items[0]])

    def _passed(self, given: torch.Tensor) -> None:
        scale = self.place.scale
        hidden = given.reshape(-1, given.shape[-1])
        value = hidden if scale == 1.0 else hidden * scale
        if self.catch:
            self.stream.caught[self.site] = value[-1].detach().clone().float().cpu()
        start, self.start = self.start, self.start + len(hidden)
        if self.site in self.stream.sites:
            steered = self.stream.steered(value, self.site, start)
            given.copy_((steered if scale == 1.0 else hidden + (steered - value) / scale).view(given.shape))


def _by_site(ops: Sequence[SiteOps]) -> dict[Site, tuple[Op, ...]]:
    return {Site(layer, hook): each for layer, hook, each in ops}
