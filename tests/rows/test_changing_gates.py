"""Gates that actions change while their request runs: each position has the gate that was applied there."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.steering.action import ActionApplied, SetGate
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from tests.kit.acted import act
from tests.kit.controlled import CROWDED, LENGTHS, PROBED, WEIGHT, ahead_of_output, hold, scores
from tests.kit.driver import Driver
from tests.kit.engines import GREEDY, engine, prompts, relative_error
from tests.kit.hubs import running_hub
from tests.kit.oracle import Live
from tests.kit.oracle_actions import vector
from tests.kit.oracle_reference import OracleReference
from tests.kit.rows import ALL, FLOAT32_BOUND, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("ahead", [0, 2], ids=["sync", "async"])
def test_a_gate_that_is_disabled_for_some_positions_ends_nothing_there(tiny, reference, tmp_path_factory, ahead):
    """Not when a preempted request computes these positions again, either, after the lease of the change."""
    gate = {"layer": PROBED.layer, "vector": WEIGHT, "threshold": 1e3, "positions": "generated", "abort": "stop"}
    keeper, address = Keeper(), f"ipc://{tmp_path_factory.mktemp('h')}/h"
    hub, asynchronous = running_hub(address, keeper), ahead_of_output(ahead)
    with hub, asynchronous, engine(tiny, hub=address, **CROWDED) as llm, Client(address) as client:
        inner = llm.llm_engine.engine_core.engine_core
        if ahead:
            inner.batch_queue_size, inner.batch_queue = ahead, collections.deque(maxlen=ahead)
            inner.step_fn = inner.step_with_batch_queue
        preempt, preempted, done = inner.scheduler._preempt_request, [], {}
        inner.scheduler._preempt_request = lambda *a, **k: (preempted.append(a), preempt(*a, **k))[1]
        core = llm.llm_engine
        for n, prompt in enumerate(prompts(LENGTHS)):
            asked = capflow.sampling_params(
                id=f"r{n}", capture=ALL, max_tokens=100, steering_gates={"rude": gate}, **GREEDY
            )
            core.add_request(f"r{n}", prompt, asked)

        def step():
            done.update({output.request_id: output for output in core.step() if output.finished})

        for _ in range(12):
            step()
        changes = [SetGate(f"r{n}", "rude", threshold=-1e3, enabled=False, lease_positions=9) for n in range(5)]
        changes.append(SetGate("r5", "rude", threshold=-1e3, lease_positions=5, label="opened"))
        outcomes = act(core, client, changes, step)
        assert all(isinstance(outcome, ActionApplied) for outcome in outcomes), outcomes
        while core.has_unfinished_requests():
            step()
        compat.flush(core)
        eventually(lambda: len(keeper.done) == len(LENGTHS))
    assert preempted
    for n in range(5):
        assert (len(done[f"r{n}"].outputs[0].token_ids), done[f"r{n}"].outputs[0].finish_reason) == (100, "length")
    (answer,), first = done["r5"].outputs, outcomes[5].position
    assert (len(answer.token_ids), answer.finish_reason) == (first + 2 - LENGTHS[5], "stop")
    score = scores(keeper, "r5")[first]
    assert float(answer.stop_reason.removeprefix("capflow:rude:")) == pytest.approx(score, abs=1e-3)
    (event,) = [each for each in keeper.events_of("r5") if each.kind == "abort"]
    assert (event.position, event.threshold) == (first + 1, -1e3)
    hold(keeper, "r5", done["r5"], reference, {})


def test_a_latch_that_is_open_stays_open_when_its_gate_changes(tiny, tmp_path):
    """No score reaches the new threshold: only the latch opens the gate behind it, but not while it is disabled."""
    gate = {"site": Site(1, "post_block"), "seed": 1, "score": "dot", "threshold": -3.0, "sharpness": None}
    gate |= {"latch": True, "positions": "generated"}
    changes = ({"threshold": 50.0}, {"threshold": 50.0, "enabled": False}, {"threshold": 50.0, "enabled": True})
    actions = [(8 + 8 * n, {"kind": "set_gate", "change": change}) for n, change in enumerate(changes)]
    request = {
        "capture": CaptureSpec.parse({"hooks": {"post_block": "all"}, "positions": "all"}),
        "steering": [(Site(3, "post_block"), 1, ("vectors", "decode_", 1.0))],
        "gate": gate,
        "actions": actions,
        "max_tokens": 90,
        "arrival": 0,
        "abort": None,
    }
    live = Live(tiny, tmp_path)
    with live.start() as llm:
        scenario = [{**request, "prompt": list(range(5 + 40 * n, 45 + 40 * n))} for n in range(4)]
        ran = live.prove(llm, scenario)
    assert live.acted == {**live.acted, "SetGate": 12}, live.acted
    assert live.acted["preempted afterwards"]
    data = capflow.open(live.root)
    for number, name in enumerate(ran.names):
        steered = data[name].steered("post_block:3").tolist()
        first, closed, opened = (ran.outcomes[n + 4 * change].position for change in range(3) for n in [number])
        assert steered[45:first] == [True] * (first - 45)
        assert steered[first:] == [not closed <= p < opened for p in range(first, len(steered))]


GATE = {"layer": PROBED.layer, "hook": "post_block", "vector": WEIGHT, "score": "dot"}


def hold_gated(keeper, name, tokens, prompt, fields, float64):
    """Hold a request's rows against the reference; return how often its gate flipped."""
    right = float64.run(tokens[:-1], prompt, fields)
    for site, kept in keeper.rows[name].items():
        assert sorted(kept) == list(range(len(tokens) - 1))
        rows = np.stack([kept[p][1] for p in range(len(tokens) - 1)])
        assert relative_error(rows, right.rows[site]) < FLOAT32_BOUND
    return right.flips


@pytest.mark.parametrize("latch", [False, True], ids=["each", "latched"])
def test_each_of_n_samples_has_a_gate_of_its_own(tiny, tmp_path_factory, latch):
    keeper, address = Keeper(), f"ipc://{tmp_path_factory.mktemp('h')}/h"
    gate = {**GATE, "threshold": 0.1, "positions": "generated", "latch": latch}
    added = {"post_block": {3: {"vector": vector(1, Site(3, "post_block")), "gate": "g", "scale": 1.0}}}
    fields = {"steering_gates": {"g": gate}, "decode_steering_vectors": added}
    (prompt,) = prompts((40,))
    with running_hub(address, keeper), engine(tiny, hub=address) as llm:
        asked = capflow.sampling_params(
            id="dice", capture=ALL, max_tokens=30, n=3, temperature=1.0, ignore_eos=True, detokenize=False,
            **fields,
        )  # fmt: skip
        (output,) = llm.generate([prompt], [asked], use_tqdm=False)
        eventually(lambda: len(keeper.done) == 3)
    float64, flips = OracleReference(tiny), []
    for sample in output.outputs:
        tokens = [*prompt["prompt_token_ids"], *sample.token_ids]
        flips.append(hold_gated(keeper, f"dice#{sample.index}", tokens, 40, fields, float64))
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    assert all(flips)


@pytest.mark.parametrize("latch", [False, True], ids=["each", "latched"])
def test_the_gates_of_streaming_input_go_on_where_it_ended(tiny, tmp_path_factory, latch):
    """What was generated becomes prompt; a latch that a first part opened is open in the second."""
    keeper, address = Keeper(), f"ipc://{tmp_path_factory.mktemp('h')}/h"
    first, second = (p["prompt_token_ids"] for p in prompts((20, 30), seed=4))
    float64 = OracleReference(tiny)
    highest = np.sort(float64.run(first, 20, {}).rows[PROBED] @ WEIGHT)[-2:]
    gate = {**GATE, "threshold": float(highest.mean()) if latch else 0.1, "positions": "all", "latch": latch}
    added = {"post_block": {3: {"vector": vector(1, Site(3, "post_block")), "gate": "g", "scale": 1.0}}}
    fields = {"steering_gates": {"g": gate}, "steering_vectors": added}
    with running_hub(address, keeper), engine(tiny, hub=address, max_num_batched_tokens=16) as llm:
        driver = Driver(llm)
        params = capflow.sampling_params(id="talk", capture=ALL, max_tokens=6, **fields, **GREEDY)
        one, two = (driver.talk("talk", part, params) for part in (first, second))
        driver.say("talk", [0], params, more=False)
        driver.run()
        eventually(lambda: "talk" in keeper.done)
    tokens = [*first, *one[:-1], *second, *two]
    assert hold_gated(keeper, "talk", tokens, len(tokens), fields, float64)
