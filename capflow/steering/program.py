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
| `ENCODE` | `activation ← a` with `a = x · row + low` where `a > high`, else 0 |
| `SET` | `x ← x + amount · (low - activation) · row` |
| `CLAMP` | `x ← x + amount · (min(max(x · row, low), high) - x · row) · row` |

Relative operations stand side by side, and all of them take the norm of `x` before the first of them.

At a site, all `ENCODE` stand before all `SET`, and as many of both: the first `SET` takes the activation of the first
`ENCODE`, the second that of the second, and so on. So all features of a sparse autoencoder that are set are encoded
from the same `x`. Both of a pair have the same gate and owner.

Scores come first, so they read the stream before anything steers it there. A gate's margin is its score minus its
threshold. The operation of a gate multiplies its amount by the gate's value: with the margin `m` of the position, that
is 1 or 0 (`m >= 0`) for a hard gate and `sigmoid(sharpness · m)` for another. For a latched gate, `m` is the largest
margin of the position and all scored positions before it.

Two requests that ask for the same steering in different forms have equal programs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site, refusal_of_divided, refusal_of_fixed
from capflow.errors import UsageError, explain
from capflow.steering.plain import check_width, crosses
from capflow.text.brief import brief

ADD, CLAMP, PATCH, RELATIVE, ENCODE, SET = 0, 1, 2, 3, 4, 5
SCORE_DOT, SCORE_COSINE, SCORE_CAST = 6, 7, 8
SCORES = frozenset((SCORE_DOT, SCORE_COSINE, SCORE_CAST))
_NAMES = ("ADD", "CLAMP", "PATCH", "RELATIVE", "ENCODE", "SET", "SCORE_DOT", "SCORE_COSINE", "SCORE_CAST")
UNGATED = -1
DIGEST_BYTES = 16

Row = npt.NDArray[np.float32]


class Op(NamedTuple):
    """One operation, with row `row` of its program's rows.

    amount: of a score, the probe's bias minus the gate's threshold; of an `ENCODE`, 1.
    low, high: the bounds of a `CLAMP`; the bias and the threshold of an `ENCODE`; `low`, the value of a `SET`.
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
    abort: `stop` or `abort` if the gate ends the request when it opens.
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
    abort: str = ""


class SiteOps(NamedTuple):
    """The operations at one site, in order."""

    layer: int
    hook: str
    ops: tuple[Op, ...]

    def __repr__(self) -> str:
        return brief(self)


class SteeringProgram(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, weakref=True, dict=True
):
    """The operations of one request.

    Many requests may have one program, so its keys are computed once.

    width: how many numbers a row has: at least those of every row that it steers. What a site's row lacks is 0.
    rows: `[n, width]` float32 little-endian; all rows differ.
    digests: the digest of each row, `DIGEST_BYTES` long.
    prefill, decode: the operations at each prompt position and at each generated one.
    patched: the patches and scores of single positions, which come before these; negative positions count from the end
        of the prompt.
    gates: the gates, at most `limits.GATES_MAX`.
    owners: the names of the owners of operations: `request`, `global` or `module NAME`. They are not part of a key.
    """

    width: int
    rows: bytes
    digests: tuple[bytes, ...]
    prefill: tuple[SiteOps, ...] = ()
    decode: tuple[SiteOps, ...] = ()
    patched: tuple[tuple[int, tuple[SiteOps, ...]], ...] = ()
    gates: tuple[ProgramGate, ...] = ()
    owners: tuple[str, ...] = ()

    __repr__ = brief

    def __reduce__(self) -> tuple[Any, ...]:
        # Two pieces of bytes, for pickle is slow with structs: 2 ms for 1,600 patches instead of 0.06.
        return SteeringProgram.unpack, (self.head, self.rows)

    @functools.cached_property
    def head(self) -> bytes:
        """All but the rows, as msgpack. The digests stand for the rows. Phases that are alike are there once."""
        decode = () if self.alike else self.decode
        return msgspec.msgpack.encode((msgspec.structs.replace(self, rows=b"", decode=decode), self.alike))

    @staticmethod
    def unpack(head: bytes, rows: bytes) -> SteeringProgram:
        """Return the program of a head and its rows: the one that this process has, if an equal one is in use here.

        Raises msgspec.ValidationError or msgspec.DecodeError for a head that is not one.
        """
        program = _in_use.get(head)
        if program is None or program.rows != rows:
            program, alike = _decoder.decode(head)
            program = msgspec.structs.replace(program, rows=rows, decode=program.prefill if alike else program.decode)
            program.__dict__["head"] = head
            _in_use[head] = program
        return program

    def array(self) -> Row:
        """Return the rows, `[n, width]` float32."""
        return np.frombuffer(self.rows, np.float32).reshape(-1, self.width)

    @functools.cached_property
    def content_key(self) -> int:
        """A number that is equal for programs that were made in the same way, on every rank; quicker than `key`."""
        parts = self.digests, self.prefill, self.decode, self.patched, self.gates
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(parts))

    def key(self, ops: Sequence[SiteOps]) -> str:
        """Return an id of these operations; it is equal for two programs that do the same."""
        return _id(self._by_content(ops))

    @functools.cached_property
    def phase_keys(self) -> tuple[str, str]:
        """The ids of the operations at each prompt position and at each generated one."""
        prefill = self.key(self.prefill)
        return prefill, prefill if self.alike else self.key(self.decode)

    @functools.cached_property
    def alike(self) -> bool:
        """Whether prompt positions and generated ones have the same operations."""
        return self.prefill == self.decode

    def patched_key(self, prompt_length: int) -> str:
        """Return an id of the operations at single positions of a request with this prompt length."""
        return _id([(position, self._by_content(ops)) for position, ops in self.patches(prompt_length).items()])

    def effect_key(self, ops: Sequence[SiteOps], phase: str) -> str:
        """Return an id of the changes that operations make to the stream; empty without any.

        Scores alone change nothing. Operations whose gate can never act in the phase are left out.

        phase: `prompt`, `last_prompt` or `generated`.
        """
        effects = [
            (layer, hook, content)
            for layer, hook, each in ops
            if (content := [self._effect(op) for op in each if op.kind not in SCORES and self._acts(op, phase)])
        ]
        return _id(effects) if effects else ""

    @functools.cached_property
    def phase_effects(self) -> tuple[str, str]:
        """The `effect_key` of the operations at each prompt position and at each generated one."""
        prompt = self.effect_key(self.prefill, "prompt")
        return prompt, prompt if self.alike and not self.gates else self.effect_key(self.decode, "generated")

    def patched_effects(self, prompt_length: int) -> dict[int, str]:
        """Return, for each patched position where more than its phase's operations act, the id of what acts there.

        prompt_length: of the request.
        """
        usual = dict(zip(("prompt", "generated"), self.phase_effects, strict=True))
        effects = {}
        for position, ops in self.patches(prompt_length).items():
            phase = "prompt" if position < prompt_length else "generated"
            effect = self.effect_key(ops, "last_prompt" if position == prompt_length - 1 else phase)
            if effect != usual[phase]:
                effects[position] = effect
        return effects

    def _acts(self, op: Op, phase: str) -> bool:
        """Return whether an operation's gate can be open in a phase."""
        if op.gate == UNGATED:
            return True
        gate = self.gates[op.gate]
        if phase == "generated":
            return gate.latched or gate.positions in ("all", "generated")
        return gate.positions in ("all", "prompt") or gate.positions == phase

    def _effect(self, op: Op) -> tuple[Any, ...]:
        """Return an operation's content, and that of its gate's score instead of the gate's number."""
        content = (op.kind, self.digests[op.row], *op[2:_UNGATED_FIELDS])
        if op.gate == UNGATED:
            return content
        gate = self.gates[op.gate]
        sites = (site for ops in self._phases for site in ops)
        scores = (score for site in sites for score in site.ops if score.kind in SCORES and score.gate == op.gate)
        score = next(((one.kind, self.digests[one.row], one.amount) for one in scores), None)
        return (*content, gate.layer, gate.hook, score, gate.positions, gate.sharpness, gate.latched)

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

    @functools.cached_property
    def longest(self) -> int:
        """The largest number of operations at one site and position, for any length of the prompt."""
        if not self.patched:
            return max((len(site.ops) for ops in self._phases for site in ops), default=0)
        from_start = _most_ops(ops for position, ops in self.patched if position >= 0)
        from_end = _most_ops(ops for position, ops in self.patched if position < 0)
        # A position of the prompt can be patched by its number from either end.
        prompt = _most_ops([self.prefill]) + from_start + from_end
        generated = _most_ops([self.decode]) + from_start
        return max((*prompt.values(), *generated.values()), default=0)

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
        if self.__dict__.get("fits") is info:
            return
        check_width(self.width, info.steered_width, "steering")
        if len(self.rows) != 4 * self.width * len(self.digests):
            raise UsageError(explain("steering", got=f"{len(self.rows)} bytes", expected=f"{len(self.digests)} rows"))
        sites = [site for ops in self._phases for site in ops]
        if not all(0 <= op.row < len(self.digests) for site in sites for op in site.ops):
            expected = f"rows of 0..{len(self.digests) - 1}" if self.digests else "no operations, as there are no rows"
            do = "make the program with capflow.steering.program.program_of"
            raise UsageError(explain("steering", got="an operation on no row", expected=expected, do=do))
        self._check_gates(sites)
        do = "make the program with capflow.steering.program.program_of"
        for position, steered in self.patched:
            if any(op.kind in (ENCODE, SET) for site in steered for op in site.ops):
                raise UsageError(explain("steering", got=f"a feature that is set at position {position} alone", do=do))
        for layer, hook, ops in sites:
            if not _paired(ops):
                raise UsageError(explain("steering", got=f"features that are not in pairs at {hook}:{layer}", do=do))
        if self.longest > limits.SITE_OPS_MAX:
            expected = f"at most {limits.SITE_OPS_MAX} at one site and position"
            raise UsageError(explain("steering", got=f"{self.longest} operations", expected=expected))
        tapped = frozenset(info.sites)
        for site in sorted(self.sites):
            site.check_tapped(tapped, "steering")
        for site in sorted(self.sites & set(info.fixed)):
            raise UsageError(refusal_of_fixed("steering", site))
        self._check_divided(sites, info)
        # The model that it fits.
        self.__dict__["fits"] = info

    def _check_divided(self, sites: Sequence[SiteOps], info: ModelInfo) -> None:
        """Raise UsageError for an operation on numbers of several tensor-parallel ranks."""
        if not info.ranks:
            return
        rows = self.array()
        for layer, hook, ops in sites:
            site = Site(layer, hook)
            if (parts := info.parts_of(site)) == 1:
                continue
            for op in ops:
                alone = op.kind in (ADD, PATCH)
                if not alone and (op.kind != CLAMP or crosses(rows[op.row], info.width_of(site) // parts)):
                    got = f"an operation {_NAMES[op.kind]}"
                    raise UsageError(refusal_of_divided("steering", site, info.ranks, got))

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

    @functools.cached_property
    def steers(self) -> bool:
        """Whether it changes the stream; a program of gates alone does not."""
        return any(op.kind not in SCORES for ops in self._phases for site in ops for op in site.ops)

    @functools.cached_property
    def sites(self) -> frozenset[Site]:
        """Every site with an operation."""
        return frozenset(Site(layer, hook) for ops in self._phases for layer, hook, _ in ops)

    @functools.cached_property
    def id(self) -> str:
        """An id of the whole program; equal for equal programs, whoever owns their operations."""

        def content(sites: Sequence[SiteOps]) -> list[Any]:
            return [
                (layer, hook, [(*op[:_UNGATED_FIELDS], *self._gate_content(op)) for op in ops])
                for layer, hook, ops in sites
            ]

        patched = [(position, content(ops)) for position, ops in self.patched]
        # The digests stand for the rows.
        return _id((self.width, b"", self.digests, content(self.prefill), content(self.decode), patched))

    @property
    def _phases(self) -> tuple[tuple[SiteOps, ...], ...]:
        """The different lists of operations."""
        return (self.prefill, *(() if self.alike else (self.decode,)), *(ops for _, ops in self.patched))


# The programs that this process got from others, by their heads, while something uses them.
_in_use: WeakValueDictionary[bytes, SteeringProgram] = WeakValueDictionary()
_decoder = msgspec.msgpack.Decoder(tuple[SteeringProgram, bool])


def _paired(ops: Sequence[Op]) -> bool:
    """Return whether each `SET` of a site has its `ENCODE`, with the same gate and owner; there is a limit."""
    pairs: list[tuple[int, int]] = []
    taken = 0
    for op in ops:
        if op.kind == ENCODE:
            pairs.append((op.gate, op.owner))
        elif op.kind == SET:
            if pairs[taken : taken + 1] != [(op.gate, op.owner)]:
                return False
            taken += 1
    return taken == len(pairs) <= limits.FEATURES_SET_MAX


def _id(content: Any) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=DIGEST_BYTES).hexdigest()


def _most_ops(positions: Iterable[Sequence[SiteOps]]) -> Counter[Site]:
    """Return the largest number of operations that one of several positions has at each site."""
    most: Counter[Site] = Counter()
    for sites in positions:
        for layer, hook, ops in sites:
            site = Site(layer, hook)
            most[site] = max(most[site], len(ops))
    return most


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
