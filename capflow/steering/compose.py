"""Programs with what actions change: gains of owners, gates, and the vectors and clamps that actions add.

Programs of several owners become one here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.steering.program import (
    ADD,
    CLAMP,
    ENCODE,
    PATCH,
    RELATIVE,
    SCORES,
    SET,
    UNGATED,
    Op,
    ProgramGate,
    SiteOps,
    SteeringProgram,
)

_OWN, _CONTROLLER = "request", "controller "


def owner_of(program: SteeringProgram, op: Op) -> str:
    """Return the owner of an operation."""
    return program.owners[op.owner] if program.owners else _OWN


def scaled(program: SteeringProgram | None, gains: Mapping[str, float]) -> SteeringProgram | None:
    """Return a program with the amounts of its owners' operations multiplied; None if nothing is left."""
    if program is None or not gains:
        return program

    def scale(op: Op) -> Op | None:
        factor = 1.0 if op.kind in SCORES else gains.get(owner_of(program, op), 1.0)
        if factor == 1.0 or (factor and op.kind == ENCODE):
            return op
        return op._replace(amount=op.amount * factor) if factor else None

    return _mapped(program, scale)


def own(program: SteeringProgram | None) -> SteeringProgram | None:
    """Return the part of a program that the request came with; None if there is none."""
    if program is None or set(program.owners) <= {_OWN}:
        return program

    def mine(op: Op) -> Op | None:
        return op if op.kind in SCORES or owner_of(program, op) == _OWN else None

    kept = _mapped(program, mine)
    gates = frozenset[int]() if kept is None else _used_gates(kept)
    gates |= {number for number, gate in enumerate(program.gates) if gate.abort}
    return _mapped(program, lambda op: mine(op) if op.kind not in SCORES or op.gate in gates else None)


def without_controllers(program: SteeringProgram) -> SteeringProgram | None:
    """Return a program without what controllers brought; None if nothing is left."""
    if not any(owner.startswith(_CONTROLLER) for owner in program.owners):
        return program

    def stays(op: Op) -> bool:
        if op.kind in SCORES:
            return not program.gates[op.gate].name.startswith(_CONTROLLER)
        return not owner_of(program, op).startswith(_CONTROLLER)

    return _mapped(program, lambda op: op if stays(op) else None)


def gate_owner(gate: ProgramGate) -> str:
    """Return who causes the events of a gate: the controller that brought it, or else the gate itself."""
    owner = gate.name.rpartition("/")[0]
    return owner if owner.startswith(_CONTROLLER) else f"gate {gate.name}"


def with_gate(
    program: SteeringProgram | None,
    name: str,
    threshold: float | None = None,
    sharpness: float | None = None,
    enabled: bool | None = None,
) -> SteeringProgram | None:
    """Return a program with a gate changed; None leaves a parameter as it is."""
    if program is None:
        return None
    gates = {number: gate for number, gate in enumerate(program.gates) if gate.name == name}
    if not gates:
        return program

    def change(op: Op) -> Op | None:
        gate = gates.get(op.gate)
        if gate is None:
            return op
        if op.kind in SCORES:
            return op if threshold is None else op._replace(amount=op.amount + gate.threshold - threshold)
        return None if enabled is False else op

    changed = tuple(
        _changed(gate, threshold, sharpness, enabled) if number in gates else gate
        for number, gate in enumerate(program.gates)
    )
    return _mapped(msgspec.structs.replace(program, gates=changed), change)


def _changed(gate: ProgramGate, threshold: float | None, sharpness: float | None, enabled: bool | None) -> ProgramGate:
    return gate._replace(
        threshold=gate.threshold if threshold is None else threshold,
        sharpness=gate.sharpness if sharpness is None else sharpness,
        abort="" if enabled is False else gate.abort,
    )


def merged(program: SteeringProgram | None, other: SteeringProgram) -> SteeringProgram:
    """Return a program that also does what another one does, after the same kind of operations at each site.

    The other has gates and owners of its own beside the program's. Raises UsageError if there are too many gates, too
    many clamps or operations at a site, or if both set one feature there.
    """
    if program is None:
        return other
    count = len(program.gates) + len(other.gates)
    if count > limits.GATES_MAX:
        got = f"{count} gates, with {len(program.gates)} of the request, of modules and of other consumers"
        raise UsageError(explain("steering_gates", got=got, expected=f"at most {limits.GATES_MAX}"))
    numbers = {name: number for number, name in enumerate(program.digests)}
    rows = [program.rows]
    for name, row in zip(other.digests, other.array(), strict=True):
        if numbers.setdefault(name, len(numbers)) == len(program.digests) + len(rows) - 1:
            rows.append(row.tobytes())
    own = program.owners or (_OWN,)
    owners = tuple(dict.fromkeys((*own, *(other.owners or (_OWN,)))))

    def moved(op: Op) -> Op:
        gate = op.gate if op.gate == UNGATED else op.gate + len(program.gates)
        row = numbers[other.digests[op.row]]
        return op._replace(row=row, gate=gate, owner=owners.index(owner_of(other, op)))

    def both(first: Sequence[SiteOps], second: Sequence[SiteOps]) -> tuple[SiteOps, ...]:
        ops = {(site.layer, site.hook): site.ops for site in first}
        for layer, hook, some in second:
            ops[layer, hook] = (*ops.get((layer, hook), ()), *map(moved, some))
        return tuple(SiteOps(*site, tuple(sorted(each, key=_order))) for site, each in sorted(ops.items()))

    patched, beside = dict(program.patched), dict(other.patched)
    made = msgspec.structs.replace(
        program,
        rows=b"".join(rows),
        digests=tuple(numbers),
        prefill=both(program.prefill, other.prefill),
        decode=both(program.decode, other.decode),
        patched=tuple((at, both(patched.get(at, ()), beside.get(at, ()))) for at in sorted({*patched, *beside})),
        gates=(*program.gates, *other.gates),
        owners=owners,
    )
    if (site := _set_twice((*made.prefill, *made.decode))) is not None:
        do = "set it in one place: the request, a module, the global state, or a controller"
        at = f"steering_features.{site.hook}.{site.layer}"
        raise UsageError(explain(at, got="a feature set twice", expected="each feature once", do=do))
    if not fits(made):
        raise UsageError(explain("steering", got="too many operations at one site", expected="fewer"))
    return made


def _set_twice(sites: Sequence[SiteOps]) -> SiteOps | None:
    """Return a site at which a feature is set twice; None if there is none."""
    for site in sites:
        rows = ([op.row for op in site.ops if op.kind == kind] for kind in (ENCODE, SET))
        pairs = list(zip(*rows, strict=True))
        if len(set(pairs)) < len(pairs):
            return site
    return None


def _order(op: Op) -> tuple[int, int]:
    """Return the place of an operation among those of its site; clamps, patches and features keep their order."""
    kind = _KINDS.get(op.kind, 0)
    return kind, op.gate if op.kind in (ADD, RELATIVE) else 0


_KINDS = {RELATIVE: 1, ADD: 2, ENCODE: 3, SET: 4, PATCH: 5, CLAMP: 5}
"""The order of operations after the scores. A patch is that of a clamp of entries; those of positions stand alone."""


def fits(program: SteeringProgram | None) -> bool:
    """Return whether no site and position has too many clamps or operations, for any length of the prompt."""
    if program is None:
        return True
    sites = (*program.prefill, *program.decode)
    for kind, most in ((CLAMP, limits.CLAMPS_AT_SITE_MAX), (SET, limits.FEATURES_SET_MAX)):
        if any(sum(op.kind == kind for op in each.ops) > most for each in sites):
            return False
    return program.longest <= limits.SITE_OPS_MAX


def _mapped(program: SteeringProgram, change: Callable[[Op], Op | None]) -> SteeringProgram | None:
    """Return a program with each operation replaced or, for None, left out."""

    def mapped(sites: Sequence[SiteOps]) -> tuple[SiteOps, ...]:
        each = (SiteOps(site.layer, site.hook, tuple(new for op in site.ops if (new := change(op)))) for site in sites)
        return tuple(site for site in each if site.ops)

    prefill, decode = mapped(program.prefill), mapped(program.decode)
    patched = tuple((position, ops) for position, sites in program.patched if (ops := mapped(sites)))
    if not prefill and not decode and not patched:
        return None
    return msgspec.structs.replace(program, prefill=prefill, decode=decode, patched=patched)


def _used_gates(program: SteeringProgram) -> frozenset[int]:
    """Return the numbers of the gates that gate an operation."""
    phases = (program.prefill, program.decode, *(sites for _, sites in program.patched))
    return frozenset(
        op.gate for sites in phases for site in sites for op in site.ops if op.kind not in SCORES and op.gate != UNGATED
    )
