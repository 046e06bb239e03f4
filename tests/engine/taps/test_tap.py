"""Both taps, the CPU's and the Triton kernel, against a float64 reference on odd shapes and poisoned memory.

The kernel runs through Triton's interpreter, in a process of its own: `TRITON_INTERPRET` is read when a kernel is
defined. Where there is a GPU, `benchmarks/gpu_kernels.py` runs the same cases on it.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from capflow.capture.site import Site
from capflow.steering.program import ADD, CLAMP, ENCODE, PATCH, RELATIVE, SET, Op, SiteOps, SteeringProgram, digest
from capflow_engine.steering.budget import Size
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.taps.step import Step
from tests.kit.sources import KIT, ROOT
from tests.kit.tap_cases import CASES, CPU, chained, check, clamp_seconds, exact, make, start_cpu


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_the_cpu_tap_equals_the_reference(case, seed):
    check(case, seed, start_cpu)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_the_cpu_tap_adds_relative_to_the_norm_as_the_reference_does(case, seed):
    check(case, seed, start_cpu, relative=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_the_cpu_tap_sets_features_as_the_reference_does(case, seed):
    check(case, seed, start_cpu, features=True)


def test_the_cases_set_features_that_are_active_and_others():
    made = [make(case, seed, features=True) for case in CASES for seed in range(5)]
    ops = [ops for one in made for _, by_site in one.steering.values() for ops in by_site.values()]
    assert {op.kind for some in ops for op in some} == {ADD, CLAMP, PATCH, ENCODE, SET}
    assert max(sum(op.kind == SET for op in some) for some in ops) > 4


def test_the_cases_add_relative_to_the_norm_among_other_operations():
    made = [make(case, seed, kinds=4) for case in CASES for seed in range(5)]
    ops = [ops for one in made for _, by_site in one.steering.values() for ops in by_site.values()]
    assert {op.kind for some in ops for op in some} == {ADD, CLAMP, PATCH, RELATIVE}
    assert any(one.scale != 1.0 and one.residual is not None for one in made)


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "amounts",
    [(2.0, None, 1.0), (None, 1.0, 2.0, None, 4.0, 1.0) * 3, (1.0,) * 10, (2.0, 1.0) * 5],
    ids=["few", "many apart", "many once", "many together"],
)
def test_the_cpu_tap_adds_to_a_requests_tokens_and_no_others(amounts, dtype, tokens, scale):
    rng = np.random.default_rng(tokens)
    size = Size(len(amounts), 4 * len(amounts), len(amounts) + 1)
    planner, bank = Planner(1), Bank(size, {Site(0, "post_block"): 0}, 4096, CPU)
    batch, changes = [], []
    for number, amount in enumerate(amounts):
        request = Tracked(f"r{number}", f"r{number}", tokens, planner.nothing, planner.nothing)
        row = exact(rng, 4096, 4, torch.float32)
        if amount is not None:
            ops = (SiteOps(0, "post_block", (Op(ADD, 0, amount),)),)
            program = SteeringProgram(4096, row.numpy().tobytes(), (digest(row.numpy().tobytes()),), ops, ops)
            request.steered = [SlotRange(0, tokens, bank.acquire(program, tokens))]
        batch.append(Scheduled(request, number * tokens, 0, tokens))
        changes.append(row.double().expand(tokens, -1) * ((amount or 0.0) / scale))
    total = len(amounts) * tokens
    hidden = exact(rng, (total + 2, 4096), 30, dtype)
    expected = hidden.double()
    expected[:total] += torch.cat(changes)
    Step(planner.plan(batch), None, bank).tap(0, hidden, None, scale)
    assert torch.equal(hidden, expected.to(dtype))


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("chains", [(64,), (64, 3, 1), (64, *(2,) * 30, 5)], ids=["one", "few", "long beside many"])
def test_long_chains_of_clamps_are_done_in_order_on_every_token(chains, tokens):
    plan, bank, programs, hidden = chained(48, tokens, chains)
    expected = hidden.double().view(len(chains), tokens, -1).clone()
    for own, program in zip(expected, programs, strict=True):
        for row in torch.from_numpy(program.array().copy()).double():
            projection = own @ row
            own.addr_(projection.clamp(-0.5, 0.5) - projection, row)
    Step(plan, None, bank).tap(0, hidden, None)
    assert torch.allclose(hidden.double(), expected.view(hidden.shape), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [128, 512])
def test_clamps_cost_about_their_arithmetic(tokens):
    tap, arithmetic = clamp_seconds(tokens, (64,))
    assert tap < 6 * arithmetic


def test_the_cases_do_every_kind_of_thing():
    made = [make(case, seed) for case in CASES for seed in range(5)]
    plans = [one.plan for one in made]
    assert any(plan.ship_rows and plan.rows > plan.ship_rows and plan.steered for plan in plans)
    ops = [ops for one in made for _, by_site in one.steering.values() for ops in by_site.values()]
    assert {op.kind for some in ops for op in some} == {ADD, CLAMP, PATCH}
    assert max(len(some) for some in ops) > 3
    assert any(len(block.runs) >= 8 for plan in plans for block in plan.blocks)


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.long)])
def test_the_triton_kernel_equals_the_reference(seeds):
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(KIT / "tap_cases.py"), str(seeds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kernel", "cases", str(seeds * len(CASES))]


@pytest.mark.long
def test_the_gpu_benchmark_checks_graphs_whose_plans_change():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "engine_ext"))}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_kernels.py"), "--smoke"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "6 cases equal to float64, 12 replays with changing plans right; 8 cases with gates" in done.stdout


@pytest.mark.long
def test_the_gpu_benchmark_checks_the_rows_of_a_compiled_step():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "engine_ext"))}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_decode.py"), "--smoke"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("| 4 | ")
