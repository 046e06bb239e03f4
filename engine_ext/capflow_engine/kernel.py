"""The tap on a GPU: one Triton program per token, which returns at once when there is nothing to do.

`launch` is the layout contract; the tables are those of `capflow_engine.tables`. The sum of a split stream is
rounded once, to the model's dtype, after it was scaled; a steering vector is added in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capflow_engine.tables import CHANNELS


@triton.jit
def _tap_kernel(
    hidden,
    residual,
    site,
    site_group,
    site_base,
    token_row,
    token_steer,
    steer_bank,
    staging,
    bank,
    scale,
    hidden_stride,
    residual_stride,
    sites,
    tokens_max,
    width: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    CHANNEL_COUNT: tl.constexpr,
):
    token = tl.program_id(0)
    here = tl.load(site)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    slot = tl.load(token_steer + token)
    bank_row = -1
    if slot >= 0:
        bank_row = tl.load(steer_bank + slot * sites + here)
    for channel in tl.static_range(CHANNEL_COUNT):
        group = tl.load(site_group + channel * sites + here)
        if group >= 0:
            row = tl.load(token_row + (channel * sites + group) * tokens_max + token)
            if row >= 0:
                value = tl.load(hidden + token.to(tl.int64) * hidden_stride + columns, mask=inside).to(tl.float32)
                if SPLIT:
                    value += tl.load(residual + token.to(tl.int64) * residual_stride + columns, mask=inside).to(
                        tl.float32
                    )
                if SCALED:
                    value *= scale
                target = (tl.load(site_base + channel * sites + here) + row).to(tl.int64)
                tl.store(staging + target * width + columns, value.to(staging.dtype.element_ty), mask=inside)
    if bank_row >= 0:
        place = hidden + token.to(tl.int64) * hidden_stride + columns
        value = tl.load(place, mask=inside).to(tl.float32)
        vector = tl.load(bank + bank_row.to(tl.int64) * width + columns, mask=inside).to(tl.float32)
        if SCALED:
            vector /= scale
        value += vector
        tl.store(place, value.to(hidden.dtype.element_ty), mask=inside)


def launch(
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
    scale: float = 1.0,
) -> None:
    """Launch the tap of one site over `hidden`, `[tokens, width]`; see `capflow_engine.tap.tap`."""
    tokens, width = hidden.shape
    assert hidden.stride(1) == 1
    assert residual is None or (residual.shape == hidden.shape and residual.stride(1) == 1)
    assert staging.shape[1] == bank.shape[1] == width
    assert staging.is_contiguous()
    assert bank.is_contiguous()
    assert site_group.shape == site_base.shape == (CHANNELS, steer_bank.shape[1])
    assert token_row.shape == (CHANNELS, steer_bank.shape[1], token_steer.shape[0])
    assert tokens <= token_steer.shape[0]
    other = hidden if residual is None else residual
    _tap_kernel[(tokens,)](
        hidden,
        other,
        site,
        site_group,
        site_base,
        token_row,
        token_steer,
        steer_bank,
        staging,
        bank,
        scale,
        hidden.stride(0),
        other.stride(0),
        steer_bank.shape[1],
        token_steer.shape[0],
        width=width,
        BLOCK=triton.next_power_of_2(width),
        SPLIT=residual is not None,
        SCALED=scale != 1.0,
        CHANNEL_COUNT=CHANNELS,
        num_warps=4 if width <= 4096 else 8,
    )
