"""Cases of gates: random programs with scores and gated operations, and what a float64 reference makes of them."""

import math
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from capflow.capture.site import Site
from capflow.limits import GATES_MAX
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
    Op,
    ProgramGate,
    SiteOps,
    SteeringProgram,
    digest,
)
from capflow_engine.steering.budget import Size
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from tests.kit.tap_cases import CASES, CPU, ROUNDING, SCALES, Made, encoded, operations, start_kernel, with_pairs

GATE_CASES = [*CASES, (5, 16, torch.float32, True, (1,) * 33), (6, 24, torch.float32, True, (150, 1, 1, 9))]
APART = 1e-4
"""How far each score is from its threshold, at least."""


class Gated(NamedTuple):
    """A step with gates.

    made: the step; its steering has the operations of each token.
    parts: the token rows of each request with gates, with its program.
    carried: of each latched request, in order, the margins that it carries.
    """

    made: Made
    parts: list
    carried: torch.Tensor | None


def score_of(kind, row, stream):
    """Return the scores of streams, `[tokens, hidden]` float64, on their own: none of it is worked out by capflow."""
    along = stream @ row
    if kind == SCORE_DOT:
        return along
    direction = np.broadcast_to(row, stream.shape)
    if kind == SCORE_CAST:
        direction = np.tanh(np.outer(along / (row @ row), row))
    return (stream * direction).sum(1) / (np.linalg.norm(stream, axis=1) * np.linalg.norm(direction, axis=1))


def value_of(margin, sharpness):
    """Return what a gate multiplies amounts with."""
    if math.isinf(sharpness):
        return float(margin >= 0)
    return 0.0 if margin == -math.inf else 1 / (1 + math.exp(min(-sharpness * margin, 700.0)))


def make_gated(case, seed, device=CPU):
    """Return a step of which most requests have gates; neighbours may have the same program."""
    sites, width, dtype, split, lengths = case
    rng = np.random.default_rng(seed)
    tokens = sum(lengths) + 3
    hidden = torch.from_numpy(rng.normal(size=(tokens, width))).to(dtype)
    residual = torch.from_numpy(3 * rng.normal(size=(tokens, width))).to(dtype) if split else None
    scale = SCALES[seed % len(SCALES)]
    stream = scale * (hidden.double() + (0 if residual is None else residual.double())).numpy()
    planner = Planner(sites)
    bank = Bank(Size(512, 8192, 512), {Site(n, "post_block"): n for n in range(sites)}, width, device)
    batch, row, steering, parts, carried, program = [], 0, {}, [], [], None
    for number, length in enumerate(lengths):
        start = int(rng.integers(0, 3))
        prompt = int(rng.integers(1, start + length + 1))
        request = Tracked(f"r{number}", f"r{number}", prompt, planner.nothing, planner.nothing)
        if rng.random() < 0.85:
            mine = stream[row : row + length]
            if program is None or rng.random() < 0.6 or not _apart(program, mine):
                program = gated_program(rng, sites, width, mine)
            request.steered = [SlotRange(0, prompt, bank.acquire(program, prompt))]
            request.gates, request.latched = program.gates, any(gate.latched for gate in program.gates)
            for position in range(start, start + length):
                steering[row + position - start] = (program, operations(program, position, prompt))
            if program.gates:
                parts.append((row, length, program))
            if request.latched:
                carried.append([float(rng.choice([-math.inf, -0.5, 0.5])) for _ in range(GATES_MAX)])
        batch.append(Scheduled(request, row, start, length))
        row += length
    plan = planner.plan(batch)
    before = torch.tensor(carried).T[: plan.gates].contiguous().to(device) if carried else None
    residual = None if residual is None else residual.to(device)
    return Gated(Made(plan, hidden.to(device), residual, bank, steering, scale), parts, before)


def _apart(program, stream):
    rows = program.array().astype(np.float64)
    ops = [op for phase in (program.prefill, program.decode) for site in phase for op in site.ops]
    ops += [op for _, some in program.patched for site in some for op in site.ops]
    scores = [score_of(op.kind, rows[op.row], stream) + op.amount for op in ops if op.kind in SCORES]
    return all(np.abs(margins).min() > APART for margins in scores)


def _threshold(rng, scores):
    """Return a threshold in the widest gap in the middle of some scores; beside the score if there is one alone."""
    ordered = np.sort(scores)
    if len(ordered) == 1:
        return float(ordered[0] + rng.choice([-1, 1]) * max(0.01, abs(ordered[0]) / 2))
    low = len(ordered) // 4
    middle = ordered[low : max(low + 2, 3 * len(ordered) // 4)]
    widest = int(np.argmax(np.diff(middle)))
    return float((middle[widest] + middle[widest + 1]) / 2)


def gated_program(rng, sites, width, stream):
    """Return a program whose gates open at some tokens of a stream."""
    rows = rng.normal(size=(8, width)).astype(np.float32)
    rows[4:] /= np.linalg.norm(rows[4:], axis=1, keepdims=True)
    by_content = tuple(digest(row.tobytes()) for row in rows)
    gates, phases, last = [], ({}, {}), {}
    for number in range(GATES_MAX if rng.random() < 0.1 else int(rng.integers(1, 4))):
        kind = int(rng.choice([SCORE_DOT, SCORE_COSINE, SCORE_CAST]))
        probe, site = int(rng.integers(4)), int(rng.integers(sites))
        latched = bool(rng.random() < 0.5 and site + 1 < sites)
        sharpness = math.inf if rng.random() < 0.6 else float(rng.uniform(0.5, 4))
        if sharpness < 0.8:
            sharpness = 1e-46  # 0 in float32
        threshold = _threshold(rng, score_of(kind, rows[probe].astype(np.float64), stream))
        gates.append(ProgramGate(f"g{number}", sharpness, latched, threshold, site, "post_block"))
        score = Op(kind, probe, -threshold, gate=number)
        positions = int(rng.integers(4))
        for phase in ([phases[0]], [phases[1]], phases, [last])[positions]:
            phase.setdefault(site, []).append(score)
    for phase in phases:
        for site in range(sites):
            open_here = [-1, -1] + [
                n for n, gate in enumerate(gates) if gate.layer < site or (gate.layer == site and not gate.latched)
            ]
            ops = [_operation(rng, int(rng.choice(open_here))) for _ in range(int(rng.integers(0, 4)))]
            if rng.random() < 0.3:
                ops = list(with_pairs(rng, ops, int(rng.choice(open_here)), (4, 8), exact=False))
            elif ops and rng.random() < 0.4:  # a lone addition
                ops = [Op(ADD, int(rng.integers(4, 8)), 1.0, gate=ops[0].gate)]
            phase.setdefault(site, []).extend(ops)
    made = [
        tuple(SiteOps(site, "post_block", tuple(ops)) for site, ops in sorted(phase.items()) if ops)
        for phase in (*phases, last)
    ]
    patched = ((-1, made[2]),) if made[2] else ()
    return SteeringProgram(width, rows.tobytes(), by_content, made[0], made[1], patched, tuple(gates))


def _operation(rng, gate):
    low, high = sorted(rng.normal(size=2).tolist())
    kind = int(rng.choice([ADD, CLAMP, PATCH, RELATIVE]))
    return Op(kind, int(rng.integers(4, 8)), float(rng.choice([-1, 0.5, 1])), low, high, gate)


def reference_of(gated, sites, counts):
    """Return `hidden` after each site, and the margins at the end; count how often gates were open and shut."""
    made = gated.made
    hidden = made.hidden.double().cpu().numpy()
    stream = made.scale * (hidden + (0 if made.residual is None else made.residual.double().cpu().numpy()))
    margins = np.full((GATES_MAX, len(hidden)), -math.inf)
    begins = {token: row for row, length, _ in gated.parts for token in range(row, row + length)}
    latched = [part for part in gated.parts if any(gate.latched for gate in part[2].gates)]
    column = {row: n for n, (row, _, _) in enumerate(latched)}
    after = []
    for site in range(sites):
        values = hidden.copy()
        here = [(token, program, ops.get(site, ())) for token, (program, ops) in made.steering.items()]
        for token, program, ops in here:
            for op in (op for op in ops if op.kind in SCORES):
                row = program.array()[op.row].astype(np.float64)
                margins[op.gate, token] = score_of(op.kind, row, stream[[token]])[0] + op.amount
        for token, program, ops in here:
            x, norm, active = stream[token].copy(), None, []
            for op in ops:
                if op.kind in SCORES:
                    continue
                amount = op.amount
                if op.gate >= 0:
                    gate, margin = program.gates[op.gate], margins[op.gate, token]
                    if gate.latched:
                        begin = begins[token]
                        before = float(gated.carried[op.gate, column[begin]])
                        margin = max(margin, before, margins[op.gate, begin : token + 1].max())
                    value = value_of(margin, gate.sharpness)
                    counts[op.kind] += 1
                    counts["open" if value > 0.5 else "shut", gate.latched] += 1
                    amount *= value
                norm = np.linalg.norm(x) if norm is None and op.kind == RELATIVE else norm
                x += _change(op, amount, x, program.array()[op.row].astype(np.float64), norm, active)
            values[token] += (x - stream[token]) / made.scale
        after.append(values)
    return after, margins


def _change(op, amount, x, row, norm, active):
    """Return what an operation adds to the stream; keep the activations of features for those that set them."""
    if op.kind == PATCH:
        return amount * (row - x)
    if op.kind == ADD:
        return amount * row
    if op.kind == RELATIVE:
        return amount * norm * row
    if op.kind == ENCODE:
        active.append(encoded(op, x, row))
        return 0.0
    if op.kind == SET:
        return amount * (op.low - active.pop(0)) * row
    along = x @ row
    return amount * (np.clip(along, op.low, op.high) - along) * row


def check_gated(case, seed, start, counts, *, device=CPU, stages=False):
    """Hold a step with gates against the reference; count how often gates were open and shut.

    start: `start_cpu` or `start_kernel`.
    stages: whether the step starts again in the middle of the sites, as on a further pipeline stage.
    """
    gated = make_gated(case, seed, device)
    made, sites = gated.made, case[0]
    rows = torch.empty((1, case[1]), dtype=made.hidden.dtype, device=device)
    expected, expected_margins = reference_of(gated, sites, counts)
    tap = start(made, rows, gated.carried)
    margins = None
    for site in range(sites):
        if stages and site == sites // 2 and margins is not None:
            tap = start(made, rows, gated.carried, margins[: made.plan.gates, : len(made.hidden)].clone())
        mine = made.hidden.clone()
        margins = tap(site, mine)
        bound = ROUNDING[mine.dtype] * (1 + np.abs(expected[site]).max(1))
        apart = np.abs(mine.cpu().double().numpy() - expected[site]).max(1)
        assert (apart <= bound).all(), f"hidden after site {site}: {apart.max():.2e}"
    if margins is not None:
        mine = margins[: made.plan.gates, : len(made.hidden)].cpu().numpy()
        np.testing.assert_allclose(mine, expected_margins[: made.plan.gates], rtol=1e-4, atol=1e-5)
    return gated


def run_all_gate_cases(device=CPU, seeds=3):
    """Run the kernel; return the number of cases, and how often gates were open and shut."""
    counts = Counter()
    for number, case in enumerate(GATE_CASES):
        for seed in range(seeds):
            check_gated(case, seed, start_kernel, counts, device=device, stages=(number + seed) % 2 == 1)
    return len(GATE_CASES) * seeds, counts


if __name__ == "__main__":
    cases, counted = run_all_gate_cases(seeds=int(sys.argv[1]))
    print("gated kernel cases", cases, *(counted[state, latched] for state in ("open", "shut") for latched in (0, 1)))
