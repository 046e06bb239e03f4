"""Drafts with async scheduling: steps are planned before the drafts of the earlier ones are accepted or rejected.

Random requests are held against the oracle, one step deep, as vLLM schedules without pipeline stages. They are captured
and patched at single positions, acted on, aborted and preempted while drafts are under way. Deeper, vLLM's V1 runner
computes wrong tokens when a request has drafts in a step and none in the next, also without capflow.
"""

import contextlib
import functools

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow_engine.scheduler.drafting import Drafting
from capflow_engine.worker.pending import Pending
from tests.kit.engines import save_drafter
from tests.kit.oracle import Live
from tests.kit.oracle_scenarios import draw_scenarios

pytestmark = pytest.mark.engine

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def drafter(tiny, tmp_path_factory):
    return save_drafter(tiny, tmp_path_factory.mktemp("drafter") / "model", noise=0.006)


def _many(live, llm, count, number):
    draw_scenarios(functools.partial(live.prove, llm), count // 6, number)


def _crowd():
    """Return requests with more tokens than the cache holds, captured and patched at single generated positions."""
    captures = (
        {"hooks": {"post_block": "all"}, "positions": "all"},
        {"hooks": {"post_block": "all"}, "positions": {"every": 5}},
        {"hooks": {"mlp_out": [1]}, "positions": [3, "last_prompt", {"generated": [7, 30]}], "max_rows": 20},
    )
    common = {"max_tokens": 60, "arrival": 0}
    return [
        {
            "prompt": np.random.default_rng(n).integers(5, 290, 40 + n).tolist(),
            "capture": CaptureSpec.parse(captures[n % 3]),
            "steering": [(Site(1, "post_block"), n, ("patches", "", [13 + 9, 13 + 31]))] if n == 4 else [],
            "abort": 30 if n == 5 else None,
            **common,
        }
        for n in range(6)
    ]


LEASED = (
    {"kind": "steer", "site": Site(1, "post_block"), "clamped": None, "seed": 21, "gain": 1.0},
    {"kind": "gain", "owner": "request", "scale": 0.5, "everywhere": False},
    {"kind": "set_gate", "change": {"threshold": -0.1}},
)

GATE = {"site": Site(1, "post_block"), "seed": 1, "score": "dot", "threshold": 0.3, "latch": False}
GATE |= {"sharpness": None, "positions": "generated"}


def _leased():
    """Return requests whose actions end by themselves, after no more positions than a step with drafts computes."""
    return [
        {
            "prompt": np.random.default_rng(50 + n).integers(5, 290, 8 + n).tolist(),
            "capture": CaptureSpec.parse({"hooks": {"post_block": "all"}, "positions": "all"}),
            "steering": [(Site(3, "post_block"), 2, ("vectors", "decode_", 1.0))],
            "gate": GATE if n % 3 == 2 else None,
            "actions": [(8 + 2 * n, {**LEASED[n % 3], "lease": {"lease_positions": 2 + n % 2}})],
            "abort": None,
            "max_tokens": 90,
            "arrival": 0,
        }
        for n in range(6)
    ]


@contextlib.contextmanager
def _leases_end_with_preemptions(llm):
    """Let the time of a request's lease be over in the step that preempts it, while its drafts are under way."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    admission, preempt = scheduler.capflow, scheduler._preempt_request
    leases = admission.actions._leases

    def preempted(request, *args, **kwargs):
        preempt(request, *args, **kwargs)
        for slot in [slot for slot in leases if slot[0] == request.request_id]:
            leases[slot] = leases[slot]._replace(over_s=0.0)
        admission.actions._end_leases(dict(admission.running(scheduler)))

    scheduler._preempt_request = preempted
    yield
    scheduler._preempt_request = preempt


@pytest.mark.parametrize(("number", "count"), [(11, 30), *(pytest.param(n, 60, marks=LONG) for n in (12, 13, 14))])
def test_every_row_is_right_though_its_position_was_uncertain_when_it_was_planned(
    tiny, drafter, tmp_path, number, count
):
    live = Live(tiny, tmp_path, ahead=1, speculative_config=drafter, num_gpu_blocks_override=12)
    with live.start() as llm:
        live.prove(llm, _crowd())
        live.prove(llm, _leased())
        assert live.acted["lease ends"] > 0, live.acted
        with _leases_end_with_preemptions(llm):
            leased = {**LEASED[0], "lease": {"lease_s": 1000.0}}
            live.prove(llm, [{**request, "actions": [(4, leased)]} for request in _crowd()])
        _many(live, llm, count, number)
    live.prove_scores()
    assert live.work["ahead"] == 1
    assert min(live.work[kind] for kind in ("accepted", "rejected", "preempted", "overshot")) > 0, live.work
    assert min(live.seen.values()) > 0, live.seen


def _no_shift(monkeypatch):
    monkeypatch.setattr(Pending, "reject", lambda self, rejection: None)


def _always_drafts(monkeypatch):
    monkeypatch.setattr(Drafting, "allowed", lambda self, request: True)


@pytest.mark.parametrize("wrong", [_no_shift, pytest.param(_always_drafts, marks=LONG)])
def test_the_oracle_notices_positions_that_stay_as_they_were_planned(tiny, drafter, tmp_path, wrong, monkeypatch):
    wrong(monkeypatch)
    live = Live(tiny, tmp_path, ahead=1, speculative_config=drafter)
    live.wait_s = 5.0
    with live.start() as llm, pytest.raises(AssertionError):
        live.prove(llm, _crowd())
