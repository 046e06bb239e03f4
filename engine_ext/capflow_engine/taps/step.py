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

from capflow.steering.program import ADD, SCORE_DOT
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.chains import INDEXED_RUNS_MIN, changed, few_or_long
from capflow_engine.taps.gates import Factor, Gating, Tokens
from capflow_engine.taps.plan import Plan, token_rows
from capflow_engine.taps.scores import Score, scores_of

_NO_LENGTHS = np.empty(0, np.int64)

_Gates = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""The code of each run's gate, and its sharpness."""


class _Run(NamedTuple):
    """Adds `amount` times a row of the bank to token rows `begin .. end`.

    wide: float32 scratch memory for at least as many rows.
    factor: the gate that multiplies the amount; None if there is none.
    """

    begin: int
    end: int
    row: int
    amount: float
    wide: torch.Tensor
    factor: Factor | None

    def add_to(self, hidden: torch.Tensor, bank: Bank, scale: float, gating: Gating | None) -> None:
        """Add it in float32 and round once; the stream is `scale` times a sum of which `hidden` is one part."""
        value = None
        if self.factor is not None and gating is not None:
            value = self.factor.of(gating)
            if value is None:
                return
        row = bank.rows[self.row]
        vector = row if self.amount == scale else row * self.amount / scale
        tokens = hidden[self.begin : self.end]
        if tokens.dtype == torch.float32:
            _add(tokens, vector, value)
        else:  # otherwise torch allocates memory for each sum, and the system spends time on clearing it
            wide = self.wide[: self.end - self.begin].copy_(tokens)
            _add(wide, vector, value)
            tokens.copy_(wide)


def _add(tokens: torch.Tensor, vector: torch.Tensor, value: torch.Tensor | None) -> None:
    """Add a vector to each token, times the token's value."""
    if value is None:
        tokens.add_(vector)
    else:
        tokens.addr_(value, vector)


class _Gathered(NamedTuple):
    """Adds one row of the bank to each of several token rows.

    tokens: the token rows; a slice if they are contiguous.
    rows: the row of the bank for each token row.
    amounts: the factor of each row, `[tokens, 1]`; None if all are 1.
    factor: the gates that multiply the amounts; None if there are none.
    """

    tokens: Tokens
    rows: torch.Tensor
    amounts: torch.Tensor | None
    factor: Factor | None

    def add_to(self, hidden: torch.Tensor, bank: Bank, scale: float, gating: Gating | None) -> None:
        """Add them in float32 and round once; the stream is `scale` times a sum of which `hidden` is one part."""
        value = None
        if self.factor is not None and gating is not None:
            value = self.factor.of(gating)
            if value is None:
                return
        change = bank.rows.index_select(0, self.rows)
        if value is not None:
            change.mul_(value.unsqueeze(1))
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
    gating: the gates of the step; None if it has none.
    """

    def __init__(self, plan: Plan, buffer: torch.Tensor | None, bank: Bank, gating: Gating | None = None) -> None:
        self.plan = plan
        self.buffer = buffer
        self.bank = bank
        self.gating = gating
        # See `_runs`.
        self._runs: list[tuple[int, int, int]] = []
        # The length of each run.
        self._lengths: npt.NDArray[np.int64] = _NO_LENGTHS
        # Site → its additions, for sites where every token has at most one operation, an addition.
        self._sums: dict[int, Sequence[_Run | _Gathered]] = {}
        # Any other steered site → the first operation of each run.
        self._heads: dict[int, npt.NDArray[np.int32]] = {}
        # Site → its scores.
        self._scores: dict[int, list[Score]] = {}
        # The token rows of runs, by the mask of the runs, which most sites share.
        self._masked: dict[bytes, Tokens] = {}
        # The gates of some tokens, by the mask of their runs and by the runs' codes and sharpness.
        self._factors: dict[bytes, Factor] = {}
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
        if self.gating is not None:
            for score in self._scores.get(site, ()):
                score.put(hidden, residual, scale, self.bank, self.gating)
        for sum_ in self._sums.get(site, ()):
            sum_.add_to(hidden, self.bank, scale, self.gating)
        if site in self._heads:
            self._steer(site, hidden, residual, scale)

    def _plan_steering(self) -> None:
        """Choose the way to steer each site; done once per step."""
        self._runs = _runs(self.plan.slots(max(source + length for source, length, _ in self.plan.steered)))
        self._lengths = np.array([end - begin for begin, end, _ in self._runs])
        heads = self.bank.heads.numpy()[[slot for _, _, slot in self._runs]].T  # [sites, runs]
        if self.gating is not None:
            heads = self._plan_scores(heads)
        kinds, numbers, following, codes = np.moveaxis(self.bank.op_ints.numpy()[heads], -1, 0)
        floats = self.bank.op_floats.numpy()[heads]
        lone = ((heads < 0) | ((kinds == ADD) & (following < 0))).all(axis=1)
        sliced = few_or_long(len(self._lengths), int(self._lengths.sum()))
        wide = torch.empty((int(self._lengths.max()) if sliced else 0, self.bank.rows.shape[1]))
        for site in np.flatnonzero((heads >= 0).any(axis=1)).tolist():
            if not lone[site]:
                self._heads[site] = heads[site]
                continue
            steered = heads[site] >= 0
            gates = (codes[site], floats[site, :, 3]) if self.gating is not None else None
            self._sums[site] = (
                self._sliced(steered, numbers[site], floats[site, :, 0], gates, wide)
                if sliced
                else [self._gathered(steered, numbers[site], floats[site, :, 0], gates)]
            )

    def _sliced(
        self,
        steered: npt.NDArray[np.bool_],
        numbers: npt.NDArray[np.int32],
        amounts: npt.NDArray[np.float32],
        gates: _Gates | None,
        wide: torch.Tensor,
    ) -> list[_Run]:
        """Return the additions of one site, run by run.

        numbers, amounts: the row of the bank and its factor, of each run.
        """
        factors: list[Factor | None] = [None] * len(steered)
        if gates is not None:
            each_run = np.eye(len(steered), dtype=bool)
            factors = [self._factor(run, gates) for run in each_run]
        each = zip(self._runs, steered.tolist(), numbers.tolist(), amounts.tolist(), factors, strict=True)
        return [_Run(*run[:2], row, amount, wide, factor) for run, use, row, amount, factor in each if use]

    def _gathered(
        self,
        steered: npt.NDArray[np.bool_],
        numbers: npt.NDArray[np.int32],
        amounts: npt.NDArray[np.float32],
        gates: _Gates | None,
    ) -> _Gathered:
        """Return the additions of one site, of all runs at once."""
        times = np.where(steered, self._lengths, 0)
        rows, factors = torch.from_numpy(numbers.repeat(times)), amounts.repeat(times)
        amount = None if (factors == 1.0).all() else torch.from_numpy(factors).unsqueeze(1)
        return _Gathered(self._tokens(steered), rows, amount, self._factor(steered, gates))

    def _factor(self, steered: npt.NDArray[np.bool_], gates: _Gates | None) -> Factor | None:
        """Return the gates of some runs; None if they have none."""
        if gates is None or (gates[0][steered] < 0).all():
            return None
        codes, sharpness = gates[0][steered], gates[1][steered]
        key = steered.tobytes() + codes.tobytes() + sharpness.tobytes()
        if key not in self._factors:
            times = self._lengths[steered]
            self._factors[key] = Factor(codes.repeat(times), sharpness.repeat(times), self._tokens(steered))
        return self._factors[key]

    def _plan_scores(self, heads: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Plan the scores of each site; return the first operations after them."""
        ints, floats = self.bank.op_ints.numpy(), self.bank.op_floats.numpy()
        heads = heads.copy()
        while (scored := (heads >= 0) & (ints[heads, 0] >= SCORE_DOT)).any():
            for site in np.flatnonzero(scored.any(axis=1)).tolist():
                kinds, rows, _, codes = ints[heads[site]].T
                amounts = floats[heads[site], 0]
                self._scores.setdefault(site, []).extend(
                    scores_of(kinds, rows, codes, amounts, scored[site], self._lengths, self._tokens, few_or_long)
                )
            heads[scored] = ints[heads[scored], 2]
        return heads

    def _tokens(self, steered: npt.NDArray[np.bool_]) -> Tokens:
        """Return the token rows of the steered runs; a slice if they are contiguous."""
        key = steered.tobytes()
        if key not in self._masked:
            runs = [run[:2] for run, use in zip(self._runs, steered.tolist(), strict=True) if use]
            begin, end = runs[0][0], runs[-1][1]
            contiguous = end - begin == sum(stop - start for start, stop in runs)
            every = (np.arange(*run) for run in runs)
            self._masked[key] = slice(begin, end) if contiguous else torch.from_numpy(np.concatenate([*every]))
        return self._masked[key]

    def _steer(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float) -> None:
        """Apply a site's operations to every steered token in float32; round once."""
        steered = self._heads[site] >= 0
        heads = self._heads[site][steered].repeat(self._lengths[steered])
        runs = [np.arange(*run[:2]) for run, use in zip(self._runs, steered, strict=True) if use]
        tokens = torch.from_numpy(np.concatenate(runs))
        half = hidden.index_select(0, tokens).float()
        stream = half.clone() if residual is None else half + residual.index_select(0, tokens).float()
        stream = stream if scale == 1.0 else stream.mul_(scale)
        change = changed(self.bank, heads, stream, self.gating, tokens)
        hidden.index_copy_(0, tokens, (half + (change if scale == 1.0 else change / scale)).to(hidden.dtype))


def _runs(slots: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Return the runs of adjacent token rows with the same slot: first row, end row, slot."""
    bounds = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(slots)] if len(slots) else []
    return [(begin, end, int(slots[begin])) for begin, end in pairwise(bounds) if slots[begin] >= 0]


def _source(runs: Any) -> Any:
    """Return the runs; if there are many, one index tensor."""
    if len(runs) < INDEXED_RUNS_MIN:
        return runs
    return torch.from_numpy(token_rows(runs))


current: Step | None = None
"""The step whose forward pass runs now, on the CPU; None outside a forward pass.

`StepRunner.forward` sets and clears it. One process runs one forward pass at a time, from one thread of vLLM's worker.
"""
