"""The tap's kernel on a GPU: correct against float64, then timed inside a CUDA graph. Prints Markdown tables.

    PYTHONPATH=.:engine_ext:tests python3 benchmarks/gpu_kernels.py [--out FILE]

Needs torch, triton, numpy, msgspec, ml_dtypes, xxhash and pluggy; not vLLM. Predicted: an idle tap costs one launch in the
graph, about 1.3 µs; a capturing one the time to read the stream twice and write it once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
import test_tap
import torch

from capflow.positions import Positions
from capflow_engine.kernel import launch
from capflow_engine.plan import Plan, Planner, Scheduled, Tracked
from capflow_engine.tables import Tables

SHAPES = [(36, 2560, 8), (36, 2560, 64), (36, 2560, 256), (36, 4096, 256), (36, 4096, 2048), (18, 640, 64)]
REPLAYS = 200
ROUNDS = 7


def check_cases() -> int:
    """Hold the kernel to the reference on every case of the tests, on the GPU; return how many there were."""
    done = 0
    for case in test_tap.CASES:
        for seed in range(20):
            plan, hidden, residual, bank = test_tap.make(case, seed)
            rows_expected, after_expected = test_tap.reference(plan, case[0], hidden, residual, bank, truncate=False)
            rows = torch.full((plan.rows + 2, hidden.shape[1]), test_tap.POISON, dtype=hidden.dtype, device="cuda")
            other = None if residual is None else residual.cuda()
            for site in range(case[0]):
                mine = hidden.cuda()
                test_tap.run_kernel(plan, site, mine, other, rows, bank.cuda())
                assert torch.equal(mine.cpu(), after_expected[site]), (case, seed, site)
            assert torch.equal(rows[: plan.rows].cpu(), rows_expected), (case, seed)
            assert (rows[plan.rows :] == test_tap.POISON).all()
            done += 1
    return done


def plan_of(kind: str, sites: int, tokens: int) -> Plan:
    """Return the plan of a decode step of `tokens` requests: idle, capturing everything, or steered at one site."""
    planner = Planner(sites)
    want = dict.fromkeys(range(sites), Positions.ALL) if kind == "capture" else {}
    batch = []
    for number in range(tokens):
        request = Tracked(str(number), str(number), 1, planner.program(want), planner.nothing)
        if kind == "steer":
            request.decode_steer = dict.fromkeys(range(sites), number % 64)
        batch.append(Scheduled(request, number, 5, 1))
    return planner.plan(batch)


def measure(sites: int, width: int, tokens: int) -> dict[str, float]:
    """Return the microseconds that one tap adds to a graph, by kind, and of a bare copy of the same rows."""
    hidden = [torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(sites)]
    residual = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    tables = Tables(
        sites=sites, tokens=tokens, rows=sites * tokens, bank_rows=64, hidden=width, dtype=torch.bfloat16,
        device=torch.device("cuda"), resident=True,
    )  # fmt: skip
    here = [torch.tensor([s], dtype=torch.int32, device="cuda") for s in range(sites)]
    tensors = list(tables.device_tensors().values())

    def taps() -> None:
        for site in range(sites):
            launch(hidden[site], residual, here[site], *tensors)

    def copies() -> None:
        for site in range(sites):
            torch.add(hidden[site], residual, out=tables.staging[site * tokens : (site + 1) * tokens])

    graphs = {}
    for name, body in (("taps", taps), ("copies", copies)):
        body()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            body()
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):  # interleaved
        for kind in ("idle", "capture", "steer"):
            tables.load(plan_of(kind, sites, tokens), tokens)
            times.setdefault(kind, []).append(_replay(graphs["taps"]) / sites)
        times.setdefault("bare add", []).append(_replay(graphs["copies"]) / sites)
    return {kind: statistics.median(values) for kind, values in times.items()}


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of one replay."""
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / REPLAYS


def plan_cost() -> float:
    """Return the milliseconds that planning takes for 256 requests at 36 sites, half of them with specs of their own."""
    import time

    planner = Planner(36)
    rng = np.random.default_rng(0)
    programs = [planner.program({int(s): Positions.ALL for s in rng.integers(0, 36, 6)}) for _ in range(8)]
    requests = [Tracked(str(n), str(n), 1, programs[n % 8], planner.nothing) for n in range(256)]
    times = []
    for step in range(200):
        batch = [Scheduled(r, n, 5 + step, 1) for n, r in enumerate(requests)]
        begin = time.perf_counter()
        planner.plan(batch)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1000


def main() -> None:
    """Check, measure, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels: no GPU here; the kernel's interpreter tests are in tests/test_tap.py")
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {check_cases()} cases equal to float64.", ""]
    lines += [
        "| sites | width | tokens | idle µs | capture µs | steer µs | bare add µs |",
        "|---|---|---|---|---|---|---|",
    ]
    for sites, width, tokens in SHAPES:
        t = measure(sites, width, tokens)
        lines.append(
            f"| {sites} | {width} | {tokens} | {t['idle']:.2f} | {t['capture']:.2f} | {t['steer']:.2f} | {t['bare add']:.2f} |"
        )
    lines += ["", f"Planning 256 requests of 8 programs at 36 sites: {plan_cost():.3f} ms."]
    text = "\n".join(lines)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
