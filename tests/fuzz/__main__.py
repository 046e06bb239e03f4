"""Runs the fuzzer: `python -m tests.fuzz --seconds 60`; `--target NAME` for one target, `--corpus` for the corpus."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from capflow.errors import CapflowError
from tests.fuzz.files import FILES
from tests.fuzz.messages import MESSAGES

TARGETS = MESSAGES | FILES
SERVED = ("http", "rpc", "vectors") if importlib.util.find_spec("vllm") else ()  # imported for them alone
NAMES = (*TARGETS, *SERVED)
CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[2]
WAIT_FACTOR = 3  # wall time that a target may take for each second of CPU time it is given
INPUT_S_MAX = 10  # of one input
MEMORY_BYTES_MAX = 1 << 30  # that reading may take besides what the process has
_LAST = "last-input"  # in a directory of its own: what is read now, for when the process does not come back


class SlowError(Exception):
    """An input took too long."""


def main():
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of CPU time, for all targets together (default: 60)"
    )
    parser.add_argument("--target", choices=sorted(NAMES), help="this one alone")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 1000, help="(default: the time)")
    parser.add_argument("--corpus", action="store_true", help="read what is kept, and nothing else")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        return work(arguments)
    names = [arguments.target] if arguments.target is not None else list(NAMES)
    return max([share(name, arguments, len(names)) for name in names])


def share(name, arguments, count):
    """Run a target in a process of its own; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--child", directory]
        command += ["--seed", str(arguments.seed), "--seconds", str(arguments.seconds / count)]
        code = subprocess.run([*command, *["--corpus"] * arguments.corpus], cwd=ROOT, check=False).returncode
        last = Path(directory, _LAST)
        if code and last.exists():
            print(f"{name}: it did harm: {keep(name, last.read_bytes())}", flush=True)
    return int(code != 0)


def keep(name, data):
    """Put an input into the corpus; return its file."""
    path = CORPUS / name / f"{zlib.crc32(data):08x}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def work(arguments):
    """Read inputs one after another, until the time is over or one does harm."""
    logging.getLogger("capflow").addHandler(logging.NullHandler())
    logging.getLogger("capflow").propagate = False
    last = Path(arguments.child, _LAST)
    targets = importlib.import_module("tests.fuzz.served").SERVED if arguments.target in SERVED else TARGETS
    target = targets[arguments.target](arguments.child)
    kept = [path.read_bytes() for path in sorted((CORPUS / arguments.target).glob("*"))]
    inputs = [*target.inputs, *kept]
    choose = random.Random(f"{arguments.target} {arguments.seed}")
    signal.signal(signal.SIGALRM, _too_slow)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES_MAX,) * 2)
    cpu_end, end = time.process_time() + arguments.seconds, time.monotonic() + WAIT_FACTOR * arguments.seconds
    count, refused, slowest = 0, 0, 0.0
    for data in inputs:
        last.write_bytes(data)
        was_refused = _read(target, data)
        assert not (was_refused and target.taken and data in target.inputs), "what is right is refused"
        refused += was_refused
        count += 1
    while not arguments.corpus and time.process_time() < cpu_end and time.monotonic() < end:
        data = target.mutate(choose, choose.choice(inputs), inputs)
        last.write_bytes(data)
        begun = time.monotonic()
        refused += _read(target, data)
        slowest = max(slowest, time.monotonic() - begun)
        count += 1
    last.unlink()
    print(f"{arguments.target}: {count} inputs, {refused} refused, the slowest took {slowest:.3f} s", flush=True)
    return 0


def _read(target, data):
    """Have a target read an input; return whether it was refused."""
    signal.alarm(INPUT_S_MAX)
    try:
        target.read(data)
    except CapflowError:
        return True
    finally:
        signal.alarm(0)
    return False


def _too_slow(*_):
    raise SlowError(f"more than {INPUT_S_MAX} s")


if __name__ == "__main__":
    sys.exit(main())
