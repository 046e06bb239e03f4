"""The spool of a process that is killed: what it was promised is compared with what its successor finds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest

from capflow.buffers.spool import Record, Spool
from tests.kit.processes.spool import POINTS, body_of
from tests.kit.sources import PROCESSES

CHILD = PROCESSES / "spool.py"


class Oracle:
    """What the lives of a spool were promised, from what they said before they died."""

    def __init__(self):
        # What was last appended under each number.
        self.tokens = {}
        self.durable = self.done = 0

    def heed(self, lines):
        for line in lines.splitlines():
            word, number, *token = line.split()
            if word == "append":
                self.tokens[int(number)] = token[0]
            elif word == "durable":
                self.durable = max(self.durable, int(number))
            else:
                self.done = max(self.done, int(number))

    def check(self, directory):
        """Return how many records were left; every one of them right, none missing and none that was done with."""
        with Spool(directory) as spool:
            assert spool.acknowledged_through >= self.done
            number = spool.acknowledged_through
            while (record := spool.read()) is not None:
                number += 1
                assert isinstance(record, Record), record
                token = self.tokens[number]
                assert (record.id, record.head, record.body) == (number, token.encode(), body_of(token))
            assert number >= self.durable
            assert spool.records_lost == 0
            # Its records are durable from here on.
            self.durable = spool.synced_through
        return len(spool)


def run_and_kill(directory, times, point=None, seed=0):
    choose, oracle, left = random.Random(seed), Oracle(), 0
    for life in range(times):
        after = choose.randrange(1, {"during-rotation": 12, "before-unlink": 8}.get(point, 60))
        command = [sys.executable, CHILD, directory, point or "-", str(after), str(choose.getrandbits(32))]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        if point is None:
            output = "".join(child.stdout.readline() for _ in range(choose.randrange(300)))
            child.kill()
            output += child.stdout.read()
            child.wait()
        else:
            output, _ = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, f"life {life}"
        oracle.heed(output.rpartition("\n")[0])
        left += oracle.check(directory)
    assert oracle.done, "nothing was ever acknowledged"
    assert left, "nothing was ever left"
    assert oracle.durable > oracle.done


@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_at_a_point_loses_and_repeats_nothing(tmp_path, point):
    run_and_kill(tmp_path, 2, point)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_often_at_a_point_loses_and_repeats_nothing(tmp_path, point):
    run_and_kill(tmp_path, 20, point, seed=1)


@pytest.mark.long
def test_a_process_killed_at_random_moments_loses_and_repeats_nothing(tmp_path):
    run_and_kill(tmp_path, 50, seed=2)
