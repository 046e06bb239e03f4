"""The cost of gates in the graph: requests with a gate against the same requests with static steering.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/gates.py [--model demo] [--batches 1,8,64,256] [--rounds N]

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/gates.py --taps

The second command times what capflow does in a step, without an engine: the plan, 18 sites of width 640, latches and
events.

One engine in this process runs all modes, turns interleaved. Each turn starts a batch of requests and times every step
in which all of them decode, by the CPU time of the process: that is the time on an idle machine with one thread, and
another process does not add to it. The machine's clock drifts, so each turn is compared with two static turns of its
round, one at its begin and one at its end. A ratio is that of the median step of the turn and the mean of theirs; of
all rounds, the median is shown. `again` is the ratio of the two: what it differs from 1 is noise.

All gates are open, which is the dear case: at a site where all gates are closed, nothing is added.

* `one`: a vector at one layer; gated by a probe at the layer before it.
* `all`: a vector at every layer; gated by one probe at the first layer.

Predicted: a score is one product of the stream with a probe, and a gated addition multiplies its rows by one factor for
    each token. That is 20 to 40 µs for the probe, 5 to 10 µs for each gated site, and 30 to 60 µs for a latch, whatever
    the batch. A step of the demo model takes 100 ms and more on one core at a batch of 8. So 1.000 to 1.003 at one site
    and up to 1.005 at all sites. Goal: at most 1.01 for batches of 8 and more.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import numpy as np

from capflow.steering.program import ADD, SCORE_DOT, Op, ProgramGate, SiteOps, SteeringProgram, digest

GOAL, BATCH_MIN = 1.01, 8
HOOK = "post_block"
# The mode that measures the noise.
AGAIN = "again"
# The gate of each mode: its sharpness, and whether it is latched.
GATES = {"hard": (math.inf, False), "sigmoid": (1e-3, False), "latched": (math.inf, True)}


def program(layers: int, width: int, where: str, gate: str | None) -> SteeringProgram:
    """Return a program with a vector at one layer or at all, with a gate or without."""
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(layers + 1, width)) * 0.01).astype(np.float32)
    first = layers // 2 if where == "one" else 0
    steered = [first + 1] if where == "one" else list(range(layers))
    number = -1 if gate is None else 0
    ops: dict[int, list[Op]] = {}
    gates = []
    if gate is not None:
        sharpness, latched = GATES[gate]
        gates.append(ProgramGate("g", sharpness, latched, -1e6, first, HOOK))
        ops[first] = [Op(SCORE_DOT, layers, 1e6, gate=0)]
        if latched:
            steered = [layer for layer in steered if layer > first]
    for layer in steered:
        ops.setdefault(layer, []).append(Op(ADD, layer, gate=number))
    sites = tuple(SiteOps(layer, HOOK, tuple(each)) for layer, each in sorted(ops.items()))
    return SteeringProgram(
        width, rows.tobytes(), tuple(digest(row.data) for row in rows), sites, sites, (), tuple(gates)
    )


def turn(llm: Any, options: Any, batch: int, steps: int, number: int, name: str) -> list[float]:
    """Return the CPU seconds of each step in which the whole batch decodes.

    name: how the requests' ids begin.
    """
    from vllm import SamplingParams

    from capflow_engine.request.options import KEY

    rng = np.random.default_rng(number)
    engine = llm.llm_engine
    for n in range(batch):
        extra = None if options is None else {KEY: options.pack()}
        params = SamplingParams(
            max_tokens=steps + 2, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        prompt = {"prompt_token_ids": [2, *rng.integers(5, 290, 3).tolist()]}
        engine.add_request(f"{name}-{number}-{n}", prompt, params)
    times = []
    while engine.has_unfinished_requests():
        begin = time.process_time()
        engine.step()
        times.append(time.process_time() - begin)
    if len(times) != steps + 2:
        raise RuntimeError(f"the batch took {len(times)} steps, expected {steps + 2}; raise VLLM_CPU_KVCACHE_SPACE")
    return times[2:-1]  # without the prompts, and the step that ends the requests


def taps(batch: int, where: str, gate: str | None, rounds: int = 200) -> float:
    """Return the microseconds that a decode step costs in the worker's plan, its 18 taps, latches and events."""
    import torch

    from capflow.capture.site import Site
    from capflow_engine.steering.budget import Size
    from capflow_engine.taps.acting import SlotRange
    from capflow_engine.taps.bank import Bank
    from capflow_engine.taps.gates import Gating
    from capflow_engine.taps.plan import Planner, Scheduled
    from capflow_engine.taps.requests import Tracked
    from capflow_engine.taps.step import Step
    from capflow_engine.worker.gates.firing import Firing, GatedStep
    from capflow_engine.worker.gates.latches import Latches

    layers, width, cpu = 18, 640, torch.device("cpu")
    made = program(layers, width, where, gate)
    bank = Bank(Size(64, 512, 64), {Site(n, HOOK): n for n in range(layers)}, width, cpu)
    planner, latches, firing, requests = Planner(layers), Latches(cpu), Firing(), []
    for n in range(batch):
        request = Tracked(f"r{n}", f"r{n}", 4, planner.nothing, planner.nothing)
        request.steered = [SlotRange(0, 4, bank.acquire(made, 4))]
        request.gates, request.latched = made.gates, any(each.latched for each in made.gates)
        requests.append(request)
    hidden, residual = torch.randn(2, batch, width)
    times, ways = [], None
    with torch.inference_mode():
        for n in range(rounds):
            begin = time.process_time()
            plan = planner.plan([Scheduled(request, row, 4 + n, 1) for row, request in enumerate(requests)])
            carried = latches.begin(plan)
            gating = Gating(plan, batch, carried, None) if plan.gates else None
            step = Step(plan, None, bank, gating, ways)
            ways = step.ways
            for site in range(layers):
                step.tap(site, hidden, residual)
            if gating is not None:
                latches.end(plan, carried, gating.margins)
                before = None if carried is None else carried.numpy()
                firing.add(GatedStep(n, plan, gating.margins.numpy(), lambda: None, before, layers))
                list(firing.settle(n))
            times.append(time.process_time() - begin)
    return 1e6 * statistics.median(times)


def report_taps() -> int:
    """Print what a step costs in the worker, with and without gates."""
    import torch

    torch.set_num_threads(1)
    print("| batch | sites | static | hard | sigmoid | latched |")
    print("|---|---|---|---|---|---|")
    for batch in (1, 8, 64, 256):
        for where in ("one", "all"):
            costs = " | ".join(f"{taps(batch, where, gate):.0f} µs" for gate in (None, *GATES))
            print(f"| {batch} | {where} | {costs} |", flush=True)
    return 0


def tiny() -> str:
    """Return the directory of a random model."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.kit.engines import save_tiny

    return str(save_tiny(tempfile.mkdtemp(prefix="capflow-bench-")))


def modes_of(model: Any) -> dict[str, Any]:
    """Return what the requests of each mode ask for."""
    from capflow_engine.request.options import RequestOptions

    modes: dict[str, Any] = {"idle": None}
    for where in ("one", "all"):
        for mode, gate in (("static", None), *((gate, gate) for gate in GATES), (AGAIN, None)):
            made = program(model.num_layers, model.hidden_size, where, gate)
            modes[f"{where} {mode}"] = RequestOptions(program=made)
    return modes


def measure(llm: Any, modes: dict[str, Any], batch: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each mode's middle step, for each turn. The ids of requests begin with their mode."""
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    number = 0
    for one in range(-1, rounds):  # the first warms up
        for mode, options in modes.items() if one % 2 else reversed(modes.items()):
            number += 1
            seconds = turn(llm, options, batch, steps, number, mode)
            if one >= 0:
                times[mode].append(statistics.median(seconds))
    return times


def ratio(times: dict[str, list[float]], mode: str, *bases: str) -> float:
    """Return how much longer the steps of a mode take than those of other modes in the same rounds."""
    rounds = zip(times[mode], zip(*(times[base] for base in bases), strict=True), strict=True)
    return statistics.median(one / statistics.mean(others) for one, others in rounds)


def report(batch: int, times: dict[str, list[float]]) -> list[str]:
    """Return the table's lines for a batch."""
    lines = []
    for where in ("one", "all"):
        static, again = f"{where} static", f"{where} {AGAIN}"
        milliseconds = 1e3 * statistics.median(times[static])
        ratios = [ratio(times, f"{where} {gate}", static, again) for gate in GATES]
        ratios.append(ratio(times, again, static))
        goal = f"{GOAL:.2f}" if batch >= BATCH_MIN else ""
        cells = " | ".join(f"{each:.4f}" for each in (ratio(times, static, "idle"), *ratios))
        lines.append(f"| {batch} | {where} | {milliseconds:.2f} ms | {cells} | {goal} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo", help="demo, tiny, or a directory")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn at a batch of 8 or less")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--taps", action="store_true", help="time the worker's part alone; no engine")
    args = parser.parse_args(arguments)
    if args.taps:
        return report_taps()
    import capflow

    model = args.model
    if model == "demo":
        from capflow_engine.jobs.demo import prepare

        model = str(prepare())
    elif model == "tiny":
        model = tiny()
    batches = [int(batch) for batch in args.batches.split(",")]
    # None listens there: a hub that runs at the usual address would capture the requests.
    os.environ["CAPFLOW_HUB"] = f"ipc://{tempfile.gettempdir()}/capflow-bench-{os.getpid()}.sock"
    llm = capflow.LLM(
        model,
        dtype=args.dtype,
        max_model_len=64,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(1024, 4 * max(batches)),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    print("| batch | sites | static step | of idle | hard | sigmoid | latched | again | goal |")
    print("|---|---|---|---|---|---|---|---|---|")
    modes = modes_of(llm.capflow_model)
    for batch in batches:
        steps = max(4, min(args.steps, args.steps * 16 // batch))
        print("\n".join(report(batch, measure(llm, modes, batch, steps, args.rounds))), flush=True)
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
