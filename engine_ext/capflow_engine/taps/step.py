"""The step in progress: a plan with the memory that its rows are copied to, and the work of each tap on the CPU.

The CPU taps read the plan itself, through `current`. The GPU taps read tables that were filled from it
(`capflow_engine.taps.tables`), because a CUDA graph replays kernels and runs no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.steering.program import ADD, CLAMP, PATCH, RELATIVE
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Plan, token_rows

_INDEXED_RUNS_MIN = 8  # with fewer runs, copying slice by slice is faster than gathering by index
_SLICED_LENGTH_MIN = 16  # so it is with runs of this many tokens on average, when rows of the bank are added
_NO_LENGTHS = np.empty(0, np.int64)


class _Run(NamedTuple):
    """Adds `amount` times a row of the bank to token rows `begin .. end`.

    wide: float32 scratch memory for at least as many rows.
    """

    begin: int
    end: int
    row: int
    amount: float
    wide: torch.Tensor

    def add_to(self, hidden: torch.Tensor, bank: Bank, scale: float) -> None:
        """Add it in float32 and round once; the stream is `scale` times a sum of which `hidden` is one part."""
        row = bank.rows[self.row]
        vector = row if self.amount == scale else row * self.amount / scale
        tokens = hidden[self.begin : self.end]
        if tokens.dtype == torch.float32:
            tokens.add_(vector)
        else:  # otherwise torch allocates memory for each sum, and the system spends time on clearing it
            tokens.copy_(self.wide[: self.end - self.begin].copy_(tokens).add_(vector))


class _Gathered(NamedTuple):
    """Adds one row of the bank to each of several token rows.

    tokens: the token rows; a slice if they are contiguous.
    rows: the row of the bank for each token row.
    amounts: the factor of each row, `[tokens, 1]`; None if all are 1.
    """

    tokens: slice | torch.Tensor
    rows: torch.Tensor
    amounts: torch.Tensor | None

    def add_to(self, hidden: torch.Tensor, bank: Bank, scale: float) -> None:
        """Add them in float32 and round once; the stream is `scale` times a sum of which `hidden` is one part."""
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
    """One step on the CPU.

    buffer: the memory for captured rows, `[plan.rows, hidden]` in the model's dtype; None if nothing is captured.
    """

    def __init__(self, plan: Plan, buffer: torch.Tensor | None, bank: Bank) -> None:
        self.plan = plan
        self.buffer = buffer
        self.bank = bank
        # See `_runs`.
        self._runs: list[tuple[int, int, int]] = []
        # The length of each run.
        self._lengths: npt.NDArray[np.int64] = _NO_LENGTHS
        # Site → its additions, for sites where every token has at most one operation, an addition.
        self._sums: dict[int, Sequence[_Run | _Gathered]] = {}
        # Any other steered site → the first operation of each run.
        self._heads: dict[int, npt.NDArray[np.int32]] = {}
        if plan.steered:
            self._plan_steering()
        # Site → (the block's runs or token rows, first row of the buffer, number of rows).
        self._copies: dict[int, list[tuple[Any, int, int]]] = {}
        for block in plan.blocks:
            source = _source(block.runs)
            for number, site in enumerate(block.sites):
                self._copies.setdefault(site, []).append((source, block.base + number * block.rows, block.rows))

    def tap(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float = 1.0) -> None:
        """Copy the site's wanted rows, then steer the site.

        hidden: `[tokens, hidden]`; changed in place.
        residual: the second part of a split stream, in the same shape; None if the stream is whole.
        scale: the site's value is `scale` times the sum of both.
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
        """Choose the way to steer each site; done once per step."""
        self._runs = _runs(self.plan.slots(max(source + length for source, length, _ in self.plan.steered)))
        heads = self.bank.heads.numpy()[[slot for _, _, slot in self._runs]].T  # [sites, runs]
        kinds, numbers, following = np.moveaxis(self.bank.op_ints.numpy()[heads], -1, 0)
        amounts = self.bank.op_floats.numpy()[heads, 0]
        lone = ((heads < 0) | ((kinds == ADD) & (following < 0))).all(axis=1)
        lengths = self._lengths = np.array([end - begin for begin, end, _ in self._runs])
        sliced = _few_or_long(len(lengths), int(lengths.sum()))
        wide = torch.empty((int(lengths.max()) if sliced else 0, self.bank.rows.shape[1]))
        # The steered tokens by the mask of steered runs, which most sites share.
        tokens: dict[bytes, slice | torch.Tensor] = {}
        for site in np.flatnonzero((heads >= 0).any(axis=1)).tolist():
            if not lone[site]:
                self._heads[site] = heads[site]
            elif sliced:
                each = zip(self._runs, heads[site], numbers[site].tolist(), amounts[site].tolist(), strict=True)
                self._sums[site] = [_Run(*run[:2], row, amount, wide) for run, head, row, amount in each if head >= 0]
            else:
                steered = heads[site] >= 0
                if (key := steered.tobytes()) not in tokens:
                    tokens[key] = self._tokens(steered)
                times = np.where(steered, lengths, 0)
                rows, factors = torch.from_numpy(numbers[site].repeat(times)), amounts[site].repeat(times)
                amount = None if (factors == 1.0).all() else torch.from_numpy(factors).unsqueeze(1)
                self._sums[site] = [_Gathered(tokens[key], rows, amount)]

    def _tokens(self, steered: npt.NDArray[np.bool_]) -> slice | torch.Tensor:
        """Return the token rows of the steered runs; a slice if they are contiguous."""
        runs = [run[:2] for run, use in zip(self._runs, steered.tolist(), strict=True) if use]
        begin, end = runs[0][0], runs[-1][1]
        if end - begin == sum(stop - start for start, stop in runs):
            return slice(begin, end)
        return torch.from_numpy(np.concatenate([np.arange(*run) for run in runs]))

    def _steer(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float) -> None:
        """Apply a site's operations to every steered token in float32; round once."""
        steered = self._heads[site] >= 0
        heads = self._heads[site][steered].repeat(self._lengths[steered])
        runs = [np.arange(*run[:2]) for run, use in zip(self._runs, steered, strict=True) if use]
        tokens = torch.from_numpy(np.concatenate(runs))
        half = hidden.index_select(0, tokens).float()
        stream = half.clone() if residual is None else half + residual.index_select(0, tokens).float()
        change = _changed(self.bank, heads, stream if scale == 1.0 else stream.mul_(scale))
        hidden.index_copy_(0, tokens, (half + (change if scale == 1.0 else change / scale)).to(hidden.dtype))


def _runs(slots: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Return the runs of adjacent token rows with the same slot: first row, end row, slot."""
    bounds = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(slots)] if len(slots) else []
    return [(begin, end, int(slots[begin])) for begin, end in pairwise(bounds) if slots[begin] >= 0]


def _few_or_long(count: int, tokens: int) -> bool:
    """Whether `count` runs or chains with `tokens` tokens in all are faster one by one than gathered by index."""
    return count < _INDEXED_RUNS_MIN or tokens >= _SLICED_LENGTH_MIN * count


def _changed(bank: Bank, heads: npt.NDArray[np.int32], stream: torch.Tensor) -> torch.Tensor:
    """Return the change that the operations make, `[tokens, hidden]` float32.

    Tokens with the same first operation have the same chain of operations. If the chains are few or have many tokens,
    each chain is applied on its own, with one product per operation. Many short chains are applied together, operation
    by operation, until few are left.

    heads: the first operation of each token.
    stream: the site's value, `[tokens, hidden]` float32; changed too.
    """
    change = torch.zeros_like(stream)
    ops, on = heads, np.arange(len(heads))  # the next operation of each unfinished token, and the tokens' indices
    while len(ops) and not _few_or_long(len(np.unique(ops)), len(ops)):
        _do_next(bank, ops, None if len(on) == len(heads) else torch.from_numpy(on), stream, change)
        following = bank.op_ints.numpy()[ops, 2]
        going = following >= 0
        ops, on = following[going], on[going]
    order = np.argsort(ops, kind="stable")
    ends = np.flatnonzero(np.diff(ops[order])) + 1
    for some in np.split(order, ends) if len(ops) else ():
        mine, op = on[some], int(ops[some[0]])
        first, length = int(mine[0]), len(mine)
        if int(mine[-1]) - first + 1 == length:
            _do_chain(bank, op, stream[first : first + length], change[first : first + length])
        else:
            tokens = torch.from_numpy(mine)
            changed = torch.zeros((length, stream.shape[1]))
            _do_chain(bank, op, stream.index_select(0, tokens), changed)
            change.index_add_(0, tokens, changed)
    return change


def _do_next(
    bank: Bank, ops: npt.NDArray[np.int32], tokens: torch.Tensor | None, stream: torch.Tensor, change: torch.Tensor
) -> None:
    """Apply one operation to each token and add its effect to `stream` and `change`.

    ops: the operation of each token.
    tokens: the rows of `stream` and `change`; None for all rows.
    """
    kinds, numbers, _ = bank.op_ints.numpy()[ops].T
    rows = bank.rows.index_select(0, torch.from_numpy(numbers.copy()))
    amount, low, high = torch.from_numpy(bank.op_floats.numpy()[ops]).unsqueeze(2).unbind(1)
    x = stream if tokens is None else stream.index_select(0, tokens)
    if (kinds == CLAMP).any():
        projection = (x * rows).sum(1, keepdim=True)
        bounded = torch.minimum(torch.maximum(projection, low), high)
        clamps = torch.from_numpy(kinds == CLAMP).unsqueeze(1)
        amount = torch.where(clamps, amount * (bounded - projection), amount)
    if (kinds == RELATIVE).any():
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        amount = torch.where(torch.from_numpy(kinds == RELATIVE).unsqueeze(1), amount * norms, amount)
    if (kinds == PATCH).any():
        rows.sub_(x * torch.from_numpy(kinds == PATCH).unsqueeze(1))
    rows.mul_(amount)
    for target in (stream, change):
        if tokens is None:
            target.add_(rows)
        else:
            target.index_add_(0, tokens, rows)


def _do_chain(bank: Bank, op: int, stream: torch.Tensor, change: torch.Tensor) -> None:
    """Apply an operation and all that follow it to all rows of `stream`, and add the total effect to `change`."""
    ints, floats = bank.op_ints.numpy(), bank.op_floats.numpy()
    vectors, times = [], []  # the rows that were added, and the factor of each token
    while op >= 0:
        amount, low, high = floats[op].tolist()
        kind, number, op = ints[op].tolist()
        row = bank.rows[number]
        if kind == PATCH:
            moved = (row - stream).mul_(amount)
            stream.add_(moved)
            change.add_(moved)
        elif kind == ADD:
            stream.add_(row, alpha=amount)
            change.add_(row, alpha=amount)
        else:
            if kind == CLAMP:
                projection = stream.mv(row)
                times.append(projection.clamp(low, high).sub_(projection).mul_(amount))
            else:
                assert kind == RELATIVE
                times.append(torch.linalg.vector_norm(stream, dim=1).mul_(amount))
            vectors.append(row)
            stream.addr_(times[-1], row)
    if vectors:
        change.addmm_(torch.stack(times, 1), torch.stack(vectors))


def _source(runs: Any) -> Any:
    """Return the runs; if there are many, one index tensor."""
    if len(runs) < _INDEXED_RUNS_MIN:
        return runs
    return torch.from_numpy(token_rows(runs))


current: Step | None = None
"""The step whose forward pass runs now, on the CPU; None outside a forward pass.

`StepRunner.forward` sets and clears it. One process runs one forward pass at a time, from one thread of vLLM's worker.
"""
