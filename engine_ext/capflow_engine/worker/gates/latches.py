"""What latched gates carry from step to step: for each request, the largest margins at earlier positions.

A step's margins stay on the device. When a request's next step is prepared, the position at which that step starts is
decided: drafts are accepted or rejected, and a preempted request starts again. So what a request carries is worked out
then, from its last step that began at or before that position.

Invariant: what a request carries into a step depends only on margins at positions before the step. Scored positions of
latched gates are always computed (`compat.cache`), so a request that starts again carries nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from capflow_engine.taps.plan import Plan

PARTS_MAX = 8
"""How many steps of a request are kept. Steps under way may be dropped; there are fewer of these."""


class _Part(NamedTuple):
    """A request's part of an earlier step.

    column: its column of `carried`.
    margins: `[gates, tokens]` of the step.
    carried: what was carried into the step, `[gates, requests]`.
    """

    start: int
    length: int
    row: int
    column: int
    margins: torch.Tensor
    carried: torch.Tensor


class Latches:
    """The latched gates of one worker's requests."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By vLLM's id, in order of position.
        self._parts: dict[str, list[_Part]] = {}

    def begin(self, plan: Plan) -> torch.Tensor | None:
        """Return what requests carry into a step: `[gates, requests]`, in the order of `plan.latched`; None without."""
        if not plan.latched:
            return None
        count = len(plan.latched)
        # The last column takes the tokens that count for nobody.
        carried = torch.full((plan.gates, count + 1), -math.inf, device=self._device)
        steps: dict[int, list[tuple[int, int, _Part]]] = {}
        for column, number in enumerate(plan.latched):
            request, _, start, _ = plan.batch[number]
            parts = self._parts.get(request.key)
            while parts and parts[-1].start > start:
                parts.pop()
            if parts:
                part = parts[-1]
                steps.setdefault(id(part.margins), []).append((column, min(part.length, start - part.start), part))
        for some in steps.values():
            self._advance(carried, some)
        return carried[:, :count]

    def end(self, plan: Plan, carried: torch.Tensor | None, margins: torch.Tensor) -> None:
        """Keep the margins of a step that was launched, `[gates, tokens]`, and what was carried into it."""
        if carried is None:
            return
        for column, number in enumerate(plan.latched):
            request, row, start, length = plan.batch[number]
            parts = self._parts.setdefault(request.key, [])
            parts.append(_Part(start, length, row, column, margins, carried))
            del parts[:-PARTS_MAX]

    def forget(self, key: str) -> None:
        """Forget a request that ended."""
        self._parts.pop(key, None)

    def _advance(self, carried: torch.Tensor, some: Sequence[tuple[int, int, _Part]]) -> None:
        """Write what requests carry out of their last step, which is the same for all of them.

        some: of each request its column of `carried`, how many tokens of the step count, and its part of the step.
        """
        _, _, (*_, margins, before) = some[0]
        gates = min(len(margins), len(carried))
        first, count = some[0][2].row, len(some)
        places = ((column, counted, part.row - first, part.column) for column, counted, part in some)
        if all(place == (n, 1, n, n) for n, place in enumerate(places)):
            # The same requests in the same order as in their last step, a token each: nearly always so.
            torch.maximum(before[:gates, :count], margins[:gates, first : first + count], out=carried[:gates, :count])
            return
        owners = np.full(margins.shape[1], carried.shape[1] - 1)
        columns, former = np.empty(len(some), np.int64), np.empty(len(some), np.int64)
        for place, (column, counted, part) in enumerate(some):
            owners[part.row : part.row + counted] = column
            columns[place], former[place] = column, part.column
        now = carried[:gates]
        now[:, self._there(columns)] = before[:gates].index_select(1, self._there(former))
        now.scatter_reduce_(1, self._there(owners).expand(gates, -1), margins[:gates], "amax")

    def _there(self, values: np.ndarray) -> torch.Tensor:
        """Return values on the device; on a GPU, copied asynchronously."""
        source = torch.from_numpy(values)
        return source if self._device.type == "cpu" else source.pin_memory().to(self._device, non_blocking=True)
