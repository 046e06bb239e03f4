"""The parts of the steering bank that requests hold. The scheduler's admission and the worker's bank count them alike.

A *configuration* is the operations at one position of a request, at all sites. A request has one configuration for its
prompt, one for generated positions, and one for each patched position. The bank stores each different configuration
once, in a *slot*, its operations in *ops*, and each different row once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from capflow.errors import UsageError, explain
from capflow.limits import BANK_BYTES_MAX, POSITION_MAX
from capflow.steering.program import SiteOps, SteeringProgram
from capflow.steering.request import NOTHING, Steering


class Size(NamedTuple):
    """The capacity of a bank.

    rows: the number of rows of `width` float32.
    ops: the number of operations.
    slots: the number of configurations.
    """

    rows: int
    ops: int
    slots: int

    @classmethod
    def of(cls, bank_bytes: int, width: int, requests_max: int) -> Size:
        """Return the size of a bank whose rows take `bank_bytes` bytes; operations and slots are small beside them."""
        rows = max(1, min(bank_bytes // (4 * width), _ROWS_MAX))
        return cls(rows, max(_OPS_PER_ROW * rows, _OPS_MIN), max(_SLOTS_MIN, _SLOTS_PER_REQUEST * requests_max))

    @property
    def reserve(self) -> Size:
        """The additional part for the vectors of controllers, which the scheduler does not count."""
        return Size(max(self.rows // _RESERVED_PART, _RESERVED_ROWS_MIN), self.ops, self.slots)

    def plus(self, other: Size) -> Size:
        """Return the size of a bank with room for both."""
        return Size(self.rows + other.rows, self.ops + other.ops, self.slots + other.slots)

    @classmethod
    def without_bound(cls) -> Size:
        """Return the size of a bank without limits."""
        return cls(sys.maxsize, sys.maxsize, sys.maxsize)

    def holds(self, needs: Sequence[Need]) -> bool:
        """Return whether an empty bank of this size has room for `needs`."""
        return Holdings(self).lacking(needs) is None

    def check(
        self, program: SteeringProgram | None, prompt_length: int = POSITION_MAX, *, asked: Steering = NOTHING
    ) -> tuple[Need, ...]:
        """Return the needs of a program; raise UsageError if it does not fit in an empty bank.

        asked: the steering that the program was made of; the error names one of its fields.
        """
        if program is None:
            return ()
        needs = needs_of(program, prompt_length)
        part = Holdings(self).lacking(needs)
        if part is not None:
            got, expected, do = self._refusal(part, needs, program.width)
            raise UsageError(explain(asked.largest_field, got=got, expected=expected, do=do))
        return needs

    def _refusal(self, part: str, needs: Sequence[Need], width: int) -> tuple[str, str, str]:
        """Return the error's `got`, `expected` and `do` for the part of the bank that is too small."""
        expected = f"at most {getattr(self, part):,}, the size of this steering bank"
        if part == "slots":
            got, do = f"{len(needs):,} positions that are steered differently", "patch fewer positions"
            more = f"start the engine with --max-num-seqs {-(-len(needs) // _SLOTS_PER_REQUEST)} or more"
            return got, expected, f"{do}, or {more}"
        if part == "ops":
            count, unit, do = sum(need.ops for need in needs), "operations", "clamp less, or patch fewer positions"
            rows = -(-count // _OPS_PER_ROW)
        else:
            count, unit, do = (
                len({row for need in needs for row in need.rows}),
                "different vectors",
                "use fewer vectors",
            )
            rows = count
        bank_bytes = 4 * width * rows
        if rows <= _ROWS_MAX and bank_bytes <= BANK_BYTES_MAX:
            do = f"{do}, or start the engine with --steering-bank-bytes {bank_bytes} or more"
        else:
            expected += "; no larger bank would hold it"
        return f"{count:,} {unit}", expected, do


HOLDS_MORE = {
    "rows": "more --steering-bank-bytes",
    "ops": "more --steering-bank-bytes",
    "slots": "a larger --max-num-seqs",
}
"""The engine's option that enlarges each part of a bank."""

_ROWS_MAX = 65_536
_OPS_PER_ROW, _OPS_MIN = 4, 16_384
_SLOTS_PER_REQUEST, _SLOTS_MIN = 4, 1_024
_RESERVED_PART, _RESERVED_ROWS_MIN = 8, 64


class Configuration(NamedTuple):
    """The operations at some positions.

    key: equal for equal configurations.
    """

    key: str
    ops: tuple[SiteOps, ...]

    @property
    def num_ops(self) -> int:
        """The number of operations."""
        return sum(len(each) for _, _, each in self.ops)


class Configured(NamedTuple):
    """The configurations of a request; None where nothing is steered.

    prefill: for prompt positions.
    decode: for generated positions.
    patched: for single positions.
    """

    prefill: Configuration | None
    decode: Configuration | None
    patched: dict[int, Configuration]

    @classmethod
    def of(cls, program: SteeringProgram, prompt_length: int) -> Configured:
        """Return the configurations of a program for a prompt of this length."""
        keys = program.phase_keys
        prefill = Configuration(keys[0], program.prefill) if program.prefill else None
        decode = prefill if program.alike else Configuration(keys[1], program.decode) if program.decode else None
        patched = {p: Configuration(program.key(ops), ops) for p, ops in program.patches(prompt_length).items()}
        return cls(prefill, decode, patched)

    def each(self) -> Iterator[Configuration]:
        """Yield each different configuration once."""
        seen = set()
        for one in (self.prefill, self.decode, *self.patched.values()):
            if one is not None and one.key not in seen:
                seen.add(one.key)
                yield one


class Need(NamedTuple):
    """The part of an empty bank that one configuration needs.

    key: the configuration's key.
    ops: the number of operations.
    rows: the digests of its rows.
    """

    key: str
    ops: int
    rows: frozenset[bytes]

    def beside(self, held: frozenset[bytes]) -> Need:
        """Return the need without rows that its holder has anyway."""
        rows = self.rows - held
        return Need(f"{self.key} {b''.join(sorted(rows)).hex()}", self.ops, rows)


def needs_of(program: SteeringProgram, prompt_length: int) -> tuple[Need, ...]:
    """Return the needs of a program for a prompt of this length."""
    return tuple(
        Need(one.key, one.num_ops, frozenset(program.digests[op.row] for _, _, ops in one.ops for op in ops))
        for one in Configured.of(program, prompt_length).each()
    )


class Holdings:
    """The parts of a bank of `size` that holders have, by the holder's name."""

    def __init__(self, size: Size) -> None:
        self.size = size
        # The needs of each holder.
        self._held: dict[str, tuple[Need, ...]] = {}
        # The number of holders of each configuration.
        self._slots: Counter[str] = Counter()
        # The number of configurations with each row.
        self._rows: Counter[bytes] = Counter()
        self._ops = 0

    def lacking(self, needs: Sequence[Need]) -> str | None:
        """Return the part of the bank (`rows`, `ops` or `slots`) without room for `needs`; None if they fit."""
        new = [need for need in needs if not self._slots[need.key]]
        rows = {row for need in new for row in need.rows if not self._rows[row]}
        if len(self._rows) + len(rows) > self.size.rows:
            return "rows"
        if self._ops + sum(need.ops for need in new) > self.size.ops:
            return "ops"
        return "slots" if len(self._slots) + len(new) > self.size.slots else None

    def hold(self, name: str, needs: Sequence[Need]) -> bool:
        """Take `needs` for a holder that has nothing yet; if they do not fit, take nothing and return False."""
        if self.lacking(needs) is not None:
            return False
        assert name not in self._held
        for key, ops, rows in needs:
            if not self._slots[key]:
                self._ops += ops
                self._rows.update(rows)
            self._slots[key] += 1
        self._held[name] = tuple(needs)
        return True

    def release(self, name: str) -> None:
        """Give back everything that a holder has."""
        for key, ops, rows in self._held.pop(name, ()):
            self._slots[key] -= 1
            if not self._slots[key]:
                del self._slots[key]
                self._ops -= ops
                self._rows.subtract(rows)
                for row in rows:
                    if not self._rows[row]:
                        del self._rows[row]

    @property
    def used(self) -> Size:
        """The sum of all held parts."""
        return Size(len(self._rows), self._ops, len(self._slots))
