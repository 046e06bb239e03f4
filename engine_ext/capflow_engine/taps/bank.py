"""The bank: what steers the requests that run, kept once however many ask for it, and counted.

It lies in tensors that taps read and that never move:

| tensor | shape | meaning |
|---|---|---|
| rows | float32 [rows, hidden] | vectors, directions and patches |
| heads | int32 [slots, sites] | the first operation of a configuration at each site; -1: none |
| op_ints | int32 [ops, 3] | of an operation: its kind, its row, the operation that follows it (-1: none) |
| op_floats | float32 [ops, 3] | of an operation: its amount, its low and its high bound |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from capflow.capture.site import Site
from capflow.errors import CapflowError, explain
from capflow.limits import SITE_OPS_MAX
from capflow.steering.program import Op, SteeringProgram
from capflow_engine.steering.budget import Configuration, Configured, Size

NONE = -1


class Steered(NamedTuple):
    """The slots of one request: of its prompt, behind it, and of single positions; `NONE` where nothing is done here."""

    prefill: int
    decode: int
    # In order.
    patched: Mapping[int, int]

    @property
    def patched_last(self) -> int:
        """The last position that has a slot of its own; -1 when there is none."""
        return next(reversed(self.patched), -1)


NOTHING = Steered(NONE, NONE, {})


class _Slot:
    """A configuration in the bank."""

    def __init__(self, key: str, ops: Sequence[int], rows: Sequence[bytes]) -> None:
        self.key, self.ops, self.rows = key, ops, rows
        self.holders = 0


class Bank:
    """The bank of one worker.

    index: the numbers of the sites that it taps.

    Its tensors are on `device`; a copy to a GPU is ordered behind the steps that were launched before it.
    """

    def __init__(self, size: Size, index: Mapping[Site, int], hidden: int, device: torch.device) -> None:
        self.size = size
        self.rows = torch.empty((size.rows, hidden), dtype=torch.float32, device=device)
        self.heads = torch.full((size.slots, max(len(index), 1)), NONE, dtype=torch.int32, device=device)
        self.op_ints = torch.empty((size.ops, 3), dtype=torch.int32, device=device)
        self.op_floats = torch.empty((size.ops, 3), dtype=torch.float32, device=device)
        self._index = index
        self._slots: dict[int, _Slot] = {}
        # By configuration.
        self._slot_of: dict[str, int] = {}
        # By digest.
        self._row_of: dict[bytes, int] = {}
        # Slots, by digest.
        self._row_holders: dict[bytes, int] = {}
        self._free_rows = _Free(size.rows)
        self._free_ops = _Free(size.ops)
        self._free_slots = _Free(size.slots)

    def acquire(self, program: SteeringProgram, prompt_length: int) -> Steered:
        """Put what a request asks for into the bank; each call is matched by one `release`.

        Raises CapflowError, with nothing taken, when there is no room; the scheduler's admission keeps that from happening.
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
                {position: slot(one) for position, one in configured.patched.items()},
            )
        except CapflowError:
            for number in taken:
                self._release(number)
            raise

    def share(self, steered: Steered) -> None:
        """Hold once more what one `acquire` took."""
        for number in (steered.prefill, steered.decode, *steered.patched.values()):
            if number != NONE:
                self._slots[number].holders += 1

    def release(self, steered: Steered) -> None:
        """Give back what one `acquire` or `share` took; what nobody holds is free."""
        for number in (steered.prefill, steered.decode, *steered.patched.values()):
            self._release(number)

    def device_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that every tap carries, by the names of the op's arguments."""
        return {name: getattr(self, name) for name in ("heads", "op_ints", "op_floats", "rows")}

    def __len__(self) -> int:
        return len(self._row_of)

    def _acquire(self, configuration: Configuration, program: SteeringProgram) -> int:
        """Return the slot of a configuration; `NONE` when it does nothing at the sites of this worker."""
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
        ints = np.empty((len(numbers), 3), np.int32)
        floats = np.empty((len(numbers), 3), np.float32)
        done = 0
        for site, each in ops:
            heads[site] = numbers[done]
            for place, op in enumerate(each):
                following = numbers[done + 1] if place + 1 < len(each) else NONE
                ints[done] = op.kind, self._row_of[program.digests[op.row]], following
                floats[done] = op.amount, op.low, op.high
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
        """Write lines of a table; on a GPU without waiting for it."""
        if not target.is_cuda:
            target.numpy()[lines] = values
            return
        source, where = torch.from_numpy(np.ascontiguousarray(values)), torch.tensor(lines)
        # From memory that is not page-locked, a copy waits for the device.
        source = source.pin_memory().to(target.device, non_blocking=True)
        target.index_copy_(0, where.pin_memory().to(target.device, non_blocking=True), source)


class _Free:
    """Numbers that are free."""

    def __init__(self, count: int) -> None:
        # Those above have been given back or taken.
        self._fresh = range(count)
        self._given: list[int] = []

    def take(self, count: int) -> list[int] | None:
        """Take some; None, and none is taken, when there are too few."""
        again = min(count, len(self._given))
        fresh = count - again
        if fresh > len(self._fresh):
            return None
        taken = [self._given.pop() for _ in range(again)]
        taken += self._fresh[:fresh]
        self._fresh = self._fresh[fresh:]
        return taken

    def give(self, numbers: Sequence[int]) -> None:
        """Give some back."""
        self._given.extend(numbers)
