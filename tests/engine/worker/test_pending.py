"""Steps wait until they are settled and leave in order; an end leaves with the last step that holds its request."""

import numpy as np
import pytest

from capflow.capture.positions import Positions
from capflow_engine.scheduler.orders import Ended
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.pending import READY, Pending
from capflow_engine.worker.sender import Computed


class Bench:
    """A planner, and steps that it planned."""

    def __init__(self):
        self.planner, self.pending, self.number = Planner(1), Pending(), 0

    def request(self, key):
        return Tracked(key, f"name-{key}", 4, self.planner.program({0: Positions.ALL}), self.planner.nothing)

    def step(self, *parts):
        self.number += 1
        batch = [Scheduled(request, n, start, length) for n, (request, start, length) in enumerate(parts)]
        plan = self.planner.plan(batch)
        rows = np.zeros(plan.rows * 8, np.uint8)
        step = Computed(self.number, 7, plan, rows, np.arange(16), READY, lent=rows.nbytes)
        self.pending.add(step)
        return step


@pytest.fixture
def bench():
    return Bench()


def test_steps_leave_in_order_when_they_are_settled(bench):
    one = bench.request("1")
    steps = [bench.step((one, n, 1)) for n in range(4)]
    assert bench.pending.settle(0) == []
    assert bench.pending.settle(2) == steps[:2]
    assert bench.pending.bytes_held == 16
    assert bench.pending.settle(2) == []
    assert bench.pending.settle(9) == steps[2:]


def test_an_end_waits_for_the_last_step_with_its_request(bench):
    one, two = bench.request("1"), bench.request("2")
    first = bench.step((one, 0, 4), (two, 0, 4))
    second = bench.step((one, 4, 1), (two, 4, 1))
    third = bench.step((two, 5, 1))
    bench.pending.end(one, Ended("stop", 4))
    assert bench.pending.settle(1) == [first]
    assert first.ended == []
    assert bench.pending.settle(2) == [second]
    assert [request for request, _ in second.ended] == [one]
    assert second.limits == {"1": 4}  # rows after its end belong to no request
    assert bench.pending.settle(3) == [third]
    assert third.ended == []


def test_an_end_that_waits_for_nothing_leaves_at_once(bench):
    one, two = bench.request("1"), bench.request("2")
    bench.step((two, 0, 4))
    bench.pending.end(one, Ended("abort", 2))
    (step,) = bench.pending.settle(0)
    assert [request for request, _ in step.ended] == [one]
    assert step.rows is None


def test_a_cut_holds_for_every_step_under_way_and_the_lowest_counts(bench):
    one = bench.request("1")
    steps = [bench.step((one, 0, 4)), bench.step((one, 4, 3))]
    bench.pending.cut("1", 6)
    bench.pending.cut("1", 5)
    bench.pending.cut("1", 9)
    assert [step.limits for step in steps] == [{"1": 5}, {"1": 5}]
