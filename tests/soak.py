"""Runs the transport for long, and holds its memory, its descriptors and its threads against bounds.

    make soak          (or: python tests/soak.py [--minutes N] [--rate N] [--seed N])

The worker of `chaos.py`, `capflow run` with the filesystem consumer, and this process, which checks every row as it is published. Every
few seconds the resident memory, the descriptors and the threads of both are noted; over the second half the memory must grow by less than 1 MB a minute (least
squares), and the others must not. Ends with exit code 1 when anything is off.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from chaos import OFF, Chaos, Options

SLOPE_MB_MAX = 1.0  # a minute
EVERY_S = 2.0


class Watched:
    """One process: its resident bytes, its descriptors and its threads, over time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.at: list[float] = []
        self.resident: list[int] = []
        self.descriptors: list[int] = []
        self.threads: list[int] = []

    def note(self, now: float) -> None:
        resident_pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.at.append(now)
        self.resident.append(resident_pages * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir()))
        self.threads.append(sum(1 for _ in Path(f"/proc/{self.pid}/task").iterdir()))

    def slope(self) -> float:
        """Return by how many MB a minute the memory grew over the second half."""
        half = len(self.at) // 2
        return float(np.polyfit(np.array(self.at[half:]) / 60, np.array(self.resident[half:]) / 1e6, 1)[0])

    @staticmethod
    def peaks(counts: list[int]) -> tuple[int, int]:
        """Return the most of something in the third quarter of the time, and in the last."""
        half = len(counts) // 2
        quarter = half + (len(counts) - half) // 2
        return max(counts[half:quarter]), max(counts[quarter:])


def run(minutes: float, options: Options, directory: Path) -> bool:
    """Run for so long; return whether all was well."""
    soak = Chaos(directory, options)
    good = True
    try:
        soak.start_hub()
        soak.start_engine()
        soak.await_return("start")
        assert soak.hub is not None
        assert soak.engine is not None
        watched = {"hub": Watched(soak.hub.pid), "engine": Watched(soak.engine.pid)}
        begun = time.monotonic()
        while (now := time.monotonic()) < begun + minutes * 60:
            for one in watched.values():
                one.note(now)
            soak.watch_for(EVERY_S)
            soak.log.forget_fresh()
        soak.stop()
        for name, value in soak.report(now - begun):
            options.tell(f"| {name} | {value} |")
        for name, one in watched.items():
            slope, peak = one.slope(), max(one.resident) / 1e6
            descriptors, threads = one.peaks(one.descriptors), one.peaks(one.threads)
            counts = (
                f"descriptors at most {descriptors[0]} then {descriptors[1]}, threads {threads[0]} then {threads[1]}"
            )
            options.tell(f"| {name} | {slope:+.2f} MB a minute, {peak:.0f} MB at most, {counts} |")
            good = good and slope < SLOPE_MB_MAX and descriptors[1] <= descriptors[0] and threads[1] <= threads[0]
        for trouble in soak.oracle.troubles:
            options.tell(trouble)
        return good and not any(soak.oracle.counts[kind] for kind in OFF)
    finally:
        soak.end()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the transport for long; watch memory and descriptors.")
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: 30)")
    parser.add_argument("--rate", type=float, default=300.0, help="frames a second (default: 300)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    options = Options(disk_full=0, rate=arguments.rate, seed=arguments.seed, tell=lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        return 0 if run(arguments.minutes, options, Path(directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
