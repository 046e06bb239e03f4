"""What requests hold of the steering bank, counted the same way where they are admitted and where the bank is.

A *configuration* is what is done at one position of a request, at all sites; a request has one for its prompt, one
behind it, and one for each patched position. The bank keeps each different configuration once, in a *slot*, its
operations in *ops*, and each different row once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from capflow.errors import UsageError, explain
from capflow.limits import POSITION_MAX
from capflow.program import SiteOps, SteeringProgram


class Size(NamedTuple):
    """How much a bank holds: rows of `hidden_size` float32, operations, and configurations."""

    rows: int
    ops: int
    slots: int

    @classmethod
    def of(cls, bank_bytes: int, hidden_size: int, requests_max: int) -> Size:
        """Return what `bank_bytes` bytes of rows make; operations and slots are small beside them."""
        rows = max(1, min(bank_bytes // (4 * hidden_size), _ROWS_MAX))
        return cls(rows, max(4 * rows, _OPS_MIN), max(_SLOTS_MIN, 4 * requests_max))

    def check(self, program: SteeringProgram | None, prompt_length: int = POSITION_MAX) -> tuple[Need, ...]:
        """Return what a program takes; raise UsageError for one that has no room in an empty bank."""
        if program is None:
            return ()
        needs = needs_of(program, prompt_length)
        if not Holdings(self).hold("", needs):
            rows = len({row for need in needs for row in need.rows})
            ops, slots = sum(need.ops for need in needs), len(needs)
            got = f"{rows} vectors, {ops} operations and {slots} configurations: more than the steering bank can hold"
            do = "ask for less, or start the engine with more --steering-bank-bytes"
            expected = f"at most {self.rows}, {self.ops} and {self.slots}"
            raise UsageError(explain("steering", got=got, expected=expected, do=do))
        return needs


_ROWS_MAX = 65_536
_OPS_MIN = 16_384
_SLOTS_MIN = 1_024


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

    def hold(self, name: str, needs: Sequence[Need]) -> bool:
        """Take what is needed under a name that holds nothing; False, and nothing is taken, where there is no room."""
        new = [need for need in needs if not self._slots[need.key]]
        rows = {row for need in new for row in need.rows if not self._rows[row]}
        fits = (
            len(self._rows) + len(rows) <= self.size.rows
            and self._ops + sum(need.ops for need in new) <= self.size.ops
            and len(self._slots) + len(new) <= self.size.slots
        )
        if not fits:
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
