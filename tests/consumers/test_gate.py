from __future__ import annotations

import itertools
import math
import re
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.plugins.configure import ConfiguredController
from capflow.plugins.consumer import ScoreBatch
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import Abort, Gain, Steer, Unsteer
from capflow.steering.vector import SteeringVector
from capflow_consumers.gate import Gate, GateConfig, GateState
from tests.kit.frames import make_model

READ, ADD = Site(1, "post_block"), Site(2, "post_block")
VECTOR = SteeringVector.make(ADD, np.arange(8), 2.0)


class View(NamedTuple):
    """A step: `(request, scores)`, or `(request, scores, start)`; and the requests that the gate steers."""

    parts: tuple
    steers: frozenset = frozenset()
    step: int = 1

    def score_batches(self):
        names, scores, starts = zip(*((*part, 0)[:3] for part in self.parts), strict=True)
        offsets = np.cumsum([0, *map(len, scores)])
        every = np.concatenate([np.array(some, np.float32) for some in scores])
        yield ScoreBatch(0, READ, names, starts, [4] * len(names), offsets, every)

    def steered(self):
        return self.steers


def view(*parts, steers=()) -> View:
    return View(parts, frozenset(steers))


def gate(**options) -> Gate:
    weight = np.eye(1, 8, dtype=np.float32).tobytes()
    fixed = {"layer": 1, "hook": "post_block", "weight": weight, "bias": 0.0, "threshold": 1.0, "vector": VECTOR}
    return Gate(GateState(**{**fixed, **options}))


def files(tmp_path, *, width=8, vector_width=8, probes=1, threshold=0.5):
    names = tuple(f"p{i}" for i in range(probes))
    Probe.make(READ, np.ones((probes, width)), [0.25] * probes, names=names, threshold=threshold).save(tmp_path / "p")
    save_vector(tmp_path / "v", ADD, np.ones(vector_width))
    return {"probe": str(tmp_path / "p"), "vector": str(tmp_path / "v")}


def actions(controller, *parts, steers=()):
    """Return the actions of a step."""
    return [decision.action for decision in controller.on_step(view(*parts, steers=steers))]


def test_a_request_is_steered_from_the_step_its_probe_fires():
    controller = gate()
    assert controller.on_step(view(("a", [0.9]), ("b", [0.0]))) == []
    (decision,) = controller.on_step(view(("a", [1.5], 7), ("b", [0.0])))
    assert (decision.action, decision.position, decision.score, decision.threshold) == (STEER, 7, 1.5, 1.0)
    assert actions(controller, ("a", [-5.0]), ("b", [1.5])) == [Steer("b", (VECTOR,))]


STEER, UNSTEER = Steer("a", (VECTOR,)), Unsteer("a")
CUTS = st.lists(st.integers(1, 199), max_size=8)
SCORES = st.lists(st.sampled_from([0.0, 0.4, 0.5, 0.9, 1.0, 2.0, float("nan")]), min_size=1, max_size=200)


def held_after(controller, scores, cuts):
    """Return what holds after the scores of a request in steps that are cut so, and the position that decided it."""
    bounds = sorted({0, *(cut for cut in cuts if cut < len(scores)), len(scores)})
    held, at, history = UNSTEER, None, []
    for first, end in itertools.pairwise(bounds):
        steers = ["a"] if isinstance(held, Steer) else []
        for decision in controller.on_step(view(("a", scores[first:end], first), steers=steers)):
            if decision.action != held:
                held, at = decision.action, decision.position
        history.append((end, held, at))
    return history


@given(SCORES, CUTS)
@example(scores=[1.0, math.nan, 0.0], cuts=[1])
def test_what_is_decided_is_the_same_wherever_the_rows_are_cut(scores, cuts):
    """Row by row: at or above 1.0 it fires, below 0.5 it releases, and in between nothing changes."""
    expected, at, states = UNSTEER, None, {}
    for position, score in enumerate(scores):
        after = STEER if score >= 1.0 else UNSTEER if score < 0.5 else expected
        expected, at = after, position if after != expected else at
        states[position + 1] = expected
    history = held_after(gate(release=0.5), scores, cuts)
    assert [held for _, held, _ in history] == [states[end] for end, _, _ in history]
    (_, _, whole), *_ = held_after(gate(release=0.5), scores, [])
    if expected == STEER:
        assert whole == at


class Slow:
    """A gate with a memory, written down row by row."""

    def __init__(self, *, ema=0.0, consecutive=1, release=None):
        self.ema, self.consecutive, self.release = ema, consecutive, release
        self.value, self.passed, self.on = None, 0, False

    def take(self, score):
        if math.isnan(score):
            self.passed = 0
            return
        self.value = score if self.value is None else self.ema * self.value + (1 - self.ema) * score
        self.passed = self.passed + 1 if self.value >= 1.0 else 0
        if self.release is not None and self.value < self.release:
            self.on = False
        elif self.passed >= self.consecutive:
            self.on = True


@given(SCORES, CUTS, st.sampled_from([0.0, 0.5, 0.9]), st.integers(1, 4), st.sampled_from([None, 0.5, 1.0]))
def test_a_gate_with_a_memory_takes_every_row_once_in_order(scores, cuts, ema, consecutive, release):
    slow, states = Slow(ema=ema, consecutive=consecutive, release=release), {}
    for position, score in enumerate(np.array(scores, np.float32).tolist()):
        slow.take(score)
        states[position + 1] = STEER if slow.on else UNSTEER
    controller = gate(ema=ema, consecutive=consecutive, release=release)
    history = held_after(controller, scores, cuts)
    assert [held for _, held, _ in history] == [states[end] for end, _, _ in history]


@given(SCORES, st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=6))
def test_positions_that_come_again_take_the_place_of_the_first(scores, drafts):
    """A draft of some rows was rejected; other rows have its positions."""
    options = {"ema": 0.5, "consecutive": 2, "release": 0.5}
    straight, tried = gate(**options), gate(**options)
    drafted = dict(drafts)
    for position, score in enumerate(scores):
        if position in drafted:
            tried.on_step(view(("a", [9.0] * drafted[position], position)))
        tried.on_step(view(("a", [score], position)))
        straight.on_step(view(("a", [score], position)))
    assert repr(tried._after["a"][-1]) == repr(straight._after["a"][-1])


def test_the_scale_grows_with_the_score_in_steps_up_to_its_bound():
    controller = gate(proportional=2.0, scale=1.0, scale_max=5.0, release=0.0)
    scales = []
    for position, score in enumerate([0.5, 1.0, 1.5, 2.0, 9.0, 0.5, -1.0]):
        taken = actions(controller, ("a", [score], position))
        scales += [action.vectors[0].scale if isinstance(action, Steer) else None for action in taken]
    # VECTOR itself has scale 2, as it would have from the option `scale`.
    assert scales == [2.0, 2.0, 3.0, 5.0, 2.0, None]
    assert len({id(some) for some in controller._vectors.values()}) <= 17


def test_a_shadow_gate_records_and_does_nothing():
    controller = gate(shadow=True, release=0.5, label="try")
    every = [controller.on_step(view(("a", [score], n))) for n, score in enumerate([0.0, 2.0, 3.0, 0.0])]
    assert [[(d.action, d.position, d.score, d.label) for d in some] for some in every] == [
        [],
        [(None, 1, 2.0, "try")],
        [],
        [(None, 3, 0.0, "try")],
    ]
    assert controller.steers() == []


@pytest.mark.parametrize("action", ["abort", "stop"])
def test_an_aborting_gate_names_itself_its_score_and_the_first_position(action):
    controller = gate(action=action, mode="ordered", vector=None)
    controller.instance = "gate@rude"
    (decision,) = controller.on_step(view(("a", [0.0, 1.25, 9.0], 4)))
    assert decision.action == Abort("a", as_=action, reason="capflow:gate@rude:1.25")
    assert decision.position == 5


def test_a_gate_of_gain_turns_an_owner_down_and_up_again():
    controller = gate(action="gain", owner="request", gain=0.25, release=0.5, vector=None)
    steps = [
        actions(controller, ("a", [score], n), steers="a" if n > 1 else ())
        for n, score in enumerate([0.0, 1.0, 1.0, 0.0])
    ]
    assert steps == [[], [Gain("a", "request", 0.25)], [], [Gain("a", "request", 1.0)]]


def test_a_forgotten_request_begins_anew():
    controller = gate(consecutive=2)
    controller.on_step(view(("a", [2.0])))
    controller.on_request_done("a")
    assert actions(controller, ("a", [2.0])) == []
    assert actions(controller, ("a", [2.0], 1)) == [STEER]


def test_below_release_the_steering_is_taken_back_and_may_come_again():
    controller, held, taken = gate(release=0.5), [], []
    for score in (0.0, 1.0, 0.5, 0.4, 0.9, 1.0):
        taken.append(actions(controller, ("a", [score]), steers=held))
        held = ["a"] if taken[-1] == [STEER] else [] if taken[-1] else held
    assert taken == [[], [STEER], [], [UNSTEER], [], [STEER]]


def test_the_files_become_a_state_that_travels(tmp_path):
    state = Gate.load(GateConfig(**files(tmp_path), scale=3.0))
    assert (Site(state.layer, state.hook), state.threshold, state.bias) == (READ, 0.5, 0.25)
    assert state.vector.site == ADD
    assert state.vector.array().tolist() == [3.0] * 8
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Gate.State) == state
    controller = Gate(state)
    (probe,) = controller.probes()
    assert (probe.site, probe.bias, probe.score, probe.positions) == (READ, 0.25, "dot", "all")
    assert controller.spec() is None
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
        ({}, {"vector": ""}, "consumers.gate.vector: got none, expected a file, with steer"),
        ({}, {"mode": "both"}, "consumers.gate.mode: got both, expected one of replicated, ordered"),
        ({}, {"score": "l2"}, "consumers.gate.score: got l2, expected one of dot, cosine, cast"),
        ({}, {"action": "sing"}, "consumers.gate.action: got sing, expected one of steer, clamp, gain, abort, stop"),
        ({}, {"action": "stop"}, "consumers.gate.mode: got replicated, expected ordered, with stop; set mode=ordered"),
        ({}, {"action": "gain"}, "consumers.gate.owner: got none, expected an owner, with gain only"),
        ({}, {"owner": "request"}, "consumers.gate.owner: got request, expected an owner, with gain only"),
        ({}, {"action": "clamp"}, "consumers.gate.value: got none, expected value alone, or min or max, with clamp"),
        ({}, {"ema": 1.0}, "consumers.gate.ema: got 1.0, expected 0 to below 1"),
        ({}, {"consecutive": 0}, "consumers.gate.consecutive: got 0, expected 1 or more"),
        ({}, {"proportional": 1.0}, "consumers.gate.scale_max: got none, expected a number of at least scale"),
        ({}, {"scale_max": 0.5}, "consumers.gate.scale_max: got 0.5, expected at least scale, 1.0"),
        ({}, {"proportional": -1.0}, "consumers.gate.proportional: got -1.0, expected a finite number"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(tmp_path, shape, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Gate.load(GateConfig(**{**files(tmp_path, **shape), **options}))


def test_a_gate_in_the_graph_is_steering_and_runs_nowhere(tmp_path):
    options = {"scale": 3.0, "sharpness": 2.0, "positions": "all_generated", "label": "why", "requests": "chat-*"}
    state = Gate.load(GateConfig(**files(tmp_path), tier="in-graph", **options))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Gate.State) == state
    spec = ConfiguredController("gate@rude", Gate, state).spec()
    assert (spec.captures, spec.runs, spec.requests) == ((), False, "chat-*")
    (gate,), (vector,) = spec.steering.gates, spec.steering.base.vectors
    assert (gate.site, gate.threshold, gate.bias, gate.sharpness) == (READ, 0.5, 0.25, 2.0)
    assert (gate.positions, gate.label, gate.latch) == ("generated", "why", False)
    assert (vector.site, vector.gate, vector.scale) == (ADD, gate.name, 3.0)
    Gate(state).open(make_model(num_layers=1))


GRAPH = {"tier": "in-graph"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "fast"}, "consumers.gate.tier: got fast, expected one of sync, in-graph"),
        ({"latch": True}, "consumers.gate.latch: got True, expected none, with tier=sync; use tier=in-graph"),
        ({"sharpness": 1.0}, "consumers.gate.sharpness: got 1.0, expected none, with tier=sync"),
        *(
            ({**GRAPH, name: value}, f"consumers.gate.{name}: got {value}, expected none, with tier=in-graph")
            for name, value in {
                "release": 0.1, "ema": 0.5, "consecutive": 2, "proportional": 1.0, "scale_max": 2.0, "action": "stop",
                "mode": "ordered", "shadow": True,
                "owner": "request", "gain": 1.0, "value": 0.0, "min": 0.0, "max": 1.0,
            }.items()
        ),
        ({**GRAPH, "vector": ""}, "consumers.gate.vector: got none, expected a file, with tier=in-graph"),
        ({**GRAPH, "positions": "x"}, "consumers.gate.positions: got x, expected one of all, prompt"),
        ({**GRAPH, "score": "l2"}, "consumers.gate.score: got l2, expected one of dot, cosine, cast"),
        ({**GRAPH, "threshold": float("nan")}, "consumers.gate.threshold: got nan, expected a finite number"),
        ({**GRAPH, "sharpness": -1.0}, "consumers.gate.sharpness: got -1.0, expected a number above 0"),
        ({**GRAPH, "positions": "last_prompt"}, "consumers.gate.latch: got False, expected true, with"),
    ],
)  # fmt: skip
def test_options_of_another_tier_and_wrong_ones_of_the_graph_are_refused(tmp_path, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Gate.load(GateConfig(**{**files(tmp_path), **options}))


@pytest.mark.parametrize(("site", "latch", "order"), [("pre_attn:1", False, "at or after"), (str(READ), True, "after")])
def test_a_vector_in_front_of_the_probe_of_the_graph_is_refused(tmp_path, site, latch, order):
    options = files(tmp_path)
    save_vector(tmp_path / "v", Site.parse(site), np.ones(8))
    message = f"consumers.gate.vector: got one at {site}, expected a vector {order} the probe's site, {READ}"
    with pytest.raises(UsageError, match=re.escape(message)):
        Gate.load(GateConfig(**options, tier="in-graph", latch=latch))


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"consumers\.gate\.probe: got 8 numbers, expected 16, the model's width"):
        gate().open(make_model(hidden=16))
    with pytest.raises(UsageError, match=r"consumers\.gate\.probe: got post_block:1, expected a tapped site"):
        gate().open(make_model(num_layers=1))
    with pytest.raises(UsageError, match=r"consumers\.gate\.vector\.post_block\.2: got no tap at post_block:2"):
        gate().open(make_model(num_layers=2))


@pytest.mark.parametrize("tier", ["sync", "in-graph"])
@pytest.mark.parametrize("part", ["p", "v"])
def test_a_gate_at_a_site_of_another_shape_is_refused_by_name(tmp_path, tier, part):
    options = files(tmp_path)
    if part == "p":
        Probe.make(Site(3, "heads"), np.ones(8)).save(tmp_path / "p")
    else:
        save_vector(tmp_path / "v", Site(3, "heads"), np.ones(8))
    with pytest.raises(UsageError) as caught:
        Gate.load(GateConfig(**options, tier=tier))
    assert str(caught.value) == f"{tmp_path / part}: site: got heads:3, expected a site of the residual stream"
