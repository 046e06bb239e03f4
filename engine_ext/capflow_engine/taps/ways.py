"""The ways in which a step steers its sites on the CPU: chosen once, and used again while nothing changes.

In a steady batch each step steers the same token rows by the same slots of the bank as the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.steering.program import ADD, SCORE_DOT
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.chains import few_or_long
from capflow_engine.taps.gates import Factor, Tokens, numbers_of
from capflow_engine.taps.scores import Score, scores_of

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

    def add_to(self, hidden: torch.Tensor, rows: torch.Tensor, scale: float, value: torch.Tensor | None) -> None:
        """Add it in float32 and round once.

        rows: those of the bank, `[rows, width]`.
        scale: the stream is `scale` times a sum of which `hidden` is one part.
        value: the value of each token's gate; None if there are no gates.
        """
        row = rows[self.row]
        vector = row if self.amount == scale else row * self.amount / scale
        tokens = hidden[self.begin : self.end]
        if tokens.dtype == torch.float32:
            _add(tokens, vector, value)
        else:  # otherwise torch allocates memory for each sum, and the system spends time on clearing it
            wide = self.wide[: self.end - self.begin, : hidden.shape[1]].copy_(tokens)
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

    def add_to(self, hidden: torch.Tensor, rows: torch.Tensor, scale: float, value: torch.Tensor | None) -> None:
        """Add them as `_Run.add_to` does."""
        change = rows.index_select(0, self.rows)
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


class Chain(NamedTuple):
    """The operations of a site where a token may have several, or one that is no addition.

    heads: the first operation of each token.
    tokens: the token rows.
    """

    heads: npt.NDArray[np.int32]
    tokens: torch.Tensor


class Ways:
    """How to steer each site.

    sums: site → its additions, for sites where every token has at most one operation, an addition.
    chains: any other steered site → its operations.
    scores: site → its scores.
    """

    def __init__(self, slots: npt.NDArray[np.int32], bank: Bank, *, gated: bool) -> None:
        """Choose the ways.

        slots: the slot that steers each token row; -1: none.
        gated: whether the step has gates.
        """
        self.sums: dict[int, Sequence[_Run | _Gathered]] = {}
        self.chains: dict[int, Chain] = {}
        self.scores: dict[int, list[Score]] = {}
        self._slots, self._bank, self._writes, self._gated = slots, bank, bank.writes, gated
        # See `_runs_of`.
        self._runs = _runs_of(slots)
        # The length of each run.
        self._lengths = np.array([end - begin for begin, end, _ in self._runs])
        # The token rows of some runs, by the mask of these.
        self._masked: dict[bytes, Tokens] = {}
        # The gates of some tokens, by the mask of their runs and by the runs' codes and sharpness.
        self._factors: dict[bytes, Factor] = {}
        self._choose()

    def hold(self, slots: npt.NDArray[np.int32], bank: Bank, *, gated: bool) -> bool:
        """Return whether they are those of a step with these slots and gates."""
        same = bank is self._bank and bank.writes == self._writes and gated == self._gated
        return same and np.array_equal(slots, self._slots)

    def _choose(self) -> None:
        heads = self._bank.heads.numpy()[[slot for _, _, slot in self._runs]].T  # [sites, runs]
        if self._gated:
            heads = self._choose_scores(heads)
        kinds, numbers, following, codes = np.moveaxis(self._bank.op_ints.numpy()[heads], -1, 0)
        floats = self._bank.op_floats.numpy()[heads]
        lone = ((heads < 0) | ((kinds == ADD) & (following < 0))).all(axis=1)
        sliced = few_or_long(len(self._lengths), int(self._lengths.sum()))
        wide = torch.empty((int(self._lengths.max()) if sliced else 0, self._bank.rows.shape[1]))
        for site in np.flatnonzero((heads >= 0).any(axis=1)).tolist():
            if not lone[site]:
                self.chains[site] = self._chain(heads[site])
                continue
            steered = heads[site] >= 0
            gates = (codes[site], floats[site, :, 3]) if self._gated else None
            self.sums[site] = (
                self._sliced(steered, numbers[site], floats[site, :, 0], gates, wide)
                if sliced
                else [self._gathered(steered, numbers[site], floats[site, :, 0], gates)]
            )

    def _chain(self, heads: npt.NDArray[np.int32]) -> Chain:
        """Return the operations of one site.

        heads: the first operation of each run.
        """
        steered = heads >= 0
        return Chain(heads[steered].repeat(self._lengths[steered]), numbers_of(self._tokens(steered)))

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

    def _choose_scores(self, heads: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Choose how to score at each site; return the first operations after them."""
        ints, floats = self._bank.op_ints.numpy(), self._bank.op_floats.numpy()
        heads = heads.copy()
        while (scored := (heads >= 0) & (ints[heads, 0] >= SCORE_DOT)).any():
            for site in np.flatnonzero(scored.any(axis=1)).tolist():
                kinds, rows, _, codes = ints[heads[site]].T
                amounts = floats[heads[site], 0]
                self.scores.setdefault(site, []).extend(
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


def _runs_of(slots: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Return the runs of adjacent token rows with the same slot: first row, end row, slot."""
    bounds = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(slots)] if len(slots) else []
    return [(begin, end, int(slots[begin])) for begin, end in pairwise(bounds) if slots[begin] >= 0]
