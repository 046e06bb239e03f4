"""The cost of sync controllers for the step thread, in processor time.

    PYTHONPATH=.:engine_ext:consumers python3 benchmarks/controllers.py

Each line is a batch that decodes, with one gate at one site. `score` scores the rows, `run` shows the step to the gate;
in the ordered mode `run` is in another thread. `rows` is a controller that gets the rows and scores them itself, in
float64, request by request. The ratio is that of `score` and `run` together against a bare loop over the batch that
unpacks each entry and does nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from capflow.capture.model import ModelInfo
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.protocol.message import ControllerSpec
from capflow.steering.vector import SteeringVector
from capflow_consumers.gate import GateState
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.control.controllers import Controllers
from capflow_engine.worker.control.view import Seen, Shown, View

PROMPT = 64
SITE = Site(0, "post_block")


def median_ms(call: Callable[[], object], times: int) -> float:
    """Return the median processor time of a call, in milliseconds."""
    taken = []
    for _ in range(times):
        began = time.thread_time()
        call()
        taken.append(time.thread_time() - began)
    return 1e3 * statistics.median(taken)


def controllers(width: int, *, fires: bool) -> Controllers:
    """Return a gate as a worker runs it."""
    rng = np.random.default_rng(1)
    weight = rng.normal(size=width).astype(np.float32)
    state = GateState(
        layer=SITE.layer,
        hook=SITE.hook,
        weight=weight.tobytes(),
        bias=0.0,
        threshold=-1e9 if fires else 1e9,
        release=-2e9,
        vector=SteeringVector.make(SITE, weight),
    )
    spec = ControllerSpec(
        "gate", msgspec.msgpack.encode(state), "", None, (CaptureSpec({SITE.hook: [SITE.layer]}, "all"),)
    )
    made = Controllers([spec], ModelInfo("m", 1, width, "bfloat16", (SITE,)), (SITE,), 0)
    assert not made.troubles
    return made


def measure(requests: int, width: int, *, fires: bool, times: int) -> tuple[float, float, float, float]:
    """Return the times of scoring, of the gate, of the rows' way and of a bare loop, for a batch that decodes."""
    planner = Planner(1)
    program = planner.program({0: Positions.ALL})
    tracked = [Tracked(str(n), f"request-{n}", PROMPT, planner.nothing, program) for n in range(requests)]
    for each in tracked:
        each.computed = PROMPT + 4
    before, plan = (
        planner.plan([Scheduled(each, n, PROMPT + step, 1) for n, each in enumerate(tracked)]) for step in (4, 5)
    )
    rows = torch.randn((requests, width)).to(torch.bfloat16)
    gate = controllers(width, fires=fires)
    keys = {each.id: each.key for each in tracked}
    assert gate.scorer is not None
    scorer = gate.scorer

    def score() -> Shown:
        parts, count = scorer.parts(plan)
        return Shown(1, plan, None, {}, parts, scorer.score(parts, count, rows))

    shown = score()
    gate.run(Shown(0, before, None, {}, shown.parts, shown.scores), keys)  # later steps repeat its actions
    wide = rows.float().numpy()
    weight = np.ones(width)

    def by_rows() -> None:
        for view_rows in View(Shown(1, plan, wide, {}), Seen((SITE,), {0: None}), 0, lambda: ()).rows():
            products = np.multiply(view_rows.rows, weight, dtype=np.float64, order="C")
            np.add.reduce(products, axis=1)

    def bare() -> None:
        for _, _, _, _ in plan.batch:
            pass

    return (
        median_ms(score, times),
        median_ms(lambda: gate.run(shown, keys), times),
        median_ms(by_rows, max(times // 4, 5)),
        median_ms(bare, times),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--width", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'requests':>8} {'gate':>6} {'score ms':>9} {'run ms':>8} {'rows ms':>8} {'ratio':>7}")
    for requests in (1, 8, 64, 256):
        for fires in (False, True):
            score, run, rows, bare = measure(requests, arguments.width, fires=fires, times=arguments.times)
            name = "fired" if fires else "idle"
            ratio = (score + run) / bare
            print(f"{requests:>8} {name:>6} {score:>9.3f} {run:>8.3f} {rows:>8.3f} {ratio:>7.1f}")


if __name__ == "__main__":
    main()
