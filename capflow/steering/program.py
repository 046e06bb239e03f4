"""Programs: the steering of one request, compiled to operations on rows.

For a position, at each steered site, a program lists the operations on the stream `x` there, in order, in float32:

| operation | effect |
|---|---|
| `SCORE_DOT` | `margins[gate] ← x · row + amount` |
| `SCORE_COSINE` | `margins[gate] ← x · row / (‖x‖ ‖row‖) + amount` |
| `SCORE_CAST` | `margins[gate] ← cos(x, tanh(proj x)) + amount`, `proj x = (x · row) / (row · row) · row` |
| `PATCH` | `x ← x + amount · (row - x)` |
| `RELATIVE` | `x ← x + amount · ‖x‖ · row` |
| `ADD` | `x ← x + amount · row` |
| `CLAMP` | `x ← x + amount · (min(max(x · row, low), high) - x · row) · row` |

Scores come first, so they read the stream before anything steers it there. A gate's margin is its score minus its
threshold. The operation of a gate multiplies its amount by the gate's value: with the margin `m` of the position, that
is 1 or 0 (`m >= 0`) for a hard gate and `sigmoid(sharpness · m)` for another. For a latched gate, `m` is the largest
margin of the position and all scored positions before it.

Two requests that ask for the same steering in different forms have equal programs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site, refusal_of_fixed
from capflow.errors import UsageError, explain
from capflow.steering.clamp import Clamp
from capflow.steering.patch import Patch
from capflow.steering.plain import NUMBER_MAX, check_width
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow.text.brief import brief

ADD, CLAMP, PATCH, RELATIVE = 0, 1, 2, 3
SCORE_DOT, SCORE_COSINE, SCORE_CAST = 4, 5, 6
SCORES = frozenset((SCORE_DOT, SCORE_COSINE, SCORE_CAST))
UNGATED = -1
DIGEST_BYTES = 16

Row = npt.NDArray[np.float32]


class SiteError(UsageError):
    """The vectors or the clamps at one site are refused.

    kind: `vectors` or `clamps`, the end of the field's name.
    got, expected, do: as in `explain`.
    where: the field; by default that of the base tier.
    """

    def __init__(self, site: Site, kind: str, got: str, expected: str, do: str, where: str = "") -> None:
        where = where or f"steering_{kind}.{site.hook}.{site.layer}"
        super().__init__(explain(where, got=got, expected=expected, do=do))
        self.site, self.kind, self._parts = site, kind, (got, expected, do)

    def named(self, where: str) -> SiteError:
        """Return the same error for another field."""
        return SiteError(self.site, self.kind, *self._parts, where)

    @classmethod
    def too_large(cls, site: Site, kind: str, got: str) -> SiteError:
        """Return the error for numbers beyond float32."""
        do = "make the vectors, or the scales that multiply them, smaller"
        return cls(site, kind, got, f"at most {NUMBER_MAX:.3g}", do)


class Op(NamedTuple):
    """One operation, with row `row` of its program's rows.

    amount: of a score, the probe's bias minus the gate's threshold.
    gate: the gate of the program that multiplies the amount; of a score, the gate that it scores.
    owner: the number of its owner in the program's `owners`.
    """

    kind: int
    row: int
    amount: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    gate: int = UNGATED
    owner: int = 0


# The number of fields of an `Op` before its gate.
_UNGATED_FIELDS = 5


class ProgramGate(NamedTuple):
    """A gate of a program; its scores are operations.

    name: `NAME` of a request's gate; `OWNER/NAME` of another owner's.
    sharpness: inf for a hard gate.
    latched: whether the gate keeps its largest margin for the rest of the request.
    threshold: a score is a margin plus this.
    layer, hook: the site of the probe.
    score: the kind of score: `dot`, `cosine` or `cast`.
    positions: the scored positions: `all`, `prompt`, `generated` or `last_prompt`.
    label: as in the request.
    """

    name: str
    sharpness: float = math.inf
    latched: bool = False
    threshold: float = 0.0
    layer: int = 0
    hook: str = ""
    score: str = "dot"
    positions: str = "all"
    label: str = ""


class SiteOps(NamedTuple):
    """The operations at one site, in order."""

    layer: int
    hook: str
    ops: tuple[Op, ...]

    def __repr__(self) -> str:
        return brief(self)


class SteeringProgram(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The operations of one request.

    rows: `[n, hidden_size]` float32 little-endian; all rows differ.
    digests: the digest of each row, `DIGEST_BYTES` long.
    prefill, decode: the operations at each prompt position and at each generated one.
    patched: the patches and scores of single positions, which come before these; negative positions count from the end
        of the prompt.
    gates: the gates, at most `limits.GATES_MAX`.
    owners: the names of the owners of operations: `request`, `global` or `module NAME`. They are not part of a key.
    """

    hidden_size: int
    rows: bytes
    digests: tuple[bytes, ...]
    prefill: tuple[SiteOps, ...] = ()
    decode: tuple[SiteOps, ...] = ()
    patched: tuple[tuple[int, tuple[SiteOps, ...]], ...] = ()
    gates: tuple[ProgramGate, ...] = ()
    owners: tuple[str, ...] = ()

    __repr__ = brief

    def array(self) -> Row:
        """Return the rows, `[n, hidden_size]` float32."""
        return np.frombuffer(self.rows, np.float32).reshape(-1, self.hidden_size)

    def key(self, ops: Sequence[SiteOps]) -> str:
        """Return an id of these operations; it is equal for two programs that do the same."""
        return _id(self._by_content(ops))

    def patched_key(self, prompt_length: int) -> str:
        """Return an id of the operations at single positions of a request with this prompt length."""
        return _id([(position, self._by_content(ops)) for position, ops in self.patches(prompt_length).items()])

    def _by_content(self, ops: Sequence[SiteOps]) -> list[Any]:
        """Return operations with the digests of their rows in the place of row numbers."""
        return [(layer, hook, [self._op_by_content(op) for op in each]) for layer, hook, each in ops]

    def _op_by_content(self, op: Op) -> tuple[Any, ...]:
        return (op.kind, self.digests[op.row], *op[2:_UNGATED_FIELDS], *self._gate_content(op))

    def _gate_content(self, op: Op) -> tuple[Any, ...]:
        """Return an operation's gate with its parameters; nothing without a gate, so that its key has no gate."""
        if op.gate == UNGATED:
            return ()
        gate = self.gates[op.gate]
        return (op.gate, gate.sharpness, gate.latched)

    def patches(self, prompt_length: int) -> dict[int, tuple[SiteOps, ...]]:
        """Return all operations at patched positions: the scores, the patches, then those of the position's phase.

        prompt_length: of the request.
        """
        merged: dict[int, dict[Site, tuple[Op, ...]]] = {}
        for written, ops in self.patched:
            position = written if written >= 0 else prompt_length + written
            if position < 0:
                continue
            here = merged.setdefault(position, {})
            for layer, hook, each in ops:
                here[Site(layer, hook)] = (*here.get(Site(layer, hook), ()), *each)
        return {
            position: _chained(here, self.prefill if position < prompt_length else self.decode)
            for position, here in sorted(merged.items())
        }

    def first_patched(self, prompt_length: int) -> int | None:
        """Return the first patched position; None if there is none."""
        return next(iter(self.patches(prompt_length)), None)

    def first_steered(self, prompt_length: int, split: int) -> int:
        """Return the first position that a request with this prompt length steers.

        split: the first position that is steered like a generated one.
        """
        patched = self.first_patched(prompt_length)
        firsts = ([0] if self.prefill else [split]) + ([] if patched is None else [patched])
        return min(firsts)

    def check(self, info: ModelInfo) -> None:
        """Raise UsageError unless the program fits this model and its sites are tapped."""
        check_width(self.hidden_size, info.hidden_size, "steering")
        if len(self.rows) != 4 * self.hidden_size * len(self.digests):
            raise UsageError(explain("steering", got=f"{len(self.rows)} bytes", expected=f"{len(self.digests)} rows"))
        sites = [site for ops in self._phases for site in ops]
        if not all(0 <= op.row < len(self.digests) for site in sites for op in site.ops):
            expected = f"rows of 0..{len(self.digests) - 1}" if self.digests else "no operations, as there are no rows"
            do = "make the program with capflow.steering.program.program_of"
            raise UsageError(explain("steering", got="an operation on no row", expected=expected, do=do))
        self._check_gates(sites)
        longest = max((len(site.ops) for site in sites), default=0)
        if longest > limits.SITE_OPS_MAX:
            expected = f"at most {limits.SITE_OPS_MAX} at one site"
            raise UsageError(explain("steering", got=f"{longest} operations", expected=expected))
        tapped = frozenset(info.sites)
        for site in sorted(self.sites):
            site.check_tapped(tapped, "steering")
        for site in sorted(self.sites & set(info.fixed)):
            raise UsageError(refusal_of_fixed("steering", site))

    def _check_gates(self, sites: Sequence[SiteOps]) -> None:
        """Raise UsageError unless the gates are valid and every operation names one of them."""
        count = len(self.gates)
        if count > limits.GATES_MAX:
            expected = f"at most {limits.GATES_MAX} of one request, with those of modules and of the global state"
            raise UsageError(explain("steering_gates", got=f"{count} gates", expected=expected, do="use fewer gates"))
        for gate in self.gates:
            field = f"steering_gates.{gate.name}"
            if not gate.sharpness > 0:
                raise UsageError(explain(f"{field}.sharpness", got=gate.sharpness, expected="a number above 0"))
            if not math.isfinite(gate.threshold):
                raise UsageError(explain(f"{field}.threshold", got=gate.threshold, expected="a finite number"))
        for site in sites:
            for op in site.ops:
                lowest = 0 if op.kind in SCORES else UNGATED
                if not lowest <= op.gate < count:
                    expected = f"one of the {count} gates of the program"
                    raise UsageError(explain("steering", got=f"an operation with gate {op.gate}", expected=expected))

    @property
    def sites(self) -> frozenset[Site]:
        """Every site with an operation."""
        return frozenset(Site(layer, hook) for ops in self._phases for layer, hook, _ in ops)

    @property
    def id(self) -> str:
        """An id of the whole program; equal for equal programs, whoever owns their operations."""

        def content(sites: Sequence[SiteOps]) -> list[Any]:
            return [
                (layer, hook, [(*op[:_UNGATED_FIELDS], *self._gate_content(op)) for op in ops])
                for layer, hook, ops in sites
            ]

        patched = [(position, content(ops)) for position, ops in self.patched]
        # The digests stand for the rows.
        return _id((self.hidden_size, b"", self.digests, content(self.prefill), content(self.decode), patched))

    @property
    def _phases(self) -> tuple[tuple[SiteOps, ...], ...]:
        return (self.prefill, self.decode, *(ops for _, ops in self.patched))


def _id(content: Any) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=DIGEST_BYTES).hexdigest()


def _chained(first: Mapping[Site, tuple[Op, ...]], then: Sequence[SiteOps]) -> tuple[SiteOps, ...]:
    second = {Site(layer, hook): ops for layer, hook, ops in then}
    sites = sorted({*first, *second})
    return tuple(
        SiteOps(*site, tuple(sorted((*first.get(site, ()), *second.get(site, ())), key=_comes_after_scores)))
        for site in sites
    )


def _comes_after_scores(op: Op) -> bool:
    return op.kind not in SCORES


def digest(row: bytes | memoryview) -> bytes:
    """Return the digest that stands for a row's content in comparisons."""
    return hashlib.sha256(row).digest()[:DIGEST_BYTES]


class _Rows:
    """Rows without repetitions.

    program: its rows come first.
    """

    def __init__(self, program: SteeringProgram | None = None) -> None:
        self._numbers = {} if program is None else {name: number for number, name in enumerate(program.digests)}
        self._rows = [] if program is None else list(program.array())

    def number(self, row: Row) -> int:
        """Return the number of a contiguous row; it is added unless an equal row is there."""
        number = self._numbers.setdefault(digest(row.data), len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        return number

    def content(self) -> bytes:
        return b"".join(row.data for row in self._rows)

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(self._numbers)


def program_of(hidden_size: int, parts: Sequence[Steering]) -> SteeringProgram | None:
    """Return the program of all steering that applies to a request.

    parts: the global state, its modules and the request's own steering.
    """
    return compile_program(
        hidden_size,
        [tier for part in parts for tier in (part.base, part.prefill)],
        [tier for part in parts for tier in (part.base, part.decode)],
        [patch for part in parts for patch in part.patches],
    )


def compile_program(
    hidden_size: int, prefill: Sequence[Tier], decode: Sequence[Tier], patches: Iterable[Patch] = ()
) -> SteeringProgram | None:
    """Return the program of a request with these tiers, in order, in its two phases; None if it does nothing.

    The vectors at a site are added up in float64 and rounded to float32 once. A sum of zero is left out.

    Raises UsageError for a part of another width and for a position that is patched twice; SiteError for numbers beyond
    float32 and for more than `limits.CLAMPS_AT_SITE_MAX` clamps at one site and position.
    """
    rows = _Rows()
    before = _site_ops(hidden_size, prefill, rows)
    after = before if decode == prefill else _site_ops(hidden_size, decode, rows)
    patched: dict[int, dict[Site, tuple[Op, ...]]] = {}
    for patch in patches:
        _check_width(patch, "steering_patches", hidden_size)
        if patch.amount == 0.0:
            continue
        given = np.frombuffer(patch.data, np.float32).reshape(len(patch.positions), hidden_size)
        for position, row in zip(patch.positions, given, strict=True):
            here = patched.setdefault(position, {})
            if patch.site in here:
                at, expected = f"steering_patches.{patch.hook}.{patch.layer}.positions", "each position of a site once"
                raise UsageError(explain(at, got=f"{position} twice", expected=expected))
            here[patch.site] = (Op(PATCH, rows.number(row), patch.amount),)
    if not before and not after and not patched:
        return None
    return SteeringProgram(
        hidden_size,
        rows.content(),
        rows.digests,
        before,
        after,
        tuple(
            (position, tuple(SiteOps(*site, ops) for site, ops in sorted(here.items())))
            for position, here in sorted(patched.items())
        ),
    )


def _site_ops(hidden_size: int, tiers: Sequence[Tier], rows: _Rows) -> tuple[SiteOps, ...]:
    ops: dict[Site, list[Op]] = {}
    # Relative vectors come first, so that they read the norm before anything is added.
    for kind in (RELATIVE, ADD):
        vectors = (v for tier in tiers for v in tier.vectors if v.relative == (kind == RELATIVE))
        for site, total in _sums(hidden_size, vectors).items():
            ops.setdefault(site, []).append(Op(kind, rows.number(total)))
    for tier in tiers:
        for clamp in tier.clamps:
            _check_width(clamp, "steering_clamps", hidden_size)
            if not abs(clamp.strength) <= NUMBER_MAX:
                raise SiteError.too_large(clamp.site, "clamps", f"a strength of {clamp.strength:g}")
            if clamp.strength != 0.0:
                row = rows.number(np.frombuffer(clamp.data, np.float32))
                ops.setdefault(clamp.site, []).append(Op(CLAMP, row, clamp.strength, clamp.low, clamp.high))
    for site, each in ops.items():
        count = sum(op.kind == CLAMP for op in each)
        if count > limits.CLAMPS_AT_SITE_MAX:
            expected = (
                f"at most {limits.CLAMPS_AT_SITE_MAX} at one position, with those of modules and of the global state"
            )
            raise SiteError(site, "clamps", f"{count:,} clamps", expected, "clamp fewer directions there")
    return tuple(SiteOps(*site, tuple(each)) for site, each in sorted(ops.items()))


def _check_width(part: SteeringVector | Clamp | Patch, field: str, hidden_size: int) -> None:
    check_width(part.width, hidden_size, f"{field}.{part.hook}.{part.layer}")


def _sums(hidden_size: int, vectors: Iterable[SteeringVector]) -> dict[Site, Row]:
    """Return the sum of the vectors at each site where it is not zero."""
    at: dict[Site, list[SteeringVector]] = {}
    for vector in vectors:
        _check_width(vector, "steering_vectors", hidden_size)
        if vector.scale != 0.0:
            at.setdefault(vector.site, []).append(vector)
    sums = np.empty((len(at), hidden_size), np.float32)
    with np.errstate(over="ignore"):
        for total, some in zip(sums, at.values(), strict=True):
            total[:] = some[0].array() if len(some) == 1 else np.sum([v.array(np.float64) for v in some], axis=0)
    # NaN where a sum holds one.
    largest = np.maximum(sums.max(axis=1), -sums.min(axis=1))
    for site, size in zip(at, largest, strict=True):
        if not size <= NUMBER_MAX:
            raise SiteError.too_large(site, "vectors", "a sum beyond float32")
    # Adding 0 turns negative zeros into positive ones.
    sums += np.float32(0)
    return {site: total for site, total, size in zip(at, sums, largest, strict=True) if size > 0.0}


def with_vectors(
    program: SteeringProgram | None, hidden_size: int, vectors: Sequence[SteeringVector]
) -> SteeringProgram | None:
    """Return a program that also adds vectors at generated positions, after its own vectors and before its clamps.

    Relative vectors are added before the others, relative to the stream as it reaches the site.
    """
    sums = _sums(hidden_size, [vector for vector in vectors if not vector.relative])
    relative = _sums(hidden_size, [vector for vector in vectors if vector.relative])
    if not sums and not relative:
        return program
    old = program or SteeringProgram(hidden_size, b"", ())
    given, rows = old.array(), _Rows(old)
    more = {site: Op(ADD, rows.number(total)) for site, total in sums.items()}
    decode = {Site(layer, hook): ops for layer, hook, ops in old.decode}
    for site, total in relative.items():
        ops = decode.get(site, ())
        summed = [op for op in ops if op.kind == RELATIVE and op.gate == UNGATED]
        number = rows.number(np.sum([total, *(given[op.row] for op in summed)], axis=0, dtype=np.float32))
        rest = [op for op in ops if op not in summed]
        begins = sum(op.kind in SCORES for op in rest)
        decode[site] = (*rest[:begins], Op(RELATIVE, number), *rest[begins:])
    for site, add in more.items():
        ops = decode.get(site, ())
        begins = next((n for n, op in enumerate(ops) if op.kind == CLAMP), len(ops))
        decode[site] = (*ops[:begins], add, *ops[begins:])
    return SteeringProgram(
        hidden_size,
        rows.content(),
        rows.digests,
        old.prefill,
        tuple(SiteOps(*site, ops) for site, ops in sorted(decode.items())),
        old.patched,
        old.gates,
        old.owners,
    )
