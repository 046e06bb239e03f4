"""The bank: the steering programs of the running requests. Equal configurations are stored once and reference-counted.

Taps read these tensors, which never move:

| tensor | shape | meaning |
|---|---|---|
| rows | float32 [rows, width] | vectors, directions and patches; NaN where a patch leaves the number that is there |
| heads | int32 [slots, sites] | the first operation of a configuration at each site; -1: none |
| op_ints | int32 [ops, 4] | per operation: its kind, its row, the next operation (-1: none), its gate code (-1: none) |
| op_floats | float32 [ops, 4] | per operation: its amount, its lower and its upper bound, the sharpness of its gate |

The pairs of `ENCODE` and `SET` at a site are numbered, and the activation of pair n is kept in place n until it is
used: n stands for the amount of its `ENCODE`, which has no gate here, and for the upper bound of its `SET`.

The code of gate `g` is `2 * g`, plus 1 if the gate is latched (`capflow_engine.taps.gates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.capture.site import Site
from capflow.errors import CapflowError, explain
from capflow.limits import FEATURES_SET_MAX, SITE_OPS_MAX
from capflow.steering.program import ENCODE, SET, UNGATED, Op, SteeringProgram
from capflow_engine.steering.budget import Configuration, Configured, Size

NONE = -1
OP_WIDTH = 4
"""The number of columns of `op_ints`, and of `op_floats`."""


SHARPNESS_MIN = 1.2e-38
"""The smallest sharpness, a normal float32: the margin of a position without a score is -inf, and 0 · -inf is NaN."""


class Steered(NamedTuple):
    """The slots of one request; `NONE` where this worker does nothing.

    prefill: the slot of prompt positions.
    decode: the slot of generated positions.
    patched: the slots of single positions, in ascending order, without positions where this worker does nothing.
    """

    prefill: int
    decode: int
    patched: Mapping[int, int]

    @property
    def patched_last(self) -> int:
        """The last position with a slot of its own; -1 if there is none."""
        return next(reversed(self.patched), -1)


NOTHING = Steered(NONE, NONE, {})


class _Slot:
    """A configuration in the bank."""

    def __init__(self, key: str, ops: Sequence[int], rows: Sequence[bytes]) -> None:
        self.key, self.ops, self.rows = key, ops, rows
        self.holders = 0


class Bank:
    """The bank of one worker.

    index: the index of each tapped site.
    width: how many numbers the widest row has that is steered. Those that a site's rows lack are not read there.
    device: where the tensors are. A copy to a GPU runs after the steps that were launched before it.
    begins: for each tapped site, which number of its rows is the first that this tensor-parallel rank has; empty if all
        are whole.
    """

    def __init__(
        self,
        size: Size,
        index: Mapping[Site, int],
        width: int,
        device: torch.device,
        begins: Sequence[int] = (),
    ) -> None:
        self.size = size
        self._begins = begins
        self.rows = torch.empty((size.rows, width), dtype=torch.float32, device=device)
        self.heads = torch.full((size.slots, max(len(index), 1)), NONE, dtype=torch.int32, device=device)
        self.op_ints = torch.empty((size.ops, OP_WIDTH), dtype=torch.int32, device=device)
        self.op_floats = torch.empty((size.ops, OP_WIDTH), dtype=torch.float32, device=device)
        # Counts the changes of what slots mean. A slot that is freed keeps its meaning until it is taken again.
        self.writes = 0
        self._index = index
        self._slots: dict[int, _Slot] = {}
        # The slot of each configuration, by the configuration's key.
        self._slot_of: dict[str, int] = {}
        # The row of each vector, direction or patch, by its digest.
        self._row_of: dict[bytes, int] = {}
        # The number of slots that use a row, by digest.
        self._row_holders: dict[bytes, int] = {}
        self._free_rows = _Free(size.rows)
        self._free_ops = _Free(size.ops)
        self._free_slots = _Free(size.slots)

    def acquire(self, program: SteeringProgram, prompt_length: int) -> Steered:
        """Put a request's program into the bank; each call is matched by one `release`.

        If the bank has no room, CapflowError is raised and nothing is taken. The scheduler's admission prevents this.
        """
        configured = Configured.of(program, prompt_length)
        taken: list[int] = []

        def slot(configuration: Configuration | None) -> int:
            if configuration is None:
                return NONE
            taken.append(self._acquire(configuration, program))
            return taken[-1]

        try:
            return Steered(
                slot(configured.prefill),
                slot(configured.decode),
                {p: number for p, one in configured.patched.items() if (number := slot(one)) != NONE},
            )
        except CapflowError:
            for number in taken:
                self._release(number)
            raise

    def rows_at(self, site: int, width: int) -> torch.Tensor:
        """Return this rank's part of the rows, `[rows, width]`.

        site: the index of the site that they steer; if its rows are wider than the bank's, it is not steered.
        width: how many numbers of its rows this rank has.
        """
        begin = self._begins[site] if self._begins else 0
        return self.rows if width >= self.rows.shape[1] else self.rows[:, begin : begin + width]

    def share(self, steered: Steered) -> None:
        """Add one reference to the slots of an `acquire`."""
        for number in (steered.prefill, steered.decode, *steered.patched.values()):
            if number != NONE:
                self._slots[number].holders += 1

    def release(self, steered: Steered) -> None:
        """Drop the references of one `acquire` or `share`; a slot without references is freed."""
        for number in (steered.prefill, steered.decode, *steered.patched.values()):
            self._release(number)

    def device_tensors(self, site: int = 0, width: int = 0) -> dict[str, torch.Tensor]:
        """Return the tensors that a tap holds, by the names of the op's arguments.

        site: the index of the tap's site.
        width: how many numbers of a row this rank has there; 0 if its rows are those of the residual stream.
        """
        tensors = {name: getattr(self, name) for name in ("heads", "op_ints", "op_floats")}
        return {**tensors, "rows": self.rows_at(site, width) if width else self.rows}

    def __len__(self) -> int:
        return len(self._row_of)

    def _acquire(self, configuration: Configuration, program: SteeringProgram) -> int:
        """Return the slot of a configuration; `NONE` if it does nothing at this worker's sites."""
        number = self._slot_of.get(configuration.key)
        if number is None:
            ops = [
                (self._index[Site(layer, hook)], each)
                for layer, hook, each in configuration.ops
                if Site(layer, hook) in self._index
            ]
            if not ops:
                return NONE
            number = self._put(configuration.key, ops, program)
        self._slots[number].holders += 1
        return number

    def _put(self, key: str, ops: Sequence[tuple[int, tuple[Op, ...]]], program: SteeringProgram) -> int:
        longest = max(len(each) for _, each in ops)
        if longest > SITE_OPS_MAX:
            expected = f"at most {SITE_OPS_MAX} at one site and position"
            raise CapflowError(explain("steering bank", got=f"{longest} operations", expected=expected))
        if (sets := max(sum(op.kind == SET for op in each) for _, each in ops)) > FEATURES_SET_MAX:
            expected = f"at most {FEATURES_SET_MAX} at one site and position"
            raise CapflowError(explain("steering bank", got=f"{sets} features that are set", expected=expected))
        self.writes += 1
        digests = {program.digests[op.row]: op.row for _, each in ops for op in each}
        new = [digest for digest in digests if digest not in self._row_of]
        numbers = self._free_ops.take(sum(len(each) for _, each in ops))
        rows = self._free_rows.take(len(new)) if numbers is not None else None
        number = self._free_slots.take(1) if rows is not None else None
        if numbers is None or rows is None or number is None:
            self._free_ops.give(numbers or ())
            self._free_rows.give(rows or ())
            raise CapflowError(explain("steering bank", got="no room", do="raise --steering-bank-bytes"))
        if new:
            given, wanted = program.array(), [digests[digest] for digest in new]
            self._upload(self.rows, rows, given if wanted == list(range(len(given))) else given[wanted])
            self._row_of.update(zip(new, rows, strict=True))
        for digest in digests:
            self._row_holders[digest] = self._row_holders.get(digest, 0) + 1
        heads = np.full(self.heads.shape[1], NONE, np.int32)
        ints = np.empty((len(numbers), OP_WIDTH), np.int32)
        floats = np.empty((len(numbers), OP_WIDTH), np.float32)
        done = 0
        for site, each in ops:
            heads[site] = numbers[done]
            pairs = {ENCODE: 0, SET: 0}
            for place, op in enumerate(each):
                following = numbers[done + 1] if place + 1 < len(each) else NONE
                code, sharpness = _gating(program, op)
                ints[done] = op.kind, self._row_of[program.digests[op.row]], following, code
                floats[done] = op.amount, op.low, op.high, sharpness
                if op.kind == ENCODE:
                    ints[done, 3], floats[done, 0] = NONE, pairs[ENCODE]
                elif op.kind == SET:
                    floats[done, 2] = pairs[SET]
                if op.kind in pairs:
                    pairs[op.kind] += 1
                done += 1
        self._upload(self.op_ints, numbers, ints)
        self._upload(self.op_floats, numbers, floats)
        self._upload(self.heads, number, heads[None])
        self._slots[number[0]] = _Slot(key, numbers, tuple(digests))
        self._slot_of[key] = number[0]
        return number[0]

    def _release(self, number: int) -> None:
        if number == NONE:
            return
        slot = self._slots[number]
        slot.holders -= 1
        if slot.holders > 0:
            return
        del self._slots[number], self._slot_of[slot.key]
        self._free_slots.give([number])
        self._free_ops.give(slot.ops)
        for digest in slot.rows:
            self._row_holders[digest] -= 1
            if not self._row_holders[digest]:
                del self._row_holders[digest]
                self._free_rows.give([self._row_of.pop(digest)])

    @staticmethod
    def _upload(target: torch.Tensor, lines: Sequence[int], values: npt.NDArray[Any]) -> None:
        """Write lines of a table; on a GPU, asynchronously."""
        if not target.is_cuda:
            target.numpy()[lines] = values
            return
        source, index = torch.from_numpy(np.require(values, requirements=("C", "W"))), torch.tensor(lines)
        # A copy from memory that is not page-locked waits for the device.
        source = source.pin_memory().to(target.device, non_blocking=True)
        target.index_copy_(0, index.pin_memory().to(target.device, non_blocking=True), source)


def _gating(program: SteeringProgram, op: Op) -> tuple[int, float]:
    """Return the gate code of an operation, and the sharpness of its gate."""
    if op.gate == UNGATED:
        return NONE, 0.0
    gate = program.gates[op.gate]
    return 2 * op.gate + gate.latched, max(gate.sharpness, SHARPNESS_MIN)


class _Free:
    """The free numbers below `count`."""

    def __init__(self, count: int) -> None:
        # Numbers that were never taken.
        self._fresh = range(count)
        # Numbers that were taken and given back.
        self._given: list[int] = []

    def take(self, count: int) -> list[int] | None:
        """Take `count` numbers; if fewer are free, take none and return None."""
        again = min(count, len(self._given))
        fresh = count - again
        if fresh > len(self._fresh):
            return None
        taken = [self._given.pop() for _ in range(again)]
        taken += self._fresh[:fresh]
        self._fresh = self._fresh[fresh:]
        return taken

    def give(self, numbers: Sequence[int]) -> None:
        """Give numbers back."""
        self._given.extend(numbers)
