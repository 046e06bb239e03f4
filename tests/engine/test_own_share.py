"""capflow's code keeps its budget of processor time in a step, with a wide margin: the machine may be slow and busy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARGIN = 5


@pytest.mark.engine
def test_the_step_keeps_its_budget():
    """It runs in a process of its own, as the benchmark changes vLLM's classes."""
    command = [sys.executable, "benchmarks/own_share.py", "--steps", "10", "--rounds", "1", "--within", str(MARGIN)]
    path = os.pathsep.join(str(ROOT / each) for each in (".", "engine_ext", "consumers"))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "| steering |" in done.stdout
