"""The step in progress: a plan bound to the memory that its rows go to, and what each tap does on the CPU.

The CPU taps read the plan itself, through `current`; the GPU taps read tables that were filled from it
(`capflow_engine.tables`), because a CUDA graph replays kernels and no Python.
"""

from __future__ import annotations

from typing import Any

import torch

from capflow_engine.plan import Plan, token_rows

_INDEXED_RUNS_MIN = 8  # with fewer runs, copying slice by slice is faster than gathering by index


class Step:
    """One step on the CPU. buffer: `[plan.rows, hidden]` in the model's dtype; bank: `[n, hidden]`."""

    def __init__(self, plan: Plan, buffer: torch.Tensor | None, bank: torch.Tensor) -> None:
        self.plan = plan
        self.buffer = buffer
        self.bank = bank
        self._copies: dict[int, list[tuple[Any, int, int]]] = {}  # site index → (group's source, first row, rows)
        for group in plan.groups:
            source = _source(group.runs)
            for number, site in enumerate(group.sites):
                self._copies.setdefault(site, []).append((source, group.base + number * group.rows, group.rows))

    def tap(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float = 1.0) -> None:
        """Copy the site's rows out, then add what steers it; `hidden` is changed in place.

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
        for begin, length, bank in self.plan.adds.get(site, ()):
            hidden[begin : begin + length] += self.bank[bank] if scale == 1.0 else self.bank[bank] / scale


def _source(runs: Any) -> Any:
    """Return the runs, or one index tensor when there are many."""
    if len(runs) < _INDEXED_RUNS_MIN:
        return runs
    return torch.from_numpy(token_rows(runs))


current: Step | None = None
"""The step whose forward pass runs now, on the CPU; None outside one. Set and cleared by `StepRunner.forward`.

One process runs one forward pass at a time: vLLM's worker calls it from one thread.
"""
