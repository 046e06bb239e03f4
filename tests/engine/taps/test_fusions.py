"""Taps that only capture leave vLLM its fusions of all-reduce and norm, as its own patterns find them."""

import json
import subprocess
import sys

import pytest

from tests.kit.engines import LAYERS
from tests.kit.sources import KIT

EVERYWHERE = ["pre_attn", "post_attn", "post_block"]
PLAIN = 2 * LAYERS + 1
"""The first is that of the embedding and the first norm."""

# By case: the tapped hooks, those that are not steered, and the fusions.
CASES = {
    "no tap": ([], [], PLAIN),
    "steered after layers": (["post_block"], [], PLAIN - LAYERS),
    "captured after layers": (["post_block"], ["post_block"], PLAIN),
    # The tap of `pre_attn:0` stands before the first norm.
    "captured everywhere": (EVERYWHERE, EVERYWHERE, PLAIN - 1),
}


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_only_taps_that_steer_stand_between_an_all_reduce_and_a_norm(tiny):
    command = [sys.executable, str(KIT / "fusions.py"), tiny]
    given = json.dumps([(hooks, fixed) for hooks, fixed, _ in CASES.values()])
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = [json.loads(line.removeprefix("counted")) for line in done.stdout.splitlines() if "counted" in line]
    assert dict(zip(CASES, counts, strict=True)) == {
        case: [LAYERS * len(hooks), fusions] for case, (hooks, _, fusions) in CASES.items()
    }
