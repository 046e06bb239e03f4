"""The processor time that capflow takes in a step, by the thread that spends it.

    OMP_NUM_THREADS=1 PYTHONPATH=.:engine_ext:consumers python benchmarks/own_share.py [--steps N] [--rounds N]

A tiny model decodes in an engine of this process, so that capflow's part is not lost beside the model's. Every method
that capflow adds to vLLM's scheduler, worker and runner is timed on its way in and out, and so is the method of vLLM
below it. What passes between is charged to the one that is running, in processor time of the thread
(`time.thread_time_ns`). So neither the model nor other processes are counted. The time that the clock itself takes is
measured and subtracted. Other threads are read by their own clocks, for each step and for each row.

* `scheduler`, `worker`: capflow's code in vLLM's step, on the step's thread.
* `taps`: copying and steering rows on the CPU, also on that thread: the arithmetic. A GPU does this in its graph.
* `sender`, `link`: the worker's threads that make frames and send them.

* `own clock`: the same two by the clocks that the engine has itself (`capflow_engine.stepclock`), in batches before the
  first method is wrapped. The meter's calls find cold caches and cost up to 5 µs each instead of the one that is
  subtracted; the clocks read the time ten times in a step, and do not see what lies between two of their parts.

Budgets, of `scheduler` and `worker` together, of a step with 256 requests: 60 µs when nothing is asked for; 400 µs for
a capture of 36 sites of each; 400 µs for 256 configurations of steering. `changing` is a batch in which a tenth of the
requests end in each step; it has no budget.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from capflow.system.cpu import thread_times_ns

ROOT = Path(__file__).parents[1]
LAYERS, WIDTH, REQUESTS = 36, 64, 256
VLLM, CLOCK = "vllm", "clock"
PARTS = ("scheduler", "worker", "taps")
BUDGETS = {"idle": 60, "capture": 400, "steering": 400, "changing, capture": None}
"""The microseconds of each mode; None for one without a budget."""


class Meter:
    """Charges the time of the thread that made it to whatever runs.

    spent: the nanoseconds of each label since `take`.
    """

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._stack = [VLLM]
        self._since = time.thread_time_ns()
        # What a call of a metered function costs its caller, and what it costs itself.
        self._outer = self._inner = 0.0
        self._calls: Counter[tuple[str, str]] = Counter()
        self._calibrate()

    def wrap(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        """Return a function whose own time is charged to a label."""

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            now, above = time.thread_time_ns(), self._stack[-1]
            self.spent[above] += now - self._since
            self._calls[above, label] += 1
            self._stack.append(label)
            self._since = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[label] += time.thread_time_ns() - self._since
                self._stack.pop()
                self._since = time.thread_time_ns()

        return metered

    def take(self) -> dict[str, float]:
        """Return the nanoseconds of each label without those of the meter, and begin anew."""
        now = time.thread_time_ns()
        self.spent[self._stack[-1]] += now - self._since
        spent = {label: float(value) for label, value in self.spent.items()}
        for (above, label), calls in self._calls.items():
            spent[above] -= calls * self._outer
            spent[label] = spent.get(label, 0.0) - calls * self._inner
        self.spent.clear()
        self._calls.clear()
        self._since = time.thread_time_ns()
        return spent

    def _calibrate(self, calls: int = 2000, rounds: int = 15) -> None:
        empty = self.wrap(lambda: None, "inner")

        def call() -> None:
            for _ in range(calls):
                empty()

        costs = []
        for _ in range(rounds):
            self.take()
            call()
            spent = self.take()
            costs.append((spent[VLLM] / calls, spent["inner"] / calls))
        self._outer, self._inner = (statistics.median(each) for each in zip(*costs, strict=True))


def meter_engine(meter: Meter, llm: Any) -> None:
    """Meter the methods that capflow adds to vLLM's classes, and vLLM's own below them."""
    from capflow_engine.taps.step import Step

    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    kinds = {
        "scheduler": (type(core.scheduler), type(core.scheduler.kv_cache_manager)),
        "worker": (type(worker), type(worker.model_runner)),
    }
    wrapped: set[tuple[type, str]] = set()
    for label, kind in ((label, kind) for label, each in kinds.items() for kind in each):
        ours = [base for base in kind.__mro__ if base.__module__.startswith("capflow_engine")]
        names = {name for base in ours for name, value in vars(base).items() if callable(value)} - {"__init__"}
        for base in kind.__mro__:
            for name in names & vars(base).keys():
                if (base, name) not in wrapped and callable(vars(base)[name]):
                    wrapped.add((base, name))
                    setattr(base, name, meter.wrap(vars(base)[name], label if base in ours else VLLM))
    Step.tap = meter.wrap(Step.tap, "taps")  # type: ignore[method-assign]


def be_hub(address: str) -> None:
    """Run a hub whose consumer takes what requests ask for and drops it."""
    from capflow.cli.hub.running import rare_collections
    from capflow.hub.hub import Hub
    from capflow.plugins.configure import ConfiguredConsumer
    from capflow.plugins.consumer import Consumer

    class Null(Consumer):
        name = "null"

        def spec(self) -> None:
            return None

        def on_frame(self, frame: Any) -> None:
            del frame

    with rare_collections(), Hub(address, [ConfiguredConsumer.of(Null(None))]):
        print("ready", flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def hub(address: str) -> Iterator[None]:
    """Run a hub in another process."""
    command = [sys.executable, __file__, "--hub", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


class Turn(NamedTuple):
    """What one batch took.

    parts: the median nanoseconds of a step, by part; `VLLM` is the rest of the step, `CLOCK` is by the engine's clocks.
    threads: the mean nanoseconds of a step, by thread.
    """

    parts: dict[str, float]
    threads: dict[str, float]


def options_of(mode: str, number: int) -> dict[str, Any] | None:
    """Return what request `number` asks for."""
    import numpy as np

    from capflow_engine.request.options import KEY, RequestOptions

    if mode == "idle":
        return None
    if mode == "steering":
        rng = np.random.default_rng(number)
        rows = {layer: (rng.normal(size=WIDTH) * 0.01).astype(np.float32) for layer in range(LAYERS)}
        return {KEY: RequestOptions.make(steering_vectors={"post_block": rows}).pack()}
    return {KEY: RequestOptions.make(capture={"hooks": {"post_block": "all"}}).pack()}


def clocked(llm: Any, mode: str, number: int, steps: int) -> float:
    """Run one batch; return the median nanoseconds of a step by the engine's own clocks."""
    from capflow_engine import stepclock

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    each, stepclock.STEPS_EACH = stepclock.STEPS_EACH, 1
    clocks = (stepclock.SCHEDULER, worker.capflow.clock)
    readings = [sum(clock.time.ns for clock in clocks) for _ in stepped(llm, mode, number, steps)]
    stepclock.STEPS_EACH = each
    return statistics.median(after - before for before, after in itertools.pairwise(readings[1 : steps + 1]))


def turn(meter: Meter, llm: Any, mode: str, number: int, steps: int) -> Turn:
    """Run one batch and return what the steps took in which all of its requests decode."""
    taken: list[dict[str, float]] = []
    clocks: list[dict[str, int]] = []
    for _ in stepped(llm, mode, number, steps, meter.take):
        taken.append(meter.take())
        clocks.append(thread_times_ns())
    middle, each = taken[2:steps], slice(1, steps)
    first, last = clocks[each][0], clocks[each][-1]
    threads = {name: (spent - first.get(name, 0)) / (len(clocks[each]) - 1) for name, spent in last.items()}
    parts = {part: statistics.median(step.get(part, 0.0) for step in middle) for part in (*PARTS, VLLM)}
    return Turn(parts, threads)


def stepped(llm: Any, mode: str, number: int, steps: int, before: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Run one batch; yield after each of its steps.

    before: called before each step.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    changing = mode.startswith("changing")
    for n in range(REQUESTS):
        # A batch that changes: in each step one request ends, and another one takes its place.
        length = steps + 2 if not changing else 2 + n % (steps + 1)
        params = SamplingParams(
            max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=options_of(mode, n)
        )
        engine.add_request(f"{mode}-{number}-{n}", {"prompt_token_ids": [2, 5 + n % 200, 7]}, params)
    while engine.has_unfinished_requests():
        before()
        engine.step()
        yield


def measure(steps: int, rounds: int) -> dict[str, list[Turn]]:
    """Return the turns of each mode."""
    sys.path.insert(0, str(ROOT))
    from tests.kit.engines import engine, save_tiny

    turns: dict[str, list[Turn]] = {mode: [] for mode in BUDGETS}
    with tempfile.TemporaryDirectory(prefix="capflow-bench-") as work:
        os.environ["CAPFLOW_HUB"] = address = f"ipc://{work}/hub"
        model = save_tiny(Path(work) / "model", num_hidden_layers=LAYERS, hidden_size=WIDTH)
        batch = {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 4 * REQUESTS}
        with hub(address), engine(model, kv_cache_memory_bytes=512 << 20, **batch) as llm:
            clocks = {mode: [clocked(llm, mode, one, steps) for one in range(-1 - rounds, 0)][1:] for mode in BUDGETS}
            meter = Meter()
            meter_engine(meter, llm)
            for one, (mode, results) in itertools.product(range(-1, rounds), turns.items()):
                result = turn(meter, llm, mode, one, steps)
                if one >= 0:
                    result.parts[CLOCK] = clocks[mode][one]
                    results.append(result)
    return turns


def median_us(values: Iterable[float]) -> float:
    """Return the median of nanoseconds, in microseconds."""
    return statistics.median(values) / 1000


def report(turns: dict[str, list[Turn]]) -> list[str]:
    """Return the table's lines."""
    lines = [
        "| 256 requests | scheduler µs | worker µs | both | own clock | budget | taps | sender | link | step ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, each in turns.items():
        parts = {part: median_us(one.parts[part] for one in each) for part in (*PARTS, VLLM, CLOCK)}
        sender, link = (median_us(one.threads.get(name, 0.0) for one in each) for name in ("sender", "worker-link"))
        both = own_us(each)
        cells = (*(parts[part] for part in ("scheduler", "worker")), both, parts[CLOCK], BUDGETS[mode])
        cells += (parts["taps"], sender, link)
        shown = " | ".join("" if cell is None else f"{cell:.0f}" for cell in cells)
        lines.append(f"| {mode} | {shown} | {parts[VLLM] / 1000:.1f} |")
    return lines


def own_us(turns: Sequence[Turn]) -> float:
    """Return the microseconds of capflow's code on the thread of the steps, without the arithmetic of taps."""
    return median_us(turn.parts["scheduler"] + turn.parts["worker"] for turn in turns)


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description="The processor time that capflow takes in a step.")
    parser.add_argument("--hub", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=24, help="decoding steps of a turn (default: 24)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mode (default: 5)")
    parser.add_argument("--within", type=float, help="exit with 1 if a mode takes more than so many budgets")
    args = parser.parse_args()
    if args.hub:
        be_hub(args.hub)
        return 0
    turns = measure(args.steps, args.rounds)
    print("\n".join(report(turns)))
    over = [mode for mode, budget in BUDGETS.items() if budget and own_us(turns[mode]) > (args.within or inf) * budget]
    if over:
        print(f"own_share: got more than {args.within:g} budgets of processor time: {', '.join(over)}", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
