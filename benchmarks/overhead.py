"""The cost of capflow: plain vLLM against capflow armed but idle, and against capturing everything to disk.

    make bench          (or: python benchmarks/overhead.py [--rounds N] [--model demo] [--json FILE])

Two engines live in processes of their own for the whole run, one plain, one with capflow. Their turns interleave:
plain, idle, capture, capture, idle, plain, … Each follows one of the same kind that does not count. A ratio is the
median of the ratios of turns of the same half round, so a minute in which the machine is slow affects both.

Each turn runs the same prompts, greedily, with `ignore_eos` and fixed lengths. `CAPFLOW_BENCH_PROMPTS` (48) and
`CAPFLOW_BENCH_LENGTHS` (128,32: tokens of a prompt and of an answer) make a turn shorter on a slow machine. The clock
of a capturing turn stops when every row is on disk, synced and published. Then every row is read back, counted and
verified, off the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Given, Result = TypeVar("Given"), TypeVar("Result")

PROMPTS = int(os.environ.get("CAPFLOW_BENCH_PROMPTS", "48"))
PROMPT_TOKENS, TOKENS = map(int, os.environ.get("CAPFLOW_BENCH_LENGTHS", "128,32").split(","))
GOALS = {"idle": 0.98, "capture": 0.85}


def child(kind: str, model: str, root: str, sites: list[str], *, eager: bool, dtype: str) -> None:
    """Be an engine: read one mode a line, run the prompts, answer with a line of JSON."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import numpy as np

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": 512,
        "max_num_seqs": max(64, PROMPTS),
        "enforce_eager": eager,
        "enable_prefix_caching": False,
    }
    if kind == "plain":
        from vllm import LLM, SamplingParams

        llm = LLM(**arguments)
    else:
        from vllm import SamplingParams

        import capflow

        if kind == "capflow":
            arguments["consumers"] = [f"filesystem:root={root},capture=requests"]
        else:  # a policy, with the hub that the environment names, if it is there
            arguments |= {"policy": kind, "spool_dir": root if kind == "spill" else None}
        llm = capflow.LLM(**arguments | ({"sites": sites} if sites else {}))
    rng = np.random.default_rng(0)
    prompts = [
        {"prompt_token_ids": [2, *rng.integers(1000, 200_000, PROMPT_TOKENS - 1).tolist()]} for _ in range(PROMPTS)
    ]
    fixed: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    out.write(json.dumps({"ready": True}) + "\n")
    params: Any
    for turn, line in enumerate(sys.stdin):
        if line.strip() == "logprobs":
            first = SamplingParams(**fixed | {"max_tokens": 1, "logprobs": 20})
            outputs = llm.generate(prompts, first, use_tqdm=False)
            logprobs = [{str(t): p.logprob for t, p in o.outputs[0].logprobs[0].items()} for o in outputs]
            out.write(json.dumps({"logprobs": logprobs}) + "\n")
            continue
        if line.startswith("steer"):
            params = steered(int(line.split()[1]), llm.capflow_model, fixed)
        elif line.startswith("capture"):
            spec = {"hooks": dict.fromkeys(line.split()[1:] or ["post_block"], "all"), "positions": "all"}
            params = [capflow.sampling_params(id=f"t{turn}-{n}", capture=spec, **fixed) for n in range(PROMPTS)]
        else:
            params = SamplingParams(**fixed)
        begin, cpu_begin = time.perf_counter(), cpu_seconds()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - begin, cpu_seconds() - cpu_begin
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        statuses = [r.status for o in outputs for r in getattr(o, "capture_results", {}).values()]
        times = {"seconds": seconds, "cpu_seconds": cpu}
        out.write(json.dumps(times | {"tokens": tokens, "statuses": statuses, "turn": turn}) + "\n")
    if kind != "plain":
        llm.close()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has now, such as its hub."""
    import psutil

    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in children)


def run_round(
    turns: Mapping[str, Callable[[Given], Result]], given: Given, number: int, seconds: Mapping[str, list[float]]
) -> dict[str, Result]:
    """Run each contender once, in an order that changes with the round; return their results.

    seconds: the CPU times of each, to which this round's are added, unless it is round 0, which warms up.
    """
    results = {}
    for kind in turns if number % 2 else reversed(turns):
        begin = cpu_seconds()
        results[kind] = turns[kind](given)
        took = cpu_seconds() - begin
        print(f"{kind}: {took:.1f} s", file=sys.stderr, flush=True)
        if number:
            seconds[kind].append(took)
    return results


def steered(configurations: int, model: Any, fixed: dict[str, Any]) -> list[Any]:
    """Return parameters that add a vector at every layer and position.

    Request n has configuration n % configurations.
    """
    import numpy as np

    import capflow

    rng = np.random.default_rng(1)
    many = []
    for _ in range(configurations):
        rows = rng.standard_normal((model.num_layers, model.hidden_size)).astype(np.float32) * 0.01
        packed = {"dtype": "float32", "shape": list(rows.shape), "layer_indices": list(range(len(rows)))}
        vectors = {"post_block": packed | {"data": rows.tobytes()}}
        many.append(capflow.sampling_params(steering_vectors=vectors, **fixed))
    return [many[n % configurations] for n in range(PROMPTS)]


class Engine:
    """An engine in a child process.

    sites: patterns of the sites that carry taps, other than those of `capflow.LLM`.
    """

    def __init__(
        self, kind: str, model: str, root: Path, sites: tuple[str, ...] = (), *, eager: bool, dtype: str
    ) -> None:
        command = [sys.executable, __file__, "--child", kind, "--model", model, "--root", str(root), "--dtype", dtype]
        command += [f"--site={site}" for site in sites]
        self._rows = root if kind == "capflow" else None
        self.log = (root.parent / f"{root.name}-{kind}.log").open("w")
        self.process = subprocess.Popen(
            command + ["--eager"] * eager, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the child's next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"overhead: an engine died; see {self.log.name}")
        return dict(json.loads(line))

    def turn(self, mode: str) -> dict[str, Any]:
        """Run the prompts twice; return the answer of the second time, whose rows are left in the root.

        A turn that follows one of another engine takes longer, so the first does not count.
        """
        self._ask(mode)
        self.forget()
        return self._ask(mode)

    def forget(self) -> None:
        """Remove the rows of its turns."""
        for directory in self._rows.glob("[!.]*") if self._rows else ():  # the consumer holds the root itself
            shutil.rmtree(directory)

    def _ask(self, mode: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(mode + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End the child."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)


def verify(root: Path, turn: int) -> tuple[int, int]:
    """Read back the captures of a turn and verify every file; return the number of rows and of bytes."""
    import capflow

    data = capflow.open(root)
    rows = size = 0
    for n in range(PROMPTS):
        request = data[f"t{turn}-{n}"]
        request.verify()
        for site in request.sites:
            values = request[site].rows
            assert values.shape[0] == PROMPT_TOKENS + TOKENS - 1, (turn, n, site, values.shape)
            rows += values.shape[0]
            size += values.nbytes
    return rows, size


def moved(engines: dict[str, Engine]) -> float:
    """Return the largest difference between the engines' logprobs of the first generated token, over the top 20."""
    plain, tapped = (engines[kind].turn("logprobs")["logprobs"] for kind in ("plain", "capflow"))
    return max(abs(p[t] - q[t]) for p, q in zip(plain, tapped, strict=True) for t in p.keys() & q.keys())


def ratio_of(plain: list[float], mode: list[float]) -> tuple[float, str]:
    """Return the speed of a mode relative to plain: the median over pairs of turns, and the quartiles."""
    ratios = [p / m for p, m in zip(plain, mode, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return middle, f"{low:.3f}-{high:.3f}"


def report(
    model: str,
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    tokens: dict[str, list[list[int]]],
    captured: tuple[int, int],
    largest: float,
) -> None:
    """Print the results."""
    median = {mode: statistics.median(values) for mode, values in seconds.items()}
    generated = PROMPTS * TOKENS
    print(
        f"\n{PROMPTS} prompts x {PROMPT_TOKENS} tokens + {TOKENS} generated, {model.rsplit('/', 1)[-1]}, "
        f"{'eager' if args.eager else 'torch.compile on'}, {platform.processor() or platform.machine()}, "
        f"{2 * args.rounds} turns each, interleaved"
    )
    print("| mode | generated tok/s (median) | of plain | quartiles | goal | spread |")
    print("|---|---|---|---|---|---|")
    for mode in ("plain", "idle", "capture"):
        ratio, quartiles = ratio_of(seconds["plain"], seconds[mode])
        spread = f"{generated / max(seconds[mode]):.0f}-{generated / min(seconds[mode]):.0f}"
        goal = f"{GOALS[mode]:.2f}" if mode in GOALS else ""
        print(f"| {mode} | {generated / median[mode]:.0f} | {ratio:.3f} | {quartiles} | {goal} | {spread} |")
    rows, size = captured
    print(
        f"\ncapture: {rows} rows, {size / 1e6:.0f} MB a turn, {size / median['capture'] / 1e6:.0f} MB/s, "
        "each file verified"
    )
    same = {m: sum(a == b for a, b in zip(tokens[m], tokens["plain"], strict=True)) for m in ("idle", "capture")}
    print(
        f"answers equal to plain vLLM's: idle {same['idle']}/{PROMPTS}, capture {same['capture']}/{PROMPTS}; "
        f"idle equal to capture: "
        f"{sum(a == b for a, b in zip(tokens['idle'], tokens['capture'], strict=True))}/{PROMPTS}"
    )
    print(f"largest difference between logprobs of the first token, top 20: {largest:.4f}")


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child")
    parser.add_argument("--root")
    parser.add_argument("--site", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="auto", help="float32 is faster on a CPU without AVX-512")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.model, args.root, args.site, eager=args.eager, dtype=args.dtype)
        return 0
    model = args.model
    if model == "demo":
        from capflow_engine.jobs.demo import prepare

        model = str(prepare())
    work = Path(tempfile.mkdtemp(prefix="capflow-bench-"))
    root = work / "rows"
    root.mkdir()
    engines = {kind: Engine(kind, model, root, eager=args.eager, dtype=args.dtype) for kind in ("plain", "capflow")}
    order = ["plain", "idle", "capture", "capture", "idle", "plain"]
    for mode in ("plain", "idle", "capture"):  # warm up
        engines["plain" if mode == "plain" else "capflow"].turn(mode)
    seconds: dict[str, list[float]] = {mode: [] for mode in order}
    tokens: dict[str, list[list[int]]] = {}
    captured = (0, 0)
    for _ in range(args.rounds):
        for mode in order:
            answer = engines["plain" if mode == "plain" else "capflow"].turn(mode)
            seconds[mode].append(answer["seconds"])
            print(f"{mode}: {answer['seconds']:.1f} s", file=sys.stderr, flush=True)
            tokens[mode] = answer["tokens"]
            assert len(answer["tokens"]) == PROMPTS
            assert all(len(t) == TOKENS for t in answer["tokens"])
            if mode == "capture":
                assert answer["statuses"] == ["ok"] * PROMPTS, answer["statuses"]
                captured = verify(root, answer["turn"])
            engines["capflow"].forget()
    largest = moved(engines)
    for engine in engines.values():
        engine.close()
    report(model, args, seconds, tokens, captured, largest)
    if args.json is not None:
        args.json.write_text(json.dumps({"seconds": seconds, "rows": captured[0], "bytes": captured[1]}))
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
