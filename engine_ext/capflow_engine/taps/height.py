"""What every tap must be given: one row for each token of a forward pass, padding included, of the site's width.

Plans name token rows. A layer that holds only a part of the tokens, as with sequence parallelism, has other rows under
the same numbers. Its tap raises an error that names the site, in the engine's first forward pass, so no wrong row is
sent. A CUDA graph replays kernels only; it is checked when it is captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from capflow.errors import CapflowError, explain

_tokens: int | None = None
"""The tokens of the model's forward pass that runs now, padding included; None outside of one.

One process runs one forward pass at a time.
"""

_sites: dict[int, tuple[str, int]] = {}
"""The names of sites and the widths of their rows, by the address of their tap's index tensor.

The tensor may be on a GPU, where reading it would wait.
"""


def register(site: torch.Tensor, label: str, width: int) -> None:
    """Remember the site of a tap.

    site: the tap's index tensor.
    label: the site's name.
    width: how many numbers of a row this rank has.
    """
    _sites[site.data_ptr()] = label, width


def watch(model: nn.Module) -> None:
    """Note how many tokens each forward pass of a model has; `model` is what the runner calls, which is not compiled.

    vLLM's runners give `positions` by name, with the tokens in the last dimension.
    """

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        global _tokens  # noqa: PLW0603
        del module, args
        positions = kwargs.get("positions")
        _tokens = None if positions is None else int(positions.shape[-1])

    def end(*_: Any) -> None:
        global _tokens  # noqa: PLW0603
        _tokens = None

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)


def check(hidden: torch.Tensor, site: torch.Tensor) -> None:
    """Raise CapflowError if a tap is given other rows than those of the step's tokens, or of another width.

    hidden: what the tap is given, `[rows, width]`.
    site: the tap's index tensor.
    """
    rows, given = hidden.shape
    label, width = _sites.get(site.data_ptr(), ("of an unknown layer", given))
    if given != width:
        got, do = f"rows of {given} numbers", "leave the site out of --sites"
        raise CapflowError(explain(f"site {label}", got=got, expected=f"{width} numbers", do=do))
    if _tokens is not None and rows != _tokens:
        subject = f"site {label}"
        expected = f"{_tokens}, one for each token of the step"
        do = "leave the site out of --sites, or turn off what shares tokens out among ranks (sequence parallelism)"
        raise CapflowError(explain(subject, got=f"{rows} rows", expected=expected, do=do))
