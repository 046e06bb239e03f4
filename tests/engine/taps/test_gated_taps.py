"""Gates in both taps, the CPU's and the Triton kernel, against a float64 reference, with tables full of old values.

The kernel runs through Triton's interpreter, in a process of its own. Where there is a GPU,
`benchmarks/gpu_kernels.py` runs the same cases on it.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest

from capflow.steering.program import SET
from tests.kit.gate_cases import GATE_CASES, check_gated
from tests.kit.sources import KIT
from tests.kit.tap_cases import start_cpu


@pytest.mark.parametrize("stages", [False, True], ids=["one stage", "two stages"])
def test_the_cpu_tap_scores_and_gates_as_the_reference_does(stages):
    counts = Counter()
    for case in GATE_CASES:
        for seed in range(8):
            check_gated(case, seed, start_cpu, counts, stages=stages)
    assert min(counts[state, latched] for state in ("open", "shut") for latched in (False, True)) > 100
    assert counts[SET] > 100


@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.long)])
def test_the_triton_kernel_scores_and_gates_as_the_reference_does(seeds):
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["."])}
    command = [sys.executable, str(KIT / "gate_cases.py"), str(seeds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *words, cases, opened, opened_latched, shut, shut_latched = done.stdout.split()
    assert [*words, cases] == ["gated", "kernel", "cases", str(seeds * len(GATE_CASES))]
    assert min(int(opened), int(opened_latched), int(shut), int(shut_latched)) > 20
