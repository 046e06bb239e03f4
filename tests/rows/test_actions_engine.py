"""Rows of requests that actions change while they run: each position is as the float64 reference has it."""

from __future__ import annotations

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.steering.action import ActionApplied, Freeze, Gain, Rejected, SetGate, Steer, Unfreeze, Unsteer
from capflow.steering.clamp import Clamp
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from tests.kit.acted import Acted, ActedReference, act, note
from tests.kit.engines import GREEDY, LAYERS, engine, prompts, relative_error, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LENGTHS = (60, 61, 62, 63, 58, 59)
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192}
"""Room for about four requests of 160 tokens, so that six which grow to that preempt each other."""

ERROR_MAX = 1e-5


@pytest.fixture(scope="module")
def float64(tiny):
    return ActedReference(tiny)


def added(seed, layer=1, scale=1.0):
    return SteeringVector.make(Site(layer, "post_block"), vector(seed), scale)


def clamp(seed, layer=2, low=-0.1, high=0.1):
    direction = vector(seed, norm=1.0)
    return Clamp.make(Site(layer, "post_block"), direction, {"min": low, "max": high}, where="c")


class Run:
    """An engine with a hub and a client, whose requests all add a vector of their own at layer 0."""

    def __init__(self, llm, client, keeper, count=6, max_tokens=100):
        self.core, self.client, self.keeper = llm.llm_engine, client, keeper
        self.preempted = 0
        scheduler = self.core.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args, **kwargs):
            self.preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted
        self.acted, self.tokens, self.steps = {}, {}, 0
        self._scheduler = scheduler
        # The first position of each request in each of the scheduler's steps; of all requests, also those that wait.
        self._positions = {}
        take = scheduler.capflow.take_actions

        def taken(inner):
            take(inner)
            running = scheduler.capflow._running(scheduler)
            names = scheduler.capflow._names
            self._positions[scheduler.capflow._step + 1] = {names[key]: each.reached for key, each in running}

        scheduler.capflow.take_actions = taken
        for n, prompt in enumerate(prompts(LENGTHS[:count])):
            own = vector(100 + n, norm=2.0)
            params = capflow.sampling_params(
                id=f"r{n}", capture=ALL, max_tokens=max_tokens, steering_vectors={"post_block": {0: own}}, **GREEDY
            )
            self.core.add_request(f"r{n}", prompt, params)
            self.acted[f"r{n}"] = Acted(len(prompt["prompt_token_ids"]), {0: own})

    def step(self):
        self.steps += 1
        for output in self.core.step():
            if output.finished:
                self.tokens[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]

    def steps_until(self, number):
        while self.steps < number and self.core.has_unfinished_requests():
            self.step()

    def act(self, *actions, owner="client"):
        outcomes = act(self.core, self.client, actions, self.step)
        note(self.acted, owner, actions, outcomes)
        return outcomes

    def positions(self, step):
        """Return the next position of each request at a step."""
        return self._positions[step]

    def finish(self):
        while self.core.has_unfinished_requests():
            self.step()
        compat.flush(self.core)

    def check(self, float64):
        """Compare every captured row with the reference; return how many positions an action changed."""
        changed = 0
        for name, tokens in self.tokens.items():
            record = self.acted[name]
            eventually(
                lambda name=name, tokens=tokens: len(self.keeper.rows[name][Site(0, "post_block")]) >= len(tokens) - 1
            )
            expected = float64.rows(tokens[:-1], record)
            plain = Acted(record.prompt, record.own)
            changed += sum(str(record.at(p)) != str(plain.at(p)) for p in range(len(tokens) - 1))
            for layer in range(LAYERS):
                rows = self.keeper.rows[name][Site(layer, "post_block")]
                got = np.stack([rows[p][1] for p in range(len(tokens) - 1)])
                error = relative_error(got, expected[layer])
                assert error <= ERROR_MAX, (name, layer, error, record.applied)
        return changed


@pytest.fixture(params=["sync", "async", "preempted"])
def run(request, tiny, tmp_path_factory):
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    keeper = Keeper()
    more = CROWDED if request.param == "preempted" else {"async_scheduling": request.param == "async"}
    with running_hub(address, keeper), engine(tiny, hub=address, **more) as llm, Client(address) as client:
        run = Run(llm, client, keeper)
        run.crowded = request.param == "preempted"
        yield run


def test_leases_gains_and_clamps_hold_at_their_positions(run, float64):
    run.steps_until(12)
    outcomes = run.act(
        Steer("r0", (added(1),), lease_positions=9),
        Steer("r1", (added(2),), clamps=(clamp(3),), gain=0.5),
        Steer("r2", (), clamps=(clamp(4), clamp(5, high=0.3))),
        Gain("r3", "request", 0.25),
        Gain("r4", "request", 0.0, lease_positions=7),
        Steer("r5", (added(6),)),
    )
    assert all(isinstance(outcome, ActionApplied) for outcome in outcomes), outcomes
    run.steps_until(30)
    outcomes = run.act(
        Gain("r1", "client", 3.0),
        Gain("r5", "client", 0.0, lease_positions=5),
        Steer("r3", (added(7),), lease_positions=30),
        Unsteer("r2"),
    )
    assert all(isinstance(outcome, ActionApplied) for outcome in outcomes), outcomes
    run.finish()
    assert run.check(float64) > 250
    assert bool(run.preempted) == run.crowded


def test_a_freeze_takes_everything_back_and_holds_until_it_ends(run, float64):
    run.steps_until(12)
    run.act(Steer("r0", (added(1),)), Gain("r1", "request", 0.0), Steer("r2", (added(2),), lease_positions=60))
    run.steps_until(25)
    (outcome,) = run.act(Freeze())
    assert isinstance(outcome, ActionApplied)
    for name, first in run.positions(outcome.step).items():
        run.acted[name].applied.append(("", Freeze(), first))
    outcomes = run.act(Steer("r3", (added(3),)), Gain("r3", "request", 0.5), Unsteer("r0"), Gain("", "global", 0.0))
    assert all(isinstance(outcome, Rejected) and "frozen" in outcome.reason for outcome in outcomes), outcomes
    run.steps_until(40)
    (outcome,) = run.act(Unfreeze())
    for name, first in run.positions(outcome.step).items():
        run.acted[name].applied.append(("", Unfreeze(), first))
    run.act(Steer("r4", (added(4),)))
    run.finish()
    assert run.check(float64) > 50


def test_bad_input_is_refused_by_its_field(run):
    run.steps_until(12)
    bad = {
        "steer.lease_s": Steer("r0", (added(1),), lease_s=0.0),
        "steer.lease_positions": Steer("r0", (added(1),), lease_positions=-1),
        "gain.scale": Gain("r0", "request", float("nan")),
        "gain.owner": Gain("r0", "nobody", 1.0),
        "set_gate.gate": SetGate("r0", "nothing", threshold=1.0),
        "set_gate.sharpness": SetGate("r0", "nothing", sharpness=0.0),
        "request": Steer("r0", (added(1),), incarnation="another"),
    }
    outcomes = run.act(*bad.values())
    for field, outcome in zip(bad, outcomes, strict=True):
        assert isinstance(outcome, Rejected)
        assert outcome.reason.startswith(field), (field, outcome.reason)
    run.finish()
