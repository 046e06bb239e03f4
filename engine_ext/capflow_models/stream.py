"""The residual stream of a Transformers model: caught and steered at its layers by forward hooks.

Operations are done in float32 and rounded to the model's dtype once, as in `capflow.program`. One prompt is computed at a time:
a layer sees positions in order, each once, so how many it saw is the position of the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from capflow.errors import UsageError, explain
from capflow.program import ADD, CLAMP, Op, SiteOps, SteeringProgram
from capflow.site import Site

HOOKS = ("pre_attn", "post_block")
"""The hooks that a layer shows from outside, whatever its architecture."""


def layers_of(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """Return a model's decoder layers in order; raises UsageError unless exactly one list of modules has `count`."""
    found = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    found = [m for m in found if not any(m is not other and _holds(other, m) for other in found)]
    if len(found) != 1:
        got = f"{len(found)} lists of {count} modules in {type(model).__name__}"
        raise UsageError(explain("the model's layers", got=got, expected="one", do="use the vLLM back end"))
    return list(found[0])


def _holds(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


class Stream:
    """The stream of one prompt and its answer, for as long as `hooked` runs.

    program: what is done to it; None for nothing. caught: for each site that was asked for, the row of the position
    that was computed last, `[hidden_size]` float32 on the CPU, as it came to the site.
    """

    def __init__(self, program: SteeringProgram | None, prompt_length: int, device: torch.device) -> None:
        self.caught: dict[Site, torch.Tensor] = {}
        self._sites = frozenset[Site]() if program is None else program.sites
        self._prompt_length = prompt_length
        if program is not None:
            self._rows = torch.tensor(program.array(), device=device)
            self._phases = _by_site(program.prefill), _by_site(program.decode)
            self._single = {at: _by_site(ops) for at, ops in program.patches(prompt_length).items()}

    @contextmanager
    def hooked(self, layers: Sequence[torch.nn.Module], catch: Collection[Site] = ()) -> Iterator[None]:
        """Catch and steer what these layers compute for as long as a block runs."""
        handles = []
        try:
            for site in {*self._sites, *catch}:
                at = _AtSite(self, site, site in catch)
                layer = layers[site.layer]
                if site.hook == "pre_attn":
                    handles.append(layer.register_forward_pre_hook(at.before, with_kwargs=True))
                else:
                    handles.append(layer.register_forward_hook(at.after))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def steered(self, hidden: torch.Tensor, site: Site, start: int) -> torch.Tensor:
        """Return the stream `[1, n, hidden_size]` of positions from `start` on with what is done to it at a site."""
        if site not in self._sites:
            return hidden
        stop = start + hidden.shape[1]
        border = min(max(self._prompt_length, start), stop)
        single = {at: ops.get(site, ()) for at, ops in self._single.items() if start <= at < stop}
        steered = hidden.clone()
        for phase, (first, end) in zip(self._phases, ((start, border), (border, stop)), strict=True):
            ops = phase.get(site, ())
            index = [at - start for at in range(first, end) if at not in single]
            if ops and index:
                steered[0, index] = self._done(hidden[0, index], ops)
        for at, ops in single.items():
            steered[0, at - start] = self._done(hidden[0, at - start], ops)
        return steered

    def _done(self, rows: torch.Tensor, ops: Sequence[Op]) -> torch.Tensor:
        """Return rows, `[n, hidden_size]` or `[hidden_size]`, with operations done."""
        x = rows.float()
        for op in ops:
            row = self._rows[op.row]
            if op.kind == ADD:
                x = x + op.amount * row
            elif op.kind == CLAMP:
                projection = (x * row).sum(-1, keepdim=True)
                x = x + op.amount * (projection.clamp(op.low, op.high) - projection) * row
            else:
                x = x + op.amount * (row - x)
        return x.to(rows.dtype)


class _AtSite:
    """A layer's forward hook. start: how many positions it has seen."""

    def __init__(self, stream: Stream, site: Site, catch: bool) -> None:
        self.stream, self.site, self.catch, self.start = stream, site, catch, 0

    def before(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._passed(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._passed(kwargs["hidden_states"])}

    def after(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return self._passed(output[0]), *output[1:]
        return self._passed(output)

    def _passed(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.dim() == 3
        assert hidden.shape[0] == 1
        if self.catch:
            self.stream.caught[self.site] = hidden[0, -1].detach().float().cpu()
        start, self.start = self.start, self.start + hidden.shape[1]
        return self.stream.steered(hidden, self.site, start)


def _by_site(ops: Sequence[SiteOps]) -> dict[Site, tuple[Op, ...]]:
    return {Site(layer, hook): each for layer, hook, each in ops}
