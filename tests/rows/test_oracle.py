"""Random requests against the oracle, and proof that it notices a plan that is wrong by one.

`CAPFLOW_ORACLE_REQUESTS` is the number of requests (`make soak-requests`: 5,000). `CAPFLOW_ORACLE_SEED` repeats a run;
the seed is printed.
"""

import dataclasses
import os
import random

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from capflow.capture.spec import CaptureSpec
from capflow_engine.taps.step import Step
from tests.kit.oracle import Live, scenarios

pytestmark = [pytest.mark.engine, pytest.mark.timeout(6 * 3600)]

LONG = pytest.mark.long
REQUESTS = int(os.environ.get("CAPFLOW_ORACLE_REQUESTS", "100"))
SEED = int(os.environ.get("CAPFLOW_ORACLE_SEED", random.SystemRandom().getrandbits(32)))


def test_every_row_of_random_requests_is_right_and_there_once(tiny, tmp_path, capsys):
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
        live.prove(llm, [{**_request(5 + 40 * n, 90), "max_tokens": 60} for n in range(5)])  # too many for the cache
        prove()
    live.prove_scores()
    with capsys.disabled():
        print(f"oracle: {live.proved} requests, {live.rows} rows, of requests and steps {live.seen}", flush=True)
        print(f"oracle: rounding decides a hard gate of {live.undecided} requests; their rows are not checked")
    assert live.proved >= REQUESTS
    assert all(live.seen.values()), f"the scenarios never made some of {live.seen}"


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
    return dataclasses.replace(plan, blocks=tuple(blocks))


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
    return dataclasses.replace(plan, blocks=tuple(blocks))


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
