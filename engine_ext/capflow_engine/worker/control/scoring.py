"""Scores of the rows that the probes of controllers read, computed where the rows are.

The rows of a step lie in the step's buffer, `[rows, hidden]` in the model's dtype; on a GPU, in the staging buffer on
the device. Only the scores leave it, 4 bytes a row.

Invariant: a score depends on its row and on its probe, and on nothing else. On the CPU, `numpy.vecdot` calls BLAS' dot
product of float32 once for each row, so the order of additions depends on the row's length alone. On a GPU, one Triton
program reduces one row, in an order that depends on the width alone. The order of a matrix product would depend on the
batch, and it takes as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.plugins.consumer import SCORES, StepProbe
from capflow_engine.taps.plan import Plan
from capflow_engine.taps.requests import VIEW

DOT, COSINE, CAST = range(len(SCORES))

Scores = npt.NDArray[np.float32]

# The numbers of a portion of rows on the CPU; more portions cost more calls than a smaller one saves in the cache.
_PORTION_NUMBERS = 1 << 20


class ScoredRows(NamedTuple):
    """The rows of one block at one site, which some probes score.

    block: the index of the block in the plan.
    site: the index of the site.
    row: the first of its rows in the step's buffer.
    rows: their number.
    first: where the scores of its first probe begin; those of the other probes follow.
    """

    block: int
    site: int
    row: int
    rows: int
    first: int


class ProbeScorer:
    """The probes of one hub's controllers.

    probes: for each, the index of its site and the probe.
    """

    def __init__(self, probes: Sequence[tuple[int, StepProbe]], hidden: int, device: torch.device, hub: int) -> None:
        self._hub = hub
        self._hidden = hidden
        self._device = device
        # The numbers of the probes of each site; their order is that of the scores.
        self.at: dict[int, list[int]] = {}
        for number, (site, _) in enumerate(probes):
            self.at.setdefault(site, []).append(number)
        given = [np.asarray(probe.weight, np.float32) for _, probe in probes]
        weights = np.stack(given) if given else np.empty((0, hidden), np.float32)
        self._weights = torch.from_numpy(weights).to(device)
        self._kinds = [SCORES.index(probe.score) for _, probe in probes]
        self._bias = np.array([probe.bias for _, probe in probes], np.float32)
        squares = np.square(weights, dtype=np.float64).sum(axis=1)
        self._squares = squares.astype(np.float32)
        self._norms = np.sqrt(squares).astype(np.float32)
        if device.type == "cpu":
            # Kept from step to step: new memory costs more than the scores.
            self._portion = torch.empty((max(1, _PORTION_NUMBERS // hidden), hidden))
        else:
            self._kinds_there = torch.tensor(self._kinds, dtype=torch.int32, device=device)
            self._numbers_there = torch.from_numpy(np.stack([self._bias, self._norms, self._squares], 1)).to(device)

    def parts(self, plan: Plan) -> tuple[list[ScoredRows], int]:
        """Return the rows of a plan that are scored, and the number of scores."""
        parts, count = [], 0
        for number, block in enumerate(plan.blocks):
            if block.channel != VIEW or block.hub != self._hub:
                continue
            for order, site in enumerate(block.sites):
                if site in self.at:
                    parts.append(ScoredRows(number, site, block.base + order * block.rows, block.rows, count))
                    count += block.rows * len(self.at[site])
        return parts, count

    def score(self, parts: Sequence[ScoredRows], count: int, rows: torch.Tensor) -> Scores:
        """Return the scores of a step on the CPU.

        rows: the step's buffer.
        """
        scores = np.empty(count, np.float32)
        for part in parts:
            some = rows[part.row : part.row + part.rows]
            for order, out in enumerate(self._on_cpu(self.at[part.site], some)):
                begin = part.first + order * part.rows
                scores[begin : begin + part.rows] = out
        return scores

    def launch(self, parts: Sequence[ScoredRows], count: int, rows: torch.Tensor) -> torch.Tensor:
        """Start to score a step on a GPU; return where the scores will be, on the device."""
        from capflow_engine.taps.gpu.score_kernel import launch

        scores = torch.empty(count, dtype=torch.float32, device=self._device)
        for part in parts:
            some = rows[part.row : part.row + part.rows]
            for order, number in enumerate(self.at[part.site]):
                begin = part.first + order * part.rows
                out = scores[begin : begin + part.rows]
                launch(some, self._weights[number], self._kinds_there[number:], self._numbers_there[number], out)
        return scores

    def _on_cpu(self, numbers: Sequence[int], rows: torch.Tensor) -> list[Scores]:
        """Return the scores of some rows by each of these probes."""
        weights = self._weights.numpy()
        sums = np.empty((len(numbers), 4, len(rows)), np.float32)
        for begin in range(0, len(rows), len(self._portion)):
            some = rows[begin : begin + len(self._portion)]
            here = slice(begin, begin + len(some))
            wide = self._portion[: len(some)].copy_(some).numpy()
            for number, out in zip(numbers, sums, strict=True):
                np.vecdot(wide, weights[number], out=out[0, here])
                if self._kinds[number] != DOT:
                    np.vecdot(wide, wide, out=out[1, here])
                if self._kinds[number] == CAST:
                    factor = out[0, here] / (self._squares[number] or np.float32(1))
                    along = torch.outer(torch.from_numpy(factor), self._weights[number]).tanh_().numpy()
                    np.vecdot(wide, along, out=out[2, here])
                    np.vecdot(along, along, out=out[3, here])
        return [self._finish(number, out) for number, out in zip(numbers, sums, strict=True)]

    def _finish(self, number: int, sums: npt.NDArray[np.float32]) -> Scores:
        """Return scores, given the sums of `x · weight`, `x · x`, and for `cast` those of `x · t` and `t · t`."""
        kind, bias = self._kinds[number], self._bias[number]
        score: Scores
        if kind == DOT:
            score = sums[0] + bias
            return score
        if kind == COSINE:
            above, below = sums[0], np.sqrt(sums[1]) * self._norms[number]
        else:
            above, below = sums[2], np.sqrt(sums[1]) * np.sqrt(sums[3])
        with np.errstate(invalid="ignore"):
            score = np.where(below == 0, np.float32(0), above / np.where(below == 0, np.float32(1), below)) + bias
        return score
