"""Controllers that do more than add a vector, and the kill switch: every row is as the float64 reference has it."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.plugins.configure import configure
from capflow.plugins.consumer import Controller, NoConfig, StepProbe
from capflow.steering.action import ActionApplied, Freeze, Gain, SetGate, Steer, Unfreeze, Unsteer
from capflow.steering.clamp import Clamp
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from capflow_engine.worker.control import controllers as control
from tests.kit.acted import Acted, ActedReference, act
from tests.kit.controlled import CROWDED, LENGTHS, PROBED, STEERED, WEIGHT, ahead_of_output, gates
from tests.kit.engines import GREEDY, LAYERS, engine, prompts, relative_error, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ERROR_MAX = 1e-5
OWN = vector(31, norm=2.0)
SHARED = vector(32, norm=2.0)
ADDED = SteeringVector.make(STEERED, vector(12))
CLAMP = Clamp.make(Site(2, "post_block"), vector(13, norm=1.0), {"min": -0.1, "max": 0.1}, where="c")
CLAMPED = Clamp.make(STEERED, vector(12), {"min": -0.1, "max": 0.1}, where="c")
OPEN = {"layer": 0, "vector": WEIGHT, "threshold": -1e6}


@pytest.fixture(scope="module")
def float64(tiny):
    return ActedReference(tiny)


SCRIPT = {
    4: lambda r: Steer(r, (ADDED,), clamps=(CLAMP,), gain=0.5, lease_positions=9, label="short"),
    8: lambda r: Gain(r, "controller script", 2.0, lease_positions=3),
    16: lambda r: SetGate(r, "g", enabled=False, lease_positions=6),
    26: lambda r: Gain(r, "request", 0.25),
    30: lambda r: Gain(r, "request", 1.0),
    34: lambda r: Steer(r, (ADDED,), clamps=(CLAMP,)),
    36: lambda r: Steer(r, (ADDED,), clamps=(CLAMP,)),
    38: lambda r: Steer(r, (ADDED,), clamps=(CLAMP,), gain=0.5),
    40: lambda r: Steer(r, (ADDED,), gain=0.5),
}


class Script(Controller):
    """Does what its script has for the number of a generated position, once for each request."""

    name = "script"
    Config = State = NoConfig

    def __init__(self, state):
        super().__init__(state)
        self.done = collections.defaultdict(set)

    @classmethod
    def load(cls, config):
        return config

    def probes(self):
        return [StepProbe(PROBED, WEIGHT, positions="all_generated")]

    def on_step(self, view):
        for part in view.scores():
            for position in range(part.start, part.start + len(part.scores)):
                number = position - part.prompt_length
                if number in SCRIPT and number not in self.done[part.request]:
                    self.done[part.request].add(number)
                    yield SCRIPT[number](part.request)


@contextlib.contextmanager
def started(tiny, tmp_path_factory, controllers, *, ahead=0, max_tokens=100, lengths=LENGTHS, own=None, **arguments):
    """Yield an engine with requests `r0`, `r1` and so on, its hub's keeper, and the records of its requests."""
    keeper, address = Keeper(), f"ipc://{tmp_path_factory.mktemp('h')}/h"
    hubs = running_hub(address, keeper, controllers=controllers)
    with hubs as hub, ahead_of_output(ahead), engine(tiny, hub=address, **arguments) as llm, Client(address) as client:
        core = llm.llm_engine.engine_core.engine_core
        if ahead:
            core.batch_queue_size = ahead
            core.batch_queue = collections.deque(maxlen=ahead)
            core.step_fn = core.step_with_batch_queue
        scheduler, preempt = core.scheduler, core.scheduler._preempt_request
        keeper.preempted = []
        scheduler._preempt_request = lambda *a, **k: (keeper.preempted.append(a), preempt(*a, **k))[1]
        acted = {}
        for n, prompt in enumerate(prompts(lengths)):
            params = capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=max_tokens, **(own or {}), **GREEDY)
            llm.llm_engine.add_request(f"r{n}", prompt, params)
            acted[f"r{n}"] = Acted(len(prompt["prompt_token_ids"]), {0: OWN} if own else {})
        yield llm, client, keeper, acted
        keeper.problems = list(hub.status()["problems"])


class Stepping:
    """Steps an engine by hand, and keeps the tokens of its requests."""

    def __init__(self, engine):
        self.engine, self.tokens, self.steps = engine, {}, 0

    def step(self):
        self.steps += 1
        for output in self.engine.step():
            if output.finished:
                self.tokens[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]

    def until(self, steps):
        while self.steps < steps:
            self.step()

    def finish(self, keeper):
        while self.engine.has_unfinished_requests():
            self.step()
        compat.flush(self.engine)
        eventually(lambda: len(keeper.done) == len(self.tokens))


def check(float64, keeper, tokens, acted):
    """Compare every captured row with the reference."""
    assert tokens
    for name, answer in tokens.items():
        expected = float64.rows(answer[:-1], acted[name])
        for layer in range(LAYERS):
            rows = keeper.rows[name][Site(layer, "post_block")]
            got = np.stack([rows[position][1] for position in range(len(answer) - 1)])
            error = relative_error(got, expected[layer])
            assert error <= ERROR_MAX, (name, layer, error, acted[name].applied)


@pytest.mark.parametrize(
    ("mode", "ahead", "delay"),
    [("replicated", 0, 1), ("replicated", 2, 1), ("ordered", 0, 1), ("ordered", 2, 2)],
    ids=["replicated", "replicated async", "ordered", "ordered async"],
)
def test_controllers_clamp_scale_set_gates_and_lease(tiny, float64, tmp_path_factory, monkeypatch, mode, ahead, delay):
    kind = type("Scripted", (Script,), {"mode": mode})
    monkeypatch.setattr(control, "load_plugins", lambda: {"script": kind})
    own = {
        "steering_gates": {"g": OPEN},
        "steering_vectors": {"post_block": {0: {"vector": OWN, "scale": 1.0, "gate": "g"}}},
    }
    controllers = [configure("script", {}, {"script": kind})]
    some = LENGTHS[:3]
    with started(tiny, tmp_path_factory, controllers, ahead=ahead, lengths=some, max_tokens=60, own=own) as (
        llm,
        _,
        keeper,
        acted,
    ):
        stepping = Stepping(llm.llm_engine)
        stepping.finish(keeper)
    assert keeper.problems == []
    for name, record in acted.items():
        events = [each for each in keeper.events_of(name) if each.asked_by == "controller script"]
        expected = []
        for number, make in SCRIPT.items():
            action, first = make(name), record.prompt + number + delay
            if number != 36:  # it changes nothing
                expected.append((action.__struct_config__.tag, first, action.label))
            if getattr(action, "lease_positions", None):
                expected.append(("lease_end", first + action.lease_positions, action.label))
            closes = Gain(name, "request", 0.0, lease_positions=6)
            record.applied.append(("controller script", closes if isinstance(action, SetGate) else action, first))
        got = [(each.kind, each.position, each.label) for each in events]
        assert sorted(got, key=lambda each: each[1]) == sorted(expected, key=lambda each: each[1])
    check(float64, keeper, stepping.tokens, acted)


@pytest.mark.parametrize(
    ("mode", "more", "options"),
    [
        ("replicated", {"ahead": 2}, ""),
        ("ordered", {}, ",consecutive=2"),
        ("ordered", {"ahead": 2}, ""),
        ("replicated", CROWDED | {}, ",ema=0.5"),
        ("ordered", CROWDED | {"ahead": 2}, ""),
    ],
    ids=["replicated", "ordered", "ordered async", "preempted", "ordered async preempted"],
)
def test_a_freeze_takes_gates_back_until_it_ends(
    tiny, float64, tmp_path, tmp_path_factory, caplog, mode, more, options
):
    """A gate in the worker, and one in the forward pass. Their actions that meet the freeze are no trouble."""
    controllers = gates(tmp_path, f":threshold=-1e9,mode={mode}{options}")
    (tmp_path / "graph").mkdir()
    in_graph = "@graph:threshold=-1e9,tier=in-graph,positions=all,scale=0.5"
    controllers += gates(tmp_path / "graph", in_graph, steered=Site(2, "post_block"), probed=STEERED)
    with started(tiny, tmp_path_factory, controllers, **more) as (llm, client, keeper, acted):
        stepping = Stepping(llm.llm_engine)
        stepping.until(25)
        (outcome,) = act(stepping.engine, client, [Freeze()], stepping.step)
        assert isinstance(outcome, ActionApplied)
        stepping.until(stepping.steps + 15)
        (outcome,) = act(stepping.engine, client, [Unfreeze()], stepping.step)
        assert isinstance(outcome, ActionApplied)
        stepping.finish(keeper)
    assert bool(keeper.preempted) == ("block_size" in more)
    again = 0
    for name, record in acted.items():
        record.shared["graph"] = {2: 0.5 * vector(12)}
        kinds = {"freeze": Freeze(), "unfreeze": Unfreeze(), "steer": Steer(name, (ADDED,))}
        events = [each for each in keeper.events_of(name) if each.kind in kinds and each.asked_by != "request"]
        events = [each for each in events if "graph" not in each.asked_by]
        events = sorted(events, key=lambda each: (each.position, each.kind != "unfreeze"))
        record.applied += [(each.asked_by, kinds[each.kind], each.position) for each in events]
        kept = [each.kind for each in events]
        assert kept.count("freeze") == kept.count("unfreeze") == 1
        frozen, over = kept.index("freeze"), kept.index("unfreeze")
        assert over == frozen + 1
        again += "steer" in kept[over:]
    assert again >= 2
    assert not any("refused" in problem for problem in [*keeper.problems, *caplog.messages])
    check(float64, keeper, stepping.tokens, acted)


RULES = {
    "r0": "@clamp:action=clamp,min=-0.1,max=0.1",
    "r1": "@gain:action=gain,owner=request,gain=0.25",
    "r2": "@rising:scale=0.05,scale_max=0.5,proportional=0.2",
    "r3": "@shadow:shadow=true",
    "r4": "@slow:ema=0.5,consecutive=2,scale=0.3",
}
"""What the hub's gates do, each on one request."""
OWN_VECTOR = {"steering_vectors": {"post_block": {0: OWN}}}


@pytest.fixture(scope="module")
def bounds(tiny, tmp_path_factory):
    """Where a gate opens and where it closes, in the middle of the scores of each request without one."""
    with started(tiny, tmp_path_factory, [], own=OWN_VECTOR) as (llm, _, keeper, acted):
        stepping = Stepping(llm.llm_engine)
        stepping.finish(keeper)
    made = {}
    for name in RULES:
        scores = [row @ WEIGHT for p, (_, row) in keeper.rows[name][PROBED].items() if p >= acted[name].prompt]
        low, high = np.quantile(scores, (0.45, 0.55))
        made[name] = float(high), float(low)
    return made


def rule(name, request, scores, threshold, release):
    """Yield what a gate decides, at which scored position, and by which score."""
    smoothed, passed, held = None, 0, None
    for position, score in scores:
        smoothed = score if smoothed is None or name != "slow" else (smoothed + score) / 2
        passed = passed + 1 if smoothed >= threshold else 0
        now = held
        if smoothed < release:
            now = None
        elif held is not None or passed >= (2 if name == "slow" else 1):
            # From the first scale to the second, in steps of one sixteenth of the way.
            steps = min(max(round(0.2 * (smoothed - threshold) / 0.45 * 16), 0), 16)
            now = {
                "clamp": Steer(request, (), clamps=(CLAMPED,)),
                "gain": Gain(request, "request", 0.25),
                "rising": Steer(request, (ADDED,), gain=0.05 + 0.45 * steps / 16),
            }.get(name, Steer(request, (ADDED,), gain=0.3))
        if now != held:
            yield position, smoothed, now or (Gain(request, "request", 1.0) if name == "gain" else Unsteer(request))
        held = now


@pytest.mark.parametrize(
    ("mode", "more", "delay"),
    [
        ("replicated", {}, 1),
        ("ordered", {"ahead": 2}, 2),
        pytest.param("ordered", CROWDED, 1, marks=pytest.mark.long),
        pytest.param("replicated", CROWDED | {"ahead": 2}, 1, marks=pytest.mark.long),
    ],
    ids=["replicated", "ordered async", "ordered preempted", "replicated preempted"],
)
def test_a_gate_clamps_scales_and_watches(tiny, float64, bounds, tmp_path, tmp_path_factory, mode, more, delay):
    controllers = gates(
        tmp_path,
        *(
            f"{each},threshold={bounds[name][0]},release={bounds[name][1]},mode={mode},requests={name}"
            for name, each in RULES.items()
        ),
    )
    with started(tiny, tmp_path_factory, controllers, own=OWN_VECTOR, **more) as (llm, _, keeper, acted):
        stepping = Stepping(llm.llm_engine)
        stepping.finish(keeper)
    assert keeper.problems == []
    assert bool(keeper.preempted) == ("block_size" in more)
    for name, each in RULES.items():
        gate, record, last = each[1 : each.index(":")], acted[name], len(stepping.tokens[name]) - 2
        rows = keeper.rows[name][PROBED]
        scores = [(position, float(rows[position][1] @ WEIGHT)) for position in range(record.prompt, last + 1)]
        expected, after = [], 0 if gate == "shadow" else delay
        for position, score, action in rule(gate, name, scores, *bounds[name]):
            if gate != "shadow":
                record.applied.append((f"controller gate@{gate}", action, position + delay))
            if position < last:
                kind = "gate" if gate == "shadow" else action.__struct_config__.tag
                expected.append((kind, position + after, pytest.approx(score, abs=1e-4)))
        events = [event for event in keeper.events_of(name) if event.asked_by == f"controller gate@{gate}"]
        events = [event for event in events if event.position - after < last]  # the last row may come too late
        assert [(event.kind, event.position, event.score) for event in events] == expected, name
        assert len(events) >= 3, name
    check(float64, keeper, stepping.tokens, acted)
