"""Rows of requests that actions change while they run: each position is as the float64 reference has it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.steering.action import ActionApplied, Freeze, Gain, Rejected, SetGate, Steer, Unfreeze, Unsteer
from capflow.steering.clamp import Clamp
from capflow.steering.vector import SteeringVector
from capflow.transport.address import is_listening
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from tests.kit.acted import Acted, ActedReference, act, note
from tests.kit.driver import Driver
from tests.kit.engines import GREEDY, LAYERS, WIDTH, engine, prompts, relative_error, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, Keeper
from tests.kit.servers import environment, process
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
        # The leases that the scheduler ended, in order.
        self.lease_ends = []
        # The first position of each request in each of the scheduler's steps; of all requests, also those that wait.
        self._positions = {}
        take = scheduler.capflow.take_actions

        def taken(inner):
            take(inner)
            self.lease_ends += scheduler.capflow.actions._ended
            running = scheduler.capflow.running(scheduler)
            names = scheduler.capflow._names
            self._positions[scheduler.capflow.step + 1] = {names[key]: each.reached for key, each in running}

        scheduler.capflow.take_actions = taken
        for n, prompt in enumerate(prompts(LENGTHS[:count])):
            own = vector(100 + n, norm=2.0)
            params = capflow.sampling_params(
                id=f"r{n}", capture=ALL, max_tokens=max_tokens, steering_vectors={"post_block": {0: own}}, **GREEDY
            )
            self.core.add_request(f"r{n}", prompt, params)
            self.acted[f"r{n}"] = Acted(len(prompt["prompt_token_ids"]), {0: own})

    def name_of(self, key):
        return self._scheduler.capflow._names[key]

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

    def act_together(self, *actions):
        """Send actions that one step takes: none runs before all have come."""
        (link,) = self._scheduler.capflow.links._links
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            sent = pool.submit(self.client.act, list(actions), 60)
            eventually(lambda: len(link.waiting) == len(actions))
            self.step()
            return sent.result()

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


@pytest.fixture(params=[pytest.param("sync", marks=pytest.mark.long), "async", "preempted"])
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
    kinds = [event.kind for event in run.keeper.events_of("r5") if event.asked_by == "engine"]
    assert kinds == ["freeze", "unfreeze"]
    assert run.check(float64) > 50


def test_an_idle_engine_answers_by_what_it_was_sent_before(tiny, tmp_path_factory):
    """Its next step takes what it answered; a gain is taken back though nobody contributes any more."""
    address, keeper = f"ipc://{tmp_path_factory.mktemp('h')}/h", Keeper()
    with running_hub(address, keeper), engine(tiny, hub=address) as llm, Client(address) as client:
        run = Run(llm, client, keeper, count=1, max_tokens=30)
        run.steps_until(5)
        outcomes = run.act(Steer("r0", (added(1),)), Gain("", "client", 0.0))
        assert all(isinstance(outcome, ActionApplied) for outcome in outcomes), outcomes
        run.finish()
        actions = [Freeze(), Gain("", "global", 0.5), Unfreeze(), Gain("", "client", 1.0), Gain("", "nobody", 1.0)]
        outcomes = client.act(actions)
        applied = [isinstance(outcome, ActionApplied) for outcome in outcomes]
        assert applied == [True, False, True, True, False], outcomes
        assert "frozen" in outcomes[1].reason
        scheduler = run.core.engine_core.engine_core.scheduler
        llm.generate(prompts(LENGTHS[:1]), capflow.sampling_params(max_tokens=2, **GREEDY), use_tqdm=False)
        assert not scheduler.capflow.actions.gains
        assert not scheduler.capflow.actions.frozen


def test_a_freeze_that_ends_in_the_same_step_takes_everything_back(run, float64):
    run.steps_until(12)
    half = Gain("", "request", 0.5, label="half")
    *_, outcome = run.act(Steer("r0", (added(1),), lease_s=60.0), Gain("r1", "request", 0.0), half)
    for name, first in run.positions(outcome.step).items():
        run.acted[name].applied.append(("client", Gain(name, "request", 0.5), first))
    run.steps_until(25)
    outcomes = run.act_together(Freeze(label="all"), Unfreeze())
    assert outcomes[0].step == outcomes[1].step
    for name, first in run.positions(outcomes[0].step).items():
        run.acted[name].applied.append(("", Unfreeze(), first))
        run.acted[name].applied.append(("client", Gain(name, "request", 0.5), first))
    run.finish()
    assert run.check(float64) > 50
    kinds = [(event.kind, event.label) for event in run.keeper.events_of("r5") if event.asked_by != "request"]
    assert kinds == [("gain", "half"), ("freeze", "all"), ("unfreeze", ""), ("gain", "half")]


def test_a_gain_that_no_request_can_take_is_refused_and_changes_nothing(run, float64):
    run.steps_until(12)
    outcomes = run.act(Steer("r0", (added(1),)), Steer("r1", (added(2),)), Gain("", "client", 3e38))
    assert isinstance(outcomes[2], Rejected)
    assert outcomes[2].reason.startswith("request r"), outcomes[2].reason
    run.finish()
    assert run.check(float64) > 100


def test_a_lease_counts_from_the_input_that_came_before_its_action(tiny, tmp_path_factory, float64):
    """A session waits; an action comes, and more input before a step takes either."""
    address, keeper = f"ipc://{tmp_path_factory.mktemp('h')}/h", Keeper()
    first, second = (prompt["prompt_token_ids"] for prompt in prompts((20, 30), seed=4))
    with running_hub(address, keeper), engine(tiny, hub=address) as llm, Client(address) as client:
        driver = Driver(llm)
        params = capflow.sampling_params(id="talk", capture=ALL, **GREEDY | {"max_tokens": 20})
        one = driver.talk("talk", first, params)
        scheduler, outcomes = llm.llm_engine.engine_core.engine_core.scheduler, []
        action = Steer("talk", (added(1),), lease_positions=9)
        sender = threading.Thread(target=lambda: outcomes.append(client.act(action, 60)))
        sender.start()
        eventually(lambda: scheduler.capflow.links._links[0].waiting)
        two = driver.talk("talk", second, params)
        sender.join()
        driver.say("talk", [0], params, more=False)
        driver.run()
        eventually(lambda: "talk" in keeper.done)
    tokens = [*first, *one[:-1], *second, *two]
    (outcome,) = outcomes
    assert outcome.position == len(tokens) - len(two)
    record = Acted(outcome.position, applied=[("client", action, outcome.position)])
    expected = float64.rows(tokens[:-1], record)
    for layer in range(LAYERS):
        rows = keeper.rows["talk"][Site(layer, "post_block")]
        got = np.stack([rows[p][1] for p in range(len(tokens) - 1)])
        assert relative_error(got, expected[layer]) <= ERROR_MAX
    (end,) = [event for event in keeper.events_of("talk") if event.kind == "lease_end"]
    assert end.position == outcome.position + 9


def test_bad_input_is_refused_by_its_field(run):
    run.steps_until(12)
    nan, narrow = np.full(WIDTH, np.nan, np.float32), np.ones(3, np.float32)
    last, post = Site(LAYERS - 1, "post_block"), "steering_vectors.post_block"
    bad = [
        ("steer.lease_s", Steer("r0", (added(1),), lease_s=0.0)),
        ("steer.lease_s", Steer("r0", (added(1),), lease_s=float("inf"))),
        ("steer.lease_positions", Steer("r0", (added(1),), lease_positions=-1)),
        (f"{post}.1: got NaN", Steer("r0", (SteeringVector(1, "post_block", nan.tobytes()),))),
        (f"{post}.{last.layer}: got 3 ", Steer("r0", (SteeringVector.make(last, narrow),))),
        (f"{post}.99", Steer("r0", (added(1, layer=99),))),
        ("gain.scale", Gain("r0", "request", float("nan"))),
        ("gain.owner", Gain("r0", "nobody", 1.0)),
        ("set_gate.gate", SetGate("r0", "nothing", threshold=1.0)),
        ("set_gate.threshold", SetGate("r0", "nothing", threshold=float("nan"))),
        ("set_gate.sharpness", SetGate("r0", "nothing", sharpness=0.0)),
        ("incarnation: got another", Steer("r0", (added(1),), incarnation="another")),
    ]
    outcomes = run.act(*(action for _, action in bad))
    for (field, _), outcome in zip(bad, outcomes, strict=True):
        assert isinstance(outcome, Rejected)
        assert outcome.reason.startswith(field), (field, outcome.reason)
    run.finish()


def test_a_lease_in_seconds_ends_on_the_clock_of_the_engine(run, float64):
    run.steps_until(12)
    asked = time.monotonic()
    outcomes = run.act(
        Steer("r0", (added(1),), lease_s=0.5), Gain("r1", "request", 0.0, lease_s=0.5), Steer("r2", (added(2),))
    )
    assert all(isinstance(outcome, ActionApplied) for outcome in outcomes), outcomes
    assert time.monotonic() - asked > 0.5 or not run.lease_ends
    run.steps_until(run.steps + 5)
    eventually(lambda: time.monotonic() > asked + 2.0)
    run.step()
    ends = {run.name_of(end.key): end for end in run.lease_ends}
    assert set(ends) == {"r0", "r1"}
    assert ends["r0"].position >= outcomes[0].position
    run.acted["r0"].applied.append(("client", Unsteer("r0"), ends["r0"].position))
    run.acted["r1"].applied.append(("client", Gain("r1", "request", 1.0), ends["r1"].position))
    run.finish()
    assert run.check(float64) > 50


def test_a_gain_for_all_requests_replaces_a_lease_on_one(run, float64):
    run.steps_until(12)
    asked = time.monotonic()
    (outcome,) = run.act(Gain("r0", "request", 0.0, lease_s=0.5))
    assert isinstance(outcome, ActionApplied), outcome
    (outcome,) = run.act(Gain("", "request", 0.25, label="quieter"))
    assert isinstance(outcome, ActionApplied), outcome
    assert not run.lease_ends, "it came in time"
    later = capflow.sampling_params(id="later", capture=ALL, max_tokens=2, **GREEDY)
    run.core.add_request("later", prompts([40])[0], later)
    for name, first in run.positions(outcome.step).items():
        run.acted[name].applied.append(("client", Gain(name, "request", 0.25), first))
    eventually(lambda: time.monotonic() > asked + 0.7)
    run.finish()
    assert not run.lease_ends
    run.tokens.pop("later")
    assert run.check(float64) > 100
    for name, first in {**run.positions(outcome.step), "later": 0}.items():
        (event,) = [event for event in run.keeper.events_of(name) if event.scale == 0.25]
        about = (event.kind, event.asked_by, event.target, event.label, event.position)
        assert about == ("gain", "client", "request", "quieter", first)


SENDER = """
import sys
import numpy as np
from capflow import Client, Site, Steer, SteeringVector

address, file = sys.argv[1:]
first, second = (SteeringVector.make(Site(1, "post_block"), each, 1.0) for each in np.load(file))
client = Client(address)
client.status()
print("ready", flush=True)
sys.stdin.readline()
for outcome in client.act([Steer("r0", (first,), lease_positions=12), Steer("r1", (second,), lease_s=1.0)], 60):
    print(outcome.position, flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def sender(address, vectors, directory):
    """Run a client in a process of its own, up to where it sends; yield it with the lines that it prints."""
    np.save(directory / "vectors.npy", np.stack(vectors))
    running = subprocess.Popen(
        [sys.executable, "-c", SENDER, address, str(directory / "vectors.npy")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = []
    try:
        assert running.stdout.readline() == "ready\n"
        threading.Thread(target=_read, args=(running.stdout, lines), daemon=True).start()
        yield running, lines
    finally:
        running.kill()
        running.wait(60)


def test_leases_end_though_their_hub_and_their_client_are_killed(tiny, float64, tmp_path):
    vectors = [vector(1), vector(2)]
    with tempfile.TemporaryDirectory(prefix="cf") as home, contextlib.ExitStack() as stack:
        address = f"ipc://{home}/h"
        hub, _ = stack.enter_context(
            process("run", "--address", address, "--consumer", "log", environment=environment(home))
        )
        eventually(lambda: is_listening(address), 60)
        llm = stack.enter_context(engine(tiny, hub=address))
        client, lines = stack.enter_context(sender(address, vectors, tmp_path))
        core = llm.llm_engine
        scheduler, given = core.engine_core.engine_core.scheduler, prompts(LENGTHS[:2])
        for n, prompt in enumerate(given):
            core.add_request(f"r{n}", prompt, capflow.sampling_params(id=f"r{n}", max_tokens=150, **GREEDY))
        for _ in range(10):
            core.step()
        client.stdin.write("\n")
        client.stdin.flush()
        eventually(lambda: core.step() and len(lines) == 2, 60)
        applied = time.monotonic()
        hub.kill()
        client.kill()
        hub.wait(60)
        client.wait(60)
        assert scheduler.capflow.actions._leases
        ends, tokens = {}, {}
        take = scheduler.capflow.actions.begin

        def begin(running):
            take(running)
            ends.update({scheduler.capflow._names[end.key]: end.position for end in scheduler.capflow.actions._ended})

        scheduler.capflow.actions.begin = begin
        for _ in range(20):
            core.step()
        eventually(lambda: time.monotonic() > applied + 1.5)
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    tokens[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        compat.flush(core)
    first, second = map(int, lines)
    assert ends["r0"] == first + 12
    assert second < ends["r1"] < len(tokens["r1"]) - 10
    for n, begins in enumerate((first, second)):
        name, prompt = f"r{n}", len(given[n]["prompt_token_ids"])
        steered = Acted(prompt, shared={"lease": {1: vectors[n]}})
        steered.applied += [("", Gain(name, "lease", 0.0), 0), ("", Gain(name, "lease", 1.0), begins)]
        for_ever = likeliest(float64, tokens[name], steered)
        steered.applied.append(("", Gain(name, "lease", 0.0), ends[name]))
        assert likeliest(float64, tokens[name], steered)[prompt - 1 :] == tokens[name][prompt:]
        assert for_ever != likeliest(float64, tokens[name], steered), "the end of the lease shows"


def likeliest(float64, tokens, acted):
    return float64.likeliest(tokens[:-1], acted)


def _read(stream, lines):
    """Append a stream's lines as they come."""
    for line in stream:
        lines.append(line)
