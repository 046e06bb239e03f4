"""The tap: one custom op, called by a forward hook at each tapped site, inside the compiled graph.

`capflow::tap` copies wanted rows of the residual stream out and adds steering vectors in place. It is
declared to mutate `hidden` only: the staging buffer is written behind the compiler's back, and nothing in
the graph reads it. All a tap needs besides the stream is in tensors that stay where they are, so a graph
captured once serves every later plan; which site it is stands in a tensor too, so that the graphs of two layers
are the same graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import capflow_engine.step as step_module
from capflow_engine import compat
from capflow_engine.tables import Tables


def tap(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: torch.Tensor,
    site_group: torch.Tensor,
    site_base: torch.Tensor,
    token_row: torch.Tensor,
    token_steer: torch.Tensor,
    steer_bank: torch.Tensor,
    staging: torch.Tensor,
    bank: torch.Tensor,
) -> None:
    """Do what the current step's plan says for one site; the op's CPU implementation.

    hidden, residual: `[tokens, hidden]`; hidden is changed in place where the site is steered. site: the
    site's index, int32 `[1]`. The tables are those of `capflow_engine.tables` and are not read here.
    """
    step = step_module.current
    if step is not None and not step.plan.idle:
        step.tap(int(site), hidden, residual)


def _tap_gpu(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: torch.Tensor,
    site_group: torch.Tensor,
    site_base: torch.Tensor,
    token_row: torch.Tensor,
    token_steer: torch.Tensor,
    steer_bank: torch.Tensor,
    staging: torch.Tensor,
    bank: torch.Tensor,
) -> None:
    from capflow_engine.kernel import launch

    launch(hidden, residual, site, site_group, site_base, token_row, token_steer, steer_bank, staging, bank)


def _tap_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: torch.Tensor,
    site_group: torch.Tensor,
    site_base: torch.Tensor,
    token_row: torch.Tensor,
    token_steer: torch.Tensor,
    steer_bank: torch.Tensor,
    staging: torch.Tensor,
    bank: torch.Tensor,
) -> None:
    return None


_library = torch.library.Library("capflow", "FRAGMENT")
compat.register_op(_library, "tap", tap, _tap_gpu, _tap_fake, mutates=["hidden"])


class Tap(nn.Module):
    """A tap at one site: a submodule of the layer it taps, called by the layer's forward hook.

    split: the layer's output is `(hidden, residual)` and the stream is their sum; otherwise the output, or the first
    of it, is the stream.
    """

    site: torch.Tensor
    site_group: torch.Tensor
    site_base: torch.Tensor
    token_row: torch.Tensor
    token_steer: torch.Tensor
    steer_bank: torch.Tensor
    staging: torch.Tensor
    bank: torch.Tensor

    def __init__(self, index: int, split: bool, tables: Tables, device: torch.device) -> None:
        super().__init__()
        self.split = split
        self.register_buffer("site", torch.tensor([index], dtype=torch.int32, device=device), persistent=False)
        for name, tensor in tables.device_tensors().items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, output: Any) -> None:
        """Tap a layer's output, `(hidden, residual)` or `hidden`, in place."""
        if self.split:
            hidden, residual = output
        else:
            hidden, residual = (output if isinstance(output, torch.Tensor) else output[0]), None
        torch.ops.capflow.tap(
            hidden,
            residual,
            self.site,
            self.site_group,
            self.site_base,
            self.token_row,
            self.token_steer,
            self.steer_bank,
            self.staging,
            self.bank,
        )


def post_block_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Call the tap of a layer at `post_block`; registered with `register_forward_hook`."""
    del args
    tap_module: Tap = module.capflow_post_block  # type: ignore[assignment]
    tap_module(output)
