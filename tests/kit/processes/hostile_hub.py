"""A hub in a process of its own, for tests that try to end it from outside: `python hostile_hub_child.py ADDRESS`.

A line on standard input ends it; it prints what it counted.
"""

from __future__ import annotations

import sys

from capflow import limits
from capflow.cli.hub.running import rare_collections
from capflow.system import heap
from tests.kit.hubs import Recorder, running_hub

limits.DEAD_S_MAX = 3.0  # whatever the library does about dead connections it does soon


def main(address):
    with rare_collections(), heap.trimmed(), running_hub(address, Recorder()) as hub:  # as `capflow run` has them
        print(hub.address, flush=True)
        sys.stdin.readline()
        print(hub.snapshot().frames, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
