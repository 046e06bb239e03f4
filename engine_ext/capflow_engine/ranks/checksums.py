"""Checksums of what steers a step: every rank keeps its own, and equal ranks have equal ones.

A step is folded as its plan is made, from what the rank will do: step, request, positions, steering program, slots of
the bank. Each fold begins with the one before, so ranks that once differed differ from there on.

There are two sums. `shared` has what all ranks of an engine share: programs of requests and actions through a hub.
`stage` has also what the tensor-parallel ranks of one pipeline stage share: slots, and actions of controllers, which
run in one stage.

Steps without a steered request are not folded: a sum holds until the next fold.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from capflow import limits
from capflow_engine.taps.plan import Plan, Scheduled

_encoder = msgspec.msgpack.Encoder()


class Folded(NamedTuple):
    """The sums after a step."""

    step: int
    shared: int
    stage: int


class StepLog(msgspec.Struct, frozen=True, array_like=True):
    """The latest steps of a rank.

    before: the sums before the first step that the log speaks for.
    last: the last one.
    folded: the folded steps, in order.
    """

    before: Folded
    last: int
    folded: tuple[Folded, ...]


class Checksums:
    """The sums of one rank. The step's thread folds; any thread takes the log."""

    def __init__(self) -> None:
        self._folded: deque[Folded] = deque(maxlen=limits.CHECKSUM_STEPS_MAX)
        # The last step, and how many were folded.
        self.last = self.folds = 0
        self._shared = self._stage = 0
        # The last folded step that is no longer in the log.
        self._before = Folded(0, 0, 0)
        self._lock = threading.Lock()

    def fold(self, step: int, plan: Plan) -> None:
        """Fold a planned step."""
        if not plan.steers:
            self.last = step
            return
        every = [_part(part) for part in plan.batch if part.request.steered is not None]
        if shared := [_shared(part) for part in every if any(key for _, _, key in part[3])]:
            self._shared = xxhash.xxh3_64_intdigest(_encoder.encode((step, shared)), self._shared)
        here = _encoder.encode((step, every)) + np.array(plan.steered, np.int64).tobytes()
        self._stage = xxhash.xxh3_64_intdigest(here, self._stage ^ self._shared)
        with self._lock:
            if len(self._folded) == self._folded.maxlen:
                self._before = self._folded[0]
            self.folds += 1
            self._folded.append(Folded(step, self._shared, self._stage))
            self.last = step

    def log(self) -> StepLog:
        """Return the latest steps."""
        with self._lock:
            return StepLog(self._before, self.last, tuple(self._folded))


_Part = tuple[str, int, int, list[tuple[int, int, int]]]
"""A request's part of a step: its key, its positions, and from which of them on which programs apply.

A program has two keys: its own, and that of the part of it that all stages share.
"""


def _part(part: Scheduled) -> _Part:
    request, _, start, length = part
    history = request.steered or []
    held = history[-1]
    if held.first <= start:  # nearly always
        return request.key, start, length, [(start, held.key, held.shared_key)]
    ranges = zip(history, [*(each.first for each in history[1:]), start + length], strict=True)
    keys = [(max(each.first, start), each.key, each.shared_key) for each, end in ranges if end > start]
    return request.key, start, length, [each for each in keys if each[0] < start + length]


def _shared(part: _Part) -> tuple[str, int, int, list[tuple[int, int]]]:
    """Return the part as all stages have it: a controller's action begins no program there."""
    key, start, length, ranges = part
    programs: list[tuple[int, int]] = []
    for first, _, program in ranges:
        if not programs or programs[-1][1] != program:
            programs.append((first, program))
    return key, start, length, programs


class Difference(NamedTuple):
    """The first step after which ranks have different sums.

    ranks: those that differ from the first rank of the engine, or of their stage.
    """

    step: int
    ranks: tuple[str, ...]


def compared(logs: Mapping[tuple[int, int], StepLog]) -> tuple[int, Difference | None]:
    """Compare the logs of an engine's ranks, by pipeline stage and tensor-parallel rank.

    Return the last step that all logs speak for, and the first difference up to there; None if there is none.
    """
    first, last = max(log.before.step for log in logs.values()), min(log.last for log in logs.values())
    sums: dict[tuple[int, int], Folded] = {}
    folds: dict[int, list[tuple[tuple[int, int], Folded]]] = {first: []}
    for rank, log in logs.items():
        sums[rank] = log.before
        for each in log.folded:
            if each.step <= first:
                sums[rank] = each
            elif each.step <= last:
                folds.setdefault(each.step, []).append((rank, each))
    for step in sorted(folds):
        sums.update(folds[step])
        if differing := _differing(sums):
            return last, Difference(step, differing)
    return last, None


def _differing(sums: Mapping[tuple[int, int], Folded]) -> tuple[str, ...]:
    """Return the ranks that differ, as `STAGE.RANK`."""
    origin = sums[min(sums)]
    return tuple(
        f"{stage}.{rank}"
        for (stage, rank), mine in sorted(sums.items())
        if mine.shared != origin.shared or mine.stage != sums[stage, 0].stage
    )
