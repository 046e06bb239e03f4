"""The memory of a step's rows, by width class (`capflow_engine.taps.widths`).

A rank that sends has the rows of all classes in one buffer of the host, class after class. Rows that are divided among
tensor-parallel ranks are first in memory of each rank, and are joined in the first one after the forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from capflow_engine.compat import engine as compat
from capflow_engine.taps.plan import Plan
from capflow_engine.taps.widths import Widths

Rows = Sequence[torch.Tensor | None]
"""Rows by width class, `[rows, width]`; None without rows."""


class RowMemory:
    """The sizes and places of one worker's rows.

    ranks: the number of tensor-parallel ranks.
    """

    def __init__(self, widths: Widths, dtype: torch.dtype, ranks: int) -> None:
        self._classes, self._dtype, self._ranks = widths.classes, dtype, ranks

    def shaped_at(self, rows: int) -> int:
        """Return the bytes of rows of class 0, behind which those of the further classes begin."""
        return rows * self._classes[0].width * self._dtype.itemsize

    def nbytes(self, plan: Plan, rows: int) -> int:
        """Return the bytes of a plan's rows in the buffer of the host.

        rows: how many of the rows of class 0 come to the host.
        """
        return sum(self._sizes(plan, rows)) if plan.shaped else self.shaped_at(rows)

    def host(self, buffer: Any, plan: Plan, rows: int) -> list[torch.Tensor | None]:
        """Return the places of a plan's rows in a buffer of `nbytes` bytes, by class; None without a buffer."""
        if buffer is None:
            return [None] * (1 + len(plan.shaped))
        if not plan.shaped and rows:  # nearly always
            return [torch.frombuffer(buffer, dtype=self._dtype).view(rows, -1)]
        counts = (rows, *plan.shaped)
        memory = torch.from_numpy(buffer).split(self._sizes(plan, rows))
        each = zip(counts, memory, self._classes, strict=False)
        return [part.view(self._dtype).view(count, width.width) if count else None for count, part, width in each]

    def parts(self, plan: Plan, host: Rows) -> list[torch.Tensor | None]:
        """Return the memory that the CPU taps copy a plan's rows to, of each further class.

        host: the places of these rows on the host; fewer if there is no room.
        """
        classes = zip(plan.shaped, self._classes[1:], strict=False)
        here = itertools.chain(host, itertools.repeat(None))
        return [
            torch.empty((rows, width.part), dtype=self._dtype) if width.divided else whole
            for (rows, width), whole in zip(classes, here, strict=False)
        ]

    def joined(self, plan: Plan, parts: Rows) -> list[torch.Tensor | None]:
        """Gather a plan's rows that are divided among ranks; None for other classes, and on all ranks but the first.

        Every rank of the stage calls this after each forward pass, with what was planned for it: whether or not the
        first rank has room for the rows.

        parts: this rank's part of the rows of each further class; more rows than the plan has are left out.
        """
        joined: list[torch.Tensor | None] = []
        for rows, part, width in zip(plan.shaped, parts, self._classes[1:], strict=False):
            whole = None
            if rows and width.divided:
                assert part is not None
                # A buffer that is too short is so on every rank.
                gathered = compat.to_first_rank(part[:rows]) if rows <= len(part) else None
                whole = None if gathered is None else width.joined(gathered.view(self._ranks, rows, width.part))
            joined.append(whole)
        return joined

    def _sizes(self, plan: Plan, rows: int) -> list[int]:
        counts = zip((rows, *plan.shaped), self._classes, strict=False)
        return [count * width.width * self._dtype.itemsize for count, width in counts]
