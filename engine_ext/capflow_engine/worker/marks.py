"""Marks: which positions of a step are steered by controllers of one pipeline stage, told to the other stages.

A replicated controller runs in one stage, and only this stage knows its actions. But a captured row says whether its
position was steered at any site of the model. So a stage sends its marks to the next one with the step's tensors. The
last stage sends all of them with the step's output to the scheduler, which orders every stage to note them before the
step is settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from capflow_engine.scheduler.orders import Marked
from capflow_engine.taps.acting import ALWAYS, Acts, SlotRange, steered_runs
from capflow_engine.taps.plan import Plan

_decoder = msgspec.msgpack.Decoder(dict[str, tuple[int, ...]])


class StageMarks:
    """The marks of the step that is prepared, in one rank: those of its stage and of the stages before it."""

    def __init__(self) -> None:
        self._step = 0
        # By vLLM's id: runs `first, end, first, end, …`, counted from the first position that the step computes.
        self.runs: dict[str, tuple[int, ...]] = {}

    def begin(self, step: int, plan: Plan) -> None:
        """Mark what the controllers of this stage steer."""
        self._step, self.runs = step, {}
        if plan.steers:
            for request, _, start, length in plan.batch:
                if request.watched and any(held.key != held.shared_key for held in request.steered or ()):
                    assert request.steered is not None
                    self._add(request.key, controlled_runs(request.steered, start, length))

    def receive(self, data: bytes) -> None:
        """Take what `data` of the stage before this one returned."""
        for key, runs in _decoder.decode(data).items():
            self._add(key, runs)

    @property
    def data(self) -> bytes:
        """The marks for the next stage; empty if there are none."""
        return msgspec.msgpack.encode(self.runs) if self.runs else b""

    def take(self) -> tuple[Marked, ...]:
        """Return the marks for the scheduler, once."""
        runs, self.runs = self.runs, {}
        return tuple(Marked(self._step, key, each) for key, each in runs.items())

    def _add(self, key: str, runs: tuple[int, ...]) -> None:
        if runs:
            self.runs[key] = merged(self.runs.get(key, ()), runs)


def controlled_runs(history: Sequence[SlotRange], start: int, length: int) -> tuple[int, ...]:
    """Return which of the positions `start .. start + length` controllers steer, as runs counted from `start`."""
    only = [held._replace(acts=_always(held.acts) if held.key != held.shared_key else Acts()) for held in history]
    return tuple(edge - start for edge in steered_runs(only, start, start + length))


def merged(runs: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    """Return the union of two sets of positions that are given as runs."""
    if not runs or not others:
        return (*runs, *others)
    pairs = sorted(zip((*runs[::2], *others[::2]), (*runs[1::2], *others[1::2]), strict=True))
    union = [*pairs[0]]
    for first, end in pairs[1:]:
        if first > union[-1]:
            union += (first, end)
        else:
            union[-1] = max(union[-1], end)
    return tuple(union)


def clipped(runs: Sequence[int], first: int, end: int) -> tuple[int, ...]:
    """Return the part of runs that lies in `first .. end`."""
    pairs = ((max(begin, first), min(stop, end)) for begin, stop in zip(runs[::2], runs[1::2], strict=True))
    return tuple(edge for pair in pairs if pair[0] < pair[1] for edge in pair)


def _always(acts: Acts) -> Acts:
    """Return where operations without a hard gate act; controllers add no others."""

    def kept(value: int) -> int:
        return value if value == ALWAYS else 0

    patched: Mapping[int, int] = {position: kept(value) for position, value in acts.patched.items()}
    return Acts(kept(acts.prefill), kept(acts.decode), patched)
