"""Ranks that steer alike have equal checksums; a fault on one rank is named with its first step."""

from __future__ import annotations

import time

import pytest

import capflow
from capflow import limits
from capflow.hub.health import problems
from tests.kit.engines import GREEDY, engine, environment, prompts, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEERING = {"steering_vectors": {"post_block": {1: vector(3)}}}
PARALLEL = {"tensor_parallel_size": 2, "in_process": False}


def report(hub):
    """Return what the hub knows of its only engine's ranks; None before the engine told it."""
    return next(iter(hub.status()["determinism"].values()), None)


def another_slot(worker):
    """Have the second rank steer nothing, where the first steers; return the last step before."""
    from capflow_engine.taps.bank import NOTHING

    capture = worker.capflow
    for tracked in capture.requests.values() if capture.rank.tp == 1 else ():
        tracked.steered[-1] = tracked.steered[-1]._replace(steered=NOTHING)
    return capture.checksums.last


def add(llm, name, tokens, **more):
    params = capflow.sampling_params(id=name, max_tokens=tokens, min_tokens=tokens, **more, **GREEDY)
    llm.llm_engine.add_request(name, prompts((40,))[0], params)


def step(llm, steps=10**9):
    while steps and llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        steps -= 1


def test_one_rank_agrees_with_itself(tiny, tmp_path_factory):
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    with running_hub(address, Keeper()) as hub, engine(tiny, hub=address) as llm:
        add(llm, "r", 20, **STEERING)
        step(llm)
        eventually(lambda: report(hub) and report(hub)["actions"] >= 20)
        assert report(hub)["consistent"]
        assert report(hub)["ranks"] == ("0.0",)


def test_healthy_ranks_agree_and_a_fault_on_one_is_named_with_its_first_step(tiny, tmp_path_factory):
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    with (
        environment(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        running_hub(address, Keeper()) as hub,
        engine(tiny, hub=address, **PARALLEL) as llm,
    ):
        add(llm, "healthy", 200, **STEERING)
        step(llm)
        eventually(lambda: (report(hub) or {"step": 0})["step"] >= 200)
        healthy = report(hub)
        assert (healthy["consistent"], healthy["first_mismatch"]) == (True, None)
        assert healthy["ranks"] == ("0.0", "0.1")
        assert healthy["actions"] >= 200
        assert not problems(hub, time.monotonic())
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


@pytest.mark.long
def test_ten_thousand_healthy_steps_have_no_mismatch(tiny, tmp_path_factory):
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    with running_hub(address, Keeper()) as hub, engine(tiny, hub=address, max_num_seqs=4, **PARALLEL) as llm:
        for number in range(200):
            add(llm, f"r{number}", 200, **(STEERING if number % 3 else {}))
        step(llm)
        eventually(lambda: report(hub)["step"] >= 10_000)
        assert report(hub)["consistent"]
