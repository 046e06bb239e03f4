"""The scores of one step on the CPU: at a site, one product for all tokens that share a probe.

A score reads the stream before anything steers it at that site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.steering.program import SCORE_COSINE, SCORE_DOT
from capflow_engine.taps.gates import Gating, Tokens

NORM_MIN = 1e-30
"""Keeps the cosine of a zero vector at 0."""

_Numbers = npt.NDArray[np.int32]


class Score(NamedTuple):
    """The scores of some tokens at one site, of one kind.

    tokens: the token rows.
    row: the probe's row of the bank; a tensor with the row of each token if they differ.
    gate: the gate that is scored; a tensor if they differ.
    amount: the bias minus the threshold; a tensor if they differ.
    """

    kind: int
    tokens: Tokens
    row: int | torch.Tensor
    gate: int | torch.Tensor
    amount: float | torch.Tensor

    def put(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float, rows: torch.Tensor, gating: Gating
    ) -> None:
        """Score the tokens; the stream is `scale` times the sum of `hidden` and `residual`.

        rows: those of the bank, `[rows, width]`.
        """
        if self.kind == SCORE_DOT and isinstance(self.row, int) and hidden.dtype == torch.float32:
            probe = rows[self.row]
            scores = _rows(hidden, self.tokens).mv(probe)
            if residual is not None:
                scores.add_(_rows(residual, self.tokens).mv(probe))
            if scale != 1.0:
                scores.mul_(scale)
        else:
            stream = _rows(hidden, self.tokens).float()
            if residual is not None:
                stream = stream + _rows(residual, self.tokens)
            probes = rows[self.row] if isinstance(self.row, int) else rows.index_select(0, self.row)
            scores = _scores(self.kind, stream if scale == 1.0 else stream * scale, probes)
        gating.put(self.gate, self.tokens, scores.add_(self.amount))


def _rows(values: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return values[tokens] if isinstance(tokens, slice) else values.index_select(0, tokens)


def _scores(kind: int, stream: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """Return the score of each row of the stream.

    probes: `[hidden]`, or `[tokens, hidden]`.
    """
    along = stream.mv(probes) if probes.dim() == 1 else (stream * probes).sum(1)
    if kind == SCORE_DOT:
        return along
    if kind == SCORE_COSINE:
        directions = probes
    else:
        along = along / (probes * probes).sum(-1).clamp_min(NORM_MIN)
        directions = torch.tanh(along.unsqueeze(1) * probes)
        along = (stream * directions).sum(1)
    lengths: torch.Tensor = torch.linalg.vector_norm(stream, dim=1) * torch.linalg.vector_norm(directions, dim=-1)
    return along / lengths.clamp_min(NORM_MIN)


def scores_of(
    kinds: _Numbers,
    rows: _Numbers,
    codes: _Numbers,
    amounts: npt.NDArray[np.float32],
    scored: npt.NDArray[np.bool_],
    lengths: npt.NDArray[np.int64],
    tokens_of: Callable[[npt.NDArray[np.bool_]], Tokens],
    few: Callable[[int, int], bool],
) -> Iterator[Score]:
    """Yield the scores of one site.

    kinds, rows, codes, amounts: of the first operation of each run.
    scored: the runs whose first operation is a score.
    lengths: of each run.
    tokens_of: returns the token rows of some runs.
    few: whether a number of groups with a number of tokens is scored group by group.
    """
    pairs = set(zip(kinds[scored].tolist(), rows[scored].tolist(), strict=True))
    single = few(len(pairs), int(lengths[scored].sum()))
    for kind, row in sorted(pairs) if single else ((kind, -1) for kind in sorted({kind for kind, _ in pairs})):
        mine = scored & (kinds == kind)
        if single and len(pairs) > 1:
            mine &= rows == row
        times = lengths[mine]
        gates = codes[mine] // 2
        yield Score(
            kind,
            tokens_of(mine),
            row if single else torch.from_numpy(rows[mine].repeat(times)),
            int(gates[0]) if (gates == gates[0]).all() else torch.from_numpy(gates.repeat(times).astype(np.int64)),
            float(amounts[mine][0])
            if (amounts[mine] == amounts[mine][0]).all()
            else torch.from_numpy(amounts[mine].repeat(times)),
        )
