"""The step in progress: a plan bound to the memory that its rows go to, and what each tap does on the CPU.

The CPU taps read the plan itself, through `current`; the GPU taps read tables that were filled from it
(`capflow_engine.tables`), because a CUDA graph replays kernels and no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.program import ADD, CLAMP
from capflow_engine.bank import Bank
from capflow_engine.plan import Plan, token_rows

_INDEXED_RUNS_MIN = 8  # with fewer runs, going slice by slice is faster than gathering by index
_SLICED_LENGTH_MIN = 16  # likewise with longer runs, tokens on average, where rows of the bank are added


class _Run(NamedTuple):
    """`amount` times a row of the bank is added to token rows `begin .. end`. wide: float32 memory for as many."""

    begin: int
    end: int
    row: int
    amount: float
    wide: torch.Tensor

    def add_to(self, hidden: torch.Tensor, bank: Bank, scale: float) -> None:
        """Add it to a stream of which `hidden` is a part, `scale` times; in float32, rounded once."""
        row = bank.rows[self.row]
        vector = row if self.amount == scale else row * self.amount / scale
        tokens = hidden[self.begin : self.end]
        if tokens.dtype == torch.float32:
            tokens.add_(vector)
        else:  # torch would take new memory for each sum, and the system time to clear it
            tokens.copy_(self.wide[: self.end - self.begin].copy_(tokens).add_(vector))


class _Gathered(NamedTuple):
    """Rows of the bank, each so many times (None: once), are added to as many token rows; these lie together if they are a slice."""

    tokens: slice | torch.Tensor
    rows: torch.Tensor
    amounts: torch.Tensor | None

    def add_to(self, hidden: torch.Tensor, bank: Bank, scale: float) -> None:
        """Add them to a stream of which `hidden` is a part, `scale` times; in float32, rounded once."""
        change = bank.rows.index_select(0, self.rows)
        if self.amounts is not None:
            change.mul_(self.amounts)
        if scale != 1.0:
            change.div_(scale)
        if isinstance(self.tokens, torch.Tensor):
            hidden.index_copy_(0, self.tokens, change.add_(hidden.index_select(0, self.tokens)).to(hidden.dtype))
        elif hidden.dtype == torch.float32:
            hidden[self.tokens].add_(change)
        else:
            tokens = hidden[self.tokens]
            tokens.copy_(change.add_(tokens))


class Step:
    """One step on the CPU. buffer: `[plan.rows, hidden]` in the model's dtype."""

    def __init__(self, plan: Plan, buffer: torch.Tensor | None, bank: Bank) -> None:
        self.plan = plan
        self.buffer = buffer
        self.bank = bank
        self._runs: list[tuple[int, int, int]] = []  # see `_runs`
        self._sums: dict[int, Sequence[_Run | _Gathered]] = {}  # site → all that is done there, where that is adding
        self._heads: dict[int, npt.NDArray[np.int32]] = {}  # any other site → the first operation of each run
        if plan.steered:
            self._plan_steering()
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
        for sum_ in self._sums.get(site, ()):
            sum_.add_to(hidden, self.bank, scale)
        if site in self._heads:
            self._steer(site, hidden, residual, scale)

    def _plan_steering(self) -> None:
        """Find what is done at each site, once for all of them."""
        self._runs = _runs(self.plan.slots(max(source + length for source, length, _ in self.plan.steered)))
        heads = self.bank.heads.numpy()[[slot for _, _, slot in self._runs]].T  # [sites, runs]
        kinds, numbers, following = np.moveaxis(self.bank.op_ints.numpy()[heads], -1, 0)
        amounts = self.bank.op_floats.numpy()[heads, 0]
        lone = ((heads < 0) | ((kinds == ADD) & (following < 0))).all(axis=1)
        lengths = np.array([end - begin for begin, end, _ in self._runs])
        sliced = len(lengths) < _INDEXED_RUNS_MIN or lengths.mean() >= _SLICED_LENGTH_MIN
        wide = torch.empty((int(lengths.max()) if sliced else 0, self.bank.rows.shape[1]))
        tokens: dict[bytes, slice | torch.Tensor] = {}  # by which runs they are of: most sites have the same
        for site in np.flatnonzero((heads >= 0).any(axis=1)).tolist():
            if not lone[site]:
                self._heads[site] = heads[site]
            elif sliced:
                each = zip(self._runs, heads[site], numbers[site].tolist(), amounts[site].tolist(), strict=True)
                self._sums[site] = [_Run(*run[:2], row, amount, wide) for run, head, row, amount in each if head >= 0]
            else:
                there = heads[site] >= 0
                if (key := there.tobytes()) not in tokens:
                    tokens[key] = self._tokens(there)
                times = np.where(there, lengths, 0)
                rows, amount = torch.from_numpy(numbers[site].repeat(times)), amounts[site].repeat(times)
                once = bool((amount == 1.0).all())
                each_amount = None if once else torch.from_numpy(amount).unsqueeze(1)
                self._sums[site] = [_Gathered(tokens[key], rows, each_amount)]

    def _tokens(self, there: npt.NDArray[np.bool_]) -> slice | torch.Tensor:
        """Return the token rows of some of the runs; a slice where they lie together."""
        runs = [run[:2] for run, has in zip(self._runs, there.tolist(), strict=True) if has]
        begin, end = runs[0][0], runs[-1][1]
        if end - begin == sum(stop - start for start, stop in runs):
            return slice(begin, end)
        return torch.from_numpy(np.concatenate([np.arange(*run) for run in runs]))

    def _steer(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float) -> None:
        """Do a site's operations on every token that has some, in float32; round once."""
        rows = np.concatenate([np.arange(begin, end) for begin, end, _ in self._runs])
        heads = np.repeat(self._heads[site], [end - begin for begin, end, _ in self._runs])
        here = np.flatnonzero(heads >= 0)
        tokens, heads = torch.from_numpy(rows[here]), heads[here]
        half = hidden.index_select(0, tokens).float()
        stream = half if residual is None else half + residual.index_select(0, tokens).float()
        change = _changed(self.bank, heads, stream if scale == 1.0 else stream * scale)
        hidden.index_copy_(0, tokens, (half + (change if scale == 1.0 else change / scale)).to(hidden.dtype))


def _runs(slots: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Return the first row, the row behind the last one, and the slot of all rows that lie together and have one slot."""
    bounds = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(slots)] if len(slots) else []
    return [(begin, end, int(slots[begin])) for begin, end in pairwise(bounds) if slots[begin] >= 0]


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
