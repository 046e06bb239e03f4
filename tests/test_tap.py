"""Both taps, the CPU's and the Triton kernel, against a float64 reference on odd shapes and poisoned memory.

The kernel runs through Triton's interpreter, in a process of its own: `TRITON_INTERPRET` is read when a kernel is
defined. Where there is a GPU, `benchmarks/gpu_kernels.py` runs the same cases on it.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from capflow.positions import Positions
from capflow_engine.plan import Planner, Scheduled, Tracked
from capflow_engine.step import Step

CASES = [  # sites, width, dtype, split, tokens of each request
    (3, 8, torch.float32, True, (1,)),
    (2, 33, torch.bfloat16, True, (5, 1, 7)),
    (4, 640, torch.bfloat16, True, (17, 1, 1, 1, 30, 2)),
    (1, 127, torch.float16, False, (3, 3)),
    (3, 64, torch.float32, False, (1,) * 13),
    (2, 40, torch.bfloat16, True, (1,) * 40),
]
POISON = -12352.0  # exact in every dtype


def make(case, seed):
    """Return a planner's plan with capture, view and steering mixed, and random tensors for it."""
    sites, width, dtype, split, lengths = case
    rng = np.random.default_rng(seed)
    planner = Planner(sites)
    batch, row = [], 0
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
            request.prefill_steer = {int(rng.integers(sites)): int(rng.integers(4))}
            request.decode_steer = {int(rng.integers(sites)): int(rng.integers(4))}
        batch.append(Scheduled(request, row, start, length))
        row += length
    generator = torch.Generator().manual_seed(seed)
    tokens = row + 3  # padding behind the batch
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    residual = (torch.randn(tokens, width, generator=generator) * 30).to(dtype) if split else None
    bank = torch.randn(4, width, generator=generator).to(dtype)
    return planner.plan(batch), hidden, residual, bank


def rounded(values, dtype, truncate):
    """Return float64 values in a dtype: to nearest, or as Triton's interpreter makes bfloat16, by cutting bits off."""
    if truncate and dtype is torch.bfloat16:
        bits = values.float().view(torch.int32) & -65536
        return bits.view(torch.float32).to(dtype)
    return values.to(dtype)


def reference(plan, sites, hidden, residual, bank, truncate):
    """Return (rows, hidden afterwards per site) in float64, rounded once to the dtype; unwritten rows poisoned."""
    h = hidden.double()
    stream = h if residual is None else h + residual.double()
    rows = torch.full((plan.rows, hidden.shape[1]), POISON, dtype=torch.float64)
    after = [h.clone() for _ in range(sites)]
    for group in plan.groups:
        for place, _ in enumerate(group.sites):
            for run in group.runs:
                at = group.base + place * group.rows + run.target
                rows[at : at + run.length] = stream[run.source : run.source + run.length]
    for site, adds in plan.adds.items():
        for add in adds:
            after[site][add.source : add.source + add.length] += bank[add.bank].double()
    return rounded(rows, hidden.dtype, truncate), [rounded(a, hidden.dtype, truncate) for a in after]


def check(case, seed, run_site, *, truncate=False):
    plan, hidden, residual, bank = make(case, seed)
    sites = case[0]
    rows = torch.full((plan.rows + 2, hidden.shape[1]), POISON, dtype=hidden.dtype)
    expected_rows, expected_after = reference(plan, sites, hidden, residual, bank, truncate)
    for site in range(sites):
        mine = hidden.clone()
        kept = None if residual is None else residual.clone()
        run_site(plan, site, mine, residual, rows, bank)
        assert torch.equal(mine, expected_after[site]), f"hidden after site {site}"
        assert residual is None or torch.equal(residual, kept)
    assert torch.equal(rows[: plan.rows], expected_rows)
    assert (rows[plan.rows :] == POISON).all()
    return plan


def run_kernel(plan, site, hidden, residual, rows, bank):
    from capflow_engine.kernel import launch
    from capflow_engine.tables import Tables

    sites = max((s for g in plan.groups for s in g.sites), default=0)
    sites = max(sites, max(plan.adds, default=0), site) + 1
    tables = Tables(
        sites=sites,
        tokens=hidden.shape[0] + 5,
        rows=1,
        bank_rows=1,
        hidden=hidden.shape[1],
        dtype=hidden.dtype,
        device=hidden.device,
        resident=True,
    )
    tables.load(plan, hidden.shape[0])
    here = torch.tensor([site], dtype=torch.int32, device=hidden.device)
    launch(
        hidden, residual, here, tables.site_group, tables.site_base, tables.token_row, tables.token_steer,
        tables.steer_bank, rows, bank,
    )  # fmt: skip


def run_cpu(plan, site, hidden, residual, rows, bank):
    Step(plan, rows, bank).tap(site, hidden, residual)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_the_cpu_tap_equals_the_reference(case, seed):
    check(case, seed, run_cpu)


def test_the_cases_do_every_kind_of_thing():
    plans = [make(case, seed)[0] for case in CASES for seed in range(5)]
    assert any(plan.ship_rows and plan.rows > plan.ship_rows and plan.adds for plan in plans)
    assert any(len(group.runs) >= 8 for plan in plans for group in plan.groups)


def test_the_triton_kernel_equals_the_reference():
    code = "import test_tap; test_tap.run_all_kernel_cases()"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kernel", "cases", "18"]


def run_all_kernel_cases():
    cases = [(case, seed) for case in CASES for seed in range(3)]
    for case, seed in cases:
        check(case, seed, run_kernel, truncate=True)
    print("kernel cases", len(cases))


def test_the_gpu_benchmark_checks_graphs_whose_plans_change():
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / name) for name in (".", "engine_ext", "tests"))}
    command = [sys.executable, str(root / "benchmarks" / "gpu_kernels.py"), "--smoke"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "6 cases equal to float64, 12 replays with changing plans right" in done.stdout
