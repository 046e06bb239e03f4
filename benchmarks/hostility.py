"""How long a well-behaved worker waits for its acknowledgements while others attack its hub.

One hub runs in a process of its own. One honest worker sends a small frame each 20 ms, without waiting for the one
before. Attacks run in processes of their own (see `tests/kit/attacks.py`). Rounds interleave: each has every attack
once, and a quiet time before each. Times are from sending to acknowledgement, over all rounds.

    python benchmarks/hostility.py --rounds 3 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from tests.kit.attacks import ATTACKS, acknowledged_s, attacking, percentile
from tests.kit.hubs import worker_link
from tests.kit.sources import PROCESSES

QUIET = "quiet"


def measure(attack: str, seconds: float) -> list[float]:
    """Return the seconds of each acknowledgement under an attack, sorted; each call has a hub of its own."""
    command = [sys.executable, str(PROCESSES / "hostile_hub.py"), "tcp://127.0.0.1:0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as hub:
        try:
            assert hub.stdout is not None
            address = hub.stdout.readline().strip()
            names = [] if attack == QUIET else [attack]
            with worker_link(address) as link, attacking(address, seconds, *names) as begin:
                begin()
                took: list[float] = acknowledged_s(link, seconds)
            if hub.poll() is not None:
                raise SystemExit(f"{attack}: the hub ended with {hub.returncode}")
            return took
        finally:
            hub.kill()


def main() -> None:
    """Measure, and print a line of JSON for each attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack in each round")
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], help="default: all")
    options = parser.parse_args()
    names = options.attacks or list(ATTACKS)
    times: dict[str, list[float]] = {name: [] for name in (QUIET, *names)}
    for _ in range(options.rounds):
        for name in names:
            times[QUIET] += measure(QUIET, options.seconds / len(names))
            times[name] += measure(name, options.seconds)
    quiet_ms_p99 = percentile(sorted(times[QUIET]), 0.99) * 1000
    for name, took in times.items():
        took.sort()
        p99_ms = percentile(took, 0.99) * 1000
        record = {
            "attack": name,
            "frames": len(took),
            "median_ms": round(statistics.median(took) * 1000, 1),
            "p99_ms": round(p99_ms, 1),
            "max_ms": round(took[-1] * 1000, 1),
            "p99_of_quiet": round(p99_ms / quiet_ms_p99, 1),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
