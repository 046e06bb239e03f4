"""The compiler: the program of all steering that applies to a request, from the parts of several owners.

The operations of each owner stay apart, so that one owner's can be scaled later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from capflow import limits
from capflow.capture.dtypes import VECTOR_DTYPES, widened
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.steering.clamp import Clamp
from capflow.steering.gate import SteeringGate, sharpness_of
from capflow.steering.plain import NUMBER_MAX, check_width, entries_row
from capflow.steering.program import (
    ADD,
    CLAMP,
    ENCODE,
    PATCH,
    RELATIVE,
    SCORE_CAST,
    SCORE_COSINE,
    SCORE_DOT,
    SCORES,
    SET,
    UNGATED,
    Op,
    ProgramGate,
    Row,
    SiteOps,
    SteeringProgram,
    digest,
)
from capflow.steering.request import Part, Steering, Tier
from capflow.steering.vector import SteeringVector

REQUEST, GLOBAL = "request", "global"
"""The names of owners; see `module_owner` for those of modules."""

# A position can be patched by its number from either end.
_PATCHES_AT_SITE_MAX = 2
# So many operations at a site are never too many, of whatever kind.
_FEW = min(limits.FEATURES_SET_MAX, limits.CLAMPS_AT_SITE_MAX, limits.SITE_OPS_MAX - _PATCHES_AT_SITE_MAX)
_BESIDE = "at one position, with those of modules and of the global state"
_SCORE_KINDS = {"dot": SCORE_DOT, "cosine": SCORE_COSINE, "cast": SCORE_CAST}


def module_owner(name: str) -> str:
    """Return the owner of a module's operations."""
    return f"module {name}"


def controller_owner(label: str) -> str:
    """Return the owner of what a controller brings to requests."""
    return f"controller {label}"


class SiteError(UsageError):
    """The vectors, the clamps or the features at one site are refused.

    kind: `vectors`, `clamps` or `features`, the end of the field's name.
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


class _Rows:
    """Rows without repetitions, each as wide as the widest that the model is steered with.

    model: the model, or the width of all its rows.
    program: its rows come first.
    """

    def __init__(self, model: ModelInfo | int, program: SteeringProgram | None = None) -> None:
        self._model = model
        self.width = model if isinstance(model, int) else model.steered_width
        self._numbers = {} if program is None else {name: number for number, name in enumerate(program.digests)}
        self._rows = [] if program is None else list(program.array())

    def shape_of(self, site: Site) -> tuple[int, ...]:
        """Return the shape of a site's rows."""
        return (self._model,) if isinstance(self._model, int) else self._model.shape_of(site)

    def check(self, part: Part | SteeringGate, field: str) -> None:
        """Raise UsageError unless a part has the width of its site's rows."""
        check_width(part.width, self.shape_of(part.site), field)

    def number(self, row: Row) -> int:
        """Return the number of a contiguous row; it is added unless an equal row is there."""
        if row.size < self.width:
            row = np.pad(row, (0, self.width - row.size))
        number = self._numbers.setdefault(digest(row.data), len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        return number

    def content(self) -> bytes:
        return b"".join(row.data for row in self._rows)

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(self._numbers)


def program_of(model: ModelInfo | int, parts: Sequence[Steering], owners: Sequence[str] = ()) -> SteeringProgram | None:
    """Return the program of all steering that applies to a request, in order; None if it does nothing.

    The vectors of an owner at a site are added up in float64, by gate, and rounded to float32 once. A sum of zero is
    left out. Equal gates are one.

    model: the model, or the width of all its rows.
    parts: the global state, its modules and the request's own steering.
    owners: the owner of each part; by default the request owns all.

    Raises UsageError for a part of another width, for a position that is patched twice and for too many gates.
    Raises SiteError for numbers beyond float32, for more than `limits.CLAMPS_AT_SITE_MAX` clamps and for more than
    `limits.SITE_OPS_MAX` operations at one site and position.
    """
    for part in parts:
        for use in part.features:
            expected = "one of an engine that knows it by name"
            raise UsageError(explain(use.where, got=f"a feature of autoencoder {use.sae}", expected=expected))
    names = tuple(owners) or (REQUEST,) * len(parts)
    numbered = tuple(dict.fromkeys(names))
    rows = _Rows(model)
    lines = _Lines(rows, names, parts)
    owned = [
        _Part(part, numbered.index(name), lines.of[n]) for n, (part, name) in enumerate(zip(parts, names, strict=True))
    ]
    prefill = [_OwnedTier(tier, part) for part in owned for tier in (part.steering.base, part.steering.prefill)]
    decode = [_OwnedTier(tier, part) for part in owned for tier in (part.steering.base, part.steering.decode)]
    last = lines.scores("last_prompt", rows)
    before = _site_ops(prefill, lines.scores("prompt", rows), rows, last)
    scores = lines.scores("generated", rows)
    same = [tier.tier for tier in prefill] == [tier.tier for tier in decode] and scores == lines.scores("prompt", rows)
    after = before if same else _site_ops(decode, scores, rows)
    patched = _patched(owned, rows)
    for site, ops in last.items():
        here = patched.setdefault(-1, {})
        here[site] = (*ops, *here.get(site, ()))
    if not before and not after and not patched:
        return None
    return SteeringProgram(
        rows.width,
        rows.content(),
        rows.digests,
        before,
        after,
        tuple(
            (position, tuple(SiteOps(*site, ops) for site, ops in sorted(here.items())))
            for position, here in sorted(patched.items())
        ),
        lines.gates,
        numbered,
    )


class _Part(NamedTuple):
    """One part of a request's steering.

    owner: the number of its owner.
    lines: the number of each of its gates, by name; `UNGATED` by the empty name.
    """

    steering: Steering
    owner: int
    lines: Mapping[str, int]

    def place(self, part: Part) -> tuple[int, int]:
        """Return the gate and the owner of a vector, a clamp, a feature or a patch."""
        return self.lines[part.gate], self.owner


class _OwnedTier(NamedTuple):
    tier: Tier
    part: _Part


class _Lines:
    """The different gates of all parts, in the order of their sites; the gates of a program.

    A gate that several parts bring has the name that the request gives it, or else that of the first part.

    of: for each part, the number of each gate by its name.
    """

    def __init__(self, rows: _Rows, owners: Sequence[str], parts: Sequence[Steering]) -> None:
        self._gates: dict[tuple[Any, ...], SteeringGate] = {}
        names: dict[tuple[Any, ...], str] = {}
        # The names of gates that the request brings: they come before the names of other owners.
        own: dict[tuple[Any, ...], str] = {}
        contents: list[dict[str, tuple[Any, ...]]] = []
        for owner, part in zip(owners, parts, strict=True):
            contents.append({})
            for gate in part.gates:
                rows.check(gate, f"steering_gates.{gate.name}.vector")
                content = _content(gate)
                self._gates.setdefault(content, gate)
                if owner == REQUEST:
                    own.setdefault(content, gate.name)
                names.setdefault(content, f"{owner}/{gate.name}")
                contents[-1][gate.name] = content
        names |= own
        order = sorted(self._gates)
        if len(order) > limits.GATES_MAX:
            expected = f"at most {limits.GATES_MAX} of one request, with those of modules and of the global state"
            field = "steering_gates" if own else "steering_name"
            raise UsageError(explain(field, got=f"{len(order)} gates", expected=expected, do="use fewer gates"))
        self.of = [{"": UNGATED, **{name: order.index(content) for name, content in some.items()}} for some in contents]
        self._ordered = [self._gates[content] for content in order]
        self.gates = tuple(
            ProgramGate(
                names[content],
                sharpness_of(gate),
                gate.latch,
                gate.threshold,
                gate.layer,
                gate.hook,
                gate.score,
                gate.positions,
                gate.label,
                gate.abort,
            )
            for content, gate in zip(order, self._ordered, strict=True)
        )

    def scores(self, positions: str, rows: _Rows) -> dict[Site, tuple[Op, ...]]:
        """Return the scores at each site.

        positions: `prompt`, `generated` or `last_prompt`.
        """
        names = (positions,) if positions == "last_prompt" else (positions, "all")
        scores: dict[Site, tuple[Op, ...]] = {}
        for number, gate in enumerate(self._ordered):
            if gate.positions in names:
                op = Op(_SCORE_KINDS[gate.score], rows.number(gate.row), gate.bias - gate.threshold, gate=number)
                scores[gate.site] = (*scores.get(gate.site, ()), op)
        return scores


def _content(gate: SteeringGate) -> tuple[Any, ...]:
    """Return what makes two gates equal; it sorts gates by site."""
    return (
        gate.site.depth,
        _SCORE_KINDS[gate.score],
        digest(gate.row.data),
        gate.threshold,
        gate.bias,
        sharpness_of(gate),
        gate.latch,
        gate.positions,
        gate.label,
        gate.abort,
    )


def _patched(parts: Sequence[_Part], rows: _Rows) -> dict[int, dict[Site, tuple[Op, ...]]]:
    """Return the patches of all parts, by position and site."""
    patched: dict[int, dict[Site, tuple[Op, ...]]] = {}
    for part in parts:
        for patch in part.steering.patches:
            _check_width(patch, "steering_patches", rows)
            if patch.amount == 0.0:
                continue
            gate, owner = part.place(patch)
            given = patch.rows(rows.shape_of(patch.site), rows.width)
            for position, row in zip(patch.positions, given, strict=True):
                here = patched.setdefault(position, {})
                if patch.site in here:
                    at = f"steering_patches.{patch.hook}.{patch.layer}.positions"
                    raise UsageError(explain(at, got=f"{position} twice", expected="each position of a site once"))
                here[patch.site] = (Op(PATCH, rows.number(row), patch.amount, gate=gate, owner=owner),)
    return patched


def _site_ops(
    tiers: Sequence[_OwnedTier],
    scores: Mapping[Site, tuple[Op, ...]],
    rows: _Rows,
    more: Mapping[Site, tuple[Op, ...]] = MappingProxyType({}),
) -> tuple[SiteOps, ...]:
    """Return the operations of a phase: the scores first, then what the tiers do.

    more: the operations that one position of the phase has before these.
    """
    ops: dict[Site, list[Op]] = {site: list(some) for site, some in scores.items()}
    # Relative vectors come first, so that they read the norm before anything is added.
    for relative in (True, False):
        for site, op in _additions(tiers, rows, relative=relative):
            ops.setdefault(site, []).append(op)
    for site, pairs in _set_features(tiers, rows).items():
        ops.setdefault(site, []).extend(pairs)
    for tier, part in tiers:
        for clamp in tier.clamps:
            _check_width(clamp, "steering_clamps", rows)
            if not abs(clamp.strength) <= NUMBER_MAX:
                raise SiteError.too_large(clamp.site, "clamps", f"a strength of {clamp.strength:g}")
            if clamp.strength != 0.0:
                ops.setdefault(clamp.site, []).extend(_clamping(clamp, rows, clamp.strength, *part.place(clamp)))
    for site, each in ops.items():
        _check_counts(site, (*more.get(site, ()), *each))
    return tuple(SiteOps(*site, tuple(each)) for site, each in sorted(ops.items()))


def _clamping(clamp: Clamp, rows: _Rows, strength: float, gate: int = UNGATED, owner: int = 0) -> list[Op]:
    """Return the operations of a clamp.

    Entries that are set to values are one operation, as a patch of a row; a range of values takes one for each entry.
    """
    if (values := clamp.values) is not None:
        row = entries_row(clamp.index, values, rows.shape_of(clamp.site), rows.width)
        return [Op(PATCH, rows.number(row), strength, gate=gate, owner=owner)]
    directions = [np.frombuffer(clamp.data, np.float32)]
    if clamp.index:
        _check_clamps(clamp.site, len(clamp.index))
        directions = [*np.zeros((len(clamp.index), rows.width), np.float32)]
        for direction, number in zip(directions, clamp.index, strict=True):
            direction[number] = 1.0
    return [Op(CLAMP, rows.number(each), strength, clamp.low, clamp.high, gate, owner) for each in directions]


def _additions(tiers: Sequence[_OwnedTier], rows: _Rows, *, relative: bool) -> Iterator[tuple[Site, Op]]:
    """Yield the sums of all relative or all other vectors with their sites: ungated ones, then those of each gate."""
    groups: dict[tuple[int, int], list[SteeringVector]] = {}
    for tier, part in tiers:
        for vector in tier.vectors:
            if vector.relative == relative:
                groups.setdefault(part.place(vector), []).append(vector)
    largest: dict[Site, float] = {}
    for (gate, owner), vectors in sorted(groups.items()):
        for site, total in _sums(rows, vectors).items():
            if len(groups) > 1:
                largest[site] = largest.get(site, 0.0) + float(np.abs(total).max())
                if largest[site] > NUMBER_MAX:
                    raise SiteError.too_large(site, "vectors", "a sum beyond float32")
            yield site, Op(RELATIVE if relative else ADD, rows.number(total), gate=gate, owner=owner)


def _set_features(tiers: Sequence[_OwnedTier], rows: _Rows) -> dict[Site, list[Op]]:
    """Return the operations that set features at each site: first all are encoded, then all are set."""
    pairs: dict[Site, dict[tuple[int, int], tuple[Op, Op]]] = {}
    for tier, part in tiers:
        for feature in tier.features:
            _check_width(feature, "steering_features", rows)
            if not abs(feature.strength) <= NUMBER_MAX:
                raise SiteError.too_large(feature.site, "features", f"a strength of {feature.strength:g}")
            if feature.strength == 0.0:
                continue
            encoder, decoder = (rows.number(np.frombuffer(row, np.float32)) for row in (feature.encoder, feature.data))
            here = pairs.setdefault(feature.site, {})
            if (encoder, decoder) in here:
                do = "set it in one place: the request, a module, or the global state"
                raise SiteError(feature.site, "features", "a feature set twice", "each feature once", do)
            gate, owner = part.place(feature)
            here[encoder, decoder] = (
                Op(ENCODE, encoder, 1.0, feature.bias, feature.threshold, gate, owner),
                Op(SET, decoder, feature.strength, feature.value, feature.value, gate, owner),
            )
    return {site: [pair[n] for n in (0, 1) for pair in here.values()] for site, here in pairs.items()}


def _check_counts(site: Site, ops: Sequence[Op]) -> None:
    """Raise SiteError for too many clamps, or too many operations, at one site and position."""
    if len(ops) <= _FEW:
        return
    sets = sum(op.kind == SET for op in ops)
    if sets > limits.FEATURES_SET_MAX:
        expected = f"at most {limits.FEATURES_SET_MAX} {_BESIDE}"
        raise SiteError(site, "features", f"{sets} features that are set", expected, "set fewer features there")
    _check_clamps(site, sum(op.kind == CLAMP for op in ops))
    most = limits.SITE_OPS_MAX - _PATCHES_AT_SITE_MAX
    if len(ops) > most:
        expected = f"at most {most} {_BESIDE}"
        raise SiteError(site, "vectors", f"{len(ops):,} operations", expected, "use fewer modules there")


def _check_clamps(site: Site, count: int) -> None:
    """Raise SiteError for too many clamps at one site and position."""
    if count > limits.CLAMPS_AT_SITE_MAX:
        expected = f"at most {limits.CLAMPS_AT_SITE_MAX} {_BESIDE}"
        raise SiteError(site, "clamps", f"{count:,} clamps", expected, "clamp fewer directions there")


def _check_width(part: Part, field: str, rows: _Rows) -> None:
    if not getattr(part, "index", ()):
        rows.check(part, f"{field}.{part.hook}.{part.layer}")


def _sums(rows: _Rows, vectors: Iterable[SteeringVector]) -> dict[Site, Row]:
    """Return the sum of the vectors at each site where it is not zero."""
    at: dict[Site, list[SteeringVector]] = {}
    for vector in vectors:
        _check_width(vector, "steering_vectors", rows)
        if vector.scale != 0.0:
            at.setdefault(vector.site, []).append(vector)
    with np.errstate(over="ignore"):
        sums = _stacked(at.values(), rows.width)
        if sums is None:
            sums = np.zeros((len(at), rows.width), np.float32)
            for total, some in zip(sums, at.values(), strict=True):
                total[: int(some[0].width)] = (
                    some[0].array() if len(some) == 1 else np.sum([v.array(np.float64) for v in some], axis=0)
                )
    # NaN where a sum holds one.
    largest = np.maximum(sums.max(axis=1), -sums.min(axis=1))
    for site, size in zip(at, largest, strict=True):
        if not size <= NUMBER_MAX:
            raise SiteError.too_large(site, "vectors", "a sum beyond float32")
    # Adding 0 turns negative zeros into positive ones.
    sums += np.float32(0)
    return {site: total for site, total, size in zip(at, sums, largest, strict=True) if size > 0.0}


def _stacked(sums: Iterable[Sequence[SteeringVector]], width: int) -> Row | None:
    """Return the only vector of each sum, `[sums, width]`; None unless they are alike and are added as they are.

    All at once takes half the time of one after another.
    """
    first: SteeringVector | None = None
    data = []
    for some in sums:
        vector = some[0]
        first = first or vector
        plain = vector.scale == 1.0 and not vector.relative and vector.dtype == first.dtype
        if len(some) > 1 or not plain or vector.width != width:
            return None
        data.append(vector.data)
    if first is None:
        return None
    values = widened(np.frombuffer(b"".join(data), VECTOR_DTYPES[first.dtype]))
    return values.astype(np.float32, copy=not values.flags.writeable).reshape(-1, width)


def with_vectors(
    program: SteeringProgram | None, model: ModelInfo | int, vectors: Sequence[SteeringVector]
) -> SteeringProgram | None:
    """Return a program that also adds vectors at generated positions, after its own vectors and before its clamps.

    Relative vectors are added before the others, relative to the stream as it reaches the site.

    model: the model, or the width of all its rows.
    """
    rows = _Rows(model, program)
    sums = _sums(rows, [vector for vector in vectors if not vector.relative])
    relative = _sums(rows, [vector for vector in vectors if vector.relative])
    if not sums and not relative:
        return program
    old = program or SteeringProgram(rows.width, b"", ())
    given = old.array()
    more = {site: Op(ADD, rows.number(total)) for site, total in sums.items()}
    decode = {Site(layer, hook): ops for layer, hook, ops in old.decode}
    for site, total in relative.items():
        ops = decode.get(site, ())
        summed = [op for op in ops if op.kind == RELATIVE and op.gate == UNGATED]
        held = (given[op.row] * np.float32(op.amount) for op in summed)
        number = rows.number(np.sum([total, *held], axis=0, dtype=np.float32))
        rest = [op for op in ops if op not in summed]
        begins = sum(op.kind in SCORES for op in rest)
        decode[site] = (*rest[:begins], Op(RELATIVE, number), *rest[begins:])
    for site, add in more.items():
        ops = decode.get(site, ())
        begins = next((n for n, op in enumerate(ops) if op.kind in (ENCODE, PATCH, CLAMP)), len(ops))
        decode[site] = (*ops[:begins], add, *ops[begins:])
    return SteeringProgram(
        rows.width,
        rows.content(),
        rows.digests,
        old.prefill,
        tuple(SiteOps(*site, ops) for site, ops in sorted(decode.items())),
        old.patched,
        old.gates,
        old.owners,
    )


def with_clamps(
    program: SteeringProgram | None, model: ModelInfo | int, clamps: Sequence[Clamp], gain: float = 1.0
) -> SteeringProgram | None:
    """Return a program that also clamps generated positions, after everything else at each site.

    model: the model, or the width of all its rows.
    """
    clamps = [clamp for clamp in clamps if clamp.strength * gain]
    if not clamps:
        return program
    rows = _Rows(model, program)
    old = program or SteeringProgram(rows.width, b"", ())
    decode = {Site(layer, hook): ops for layer, hook, ops in old.decode}
    for clamp in clamps:
        _check_width(clamp, "steering_clamps", rows)
        decode[clamp.site] = (*decode.get(clamp.site, ()), *_clamping(clamp, rows, clamp.strength * gain))
    sites = tuple(SiteOps(*site, ops) for site, ops in sorted(decode.items()))
    return msgspec.structs.replace(old, rows=rows.content(), digests=rows.digests, decode=sites)
