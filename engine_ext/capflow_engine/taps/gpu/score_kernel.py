"""The scores of rows on a GPU: one Triton program for each row, so a row's score does not depend on the other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from capflow.plugins.consumer import SCORES


@triton.jit
def _tanh(x):
    """Return tanh in a form that does not overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _score_kernel(
    rows,
    weight,
    kind,
    numbers,
    out,
    width: tl.constexpr,
    BLOCK: tl.constexpr,
    CAST: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(rows + row.to(tl.int64) * width + columns, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0.0)
    score = tl.sum(x * w, axis=0)
    which = tl.load(kind)
    if which != 0:
        norm = tl.sqrt(tl.sum(x * x, axis=0))
        below = norm * tl.load(numbers + 1)
        if which == CAST:
            squares = tl.load(numbers + 2)
            along = _tanh(score / tl.where(squares > 0, squares, 1.0) * w)
            score = tl.sum(x * along, axis=0)
            below = norm * tl.sqrt(tl.sum(along * along, axis=0))
        score = tl.where(below == 0, 0.0, score / tl.where(below == 0, 1.0, below))
    tl.store(out + row, score + tl.load(numbers))


def unfused(device: torch.device) -> dict[str, bool]:
    """Return the options of a launch without fused multiply-adds, for kernels that sum products.

    With them, the first step of a sum across threads rounds the product of only one of two threads, and so leaves
    threads with different sums. Near its threshold, a gate would be open in a part of a row.
    """
    return {"enable_fp_fusion": False} if device.type == "cuda" else {}


def launch(
    rows: torch.Tensor, weight: torch.Tensor, kind: torch.Tensor, numbers: torch.Tensor, out: torch.Tensor
) -> None:
    """Score rows, `[n, width]`.

    weight: `[width]` float32.
    kind: int32, the index of the score in `capflow.plugins.consumer.SCORES`.
    numbers: `[3]` float32: the bias, and the weight's norm and the square of that.
    out: `[n]` float32.
    """
    count, width = rows.shape
    assert rows.is_contiguous()
    assert weight.shape == (width,)
    _score_kernel[(count,)](
        rows,
        weight,
        kind,
        numbers,
        out,
        width=width,
        BLOCK=triton.next_power_of_2(width),
        CAST=SCORES.index("cast"),
        num_warps=4 if width <= 4096 else 8,
        **unfused(rows.device),
    )
