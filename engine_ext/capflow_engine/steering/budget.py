"""What requests hold of the steering bank, counted the same way where they are admitted and where the bank is.

A *configuration* is what is done at one position of a request, at all sites; a request has one for its prompt, one
behind it, and one for each patched position. The bank keeps each different configuration once, in a *slot*, its
operations in *ops*, and each different row once.
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
    """How much a bank holds: rows of `hidden_size` float32, operations, and configurations."""

    rows: int
    ops: int
    slots: int

    @classmethod
    def of(cls, bank_bytes: int, hidden_size: int, requests_max: int) -> Size:
        """Return what `bank_bytes` bytes of rows make; operations and slots are small beside them."""
        rows = max(1, min(bank_bytes // (4 * hidden_size), _ROWS_MAX))
        return cls(rows, max(_OPS_PER_ROW * rows, _OPS_MIN), max(_SLOTS_MIN, _SLOTS_PER_REQUEST * requests_max))

    @property
    def reserve(self) -> Size:
        """What a bank has besides this, for what controllers add: the scheduler does not count that."""
        return Size(max(self.rows // _RESERVED_PART, _RESERVED_ROWS_MIN), self.ops, self.slots)

    def plus(self, other: Size) -> Size:
        """Return the size of a bank that has room for both."""
        return Size(self.rows + other.rows, self.ops + other.ops, self.slots + other.slots)

    @classmethod
    def without_bound(cls) -> Size:
        """Return the size of a bank that holds whatever comes."""
        return cls(sys.maxsize, sys.maxsize, sys.maxsize)

    def check(
        self, program: SteeringProgram | None, prompt_length: int = POSITION_MAX, *, said: Steering = NOTHING
    ) -> tuple[Need, ...]:
        """Return what a program takes; raise UsageError for one that has no room in an empty bank.

        said: what the program was made of, by which the error names a field.
        """
        if program is None:
            return ()
        needs = needs_of(program, prompt_length)
        part = Holdings(self).lacking(needs)
        if part is not None:
            got, expected, do = self._refusal(part, needs, program.hidden_size)
            raise UsageError(explain(said.largest_field, got=got, expected=expected, do=do))
        return needs

    def _refusal(self, part: str, needs: Sequence[Need], hidden_size: int) -> tuple[str, str, str]:
        """Return what came, what was expected, and what to do where a part of the bank is too small for what is needed."""
        if part == "slots":
            got, do = f"{len(needs):,} positions that are steered differently", "patch fewer positions"
            more = f"start the engine with --max-num-seqs {-(-len(needs) // _SLOTS_PER_REQUEST)} or more"
            return got, f"at most {self.slots:,}, which is what a steering bank holds", f"{do}, or {more}"
        if part == "ops":
            count, what, do = sum(need.ops for need in needs), "operations", "clamp less, or patch fewer positions"
            rows = -(-count // _OPS_PER_ROW)
        else:
            count, what, do = len({row for need in needs for row in need.rows}), "different vectors", "steer by fewer"
            rows = count
        bank_bytes = 4 * hidden_size * rows
        if rows <= _ROWS_MAX and bank_bytes <= BANK_BYTES_MAX:
            do = f"{do}, or start the engine with --steering-bank-bytes {bank_bytes} or more"
            where = "which is what this steering bank holds"
        else:
            where = "which is what this steering bank holds; no larger one would hold it"
        return f"{count:,} {what}", f"at most {getattr(self, part):,}, {where}", do


HOLDS_MORE = {
    "rows": "more --steering-bank-bytes",
    "ops": "more --steering-bank-bytes",
    "slots": "a larger --max-num-seqs",
}
"""What makes each part of a bank larger."""

_ROWS_MAX = 65_536
_OPS_PER_ROW, _OPS_MIN = 4, 16_384
_SLOTS_PER_REQUEST, _SLOTS_MIN = 4, 1_024
_RESERVED_PART, _RESERVED_ROWS_MIN = 8, 64


class Configuration(NamedTuple):
    """What is done at some positions: its name, equal for equal ones, the operations, and how many there are."""

    key: str
    ops: tuple[SiteOps, ...]

    @property
    def num_ops(self) -> int:
        """How many operations there are."""
        return sum(len(each) for _, _, each in self.ops)


class Configured(NamedTuple):
    """The configurations of a request: of its prompt, behind it, and of single positions; None where nothing is done."""

    prefill: Configuration | None
    decode: Configuration | None
    patched: dict[int, Configuration]

    @classmethod
    def of(cls, program: SteeringProgram, prompt_length: int) -> Configured:
        """Return the configurations that a program has with a prompt of this length."""

        def named(ops: tuple[SiteOps, ...]) -> Configuration | None:
            return Configuration(program.key(ops), ops) if ops else None

        prefill = named(program.prefill)
        decode = prefill if program.decode == program.prefill else named(program.decode)
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
    """What one configuration takes of the bank, where nobody else has it: its key, operations, and rows by digest."""

    key: str
    ops: int
    rows: frozenset[bytes]

    def beside(self, known: frozenset[bytes]) -> Need:
        """Return what it takes besides rows that its holder has anyway."""
        rows = self.rows - known
        return Need(f"{self.key} {b''.join(sorted(rows)).hex()}", self.ops, rows)


def needs_of(program: SteeringProgram, prompt_length: int) -> tuple[Need, ...]:
    """Return what a program with a prompt of this length takes."""
    return tuple(
        Need(one.key, one.num_ops, frozenset(program.digests[op.row] for _, _, ops in one.ops for op in ops))
        for one in Configured.of(program, prompt_length).each()
    )


class Holdings:
    """Who holds what, by name; the bank has room for `size`."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self._held: dict[str, tuple[Need, ...]] = {}  # by holder
        self._slots: Counter[str] = Counter()  # how many hold each configuration
        self._rows: Counter[bytes] = Counter()  # in how many configurations each row is
        self._ops = 0

    def lacking(self, needs: Sequence[Need]) -> str | None:
        """Return which part of the bank, `rows`, `ops` or `slots`, has no room for what is needed; None where all have."""
        new = [need for need in needs if not self._slots[need.key]]
        rows = {row for need in new for row in need.rows if not self._rows[row]}
        if len(self._rows) + len(rows) > self.size.rows:
            return "rows"
        if self._ops + sum(need.ops for need in new) > self.size.ops:
            return "ops"
        return "slots" if len(self._slots) + len(new) > self.size.slots else None

    def hold(self, name: str, needs: Sequence[Need]) -> bool:
        """Take what is needed under a name that holds nothing; False, and nothing is taken, where there is no room."""
        if self.lacking(needs) is not None:
            return False
        assert name not in self._held
        for key, ops, some in needs:
            if not self._slots[key]:
                self._ops += ops
                self._rows.update(some)
            self._slots[key] += 1
        self._held[name] = tuple(needs)
        return True

    def release(self, name: str) -> None:
        """Give back everything that was taken under a name."""
        for key, count, some in self._held.pop(name, ()):
            self._slots[key] -= 1
            if not self._slots[key]:
                del self._slots[key]
                self._ops -= count
                self._rows.subtract(some)
                for row in some:
                    if not self._rows[row]:
                        del self._rows[row]

    @property
    def used(self) -> Size:
        """What is held in all."""
        return Size(len(self._rows), self._ops, len(self._slots))
