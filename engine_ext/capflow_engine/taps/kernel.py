"""The tap on a GPU: one Triton program per token. A program with nothing to do returns at once.

`launch` checks the layout of the tables of `capflow_engine.taps.tables` and `capflow_engine.taps.bank`. A captured row
of a split stream is summed and scaled in float32 and rounded once, to the model's dtype. Steering operations work on
the stream in float32; their total change is added to `hidden` and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capflow.limits import SITE_OPS_MAX
from capflow.steering.program import CLAMP, PATCH, RELATIVE
from capflow_engine.taps.tables import CHANNELS


@triton.jit
def _tap_kernel(
    hidden,
    residual,
    site,
    site_line,
    site_base,
    token_row,
    token_steer,
    staging,
    heads,
    op_ints,
    op_floats,
    rows,
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
    CLAMPS: tl.constexpr,
    PATCHES: tl.constexpr,
    RELATIVES: tl.constexpr,
    OPS_MAX: tl.constexpr,
):
    token = tl.program_id(0)
    here = tl.load(site)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    slot = tl.load(token_steer + token)
    op = -1
    if slot >= 0:
        op = tl.load(heads + slot * sites + here)
    for channel in tl.static_range(CHANNEL_COUNT):
        block = tl.load(site_line + channel * sites + here)
        if block >= 0:
            row = tl.load(token_row + (channel * sites + block) * tokens_max + token)
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
    if op >= 0:
        place = hidden + token.to(tl.int64) * hidden_stride + columns
        half = tl.load(place, mask=inside).to(tl.float32)
        stream = half
        if SPLIT:
            stream += tl.load(residual + token.to(tl.int64) * residual_stride + columns, mask=inside).to(tl.float32)
        if SCALED:
            stream *= scale
        change = tl.zeros([BLOCK], tl.float32)
        done = 0
        while (op >= 0) & (done < OPS_MAX):
            kind = tl.load(op_ints + op * 3)
            row = tl.load(op_ints + op * 3 + 1).to(tl.int64)
            vector = tl.load(rows + row * width + columns, mask=inside, other=0.0)
            steered = tl.where(inside, stream + change, 0.0)
            projection = tl.sum(steered * tl.where(kind == RELATIVES, steered, vector), axis=0)
            low = tl.load(op_floats + op * 3 + 1)
            high = tl.load(op_floats + op * 3 + 2)
            bounded = tl.minimum(tl.maximum(projection, low), high)
            times = tl.where(kind == CLAMPS, bounded - projection, 1.0)
            along = tl.where(kind == RELATIVES, tl.sqrt(tl.abs(projection)), times) * vector
            change += tl.load(op_floats + op * 3) * tl.where(kind == PATCHES, vector - steered, along)
            op = tl.load(op_ints + op * 3 + 2)
            done += 1
        if SCALED:
            change /= scale
        tl.store(place, (half + change).to(hidden.dtype.element_ty), mask=inside)


def launch(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: torch.Tensor,
    site_line: torch.Tensor,
    site_base: torch.Tensor,
    token_row: torch.Tensor,
    token_steer: torch.Tensor,
    staging: torch.Tensor,
    heads: torch.Tensor,
    op_ints: torch.Tensor,
    op_floats: torch.Tensor,
    rows: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """Launch the tap of one site over `hidden`, `[tokens, width]`; see `capflow_engine.taps.tap.tap`."""
    tokens, width = hidden.shape
    assert hidden.stride(1) == 1
    assert residual is None or (residual.shape == hidden.shape and residual.stride(1) == 1)
    sites = heads.shape[1]
    assert staging.shape[1] == rows.shape[1] == width
    assert staging.is_contiguous()
    assert rows.is_contiguous()
    assert site_line.shape == site_base.shape == (CHANNELS, sites)
    assert token_row.shape == (CHANNELS, sites, token_steer.shape[0])
    assert tokens <= token_steer.shape[0]
    other = hidden if residual is None else residual
    _tap_kernel[(tokens,)](
        hidden,
        other,
        site,
        site_line,
        site_base,
        token_row,
        token_steer,
        staging,
        heads,
        op_ints,
        op_floats,
        rows,
        scale,
        hidden.stride(0),
        other.stride(0),
        sites,
        token_steer.shape[0],
        width=width,
        BLOCK=triton.next_power_of_2(width),
        SPLIT=residual is not None,
        SCALED=scale != 1.0,
        CHANNEL_COUNT=CHANNELS,
        CLAMPS=CLAMP,
        PATCHES=PATCH,
        RELATIVES=RELATIVE,
        OPS_MAX=SITE_OPS_MAX,
        num_warps=4 if width <= 4096 else 8,
    )
