"""The step in progress: a plan bound to the memory that its rows go to, and what each tap does on the CPU.

The CPU taps read the plan itself, through `current`; the GPU taps read tables that were filled from it
(`capflow_engine.tables`), because a CUDA graph replays kernels and no Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from capflow.program import ADD, CLAMP
from capflow_engine.bank import Bank
from capflow_engine.plan import Plan, token_rows

_INDEXED_RUNS_MIN = 8  # with fewer runs, copying slice by slice is faster than gathering by index


class Step:
    """One step on the CPU. buffer: `[plan.rows, hidden]` in the model's dtype."""

    def __init__(self, plan: Plan, buffer: torch.Tensor | None, bank: Bank) -> None:
        self.plan = plan
        self.buffer = buffer
        self.bank = bank
        end = max((source + length for source, length, _ in plan.steered), default=0)
        slots = plan.slots(end)
        self._steered = np.flatnonzero(slots >= 0)  # token rows
        self._slots = slots[self._steered]  # of each of them
        self._copies: dict[int, list[tuple[Any, int, int]]] = {}  # site index → (group's source, first row, rows)
        for group in plan.groups:
            source = _source(group.runs)
            for number, site in enumerate(group.sites):
                self._copies.setdefault(site, []).append((source, group.base + number * group.rows, group.rows))

    def tap(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float = 1.0) -> None:
        """Copy the site's rows out, then steer it; `hidden` is changed in place.

        hidden, residual: `[tokens, hidden]`; the site's value is `scale` times their sum, or `hidden` alone.
        """
        for source, row, rows in self._copies.get(site, ()):
            assert self.buffer is not None
            if isinstance(source, torch.Tensor):
                out = self.buffer[row : row + len(source)]
                torch.index_select(hidden, 0, source, out=out)
                if residual is not None:
                    torch.add(out, residual.index_select(0, source), out=out)
            else:
                for begin, target, length in source:
                    out = self.buffer[row + target : row + target + length]
                    if residual is None:
                        out.copy_(hidden[begin : begin + length])
                    else:
                        torch.add(hidden[begin : begin + length], residual[begin : begin + length], out=out)
            if scale != 1.0:
                self.buffer[row : row + rows].mul_(scale)
        if len(self._steered):
            self._steer(site, hidden, residual, scale)

    def _steer(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float) -> None:
        """Do a site's operations on every token that has some, in float32; round once."""
        heads = self.bank.heads.numpy()[self._slots, site]
        here = np.flatnonzero(heads >= 0)
        if not len(here):
            return
        tokens = torch.from_numpy(self._steered[here])
        half = hidden.index_select(0, tokens).float()
        change = _added(self.bank, heads[here])
        if change is None:
            stream = half if residual is None else half + residual.index_select(0, tokens).float()
            change = _changed(self.bank, heads[here], stream if scale == 1.0 else stream * scale)
        hidden.index_copy_(0, tokens, (half + (change if scale == 1.0 else change / scale)).to(hidden.dtype))


def _added(bank: Bank, heads: npt.NDArray[np.int32]) -> torch.Tensor | None:
    """Return what operations add, `[tokens, hidden]` float32, where each token has one and it only adds; else None."""
    kinds, numbers, following = bank.op_ints.numpy()[heads].T
    if (kinds != ADD).any() or (following >= 0).any():
        return None
    rows = bank.rows.index_select(0, torch.from_numpy(numbers))
    amount = bank.op_floats[torch.from_numpy(heads), :1]
    return rows.mul_(amount)


def _changed(bank: Bank, heads: npt.NDArray[np.int32], stream: torch.Tensor) -> torch.Tensor:
    """Return what operations change, `[tokens, hidden]` float32. heads: the first operation of each token.

    stream: `[tokens, hidden]` float32, the site's value.
    """
    ints, floats = bank.op_ints.numpy(), bank.op_floats.numpy()
    change = torch.zeros_like(stream)
    ops, on = heads, np.arange(len(heads))  # the next operation of each token that has one, and which token it is
    while len(ops):
        kinds, numbers, following = ints[ops].T
        for kind in np.unique(kinds):
            some = np.flatnonzero(kinds == kind)
            tokens = torch.from_numpy(on[some])
            rows = bank.rows.index_select(0, torch.from_numpy(numbers[some]))
            amount, low, high = torch.from_numpy(floats[ops[some]]).T.unsqueeze(2)
            if kind == ADD:
                change.index_add_(0, tokens, amount * rows)
                continue
            steered = (stream + change).index_select(0, tokens)
            if kind == CLAMP:
                projection = (steered * rows).sum(1, keepdim=True)
                bounded = torch.minimum(torch.maximum(projection, low), high)
                change.index_add_(0, tokens, amount * (bounded - projection) * rows)
            else:
                change.index_add_(0, tokens, amount * (rows - steered))
        going = following >= 0
        ops, on = following[going], on[going]
    return change


def _source(runs: Any) -> Any:
    """Return the runs, or one index tensor when there are many."""
    if len(runs) < _INDEXED_RUNS_MIN:
        return runs
    return torch.from_numpy(token_rows(runs))


current: Step | None = None
"""The step whose forward pass runs now, on the CPU; None outside one. Set and cleared by `StepRunner.forward`.

One process runs one forward pass at a time: vLLM's worker calls it from one thread.
"""
