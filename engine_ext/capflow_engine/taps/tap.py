"""The tap: one custom op, called by a forward hook at each tapped site, inside the compiled graph.

`install` puts a tap at a hook point that `capflow_engine.layer.structure` found: before or after a module of the layer.

`capflow::tap` copies wanted rows of the residual stream to the staging buffer, scores gates, and steers the stream in
place. It is declared to mutate `hidden` only. The compiler does not know of the writes to the staging buffer and to the
margins of gates; only taps read the margins, and taps run in the order of the stream. Besides the stream, a tap reads
only tensors that never move, so a graph that is captured once serves every later plan. The index of the site is in a
tensor too, so the graphs of two layers are the same graph.

The compiler drops a tap of a tensor that nothing reads later, such as the sum that the model's last norm returns. There
`capflow::tap_beside` is declared to mutate another tensor, which is read. It can only capture.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from capflow.capture.site import FORWARD_HOOKS, HOOKS
from capflow_engine.compat import engine as compat
from capflow_engine.layer.structure import HookPlace
from capflow_engine.taps import height
from capflow_engine.taps import step as step_module
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.tables import Tables


def tap(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: torch.Tensor,
    site_line: torch.Tensor,
    site_base: torch.Tensor,
    token_row: torch.Tensor,
    token_steer: torch.Tensor,
    staging: torch.Tensor,
    margins: torch.Tensor,
    first: torch.Tensor,
    token_latch: torch.Tensor,
    carried: torch.Tensor,
    heads: torch.Tensor,
    op_ints: torch.Tensor,
    op_floats: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
) -> None:
    """Carry out the current step's plan at one site; the op's CPU implementation.

    The tables of `capflow_engine.taps.tables` and `capflow_engine.taps.bank` are not read here.

    hidden: `[tokens, hidden]`, with or without a leading 1; changed in place where the site is steered.
    residual: the second part of a split stream, in the same shape; None if the stream is whole.
    site: the index of the site, int32 `[1]`.
    scale: the site's value is `scale` times the sum of `hidden` and `residual`.
    """
    hidden = hidden.view(-1, hidden.shape[-1])
    height.check(hidden, site)
    step = step_module.current
    if step is not None and not step.plan.idle:
        step.tap(int(site), hidden, None if residual is None else residual.view(hidden.shape), scale)


@functools.wraps(tap)
def _tap_gpu(hidden: torch.Tensor, residual: torch.Tensor | None, site: torch.Tensor, *tables_and_scale: Any) -> None:
    from capflow_engine.taps.gpu.kernel import launch

    hidden = hidden.view(-1, hidden.shape[-1])
    height.check(hidden, site)
    launch(hidden, None if residual is None else residual.view(hidden.shape), site, *tables_and_scale)


def _tap_fake(*args: Any) -> None:
    del args


def _beside(op: Callable[..., None]) -> Callable[..., None]:
    """Return an op that does what `op` does, at a site that is not steered, and takes a tensor more.

    The tensor is any that is read later; it is not touched.
    """

    def tap_beside(used: torch.Tensor, *args: Any) -> None:
        del used
        op(*args)

    used, *_ = inspect.signature(tap_beside).parameters.values()
    parameters = [used, *inspect.signature(op).parameters.values()]
    tap_beside.__signature__ = inspect.Signature(parameters, return_annotation="None")  # type: ignore[attr-defined]
    return tap_beside


_library = torch.library.Library("capflow", "FRAGMENT")
compat.register_op(_library, "tap", tap, _tap_gpu, _tap_fake, mutates=["hidden"])
compat.register_op(_library, "tap_beside", _beside(tap), _beside(_tap_gpu), _tap_fake, mutates=["used"])


class Tap(nn.Module):
    """A tap at one site: a submodule of the module that it precedes or follows, called by that module's hook."""

    site: torch.Tensor
    site_line: torch.Tensor
    site_base: torch.Tensor
    token_row: torch.Tensor
    token_steer: torch.Tensor
    staging: torch.Tensor
    margins: torch.Tensor
    first: torch.Tensor
    token_latch: torch.Tensor
    carried: torch.Tensor
    heads: torch.Tensor
    op_ints: torch.Tensor
    op_floats: torch.Tensor
    rows: torch.Tensor

    def __init__(
        self,
        index: int,
        place: HookPlace,
        tables: Tables,
        bank: Bank,
        device: torch.device,
        width_class: int = 0,
        width: int = 0,
    ) -> None:
        super().__init__()
        self.slots, self.items, self.used, self.scale = place.slots, place.items, place.used, place.scale
        # Of a site whose rows have a shape of their own: a model may pass them as `[tokens, heads, head_dim]`.
        self.width = width if width_class else None
        self.register_buffer("site", torch.tensor([index], dtype=torch.int32, device=device), persistent=False)
        steering = bank.device_tensors(index, self.width or 0)
        for name, tensor in {**tables.device_tensors(width_class), **steering}.items():
            self.register_buffer(name, tensor, persistent=False)

    def before(self, args: Any, kwargs: Any) -> None:
        """Tap the arguments of a module."""
        self([slot.of(args, kwargs) for slot in self.slots])

    def after(self, output: Any) -> None:
        """Tap the output of a module."""
        alone = isinstance(output, torch.Tensor)
        assert 0 in self.items or not alone, "a tensor alone is element 0"
        if self.used is None:
            self([output] if alone else [output[n] for n in self.items])
        else:
            torch.ops.capflow.tap_beside(output[self.used], output[self.items[0]], None, *self._arguments())

    def forward(self, parts: list[torch.Tensor | None]) -> None:
        """Tap the stream in place.

        parts: the stream as one tensor, or as `hidden` and `residual`; `residual` may be None.
        """
        assert parts[0] is not None
        if self.width is not None and parts[0].shape[-1] != self.width:
            parts = [None if part is None else part.view(-1, self.width) for part in parts]
            assert parts[0] is not None
        torch.ops.capflow.tap(parts[0], parts[1] if len(parts) > 1 else None, *self._arguments())

    def _arguments(self) -> tuple[Any, ...]:
        return (
            self.site,
            self.site_line,
            self.site_base,
            self.token_row,
            self.token_steer,
            self.staging,
            self.margins,
            self.first,
            self.token_latch,
            self.carried,
            self.heads,
            self.op_ints,
            self.op_floats,
            self.rows,
            self.scale,
        )


def install(layer: nn.Module, hook: str, place: HookPlace, tap: Tap) -> None:
    """Put a tap at a layer's hook point; called before anything is compiled."""
    module = layer.get_submodule(place.module)
    while isinstance(module, nn.Sequential):  # it would call the tap as one of its own modules
        module = module[0 if place.slots else -1]
    setattr(module, _attribute(hook), tap)
    before, after = _HOOKS[hook]
    if place.alone:
        module.forward = types.MethodType(_tapped_forward, module)
    elif place.slots:
        module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        module.register_forward_hook(after)


def _tapped_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the taps before a module, then its forward: in the place of a forward that is called alone."""
    for hook in FORWARD_HOOKS:
        if (tap := getattr(module, _attribute(hook), None)) is not None:
            tap.before(args, kwargs)
    return type(module).forward(module, *args, **kwargs)


def _attribute(hook: str) -> str:
    return f"capflow_{hook}"


def _hooks(hook: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the functions that call a module's tap for one hook: before, and after its forward.

    They hold no state of a layer, so the compiled graphs of two layers have the same constants.
    """
    attribute = _attribute(hook)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        getattr(module, attribute).before(args, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        del args
        getattr(module, attribute).after(output)

    return before, after


_HOOKS = {hook: _hooks(hook) for hook in HOOKS}
