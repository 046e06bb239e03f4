"""Runs the transport for a long time beside hostile peers, and checks its memory, descriptors and threads.

    make soak          (or: python -m tests.soak [--minutes N] [--rate N] [--seed N])

The processes are the worker of `tests.chaos`, `capflow run` with the filesystem consumer and small caches
(`tests.soak.hub`), and this one, which checks every row as it is published. An attack of `tests.kit.attacks` begins
every 20 seconds and lasts 4 seconds. Between attacks, the resident memory, descriptors and threads of hub and worker
are sampled. Samples count once the hub keeps its maximum number of results and every attack has run twice. Over these
samples, the memory may grow by at most 0.1 MB a minute (Theil-Sen: the median of the slopes between all pairs of
samples), and the descriptors and threads must not grow. The exit code is 1 if a bound is passed, or if a row is lost,
repeated or wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from capflow import limits
from tests.chaos.run import OFF, Chaos, Options
from tests.kit.attacks import ATTACKS, attacking
from tests.soak import hub as soak_hub

SLOPE_MB_MAX = 0.1  # a minute
EVERY_S = 2.0
CYCLE_S = 20.0  # from one attack to the next
ATTACK_S = 4.0
SETTLE_S = 6.0  # after an attack
ROUNDS_WARM = 2  # of all attacks, before samples count
SAMPLES_MIN = 30
SAMPLES_COMPARED_MAX = 2_000
# `idle` needs TCP. The requests of the other two are valid ones, and the oracle did not send them.
HOSTILE = tuple(name for name in ATTACKS if name not in ("idle", "ends", "leaves"))


class Watched:
    """One process: its resident bytes, its descriptors and its threads, over time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.at: list[float] = []
        self.resident: list[int] = []
        self.descriptors: list[int] = []
        self.threads: list[int] = []

    def note(self, now: float) -> None:
        resident_pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        self.at.append(now)
        self.resident.append(resident_pages * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir()))
        self.threads.append(sum(1 for _ in Path(f"/proc/{self.pid}/task").iterdir()))

    def slope(self) -> float:
        """Return by how many MB a minute the memory grew."""
        every = -(-len(self.at) // SAMPLES_COMPARED_MAX)
        at, resident = np.array(self.at[::every]) / 60, np.array(self.resident[::every]) / 1e6
        first, second = np.triu_indices(len(at), 1)
        return float(np.median((resident[second] - resident[first]) / (at[second] - at[first])))

    @staticmethod
    def peaks(counts: list[int]) -> tuple[int, int]:
        """Return the most of something in the first half of the time, and in the second."""
        half = len(counts) // 2
        return max(counts[:half]), max(counts[half:])


class Soak(Chaos):
    """A worker and a hub with small caches, which nobody kills."""

    command = (soak_hub.__file__, "run", "--memory-bytes-max", str(limits.MEMORY_BYTES_MIN))

    def cycle(self, number: int, watched: list[Watched]) -> None:
        """Attack the hub, let it settle, and take samples until the next attack."""
        end = time.monotonic() + CYCLE_S
        with attacking(self.address, ATTACK_S, HOSTILE[number % len(HOSTILE)]) as begin:
            begin()
            self.watch_for(ATTACK_S)
        self.watch_for(SETTLE_S)
        while (now := time.monotonic()) < end:
            for one in watched:
                one.note(now)
            self.watch_for(EVERY_S)
        self.log.forget_fresh()

    def is_warm(self, cycles: int) -> bool:
        """Return whether the hub keeps as many results as it may, and has met every attack."""
        done = min(len(check.records) for check in self.checks)
        return done > soak_hub.RESULTS_KEPT_MAX and cycles >= ROUNDS_WARM * len(HOSTILE)


def run(minutes: float, options: Options, directory: Path) -> bool:
    """Run for so long; return whether all bounds are kept."""
    soak = Soak(directory, options)
    try:
        soak.start_hub()
        soak.start_engine()
        soak.await_return("start")
        assert soak.hub is not None
        assert soak.engine is not None
        pids = {"hub": soak.hub.pid, "engine": soak.engine.pid}
        watched: dict[str, Watched] = {}
        cycles, begun = 0, time.monotonic()
        while (now := time.monotonic()) < begun + minutes * 60:
            if not watched and soak.is_warm(cycles):
                watched = {name: Watched(pid) for name, pid in pids.items()}
                options.tell(f"the caches are full after {(now - begun) / 60:.1f} minutes and {cycles} attacks")
            soak.cycle(cycles, list(watched.values()))
            cycles += 1
        soak.stop()
        for name, value in soak.report(now - begun):
            options.tell(f"| {name} | {value} |")
        kept = [judge(name, one, options) for name, one in watched.items()]
        if not watched:
            options.tell("the caches were never full: run it for longer")
        for trouble in soak.oracle.troubles:
            options.tell(trouble)
        return bool(kept) and all(kept) and not any(soak.oracle.counts[kind] for kind in OFF)
    finally:
        soak.end()


def judge(name: str, one: Watched, options: Options) -> bool:
    """Print how a process grew; return whether it kept the bounds."""
    if len(one.at) < SAMPLES_MIN:
        options.tell(f"| {name} | {len(one.at)} samples are too few: run it for longer |")
        return False
    minutes, slope = (one.at[-1] - one.at[0]) / 60, one.slope()
    descriptors, threads = one.peaks(one.descriptors), one.peaks(one.threads)
    options.tell(
        f"| {name} | {slope:+.3f} MB a minute over {minutes:.1f} minutes ({len(one.at)} samples), "
        f"{max(one.resident) / 1e6:.0f} MB at most, "
        f"descriptors at most {descriptors[0]} then {descriptors[1]}, threads {threads[0]} then {threads[1]} |"
    )
    return slope <= SLOPE_MB_MAX and descriptors[1] <= descriptors[0] and threads[1] <= threads[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the transport for long; watch memory and descriptors.")
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: 60; at least 6)")
    parser.add_argument("--rate", type=float, default=300.0, help="frames a second (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    options = Options(
        disk_full=0,
        rate=arguments.rate,
        seed=arguments.seed,
        forget=True,
        length_max=8,
        hostile=True,
        tell=lambda text: print(text, flush=True),
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        return 0 if run(arguments.minutes, options, Path(directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
