"""Cases of taps: random plans and programs, what a float64 reference makes of them, and a comparison with a kernel."""

import math
import sys
import time
from typing import NamedTuple

import numpy as np
import torch

from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.steering.program import ADD, CLAMP, ENCODE, PATCH, RELATIVE, SET, Op, SiteOps, SteeringProgram, digest
from capflow_engine.steering.budget import Size
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.gates import Gating
from capflow_engine.taps.plan import Plan, Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.taps.step import Step

CASES = [  # sites, width, dtype, split, tokens of each request
    (3, 8, torch.float32, True, (1,)),
    (2, 33, torch.bfloat16, True, (5, 1, 7)),
    (4, 640, torch.bfloat16, True, (17, 1, 1, 1, 30, 2)),
    (1, 127, torch.float16, False, (3, 3)),
    (3, 64, torch.float32, False, (1,) * 13),
    (2, 40, torch.bfloat16, True, (1,) * 40),
]
SCALES = (1.0, 4.0, 0.5)  # of the stream, as some models have; powers of two, so that nothing is rounded
CPU = torch.device("cpu")
POISON = -12352.0  # exact in every dtype


class Made(NamedTuple):
    """A step.

    steering: for each steered token row its program, and its operations by site.
    scale: of the stream, relative to what is captured and steered.
    begin: the number of a program's rows that is the first of the tapped ones, as in a tensor-parallel rank.
    """

    plan: Plan
    hidden: torch.Tensor
    residual: torch.Tensor | None
    bank: Bank
    steering: dict
    scale: float
    begin: int = 0


def make(case, seed, device=CPU, kinds=3, features=False):
    """Return a planner's plan with capture, view and steering mixed, and random tensors for it.

    kinds: the number of kinds of operations.
    features: whether features are set among them.
    """
    sites, width, dtype, split, lengths = case
    rng = np.random.default_rng(seed)
    planner = Planner(sites)
    index = {Site(n, "post_block"): n for n in range(sites)}
    wider = width + 7 * (seed % 2)  # other sites may have wider rows
    begin = 5 * (seed % 4 == 3)
    bank = Bank(Size(256, 2048, 256), index, wider, device, [begin] * sites)
    batch, row, steering = [], 0, {}
    sets = [Positions.ALL, Positions.ALL_PROMPT, Positions.LAST_PROMPT, Positions.ALL_GENERATED, Positions.NONE]
    for number, length in enumerate(lengths):
        ship = {s: sets[rng.integers(len(sets))] for s in range(sites)}
        view = {int(rng.integers(sites)): Positions.ALL} if rng.random() < 0.3 else {}
        start = int(rng.integers(0, 3))
        request = Tracked(
            f"r{number}",
            f"r{number}",
            int(rng.integers(1, start + length + 1)),
            planner.program(ship),
            planner.program(view),
        )
        if rng.random() < 0.6:
            program = random_program(rng, sites, width, kinds, features, wider, begin)
            request.steered = [SlotRange(0, request.prompt_length, bank.acquire(program, request.prompt_length))]
            for position in range(start, start + length):
                steering[row + position - start] = (program, operations(program, position, request.prompt_length))
        batch.append(Scheduled(request, row, start, length))
        row += length
    tokens = row + 3  # padding after the batch
    hidden = exact(rng, (tokens, width), 4, dtype).to(device)
    residual = exact(rng, (tokens, width), 30, dtype).to(device) if split else None
    return Made(planner.plan(batch), hidden, residual, bank, steering, SCALES[seed % len(SCALES)], begin)


def exact(rng, shape, limit, dtype):
    """Return random multiples of 1/4: float32 results of these are exact, so they can be compared for equality."""
    return torch.from_numpy(rng.integers(-4 * limit, 4 * limit, shape) / 4).to(dtype)


def random_program(rng, sites, width, kinds=3, features=False, wider=0, begin=0):
    """Return a program of additions, clamps and patches; its directions have few numbers, so their sums stay exact.

    Some patches leave most numbers of a row.

    wider: the width of its rows, if it is not that of the sites; what the sites lack is poisoned.
    begin: where the numbers of the sites begin in them.
    """
    wider = wider or width
    end = begin + width

    def row(others=0.0):
        values = np.full(wider, others, np.float32)
        values[begin + rng.integers(0, width, 6)] = rng.choice([-1, -0.5, 0.5, 1], 6)
        values[:begin] = values[end:] = POISON
        return values

    rows = [*(row() for _ in range(4)), row(np.nan)]

    def ops():
        count = int(rng.integers(0, 4))
        for _ in range(count):
            kind = int(rng.integers(kinds))
            low, high = sorted(float(n) for n in rng.integers(-6, 6, 2))
            if rng.random() < 0.3:
                low = -math.inf
            yield Op(kind, int(rng.integers(4 + (kind == PATCH))), float(rng.choice([-2, 0.5, 1])), low, high)

    def phase():
        every = ((site, with_pairs(rng, list(ops())) if features else tuple(ops())) for site in range(sites))
        return tuple(SiteOps(site, "post_block", some) for site, some in every if some)

    return SteeringProgram(
        wider,
        b"".join(row.tobytes() for row in rows),
        tuple(digest(row.tobytes()) for row in rows),
        phase(),
        phase(),
        ((1, phase()), (-1, phase())),
    )


def with_pairs(rng, ops, gate=-1, rows=(0, 4), exact=True):
    """Return operations with a few features set among them: first all are encoded, then all are set."""
    number = (lambda low, high: float(rng.integers(low, high))) if exact else rng.uniform
    pairs = []
    for _ in range(int(rng.integers(0, 4))):
        encode = Op(ENCODE, int(rng.integers(*rows)), 1.0, number(-3, 3), number(0, 3), gate)
        value, amount = number(-2, 3), float(rng.choice([-1, 0.5, 1]))
        pairs.append((encode, Op(SET, int(rng.integers(*rows)), amount, value, value, gate)))
    first, second = sorted(rng.integers(0, len(ops) + 1, 2).tolist())
    encodes, sets = ([pair[n] for pair in pairs] for n in (0, 1))
    return (*ops[:first], *encodes, *ops[first:second], *sets, *ops[second:])


def encoded(op, x, row):
    """Return the activation of a feature."""
    value = float(x @ row) + op.low
    return value if value > op.high else 0.0


def operations(program, position, prompt_length):
    """Return what a program does at a position, by site, computed independently."""
    by_site = {}
    for written, ops in program.patched:
        if position == (written if written >= 0 else prompt_length + written):
            for site, _, each in ops:
                by_site.setdefault(site, []).extend(each)
    for site, _, each in program.prefill if position < prompt_length else program.decode:
        by_site.setdefault(site, []).extend(each)
    return by_site


def rounded(values, dtype, truncate):
    """Return float64 values in a dtype: to nearest, or as Triton's interpreter makes bfloat16, by cutting bits off."""
    if truncate and dtype is torch.bfloat16:
        bits = values.float().view(torch.int32) & -65536
        return bits.view(torch.float32).to(dtype)
    return values.to(dtype)


def reference(made, sites, truncate):
    """Return (rows, hidden afterwards per site) in float64, rounded once to the dtype; unwritten rows poisoned."""
    h = made.hidden.double().cpu()
    stream = made.scale * (h if made.residual is None else h + made.residual.double().cpu())
    rows = torch.full((made.plan.rows, h.shape[1]), POISON, dtype=torch.float64)
    after = [h.clone() for _ in range(sites)]
    for block in made.plan.blocks:
        for place, _ in enumerate(block.sites):
            for run in block.runs:
                at = block.base + place * block.rows + run.target
                rows[at : at + run.length] = stream[run.source : run.source + run.length]
    for token, (program, by_site) in made.steering.items():
        given = torch.from_numpy(program.array()[:, made.begin : made.begin + h.shape[1]].copy()).double()
        for site, ops in by_site.items():
            x = stream[token].clone()
            norm, active = None, []
            for op in ops:
                kind, number, amount, low, high, *_ = op
                row = given[number]
                if kind == PATCH:
                    x = torch.where(row.isnan(), x, x + amount * (row - x))
                elif kind == ADD:
                    x += amount * row
                elif kind == RELATIVE:
                    norm = x.norm() if norm is None else norm
                    x += amount * norm * row
                elif kind == ENCODE:
                    active.append(encoded(op, x, row))
                elif kind == SET:
                    x += amount * (low - active.pop(0)) * row
                else:
                    projection = float(x @ row)
                    x += amount * (min(max(projection, low), high) - projection) * row
            after[site][token] += (x - stream[token]) / made.scale
    dtype = made.hidden.dtype
    return rounded(rows, dtype, truncate), [rounded(a, dtype, truncate) for a in after]


ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far a norm, which is not exact in float32, may take a value from the reference, of the largest value."""


def check(case, seed, start, *, truncate=False, device=CPU, relative=False, features=False):
    """Hold a tap against the reference; to the bit, unless operations relative to the norm are among the others.

    start: `start_cpu` or `start_kernel`.
    features: whether features are set among the operations.
    """
    made = make(case, seed, device, kinds=4 if relative else 3, features=features)
    sites, rows_made = case[0], made.plan.rows
    rows = torch.full((rows_made + 2, made.hidden.shape[1]), POISON, dtype=made.hidden.dtype, device=device)
    expected_rows, expected_after = reference(made, sites, truncate)
    tap = start(made, rows)
    for site in range(sites):
        mine = made.hidden.clone()
        kept = None if made.residual is None else made.residual.clone()
        tap(site, mine)
        if relative:
            expected, bound = expected_after[site].double(), ROUNDING[mine.dtype]
            apart = (mine.cpu().double() - expected).abs().amax(1)
            assert (apart <= bound * (1 + expected.abs().amax(1))).all(), f"hidden after site {site}"
        else:
            assert torch.equal(mine.cpu(), expected_after[site]), f"hidden after site {site}"
        assert kept is None or torch.equal(made.residual, kept)
    assert torch.equal(rows[:rows_made].cpu(), expected_rows)
    assert (rows[rows_made:] == POISON).all()
    return made.plan


def start_kernel(made, rows, carried=None, received=None):
    """Start a step of the kernel, with tables full of what an earlier step left; return its tap at a site."""
    from capflow_engine.taps.gpu.kernel import launch
    from capflow_engine.taps.tables import Tables

    tables = Tables(
        sites=made.bank.heads.shape[1],
        tokens=made.hidden.shape[0] + 5,
        rows=1,
        hidden=made.hidden.shape[1],
        dtype=made.hidden.dtype,
        device=made.hidden.device,
        resident=True,
        requests=len(made.plan.batch) + 2,
    )
    for table in (tables.margins, tables.carried, tables.first, tables.token_latch):
        table.fill_(-POISON)
    tables.load(made.plan, made.hidden.shape[0], carried, received)
    tensors = tables.device_tensors() | {"staging": rows} | made.bank.device_tensors(0, rows.shape[1])

    def tap(site, hidden):
        here = torch.tensor([site], dtype=torch.int32, device=hidden.device)
        launch(hidden, made.residual, here, *tensors.values(), made.scale)
        return tables.margins

    return tap


def start_cpu(made, rows, carried=None, received=None):
    """Start a step on the CPU; return its tap at a site."""
    gating = Gating(made.plan, made.hidden.shape[0], carried, received) if made.plan.gates else None
    step = Step(made.plan, rows, made.bank, gating)

    def tap(site, hidden):
        step.tap(site, hidden, made.residual, made.scale)
        return None if gating is None else gating.margins

    return tap


def chained(width, tokens, chains):
    """Return a step's parts: of each chain its number of clamps, done on that many tokens; some have the same."""
    rng = np.random.default_rng(len(chains))
    planner, bank = Planner(1), Bank(Size(4096, 8192, 256), {Site(0, "post_block"): 0}, width, CPU)
    batch, programs = [], []
    for number, clamps in enumerate(chains):
        request = Tracked(f"r{number}", f"r{number}", tokens, planner.nothing, planner.nothing)
        rows = rng.normal(size=(clamps, width)).astype(np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        ops = (SiteOps(0, "post_block", tuple(Op(CLAMP, n, 1.0, -0.5, 0.5) for n in range(clamps))),)
        program = SteeringProgram(width, rows.tobytes(), tuple(digest(row.tobytes()) for row in rows), ops, ops)
        if number % 3 == 1:
            program = programs[-1]
        programs.append(program)
        request.steered = [SlotRange(0, tokens, bank.acquire(program, tokens))]
        batch.append(Scheduled(request, number * tokens, 0, tokens))
    return planner.plan(batch), bank, programs, torch.randn((len(chains) * tokens, width))


def clamp_seconds(tokens, chains, width=640, rounds=15):
    """Return the seconds of a tap and of the arithmetic that it does, the best of several turns of each."""
    plan, bank, programs, hidden = chained(width, tokens, chains)
    tap = arithmetic = math.inf
    for _ in range(rounds):
        given = hidden.clone()
        began = time.perf_counter()
        Step(plan, None, bank).tap(0, given, None)
        tap = min(tap, time.perf_counter() - began)
        began = time.perf_counter()
        for number, program in enumerate(programs):
            x = hidden[number * tokens : (number + 1) * tokens].clone()
            for row in torch.from_numpy(program.array().copy()):
                projection = x @ row
                x.addr_(projection.clamp(-0.5, 0.5) - projection, row)
        arithmetic = min(arithmetic, time.perf_counter() - began)
    return tap, arithmetic


def check_wide_site():
    """Hold the kernel at a site with wider rows than the bank: it is captured and not steered."""
    planner, bank = Planner(1), Bank(Size(2, 8, 2), {Site(0, "post_block"): 0}, 4, CPU)
    request = Tracked("r", "r", 3, planner.program({0: Positions.ALL}), planner.nothing)
    plan = planner.plan([Scheduled(request, 0, 0, 3)])
    hidden, rows = torch.randn(3, 9), torch.empty(plan.rows, 9)
    start_kernel(Made(plan, hidden, None, bank, {}, 1.0), rows)(0, hidden.clone())
    assert torch.equal(rows, hidden)


def run_all_kernel_cases(seeds):
    cases = [(case, number * seeds + seed) for number, case in enumerate(CASES) for seed in range(seeds)]
    for case, seed in cases:
        check(case, seed, start_kernel, truncate=True)
        check(case, seed, start_kernel, truncate=True, relative=True)
        check(case, seed, start_kernel, truncate=True, features=True)
    check_wide_site()
    print("kernel cases", len(cases))


if __name__ == "__main__":
    run_all_kernel_cases(int(sys.argv[1]))
