"""Ranks that steer alike have equal checksums; a fault on one rank is named with its first step."""

from __future__ import annotations

import collections
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

import capflow
from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.hub.health import problems
from capflow.hub.monitor.metrics import registry_of
from capflow.steering.action import FROZEN, FROZEN_TROUBLE, ActionApplied, Gain, Rejected, Steer
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from tests.kit.controlled import PROBED, WEIGHT, gates
from tests.kit.engines import GREEDY, engine, environment, prompts, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEERING = {"steering_vectors": {"post_block": {1: vector(3)}}}
PARALLEL = {"tensor_parallel_size": 2, "in_process": False}


determinism_at = pytest.importorskip("capflow_engine.serve.http.steering_routes").determinism_at


def report(hub):
    """Return what the hub knows of its only engine's ranks; None before the engine told it."""
    return next(iter(hub.status()["determinism"].values()), None)


def another_slot(worker):
    """Have the second rank steer nothing, where the first steers; return the last step before."""
    from capflow_engine.taps.bank import NOTHING

    capture = worker.capflow
    for tracked in capture.requests.values() if capture.rank.tp == 1 else ():
        *before, last = tracked.steered
        tracked.steered = (*before, last._replace(steered=NOTHING))
    return capture.checksums.last


def add(llm, name, tokens, **more):
    params = capflow.sampling_params(id=name, max_tokens=tokens, min_tokens=tokens, **more, **GREEDY)
    llm.llm_engine.add_request(name, prompts((40,))[0], params)


def step(llm, steps=10**9):
    """Run steps; return the last output of each request."""
    outputs = {}
    while steps and llm.llm_engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.llm_engine.step()}
        steps -= 1
    return outputs


def consistent_in_metrics(hub):
    """Return the value of the hub's only sample of `capflow_steering_consistent`."""
    ((sample,),) = (
        metric.samples for metric in registry_of(hub).collect() if metric.name == "capflow_steering_consistent"
    )
    return sample.value


def test_one_rank_agrees_with_itself(tiny, tmp_path_factory):
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    with running_hub(address, Keeper()) as hub, engine(tiny, hub=address) as llm:
        add(llm, "r", 20, **STEERING)
        step(llm)
        eventually(lambda: report(hub) and report(hub)["actions"] >= 20)
        assert report(hub)["consistent"]
        assert report(hub)["ranks"] == ("0.0",)


@pytest.mark.long
def test_healthy_ranks_agree_and_a_fault_on_one_is_named_with_its_first_step(tiny, tmp_path_factory):
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    with (
        environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        running_hub(address, Keeper()) as hub,
        engine(tiny, hub=address, **PARALLEL) as llm,
    ):
        add(llm, "healthy", 80, **STEERING)
        step(llm)
        eventually(lambda: (report(hub) or {"step": 0})["step"] >= 80)
        healthy = report(hub)
        assert (healthy["consistent"], healthy["first_mismatch"]) == (True, None)
        assert healthy["ranks"] == ("0.0", "0.1")
        assert healthy["actions"] >= 80
        assert not problems(hub, time.monotonic())
        assert consistent_in_metrics(hub) == 1
        add(llm, "faulty", 150, **STEERING)
        step(llm, 20)
        before = llm.collective_rpc(another_slot)
        step(llm)
        eventually(lambda: not report(hub)["consistent"])
        faulty = report(hub)
        assert (faulty["first_mismatch"], faulty["differing"]) == (before[0] + 1, ("0.1",))
        assert faulty["step"] - faulty["first_mismatch"] <= 2 * limits.CHECKSUM_STEPS
        eventually(lambda: problems(hub, time.monotonic()))
        (problem,) = problems(hub, time.monotonic())
        assert f"ranks steer differently since step {faulty['first_mismatch']}: 0.1" in problem
        assert consistent_in_metrics(hub) == 0
        over_http = determinism_at(llm.capflow_settings.hubs[0], llm.capflow_settings.engine)
        assert (over_http["first_mismatch"], over_http["differing"]) == (faulty["first_mismatch"], ["0.1"])


def flipped_rows(worker):
    """Have the second rank score with probes of the opposite sign."""
    capture = worker.capflow
    if capture.rank.tp == 1:
        capture.bank.rows.neg_()
    return capture.checksums.last


@pytest.mark.long
def test_a_gate_that_opens_on_one_rank_alone_is_named(tiny, tmp_path_factory):
    """The gate steers nothing, so programs, slots and answers are equal: only what it scores differs."""
    address, keeper = f"ipc://{tmp_path_factory.mktemp('h')}/h", Keeper()
    gate = {"g": {"layer": PROBED.layer, "vector": WEIGHT, "threshold": 0.0}}
    with (
        environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        running_hub(address, keeper) as hub,
        engine(tiny, hub=address, **PARALLEL) as llm,
    ):
        add(llm, "healthy", 150, steering_gates=gate)
        step(llm)
        eventually(lambda: (report(hub) or {"step": 0})["step"] >= 150)
        assert report(hub)["consistent"]
        eventually(lambda: "healthy" in keeper.done or keeper.events_of("healthy"))
        add(llm, "faulty", 200, steering_gates=gate)
        step(llm, 20)
        before = llm.collective_rpc(flipped_rows)[0]
        step(llm)
        eventually(lambda: report(hub)["actions"] >= 350 - 2)
        faulty = report(hub)
    assert not faulty["consistent"]
    assert faulty["differing"] == ("0.1",)
    assert before < faulty["first_mismatch"] <= before + 4
    opened = [event for event in keeper.events if event.kind == "gate"]
    assert len(opened) >= 10


GATED_FROM, TOKENS = 41, 180
"""A gate acts from the position after the first generated row of a prompt of 40 tokens on."""


def one_rank_refuses(worker):
    """Have the second rank refuse what controllers decide, as if its bank were full."""
    from capflow.errors import CapflowError

    capture = worker.capflow

    def act(*args, **more):
        raise CapflowError("a fault of one rank")

    if capture.rank.tp == 1:
        capture.histories.act = act
    return capture.checksums.last


@pytest.mark.long
@pytest.mark.parametrize("reaction", ["warn", "freeze", "abort"])
def test_each_reaction_to_a_controller_that_acts_on_one_rank_alone(tiny, tmp_path, tmp_path_factory, reaction):
    """A gate steers `gated` on the first rank; `static` and `plain` run the same on both."""
    address, keeper = f"ipc://{tmp_path_factory.mktemp('h')}/h", Keeper()
    controllers = gates(tmp_path, ":threshold=-1e9,mode=replicated,requests=gated*")
    with (
        environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        running_hub(address, keeper, controllers=controllers) as hub,
        engine(tiny, hub=address, on_divergence=reaction, **PARALLEL) as llm,
    ):
        add(llm, "gated-healthy", 60, capture=ALL)
        step(llm)
        eventually(lambda: keeper.events_of("gated-healthy"))
        before = llm.collective_rpc(one_rank_refuses)[0]
        for name, more in (("gated", {}), ("static", STEERING), ("plain", {})):
            add(llm, name, TOKENS, capture=ALL, **more)
        outputs = step(llm)
        eventually(lambda: not report(hub)["consistent"])
        eventually(lambda: {"gated", "static", "plain"} <= keeper.done.keys())
        faulty = report(hub)
        with Client(address) as client:
            gain = client.act(Gain("", "global", 0.5), timeout=20)
        trouble = "; ".join(problems(hub, time.monotonic()))
    actions = [(event.request, event.kind, event.asked_by) for event in keeper.events]
    # One action on each gated request: on both ranks, then on the first alone.
    assert actions.count(("gated-healthy", "steer", "controller gate")) == 1
    assert actions.count(("gated", "steer", "controller gate")) == 1
    assert faulty["actions"] > 60
    assert before < faulty["first_mismatch"] <= before + 45
    assert faulty["differing"] == ("0.1",)
    assert f"ranks steer differently since step {faulty['first_mismatch']}" in trouble
    reason = f"capflow:divergence:step {faulty['first_mismatch']}:0.1"
    finish = {name: outputs[name].outputs[0].finish_reason for name in ("gated", "static", "plain")}
    changes = [event for event in keeper.events if event.asked_by == "engine"]
    if reaction == "abort":
        assert finish == {"gated": "abort", "static": "length", "plain": "length"}
        assert outputs["gated"].outputs[0].stop_reason == reason
        assert [(event.request, event.kind, event.label) for event in changes] == [("gated", "abort", reason)]
        assert len(outputs["gated"].outputs[0].token_ids) < TOKENS
        assert isinstance(gain, ActionApplied)
        return
    assert set(finish.values()) == {"length"}
    steered = [position for position, one in keeper.steered["gated"].items() if one]
    if reaction == "warn":
        assert not changes
        assert steered == [*range(GATED_FROM, 40 + TOKENS - 1)]
        return
    assert {(event.request, event.kind, event.label) for event in changes} == {
        (name, "freeze", reason) for name in finish
    }
    (frozen,) = (event for event in changes if event.request == "gated")
    assert steered == [*range(GATED_FROM, frozen.position)]
    assert frozen.step - faulty["first_mismatch"] <= 3 * limits.CHECKSUM_STEPS
    assert FROZEN_TROUBLE in trouble
    assert gain == Rejected(gain.id, FROZEN)


def one_stage_ignores(worker):
    """Have the second pipeline stage ignore what a hub orders."""
    capture = worker.capflow
    if capture.rank.pp == 1:
        capture.changes._order = lambda ordered: None
    return capture.checksums.last


@pytest.mark.long
@pytest.mark.timeout(900)
def test_stages_of_a_pipeline_agree_and_requests_end_when_one_ignores_an_action(tiny, tmp_path_factory):
    """No request differs within a stage, so all that something steers are aborted."""
    address, keeper = f"ipc://{tmp_path_factory.mktemp('h')}/h", Keeper()
    steer = Steer("", (SteeringVector.make(Site(3, "post_block"), vector(4)),))
    arguments = {"pipeline_parallel_size": 2, "in_process": False, "enforce_eager": False, "max_model_len": 512}
    with (
        environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        running_hub(address, keeper) as hub,
        engine(tiny, hub=address, on_divergence="abort", **arguments) as llm,
        Client(address) as client,
    ):
        add(llm, "healthy", 150, **STEERING)
        step(llm, 10)
        acted(llm, client, replace(steer, request="healthy"))
        step(llm)
        eventually(lambda: report(hub)["step"] >= 150)
        healthy = report(hub)
        assert (healthy["consistent"], healthy["ranks"]) == (True, ("0.0", "1.0"))
        assert healthy["actions"] >= 150
        before = llm.collective_rpc(one_stage_ignores)[0]
        add(llm, "steered", 400, capture=ALL)
        add(llm, "plain", 400, capture=ALL)
        step(llm, 10)
        acted(llm, client, replace(steer, request="steered"))
        outputs = step(llm)
        eventually(lambda: not report(hub)["consistent"])
        faulty = report(hub)
        eventually(lambda: {"steered", "plain"} <= keeper.done.keys())
    assert before < faulty["first_mismatch"] <= before + 60
    assert faulty["differing"] == ("1.0",)
    (steered,), (plain,) = outputs["steered"].outputs, outputs["plain"].outputs
    assert (steered.finish_reason, plain.finish_reason) == ("abort", "length")
    assert steered.stop_reason == f"capflow:divergence:step {faulty['first_mismatch']}:1.0"
    assert len(steered.token_ids) <= 6 * limits.CHECKSUM_STEPS
    # Two actions of a client, one event of the engine.
    kinds = [(event.request, event.kind, event.asked_by) for event in keeper.events if event.asked_by != "request"]
    assert kinds == [("healthy", "steer", "client"), ("steered", "steer", "client"), ("steered", "abort", "engine")]


def acted(llm, client, action):
    """Have an action applied while an engine steps."""
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(client.act, action, timeout=60)
        while not outcome.done():
            step(llm, 1)
        assert isinstance(outcome.result(), ActionApplied)


def test_another_reaction_is_refused_by_name(tiny):
    with pytest.raises(UsageError, match="on_divergence: got stop, expected one of warn, freeze, abort"):
        capflow.LLM(str(tiny), on_divergence="stop")


@pytest.mark.long
def test_ten_thousand_healthy_steps_have_no_mismatch(tiny, tmp_path, tmp_path_factory):
    """Two of three requests are steered: by vectors, by a gate in the graph and by a controller, all at once."""
    address, keeper = f"ipc://{tmp_path_factory.mktemp('h')}/h", Keeper()
    controllers = gates(tmp_path, ":threshold=0,mode=replicated,requests=gated*")
    hard = {"g": {"layer": PROBED.layer, "vector": WEIGHT, "threshold": 0.0}}
    added = {3: {"vector": vector(5), "gate": "g"}}
    in_graph = {"steering_gates": hard, "decode_steering_vectors": {"post_block": added}}
    kinds = [("gated", STEERING), ("gated-in-graph", in_graph), ("plain", {})]
    with (
        running_hub(address, keeper, controllers=controllers) as hub,
        engine(tiny, hub=address, max_num_seqs=4, **PARALLEL) as llm,
    ):
        for number in range(201):
            name, more = kinds[number % 3]
            add(llm, f"{name}-{number}", 200, **more)
        step(llm)
        eventually(lambda: report(hub)["step"] >= 10_000)
        result = report(hub)
    assert result["consistent"]
    assert result["actions"] >= 6_000
    events = collections.Counter(event.kind for event in keeper.events)
    assert events["steer"] >= 100
    assert events["gate"] >= 500
