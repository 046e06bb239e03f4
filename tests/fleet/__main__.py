"""Runs the fleet: `python -m tests.fleet [--workers 1000] [--hubs 8]`; the exit code is 1 if anything is lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fleet.run import HEAD, copy_rate, live, saturate

HIDDEN = 1024
# Rows of a frame, and how many frames are sent.
SIZES = ((1, 30_000), (16, 20_000), (256, 3_000))


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet")
    parser.add_argument("--workers", type=int, default=1_000, help="(default: 1000)")
    parser.add_argument("--hubs", type=int, default=8, help="(default: 8)")
    parser.add_argument("--requests", type=int, default=5, help="of each worker (default: 5)")
    parser.add_argument("--frames-s", type=float, default=500.0, help="of all workers (default: 500)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of frames that saturate a hub")
    parser.add_argument("--only", choices=["saturation", "death"], help="run only this part")
    arguments = parser.parse_args()
    if arguments.only != "death":
        print(f"One hub, rows of {HIDDEN} float32; rates for each second of the hub's CPU time.\n\n{HEAD}", flush=True)
        for sessions in (16, arguments.workers):
            for rows, frames in SIZES:
                with tempfile.TemporaryDirectory(prefix="cf") as directory:
                    load = saturate(Path(directory), sessions, rows, HIDDEN, max(1, int(frames * arguments.scale)))
                print(load.line(copy_rate(load.nbytes // load.frames)), flush=True)
        print()
    if arguments.only == "saturation":
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        outcome = live(
            Path(directory),
            workers=arguments.workers,
            hubs_count=arguments.hubs,
            requests=arguments.requests,
            frames_s=arguments.frames_s,
        )
    print(
        f"{arguments.workers} workers, {arguments.hubs} hubs, {outcome.requests} requests, {outcome.rows} rows, "
        f"{time.monotonic() - began:.0f} s; one hub was killed and came back: {outcome.again} frames given again to "
        f"its consumer, {dict(outcome.faults) or 'nothing lost, nothing twice'}"
    )
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
