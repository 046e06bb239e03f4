"""How long capflow takes to start: the help, a hub, and what it adds to the start of vLLM.

    PYTHONPATH=.:consumers:dashboard:engine_ext python3 benchmarks/start.py [help] [hub] [engine]

Each program starts in a process of its own, and they take turns. A turn lasts until the program is ready: the help has
ended; the hub has said where it listens; the engine has been made. Wall time, and the CPU time of the process and of
its children until then. `adds` is the median of the differences to the bare program of the same round: `python -c pass`
for the help and the hub, and vLLM alone for the engine.

Bytecode is cached, as pip does. The engines share a cache of compiled graphs, which round 0 fills; it is shown by
itself as the first start.

--tree: another checkout, whose capflow takes its turns too; repeatable. The help and the hubs are measured in each.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".", "consumers", "dashboard", "engine_ext")
GOALS = {"help": "0.2 s", "hub": "0.5 s", "engine": "adds 1 s"}
CONSUMERS = ("log", "filesystem:root={0}/rows", "duckdb:path={0}/scores.duckdb,probes={1}/examples/code.safetensors")
ENGINE = """
import json, os, sys
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if "consumers" in arguments:
        import capflow
        LLM = capflow.LLM
    else:
        from vllm import LLM
    llm = LLM(**arguments)
    print("ready", flush=True)
    sys.stdin.read()
"""


class Took(NamedTuple):
    """Seconds of a start, by the clock and by the processors."""

    wall: float
    cpu: float


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a program that imports capflow from a checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": os.pathsep.join(str(tree / folder) for folder in FOLDERS)}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of its children, and of theirs, ended ones included."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True)))


def start(command: Sequence[str], tree: Path, ready: str, *, errors: bool = False) -> Took:
    """Start a program, wait until it writes a line with a word, and end it.

    ready: the word; empty for the program's end.
    errors: whether the word comes on standard error.
    """
    streams = {"stderr" if errors else "stdout": subprocess.PIPE}
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment(tree), text=True, **streams)
    with process:
        lines = process.stderr if errors else process.stdout
        if not ready:
            before = os.times()
            lines.read()
            process.wait()
            wall, after = time.perf_counter() - begun, os.times()
            return Took(wall, sum(after[2:4]) - sum(before[2:4]))
        if not any(ready in line for line in lines):
            sys.exit(f"start: {command} ended before it was ready")
        took = Took(time.perf_counter() - begun, cpu_seconds(process.pid))
        if errors:
            process.send_signal(signal.SIGTERM)
        process.stdin.close()
        lines.read()
    return took


def helped(code: Sequence[str], tree: Path) -> Took:
    return start([sys.executable, *code], tree, "")


def hub(consumer: str, tree: Path) -> Took:
    """Start a hub with a consumer, in a new directory."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--consumer", consumer.format(directory, ROOT), "--address", f"ipc://{directory}/socket"]
        return start([sys.executable, "-m", "capflow", "run", *options], tree, "listening", errors=True)


def engine(arguments: Mapping[str, object], tree: Path) -> Took:
    """Start an engine; with `consumers`, capflow's, whose files go to a new directory."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "engine.py"
        script.write_text(ENGINE, encoding="utf-8")
        if "consumers" in arguments:
            arguments = {**arguments, "consumers": [f"filesystem:root={directory}/rows"]}
        return start([sys.executable, str(script), json.dumps(arguments)], tree, "ready")


def measure(contenders: Mapping[str, Callable[[], Took]], rounds: int) -> None:
    """Run the contenders in turns, and print a table; the first one is the bare program."""
    took: dict[str, list[Took]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in contenders if number % 2 else reversed(contenders):
            took[name].append(contenders[name]())
            print(f"{name}: {took[name][-1].wall:.2f} s, CPU {took[name][-1].cpu:.2f} s", file=sys.stderr, flush=True)
    bare = next(iter(contenders))
    print("| program | first start, s | s | CPU s | adds, s | adds, CPU s |\n|---|---|---|---|---|---|")
    for name, (first, *others) in took.items():
        wall, cpu = (statistics.median(column) for column in zip(*others, strict=True))
        pairs = [(each.wall - b.wall, each.cpu - b.cpu) for each, b in zip(others, took[bare][1:], strict=True)]
        adds = "|".join(f" {statistics.median(column):.2f} " for column in zip(*pairs, strict=True))
        print(f"| {name} | {first.wall:.2f} | {wall:.3f} | {cpu:.3f} |{' | ' if name == bare else adds}|")


def main() -> int:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*GOALS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of engines; three times as many of the others")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sites", action="append", default=[], metavar="HOOK:LAYER")
    parser.add_argument("--tree", action="append", type=Path, default=[], metavar="DIRECTORY")
    args = parser.parse_args()
    parts = args.parts or list(GOALS)
    trees = {"": ROOT} | {f", {tree}": tree.resolve() for tree in args.tree}
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    none = {"python -c pass": functools.partial(helped, ["-c", "pass"], ROOT)}
    if "help" in parts:
        print(f"\nhelp, goal {GOALS['help']}")
        programs = none | {"python -c 'import click'": functools.partial(helped, ["-c", "import click"], ROOT)}
        for name, tree in trees.items():
            for command in ("--help", "run --help", "serve --help"):
                code = ["-m", "capflow", *command.split()]
                programs[f"capflow {command}{name}"] = functools.partial(helped, code, tree)
        measure(programs, 3 * args.rounds)
    if "hub" in parts:
        print(f"\nhub, goal {GOALS['hub']}")
        hubs = {
            f"{consumer.partition(':')[0]}{name}": functools.partial(hub, consumer, tree)
            for consumer in CONSUMERS
            for name, tree in trees.items()
        }
        measure(none | hubs, 3 * args.rounds)
    if "engine" in parts:
        print(f"\nengine, goal: {GOALS['engine']}")
        model = args.model
        if model == "demo":
            from capflow_engine.jobs.demo import prepare

            model = str(prepare())
        os.environ["VLLM_CACHE_ROOT"] = cache = tempfile.mkdtemp(prefix="capflow-start-")
        arguments: dict[str, object] = {"model": model, "dtype": args.dtype, "max_model_len": 512}
        arguments["enforce_eager"] = args.eager
        tapped: dict[str, object] = {"consumers": [], **({"sites": args.sites} if args.sites else {})}
        engines = {"vLLM": functools.partial(engine, arguments, ROOT)}
        for name, tree in trees.items():
            engines[f"capflow{name}"] = functools.partial(engine, arguments | tapped, tree)
        measure(engines, args.rounds)
        shutil.rmtree(cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())
