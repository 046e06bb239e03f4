"""Checksums of what steers a step: every rank keeps its own, and equal ranks have equal ones.

A step is folded as its plan is made, from what the rank will do: step, request, positions, steering program, slots of
the bank; and, when it is settled, which gates were open. Each fold begins with the one before, so ranks that once
differed differ from there on.

There are two sums. `shared` has what all ranks of an engine share: programs of requests and actions through a hub.
`stage` has also what the tensor-parallel ranks of one pipeline stage share: slots, and actions of controllers, which
run in one stage.

Steps without a steered request are not folded: a sum holds until the next fold.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow_engine.taps.plan import Plan

_encoder = msgspec.msgpack.Encoder()

Indices = npt.NDArray[np.int64]


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


class _Recent(NamedTuple):
    """A folded step, for `Checksums.requests`."""

    step: int
    plan: Plan


class Checksums:
    """The sums of one rank. The step's thread folds; any thread takes the log.

    Each request was hashed with what steers it when that changed, so a step costs the hash of some numbers for each.

    last: the last step, also one that was not folded.
    folds: how many steps were folded.
    gates: those of the steps that are not settled, oldest first.
    """

    def __init__(self) -> None:
        self._folded: deque[Folded] = deque(maxlen=limits.CHECKSUM_STEPS_MAX)
        self._recent: deque[_Recent] = deque(maxlen=limits.CHECKSUM_PARTS_MAX)
        self.last = self.folds = 0
        self._shared = self._stage = 0
        # The last folded step that is no longer in the log.
        self._before = Folded(0, 0, 0)
        self.gates: deque[tuple[int, npt.NDArray[Any], Callable[[], None]]] = deque()
        self._lock = threading.Lock()

    def fold(self, step: int, plan: Plan) -> None:
        """Fold a planned step."""
        if plan.steering is None:
            self.last = step
            return
        number = step.to_bytes(8, "little")
        _, starts, lengths, _, _, whole, shared = plan.steering
        if shared.any():
            here = shared != 0
            every = np.concatenate((shared[here].view(np.int64), starts[here], lengths[here]))
            self._shared = xxhash.xxh3_64_intdigest(number + every.tobytes(), self._shared)
        every = np.concatenate((whole.view(np.int64), starts, lengths))
        self._stage = xxhash.xxh3_64_intdigest(
            number + every.tobytes() + plan.steered.packed, self._stage ^ self._shared
        )
        with self._lock:
            if len(self._folded) == self._folded.maxlen:
                self._before = self._folded[0]
            self.folds += 1
            self._folded.append(Folded(step, self._shared, self._stage))
            self._recent.append(_Recent(step, plan))
            self.last = step

    def add_gates(self, step: int, margins: npt.NDArray[Any], ready: Callable[[], None]) -> None:
        """Add the gates of a step that was just launched; they are folded when it is settled.

        margins: float32 `[gates, tokens]`, in the host's memory; valid after `ready` returned.
        """
        self.gates.append((step, margins, ready))

    def settle(self, settled: int) -> None:
        """Fold which gates were open in the steps up to number `settled`, with the next step that is folded.

        The outputs of these steps are out, so their margins are in the host's memory. Scores are not folded: on some
        devices their last bits may differ between ranks that do the same.
        """
        while self.gates and self.gates[0][0] <= settled:
            step, margins, ready = self.gates.popleft()
            ready()
            bits = np.packbits(margins >= 0).tobytes()
            self._stage = xxhash.xxh3_64_intdigest(step.to_bytes(8, "little") + bits, self._stage)

    def log(self) -> StepLog:
        """Return the latest steps."""
        with self._lock:
            return StepLog(self._before, self.last, tuple(self._folded))

    def requests(self, step: int) -> dict[str, int] | None:
        """Return a sum of each steered request of a recent step alone, by vLLM's id; None if the step is gone."""
        with self._lock:
            recent = next((each for each in self._recent if each.step == step), None)
        if recent is None:
            return None
        plan = recent.plan
        assert plan.steering is not None
        sums = {}
        each = zip(*(column.tolist() for column in plan.steering[:5]), strict=True)
        for number, start, length, first, key in each:
            request, row, _, _ = plan.batch[number]
            slots = [(max(s, row) - row, min(s + n, row + length) - row, slot) for s, n, slot in plan.steered]
            mine = (start, length, first, key, [each for each in slots if each[0] < each[1]])
            sums[request.key] = xxhash.xxh3_64_intdigest(_encoder.encode(mine))
        return sums


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
