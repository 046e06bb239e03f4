"""Gates that actions change while their request runs: each position has the gate that was applied there."""

from __future__ import annotations

import collections

import pytest

import capflow
from capflow.steering.action import ActionApplied, SetGate
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from tests.kit.acted import act
from tests.kit.controlled import CROWDED, LENGTHS, PROBED, WEIGHT, ahead_of_output, hold, scores
from tests.kit.engines import GREEDY, engine, prompts
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, Keeper
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
