"""The step in progress: a plan with the memory that its rows are copied to, and the work of each tap on the CPU.

The CPU taps read the plan itself, through `current`. The GPU taps read tables that were filled from it
(`capflow_engine.taps.tables`), because a CUDA graph replays kernels and runs no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from capflow_engine.taps.bank import Bank
from capflow_engine.taps.chains import INDEXED_RUNS_MIN, changed
from capflow_engine.taps.gates import Gating
from capflow_engine.taps.plan import Plan, token_rows
from capflow_engine.taps.ways import Chain, Ways


class Step:
    """One step on the CPU.

    buffer: the memory for captured rows, `[plan.rows, hidden]` in the model's dtype; None if none are captured.
    shaped: the memory for those of further width classes, in the order of `plan.shaped`.
    gating: the gates of the step; None if it has none.
    ways: how an earlier step steered its sites; used again if this one does the same. Afterwards how this one does;
        None if it steers nothing.
    """

    def __init__(
        self,
        plan: Plan,
        buffer: torch.Tensor | None,
        bank: Bank,
        gating: Gating | None = None,
        ways: Ways | None = None,
        shaped: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.plan = plan
        self.bank = bank
        self.gating = gating
        self.ways: Ways | None = None
        if plan.steered:
            slots = plan.slots(plan.steered.end)
            gated = gating is not None
            same = ways is not None and ways.hold(slots, bank, gated=gated)
            self.ways = ways if same else Ways(slots, bank, gated=gated)
        # Site → (the block's runs or token rows, the memory for its rows).
        self._copies: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        buffers = (buffer, *shaped)
        for block in plan.blocks:
            source, here = _source(block.runs), buffers[block.width_class]
            assert here is not None
            shape = len(block.sites), block.rows, here.shape[1]
            rows = here if block.end - block.base == len(here) else here[block.base : block.end]
            for site, each in zip(block.sites, rows.view(shape).unbind(0), strict=True):
                if (copies := self._copies.get(site)) is None:
                    self._copies[site] = [(source, each)]
                else:
                    copies.append((source, each))

    def tap(self, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float = 1.0) -> None:
        """Copy the site's wanted rows, then steer the site.

        hidden: `[tokens, hidden]`; changed in place.
        residual: the second part of a split stream, in the same shape; None if the stream is whole.
        scale: the site's value is `scale` times the sum of both.
        """
        for source, rows in self._copies.get(site, ()):
            if isinstance(source, torch.Tensor):
                if rows.dtype == hidden.dtype:
                    torch.index_select(hidden, 0, source, out=rows)
                else:  # some models compute the logits of experts in float32
                    rows.copy_(hidden.index_select(0, source))
                if residual is not None:
                    torch.add(rows, residual.index_select(0, source), out=rows)
            else:
                for begin, target, length in source:
                    out = rows[target : target + length]
                    if residual is None:
                        out.copy_(hidden[begin : begin + length])
                    else:
                        torch.add(hidden[begin : begin + length], residual[begin : begin + length], out=out)
            if scale != 1.0:
                rows.mul_(scale)
        if self.ways is not None:
            self._steer(self.ways, site, hidden, residual, scale)

    def _steer(self, ways: Ways, site: int, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float) -> None:
        rows = self.bank.rows_at(site, hidden.shape[1])
        if self.gating is not None:
            for score in ways.scores.get(site, ()):
                score.put(hidden, residual, scale, rows, self.gating)
        for sum_ in ways.sums.get(site, ()):
            value = None
            if sum_.factor is not None:
                assert self.gating is not None
                value = sum_.factor.of(self.gating)
                if value is None:  # all gates are closed
                    continue
            sum_.add_to(hidden, rows, scale, value)
        if (chain := ways.chains.get(site)) is not None:
            self._do_chain(chain, rows, hidden, residual, scale)

    def _do_chain(
        self, chain: Chain, rows: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, scale: float
    ) -> None:
        """Apply a site's operations to every steered token in float32; round once.

        rows: those of the bank, as wide as the site's.
        """
        tokens = chain.tokens
        half = hidden.index_select(0, tokens).float()
        stream = half.clone() if residual is None else half + residual.index_select(0, tokens).float()
        stream = stream if scale == 1.0 else stream.mul_(scale)
        change = changed(self.bank, rows, chain.heads, stream, self.gating, tokens)
        hidden.index_copy_(0, tokens, (half + (change if scale == 1.0 else change / scale)).to(hidden.dtype))


def _source(runs: Any) -> Any:
    """Return the runs; if there are many, one index tensor."""
    if len(runs) < INDEXED_RUNS_MIN:
        return runs
    return torch.from_numpy(token_rows(runs))


current: Step | None = None
"""The step whose forward pass runs now, on the CPU; None outside a forward pass.

`StepRunner.forward` sets and clears it. One process runs one forward pass at a time, from one thread of vLLM's worker.
"""
