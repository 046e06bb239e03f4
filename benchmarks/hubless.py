"""The cost of a missing hub for the engine: tokens a second with the hub stopped, or never there, against one with it.

    python benchmarks/hubless.py [--rounds N] [--model demo] [--policy drop|spill] [--dtype float32]

Two engines with the policy live in processes of their own for the whole run. One has met a hub that captures every
layer and position of every request; the other's hub was never there. The first engine takes turns with the hub running
and with it stopped. All turns interleave, and a ratio is the median of the ratios of adjacent turns. The answers of all
must be equal. `CAPFLOW_BENCH_PROMPTS` and `CAPFLOW_BENCH_LENGTHS` are as in `overhead.py`.

Predicted: with the hub stopped, the rows go to the spool instead of the socket, or nowhere. Without a hub, nothing is
    captured: 1.00 and above. Goal: 0.98.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overhead import PROMPTS, TOKENS, Engine, ratio_of

from capflow.transport.client import Client

GOAL = 0.98
MODES = ("hub", "stopped", "absent")


class Hub:
    """`capflow run` with the filesystem consumer, which can be started and stopped many times."""

    def __init__(self, address: str, root: Path) -> None:
        consumer = f"filesystem:root={root},on_collision=overwrite,policy=block"
        self.command = [sys.executable, "-m", "capflow", "run", "--address", address, "--consumer", consumer]
        self.address = address
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *, wanted: bool) -> None:
        """Start or stop it, unless it is so already."""
        if wanted and self.process is None:
            self.process = subprocess.Popen(self.command, stderr=subprocess.DEVNULL)
            with Client(self.address, 60) as client:
                while not any(session["role"] == "worker" for session in client.status()["sessions"]):
                    if self.process.poll() is not None:
                        sys.exit("hubless: the hub ended")
        elif not wanted and self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(120)
            self.process = None


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--policy", default="spill", choices=["drop", "spill"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="auto", help="float32 is faster on a CPU without AVX-512")
    args = parser.parse_args()
    model = args.model
    if model == "demo":
        from capflow_engine.jobs.demo import prepare

        model = str(prepare())
    work = Path(tempfile.mkdtemp(prefix="cfb-"))
    hub = Hub(f"ipc://{work}/hub.sock", work / "rows")
    hub.process = subprocess.Popen(hub.command, stderr=subprocess.DEVNULL)
    engines = {}
    for name in ("hub", "none"):
        (work / name).mkdir()
        os.environ["CAPFLOW_HUB"] = f"ipc://{work}/{name}.sock"
        engines[name] = Engine(args.policy, model, work / name / "spool", eager=args.eager, dtype=args.dtype)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    tokens: dict[str, list[list[int]]] = {}
    for turn in range(2 * args.rounds + 1):  # the first warms up
        for mode in MODES if turn % 2 else MODES[::-1]:
            hub.run(wanted=mode == "hub")
            answer = engines["none" if mode == "absent" else "hub"].turn("idle")
            tokens[mode] = answer["tokens"]
            if turn:
                seconds[mode].append(answer["seconds"])
            print(f"{mode}: {answer['seconds']:.1f} s", file=sys.stderr, flush=True)
    hub.run(wanted=False)
    for engine in engines.values():
        engine.close()
    median = {mode: statistics.median(values) for mode, values in seconds.items()}
    generated = PROMPTS * TOKENS
    print(
        f"\npolicy {args.policy}, {PROMPTS} prompts, {model.rsplit('/', 1)[-1]}, "
        f"{2 * args.rounds} turns each, interleaved"
    )
    print("| hub | generated tok/s (median) | of a run with it | quartiles | goal | spread | answers equal |")
    print("|---|---|---|---|---|---|---|")
    for mode in MODES:
        same = sum(a == b for a, b in zip(tokens[mode], tokens["hub"], strict=True))
        spread = f"{generated / max(seconds[mode]):.0f}-{generated / min(seconds[mode]):.0f}"
        ratio, quartiles = ratio_of(seconds["hub"], seconds[mode])
        print(
            f"| {mode} | {generated / median[mode]:.0f} | {ratio:.3f} | {quartiles} | {GOAL} "
            f"| {spread} | {same}/{PROMPTS} |"
        )
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
