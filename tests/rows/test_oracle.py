"""Random requests against the oracle, and proof that it notices a plan that is wrong by one.

`CAPFLOW_ORACLE_REQUESTS` is the number of requests (`make soak-requests`: 5,000). `CAPFLOW_ORACLE_SEED` repeats a run;
the seed is printed.
"""

import os
import random

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from capflow import limits
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow_engine.scheduler.admission import Admission
from capflow_engine.scheduler.orders import News, Orders
from capflow_engine.taps.step import Step
from capflow_engine.worker.history import Histories
from tests.kit.oracle import Live
from tests.kit.oracle_actions import SITES
from tests.kit.oracle_scenarios import draw_scenarios, moved, scenarios

pytestmark = [pytest.mark.engine, pytest.mark.timeout(6 * 3600)]

LONG = pytest.mark.long
REQUESTS = int(os.environ.get("CAPFLOW_ORACLE_REQUESTS", "100"))
SEED = int(os.environ.get("CAPFLOW_ORACLE_SEED", random.SystemRandom().getrandbits(32)))


def test_every_row_of_random_requests_is_right_and_there_once(tiny, tmp_path, capsys, monkeypatch):
    for name in ("STEP_BYTES_MAX", "STEP_PART_BYTES_MAX"):  # larger steps leave in several frames
        monkeypatch.setattr(limits, name, 20_000)
    live = Live(tiny, tmp_path)
    with capsys.disabled():
        print(f"\noracle: seed {SEED}", flush=True)

    @seed(SEED)
    @settings(
        max_examples=max(1, REQUESTS // 6),
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(scenarios)
    def prove(scenario):
        if live.proved < REQUESTS:
            live.prove(llm, scenario)

    with live.start() as llm:
        live.prove(llm, _crowd())
        prove()
    live.prove_scores()
    with capsys.disabled():
        print(f"oracle: {live.proved} requests, {live.rows} rows, of requests and steps {dict(live.seen)}", flush=True)
        print(f"oracle: actions, and what they did: {dict(live.acted)}")
        print(f"oracle: rounding decides a hard gate of {live.undecided} requests; their rows are not checked")
    assert live.proved >= REQUESTS
    assert all(live.seen.values()), f"the scenarios never made some of {live.seen}"
    assert all(live.acted[each] for each in ACTED), f"the scenarios never made some of {ACTED}: {live.acted}"


@LONG
def test_rows_of_sites_that_are_not_steered_are_right_beside_steered_ones(tiny, tmp_path):
    """Their taps lie where norms return the stream."""
    steered = [Site(1, "post_block"), *(site for site in SITES if site.hook.startswith("mlp_"))]
    live = Live(tiny, tmp_path, steer_sites=[str(site) for site in steered])
    others = set(SITES) - set(steered)
    with live.start() as llm:
        live.prove(llm, moved(_crowd(), others, "mlp_out"))
        draw_scenarios(
            lambda scenario: live.prove(llm, moved(scenario, others, "mlp_out")), max(1, REQUESTS // 6), SEED
        )
    live.prove_scores()
    assert all(live.seen[each] for each in ("preempted", "cached", "chunked", "vectors")), live.seen


ACTED = (
    *("Steer", "Unsteer", "Gain", "SetGate", "Abort", "Freeze", "Unfreeze", "Steer rejected", "Gain rejected"),
    *("lease ends", "controllers", "gates that end", "preempted afterwards"),
)
SITE = Site(1, "post_block")
STEER = {"kind": "steer", "site": SITE, "clamped": Site(3, "mlp_out"), "seed": 21, "gain": 1.0, "lease": {}}
GAIN = {"kind": "gain", "owner": "request", "scale": 0.5, "everywhere": False, "lease": {}}
SET = {"kind": "set_gate", "change": {"threshold": -0.1}, "lease": {}}
GATE = {"site": Site(0, "post_block"), "seed": 1, "score": "dot", "threshold": 0.3, "sharpness": None, "latch": False}


def _crowd():
    """Return requests that the cache has too little room for, with actions of each kind."""
    gate = {**GATE, "positions": "generated"}
    steering = [(Site(2, "post_block"), 1, ("vectors", "decode_", 1.0)), (SITE, 2, ("features", "", {"set": 1.5}))]
    some = [
        {"actions": [(9, STEER), (14, {**STEER, "seed": 22, "lease": {"lease_positions": 9}})], "controller": "a"},
        {"actions": [(9, GAIN), (12, {**GAIN, "owner": "nobody"}), (15, STEER), (25, {"kind": "unsteer"})]},
        {"actions": [(9, SET), (16, {**SET, "change": {"enabled": False}})], "gate": gate},
        {"actions": [(9, {**STEER, "lease": {"lease_s": 0.05}}), (11, {"kind": "wrong", "fault": "lease"})]},
        {"actions": [(50, {"kind": "abort", "as": "stop"})], "controller": "b"},
        {"gate": {**gate, "threshold": 0.6, "abort": "stop"}},
        {"actions": [(30, {"kind": "freeze"}), (36, {"kind": "unfreeze"}), (40, STEER)], "controller": "b"},
    ]
    return [
        {**_request(5 + 30 * n, 60), "steering": steering if n == 2 else [], "max_tokens": 60, **each}
        for n, each in enumerate(some)
    ]


def _request(first, length):
    capture = {"hooks": {"post_block": "all"}, "positions": [3, "last_prompt", {"generated": [0, 3]}]}
    return {
        "prompt": list(range(first, first + length)),
        "max_tokens": 6,
        "capture": CaptureSpec.parse(capture),
        "steering": [],
        "arrival": 0,
        "abort": None,
    }


def by_one_row(plan):
    """Take each row from the token beside it."""
    return _regroup(plan, runs=lambda run: run._replace(source=run.source - 1 if run.source else 1))


def by_one_layer(plan):
    """Put each layer's rows where the next one's belong."""
    blocks = [block._replace(sites=(*block.sites[1:], block.sites[0])) for block in plan.blocks]
    return msgspec.structs.replace(plan, blocks=tuple(blocks))


def by_one_position(plan):
    """Give each row the position after its own."""
    return _regroup(plan, spans=lambda span: span._replace(start=span.start + 1))


def by_one_request(plan):
    """Give each row the next request of the batch."""
    return _regroup(plan, spans=lambda span: span._replace(request=(span.request + 1) % len(plan.batch)))


def _regroup(plan, runs=lambda run: run, spans=lambda span: span):
    blocks = [
        block._replace(runs=tuple(map(runs, block.runs)), spans=tuple(map(spans, block.spans))) for block in plan.blocks
    ]
    return msgspec.structs.replace(plan, blocks=tuple(blocks))


@pytest.mark.parametrize(
    "wrong",
    [by_one_row, *(pytest.param(wrong, marks=LONG) for wrong in (by_one_layer, by_one_position, by_one_request))],
)
def test_a_plan_that_is_wrong_by_one_is_noticed(tiny, tmp_path, wrong, monkeypatch):
    live = Live(tiny, tmp_path)
    scenario = [_request(10, 30), _request(60, 35), _request(100, 25)]
    with live.start() as llm:
        live.prove(llm, scenario)
        if wrong in (by_one_row, by_one_layer):  # an error of the taps, not of the report
            original = Step.__init__
            monkeypatch.setattr(Step, "__init__", lambda self, plan, *rest: original(self, wrong(plan), *rest))
        else:
            planner = llm.llm_engine.model_executor.driver_worker.worker.capflow.planner
            plan_of = planner.plan
            monkeypatch.setattr(planner, "plan", lambda batch: wrong(plan_of(batch)))
        live.wait_s = 5.0
        with pytest.raises(AssertionError):
            live.prove(llm, scenario)


def history_is_dropped_at_preemption(monkeypatch):
    """Steer all positions by what holds last."""
    renew = Histories._renew

    def renewed(self, tracked, first, **more):
        renew(self, tracked, first, **more)
        if tracked.steered is not None:
            tracked.steered = [tracked.steered[-1]._replace(first=0)]

    monkeypatch.setattr(Histories, "_renew", renewed)


def actions_come_one_step_late(monkeypatch):
    take, later = Orders.__dict__["attach"], []

    def attach(self, scheduler_output):
        self.news = news = self.news or News()
        news.actions, later[:] = [*later], news.actions
        take(self, scheduler_output)

    monkeypatch.setattr(Orders, "attach", attach)


@pytest.mark.parametrize("mutant", [history_is_dropped_at_preemption, actions_come_one_step_late])
def test_an_action_that_holds_elsewhere_is_noticed(tiny, tmp_path, mutant, monkeypatch):
    live = Live(tiny, tmp_path)
    mutant(monkeypatch)
    live.wait_s = 5.0
    with live.start() as llm, pytest.raises(AssertionError):
        live.prove(llm, _crowd())
    assert any(live.watched.preempted.values())


def _conversation(live, llm):
    """Prove requests of which some are acted on, and requests that go on from their answers."""
    names = [{**_request(5 + 60 * n, 40), "max_tokens": 70} for n in range(3)]
    names[0]["actions"], names[1]["actions"] = [(5, STEER)], [(5, GAIN)]
    names[1]["steering"] = [(SITE, 1, ("vectors", "", 1.0))]
    ran = live.prove(llm, names)
    before = live.seen["cached"]
    capture = CaptureSpec.parse({"hooks": {"post_block": "all"}, "positions": "all_generated"})
    for name, first in zip(ran.names, names, strict=True):
        prompt = [*first["prompt"], *ran.answers[name].tokens]
        live.prove(llm, [{**_request(0, 1), "prompt": prompt, "capture": capture, "steering": first["steering"]}])
    return live.seen["cached"] - before


def test_blocks_that_were_computed_under_an_action_are_not_shared(tiny, tmp_path):
    live = Live(tiny, tmp_path)
    with live.start() as llm:
        assert _conversation(live, llm) == 3, "the prompts of all, and the answer of the plain one"


def test_a_cache_without_the_history_of_actions_is_noticed(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Admission, "_fork_for_itself", lambda *_: None)
    live = Live(tiny, tmp_path)
    with live.start() as llm, pytest.raises(AssertionError):
        _conversation(live, llm)
