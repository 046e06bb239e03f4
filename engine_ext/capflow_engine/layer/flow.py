"""The way of a tensor through the calls of a dry run: which hold its numbers in their order, and which read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capflow_engine.layer.dryrun import Call, overlap
from capflow_engine.layer.parts import Norm

_aten = torch.ops.aten
_LAYOUT = tuple(
    getattr(_aten, name)
    for name in ("view", "_unsafe_view", "alias", "detach", "unsqueeze", "squeeze", "clone", "_to_copy")
)
"""Operations that return the numbers that they are given, in their order."""
_GATING = (_aten.mul, _aten.mul_)


def carried(
    calls: Sequence[Call], start: tuple[torch.Tensor, ...], number: int, heads: int = 0
) -> tuple[set[int], list[int]]:
    """Return the tensors that hold a value in its own layout, as ids, and the numbers of calls that read one otherwise.

    start: the value.
    number: of the call that returns it.
    heads: how many heads the value is made of, so that each may be cut to its first numbers, normed and gated; 0 for no
        heads, whose numbers must stay as they are.
    """
    same = {id(tensor) for tensor in start}
    readers = []
    for n, call in enumerate(calls[number + 1 :], number + 1):
        given = [tensor for _, tensor in call.given if id(tensor) in same]
        if not given:
            continue
        if _carries(call, given, heads):
            same |= {id(tensor) for tensor in call.returned}
        else:
            readers.append(n)
    return same, readers


def _carries(call: Call, given: list[torch.Tensor], heads: int) -> bool:
    first = given[0]
    if isinstance(call.part, Norm):
        return heads > 0 and len(call.given) == 1 and call.returned[0].shape == first.shape
    if call.part is not None or not call.returned:
        return False
    result = call.returned[0]
    if call.func in _LAYOUT:
        return result.numel() == first.numel()
    if call.func in _GATING:  # an output gate multiplies each number by one of its own
        return heads > 0 and len(given) == 1 and result.shape == first.shape
    if call.func is _aten.slice:
        cut = heads > 0 and first.dim() > 2 and result.shape[:-1] == first.shape[:-1]
        return result.storage_offset() == first.storage_offset() and (cut or result.shape == first.shape)
    return False


def later_reader(calls: Sequence[Call], number: int, tensor: torch.Tensor) -> int | None:
    """Return the number of the first call after one that reads a number of a tensor's memory; None if there is none."""
    for n, call in enumerate(calls[number + 1 :], number + 1):
        if any(not call.is_view(other) and overlap(other, tensor) for _, other in call.given):
            return n
    return None
