from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.plugins.consumer import StepRows
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import Steer, Unsteer
from capflow.steering.vector import SteeringVector
from capflow_consumers.gate import Gate, GateConfig, GateState
from tests.kit.frames import make_model

READ, ADD = Site(1, "post_block"), Site(2, "post_block")
VECTOR = SteeringVector.make(ADD, np.arange(8), 2.0)


class View(NamedTuple):
    """A step: `(request, rows)`, or `(request, rows, site, start)`."""

    parts: tuple
    step: int = 1

    def rows(self):
        for request, rows, *place in self.parts:
            site, start = place or (READ, 0)
            yield StepRows(request, site, start, 4, np.array([[score] + [0] * 7 for score in rows], np.float32))


def view(*parts) -> View:
    return View(parts)


def gate(release: float | None = None, bias: float = 0.0) -> Gate:
    weight = np.eye(1, 8, dtype=np.float32).tobytes()
    return Gate(GateState(1, "post_block", weight, bias, 1.0, release, VECTOR, "all"))


def files(tmp_path, *, width=8, vector_width=8, probes=1, threshold=0.5):
    names = tuple(f"p{i}" for i in range(probes))
    Probe.make(READ, np.ones((probes, width)), [0.25] * probes, names=names, threshold=threshold).save(tmp_path / "p")
    save_vector(tmp_path / "v", ADD, np.ones(vector_width))
    return {"probe": str(tmp_path / "p"), "vector": str(tmp_path / "v")}


def test_a_request_is_steered_from_the_step_its_probe_fires():
    controller = gate()
    assert controller.on_step(view(("a", [0.9]), ("b", [0.0]))) == []
    assert controller.on_step(view(("a", [1.0]), ("b", [0.0]))) == [Steer("a", (VECTOR,))]
    assert controller.on_step(view(("a", [-5.0]), ("b", [1.5]))) == [Steer("b", (VECTOR,))]


STEER, UNSTEER = Steer("a", (VECTOR,)), Unsteer("a")
CUTS = st.lists(st.integers(1, 199), max_size=8)


@given(st.lists(st.sampled_from([0.0, 0.4, 0.5, 0.9, 1.0, 2.0, float("nan")]), min_size=1, max_size=200), CUTS)
def test_what_is_decided_is_the_same_wherever_the_rows_are_cut(scores, cuts):
    """Row by row: at or above 1.0 it fires, below 0.5 it releases, and in between nothing changes."""
    expected = None
    for score in scores:
        expected = STEER if score >= 1.0 else UNSTEER if score < 0.5 else expected
    bounds = sorted({0, *(cut for cut in cuts if cut < len(scores)), len(scores)})
    controller, last = gate(release=0.5), None
    for first, end in itertools.pairwise(bounds):
        actions = controller.on_step(view(("a", scores[first:end], READ, first)))
        last = actions[0] if actions else last
    assert last == expected


def test_every_row_counts_in_the_order_of_the_positions():
    assert gate().on_step(view(("a", [9.0, 9.0, 0.0]))) == [STEER]
    parts = ("a", [0.0], READ, 7), ("a", [9.0], READ, 2)
    assert gate().on_step(view(*parts)) == [STEER]
    assert gate(release=0.5).on_step(view(*parts)) == gate(release=0.5).on_step(view(*parts[::-1])) == [UNSTEER]


def test_rows_of_other_sites_are_not_scored():
    assert gate().on_step(view(("a", [9.0], ADD, 0))) == []


def test_the_bias_counts():
    assert gate(bias=1.0).on_step(view(("a", [0.0]))) == [Steer("a", (VECTOR,))]


def test_below_release_the_steering_is_taken_back_and_may_come_again():
    controller = gate(release=0.5)
    actions = [controller.on_step(view(("a", [score]))) for score in (0.0, 1.0, 0.5, 0.4, 0.9, 1.0)]
    assert actions == [[UNSTEER], [STEER], [], [UNSTEER], [], [STEER]]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), st.integers(0, 5), st.booleans())
def test_a_score_does_not_depend_on_what_else_is_in_the_batch(row, others, strided):
    rng = np.random.default_rng(others)
    controller = Gate(msgspec.structs.replace(gate().state, weight=rng.normal(size=8).astype(np.float32).tobytes()))
    rows = np.concatenate([rng.normal(size=(others, 8)).astype(np.float32), np.array([row], np.float32)])
    if strided:
        rows = np.asfortranarray(rows)
    (alone,) = controller._scores(np.array([row], np.float32))
    assert controller._scores(rows)[-1] == alone
    assert alone == np.add.reduce(np.array(row, np.float32).astype(np.float64) * controller._weight)


def test_the_files_become_a_state_that_travels(tmp_path):
    state = Gate.load(GateConfig(**files(tmp_path), scale=3.0))
    assert (Site(state.layer, state.hook), state.threshold, state.bias) == (READ, 0.5, 0.25)
    assert state.vector.site == ADD
    assert state.vector.array().tolist() == [3.0] * 8
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Gate.State) == state
    controller = Gate(state)
    assert (controller.spec().hooks, controller.spec().positions) == ({"post_block": [1]}, "all")
    controller.open(make_model())


def test_the_option_threshold_goes_before_the_files(tmp_path):
    assert Gate.load(GateConfig(**files(tmp_path), threshold=7.0)).threshold == 7.0


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ({"vector_width": 4}, {}, "v: vector: got 4 numbers, expected 8, the probe's width"),
        ({"probes": 2}, {}, "p: weight: got 2 probes, expected one"),
        ({}, {"release": 0.6}, "consumers.gate.release: got 0.6, expected at most the threshold, 0.5"),
        ({}, {"release": float("nan")}, "consumers.gate.release: got nan, expected at most"),
        ({}, {"threshold": float("nan")}, "consumers.gate.threshold: got nan, expected a finite number"),
        ({}, {"positions": "x"}, "consumers.gate.positions: got x, expected one of"),
        ({}, {"scale": float("inf")}, "scale: got inf, expected a finite number"),
        ({}, {"vector": "/missing"}, "/missing: got no such file"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(tmp_path, shape, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Gate.load(GateConfig(**{**files(tmp_path, **shape), **options}))


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"consumers\.gate\.probe: got 8 numbers, expected 16, the model's width"):
        gate().open(make_model(hidden=16))
    with pytest.raises(UsageError, match=r"consumers\.gate\.probe: got post_block:1, expected a tapped site"):
        gate().open(make_model(num_layers=1))
    with pytest.raises(UsageError, match=r"consumers\.gate\.vector\.post_block\.2: got no tap at post_block:2"):
        gate().open(make_model(num_layers=2))
