"""A hub is killed at each point of its work on a consumer's inbox: all rows are in files, whole and once."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import capflow
from tests.kit.crashing_hub import HIDDEN, ROWS, SITE, Worker
from tests.kit.frames import make_hello, make_model, row_of
from tests.kit.hubs import address, worker_link
from tests.kit.processes.spool import POINTS
from tests.kit.sources import PROCESSES
from tests.kit.waiting import eventually

__all__ = ["address"]

CHILD = PROCESSES / "hub_crash.py"
# How often a hub passes a point at most before it is killed: between two passes of these it takes up to hundreds of
# frames.
AFTER_MAX = {"before-fsync": 20, "during-rotation": 5, "before-unlink": 4, "before-cursor": 5}


def run_and_kill(address, directory, times, point, seed=0, layout="packed"):
    choose = random.Random(seed)

    def start(point, after):
        command = [sys.executable, CHILD, address, directory, point, str(after), layout]
        return subprocess.Popen(command, stdin=subprocess.PIPE)

    with worker_link(address, make_hello(model=make_model(1, HIDDEN)), wait=False) as link:
        worker = None
        for life in range(times):
            with start(point, choose.randrange(1, AFTER_MAX.get(point, 100))) as hub:
                if worker is None:
                    eventually(lambda: link.ever_connected or hub.poll() is not None)
                    worker = Worker(link, choose) if link.ever_connected else None
                deadline = time.monotonic() + 60
                while worker is not None and hub.poll() is None and time.monotonic() < deadline:
                    worker.turn()
                assert hub.wait(60) == -signal.SIGKILL, f"life {life}"
        with start("-", 0) as hub:
            eventually(lambda: link.connected)
            worker = worker or Worker(link, choose)
            for _ in range(50):
                worker.turn()
            worker.end()
            eventually(lambda: link.counters["unacked_frames"] + link.counters["queued_frames"] == 0)
            link.close(5)
            hub.stdin.close()
            assert hub.wait(60) == 0
    data = capflow.open(directory / "rows")
    result = [capture.id for name in data.requests() for capture in data.captures(name, look=False)]
    assert sorted(result) == sorted(worker.lengths)  # none twice
    for name, length in worker.lengths.items():
        capture = data[name]
        assert capture.status == "ok", (name, capture.error)
        capture.verify()
        firsts = range(0, length, ROWS)
        assert [event.position for event in capture.events] == [first + 1 for first in firsts], name
        if length:
            rows, positions, _ = capture[SITE]
            assert positions.tolist() == list(range(length))
            expected = np.stack([row_of(name, capture.sites[0], position, HIDDEN) for position in range(length)])
            assert rows.tobytes() == expected.tobytes()
            assert np.flatnonzero(capture.steered(SITE)).tolist() == [f + n for f in firsts for n in (1, 2)]
    return len(worker.lengths)


@pytest.mark.parametrize("point", POINTS)
def test_a_hub_killed_at_a_point_loses_and_repeats_nothing(address, tmp_path, point):
    assert run_and_kill(address, tmp_path, 1, point)


@pytest.mark.parametrize("layout", ["per_file", "sharded"])
def test_a_hub_killed_loses_and_repeats_nothing_in_any_layout(address, tmp_path, layout):
    assert run_and_kill(address, tmp_path, 3, "after-write", seed=2, layout=layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["per_file", "packed", "sharded"])
@pytest.mark.parametrize("point", POINTS)
def test_a_hub_killed_often_at_a_point_loses_and_repeats_nothing(address, tmp_path, point, layout):
    assert run_and_kill(address, tmp_path, 20, point, seed=1, layout=layout) > 20
