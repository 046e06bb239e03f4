"""Runs seeds: `python -m tests.simulation --seeds 10000 --jobs 2`; one seed with its trace: `--seed N [--steps N]`."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.kit.revision import revision
from tests.simulation.mutations import MUTATIONS, undone
from tests.simulation.run import simulate

ROOT = Path(__file__).parents[2]


def main():
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once (default: one a core)")
    parser.add_argument("--until-failure", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--seed", type=int, help="run this one alone and print its trace")
    parser.add_argument("--steps", type=int, help="of one seed, stop after so many")
    parser.add_argument("--mutate", choices=sorted(MUTATIONS), help="undo this mend")
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if sys.flags.hash_randomization:  # the order of sets is part of a run
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, cwd=ROOT, check=False).returncode
    with contextlib.nullcontext() if arguments.mutate is None else undone(arguments.mutate):
        if arguments.seed is not None:
            return replay(arguments.seed, arguments.steps)
        if arguments.jobs > 1:
            return share(arguments)
        return work(arguments)


def share(arguments):
    """Run seeds in several processes; return the exit code."""
    command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:], "--jobs", "1", "--step", str(arguments.jobs)]
    children = [
        subprocess.Popen([*command, "--first", str(arguments.first + number), "--seeds", str(arguments.seeds - number)])
        for number in range(arguments.jobs)
    ]
    return max(child.wait() for child in children)


def replay(seed, steps):
    """Run one seed, and print what it does; return the exit code."""

    def on_line(step, now, task, line):
        who = "-" if task is None else f"{task.process.name}.{task.name}"
        print(f"{step:7d} {now:10.4f} {who:24s} {line}")

    report = simulate(seed, stop_at=steps, on_line=on_line)
    print(f"faults: {report.faults}", f"digest: {report.digest:016x}", *report.off, sep="\n")
    return 1 if report.off else 0


def work(arguments):
    """Run seeds one after another; return the exit code."""
    seeds = range(arguments.first, arguments.first + arguments.seeds, arguments.step)
    begun, bad, steps, digest = time.monotonic(), 0, 0, 0
    mutate = f" --mutate {arguments.mutate}" if arguments.mutate is not None else ""
    for seed in seeds:
        report = simulate(seed)
        steps += report.steps
        digest ^= report.digest
        if report.off:
            bad += 1
            print(f"seed {seed}: {report.faults}", *report.off, sep="\n  ")
            print(f"  replay: python -m tests.simulation --seed {seed} --steps {report.steps}{mutate}", flush=True)
            if arguments.until_failure:
                break
    took = time.monotonic() - begun
    print(
        f"{len(seeds)} seeds, {bad} failed, {steps} steps, {took:.1f} s, {took / max(1, len(seeds)) * 1000:.0f} ms each"
    )
    print(
        f"from seed {arguments.first} in steps of {arguments.step} at commit {revision()}, digest: {digest:016x}",
        flush=True,
    )
    return 1 if bad else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # DuckDB counts at the end what runs that were cut short hold
