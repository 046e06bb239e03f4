"""The simulation: seeds find nothing, each does the same every time, and a mend that is undone is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.kit.sources import ROOT

SEEDS = 200
MUTATIONS = {
    "D2": 20,
    "D3": 0,
    "D4": 10,
    "D5": 20,
    "D7": 10,
    "D8": 30,
    "D12": 20,
    "frames-again": 0,
    "sync": 0,
}
"""Mends that are undone, and the seed from which one of the `SEEDS` finds it soon."""


def simulate(*arguments):
    """Run the simulation; return its exit code and what it printed."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return ended.returncode, ended.stdout


def test_no_seed_finds_anything():
    code, output = simulate("--seeds", SEEDS // 2, "--jobs", os.cpu_count() or 1)
    assert code == 0, output
    assert output.count(" 0 failed") == (os.cpu_count() or 1)


def test_a_seed_makes_the_same_steps_each_time():
    runs = [simulate("--seeds", 6, "--jobs", 1)[1] for _ in range(2)]
    digests = [re.findall(r"digest: ([0-9a-f]{16})", output) for output in runs]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1
    assert digests[0] != re.findall(r"digest: ([0-9a-f]{16})", simulate("--seeds", 6, "--first", 6, "--jobs", 1)[1])


@pytest.mark.parametrize(
    ("mutation", "first"),
    [
        pytest.param(mutation, first, marks=pytest.mark.long if mutation == "D12" else ())
        for mutation, first in MUTATIONS.items()
    ],
)
def test_a_mend_that_is_undone_is_found(mutation, first):
    seeds = ("--first", first, "--seeds", SEEDS - first)
    code, output = simulate("--mutate", mutation, *seeds, "--jobs", 1, "--until-failure")
    assert code == 1, output
    assert "Traceback" not in output


def test_the_command_of_a_failing_seed_repeats_it():
    _, output = simulate("--mutate", "D4", "--seeds", SEEDS, "--jobs", 1, "--until-failure")
    (replay,) = re.findall(r"replay: python -m tests.simulation (.*)", output)
    code, again = simulate(*replay.split())
    assert code == 1
    off = [line.strip() for line in output.splitlines() if line.startswith("  ") and "replay:" not in line]
    assert off
    assert set(off) <= {line.strip() for line in again.splitlines()}
