"""Controllers on running engines: a gate acts at the right position in each mode, and rows follow from its actions."""

from __future__ import annotations

import numpy as np
import pytest

import capflow
from tests.kit.controlled import (
    CROWDED,
    LENGTHS,
    PROBED,
    WEIGHT,
    first_above,
    gates,
    hold,
    hold_ends,
    mostly_long,
    run,
    scores,
)
from tests.kit.engines import GREEDY, engine, prompts, save_drafter, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


FULL = CROWDED | {"num_gpu_blocks_override": 13}
"""Less room: requests that end early leave some."""


@pytest.fixture(scope="module")
def threshold(tiny, reference):
    """A score that about half of the requests reach late."""
    with engine(tiny) as llm:
        outputs = llm.generate(prompts(LENGTHS), capflow.sampling_params(max_tokens=100, **GREEDY), use_tqdm=False)
    highest = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        highest.append((reference.post_block(tokens)[PROBED.layer, len(output.prompt_token_ids) + 20 :] @ WEIGHT).max())
    return float(np.median(highest)) - 1e-3


@pytest.mark.parametrize(
    ("mode", "more", "delay"),
    mostly_long(
        {
            "replicated": ("replicated", {"ahead": 2}, 1),
            "ordered": ("ordered", {}, 1),
            "ordered async": ("ordered", {"ahead": 2}, 2),
            "ordered async deeper": ("ordered", {"ahead": 3}, 3),
            "ordered preempted": ("ordered", CROWDED | {}, 1),
            "ordered async preempted": ("ordered", CROWDED | {"ahead": 2}, 2),
            "preempted": ("replicated", CROWDED | {"ahead": 2}, 1),
            "ordered async dropped": ("ordered", {"ahead": 2, "resets": 7}, 2),
            "dropped": ("replicated", {"ahead": 2, "resets": 7}, 1),
        },
        *("replicated", "ordered async deeper", "ordered async preempted", "ordered async dropped"),
    ),
)
def test_a_gate_acts_at_its_position_and_rows_follow(
    tiny, reference, tmp_path, tmp_path_factory, threshold, mode, more, delay
):
    controllers = gates(tmp_path, f":threshold={threshold},mode={mode}")
    keeper, outputs = run(tiny, tmp_path_factory, controllers, **more)
    assert keeper.problems == []
    fired, preempted = 0, set(keeper.preempted)
    assert bool(preempted) == ("block_size" in more or "resets" in more)
    for n, output in enumerate(outputs):
        first = first_above(keeper, f"r{n}", threshold, LENGTHS[n])
        events = keeper.events_of(f"r{n}")
        if first is None:
            assert not events
            hold(keeper, f"r{n}", output, reference, {})
            continue
        (event,) = events
        assert (event.kind, event.asked_by, event.position) == ("steer", "controller gate", first + delay)
        assert event.threshold == pytest.approx(threshold)
        assert event.score == pytest.approx(scores(keeper, f"r{n}")[first], rel=1e-5)
        hold(keeper, f"r{n}", output, reference, {1: (vector(12), event.position)})
        fired += 1
    assert 0 < fired < len(outputs)


@pytest.fixture(scope="module")
def drafter(tiny, tmp_path_factory):
    return {"speculative_config": save_drafter(tiny, tmp_path_factory.mktemp("drafter") / "model", noise=0.006)}


@pytest.mark.parametrize(
    ("action", "more"),
    mostly_long(
        {
            "sync": ("stop", {}),
            "async": ("abort", {"ahead": 2}),
            "async deeper": ("stop", {"ahead": 3}),
            "preempted": ("abort", FULL),
            "async preempted": ("stop", FULL | {"ahead": 2}),
            "dropped": ("stop", {"ahead": 2, "resets": 7}),
            "deeper dropped": ("stop", {"ahead": 3, "resets": 8}),
            "drafts": ("stop", None),
        },
        *("async", "async preempted", "deeper dropped", "drafts"),
    ),
)
def test_a_request_ends_with_the_token_of_the_row_that_fired(
    tiny, reference, tmp_path, tmp_path_factory, threshold, drafter, action, more
):
    """Beside the gate that ends requests, one in the other mode watches them."""
    controllers = gates(
        tmp_path, f"@rude:threshold={threshold},mode=ordered,action={action}", "@idle:threshold=1e9,mode=replicated"
    )
    keeper, outputs = run(tiny, tmp_path_factory, controllers, **(drafter if more is None else more))
    assert keeper.problems == []
    assert bool(keeper.preempted) == bool({"block_size", "resets"} & set(more or ()))
    assert bool(keeper.counts["rejected"]) == bool(keeper.counts["accepted"]) == (more is None)
    fired = hold_ends(keeper, outputs, reference, threshold, action, "gate@rude", length=100)
    assert 0 < fired < len(outputs)
    assert [event.asked_by for event in keeper.events] == ["controller gate@rude"] * fired


def test_a_prompt_that_fires_ends_its_request_before_a_token_behind_it(tiny, reference, tmp_path, tmp_path_factory):
    """Prompts in chunks; a row in their middle fires, or the last one."""
    controllers = gates(tmp_path, ":threshold=-1e9,mode=ordered,action=stop,positions=40+99")
    keeper, outputs = run(tiny, tmp_path_factory, controllers, lengths=(30, 100, 60), max_tokens=9)
    assert keeper.problems == []
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [9, 0, 0]
    assert [max(keeper.rows[f"r{n}"][PROBED]) for n in range(3)] == [37, 40, 40]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "stop", "stop"]
    keeper, outputs = run(
        tiny,
        tmp_path_factory,
        gates(tmp_path, ":threshold=-1e9,mode=ordered,action=stop,positions=last_prompt"),
        lengths=(30, 100),
        max_tokens=9,
    )
    for n, output in enumerate(outputs):
        assert len(output.outputs[0].token_ids) == 1
        hold(keeper, f"r{n}", output, reference, {})


def test_a_second_turn_reads_as_many_cached_tokens_with_an_idle_ordered_gate(tiny, tmp_path, tmp_path_factory):
    def cached(controllers, threshold=None):
        keeper = Keeper()
        address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
        with running_hub(address, keeper, controllers=controllers), engine(tiny, hub=address, block_size=32) as llm:
            params = capflow.sampling_params(max_tokens=100, **GREEDY)
            (first,) = llm.generate(prompts((60,)), params, use_tqdm=False)
            tokens = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7]
            params = capflow.sampling_params(max_tokens=2, **GREEDY)
            (second,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
            return second.num_cached_tokens, sorted(event.position for event in keeper.events)

    plain, _ = cached([])
    idle, events = cached(gates(tmp_path, ":threshold=1e8,mode=ordered"))
    assert (plain, idle, events) == (128, 128, [])
    replicated, _ = cached(gates(tmp_path, ":threshold=1e8"))
    assert replicated == 32
    steered, events = cached(gates(tmp_path, ":threshold=-1e9,mode=ordered,positions=generated:40:41"))
    assert events[0] == 60 + 41
    assert steered == 96


def test_two_gates_of_one_hub_add_up_in_their_order(tiny, reference, tmp_path, tmp_path_factory):
    """One in each mode, at other positions of the same site, and one that sees only another request."""
    controllers = gates(
        tmp_path,
        "@early:threshold=-1e9,positions=last_prompt",
        "@late:threshold=-1e9,mode=ordered,positions=generated:5:6,scale=0.5",
        "@other:threshold=-1e9,requests=r1,mode=ordered,scale=-1",
    )
    keeper, outputs = run(tiny, tmp_path_factory, controllers, lengths=(40, 41), max_tokens=20)
    assert keeper.problems == []
    assert [(e.asked_by, e.position) for e in keeper.events_of("r0")] == [
        ("controller gate@early", 40),
        ("controller gate@late", 46),
    ]
    assert [e.asked_by for e in keeper.events_of("r1")] == [
        "controller gate@early",
        "controller gate@other",
        "controller gate@late",
    ]
    tokens = [*outputs[0].prompt_token_ids, *outputs[0].outputs[0].token_ids]
    ramp = np.zeros((len(tokens), len(vector(12))), np.float32)
    ramp[40:] += vector(12)
    ramp[46:] += 0.5 * vector(12)
    hold(keeper, "r0", outputs[0], reference, {1: (ramp, 0)})


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("action", ["steer", "stop"])
def test_an_ordered_gate_works_across_pipeline_stages(tiny, reference, tmp_path, tmp_path_factory, threshold, action):
    """The probe is on the last stage, the vector on the first; compiled, as the CPU's stages must be."""
    controllers = gates(tmp_path, f":threshold={threshold},mode=ordered,action={action}")
    arguments = {"pipeline_parallel_size": 2, "in_process": False, "enforce_eager": False}
    keeper, outputs = run(tiny, tmp_path_factory, controllers, **arguments)
    assert keeper.problems == []
    check(keeper, outputs, reference, threshold, action)


@pytest.mark.long
@pytest.mark.parametrize("action", ["steer", "stop"])
def test_an_ordered_gate_is_the_same_on_two_ranks(tiny, reference, tmp_path, tmp_path_factory, threshold, action):
    controllers = gates(tmp_path, f":threshold={threshold},mode=ordered,action={action}")
    arguments = {"tensor_parallel_size": 2, "in_process": False}
    keeper, outputs = run(tiny, tmp_path_factory, controllers, **arguments)
    assert keeper.problems == []
    check(keeper, outputs, reference, threshold, action)


def check(keeper, outputs, reference, threshold, action):
    """Hold rows and answers against the one event of each request that fired."""
    fired = 0
    for n, output in enumerate(outputs):
        first = first_above(keeper, f"r{n}", threshold, LENGTHS[n])
        events = keeper.events_of(f"r{n}")
        assert len(events) == (first is not None)
        fired += first is not None
        if action == "stop" and first is not None:
            assert len(output.outputs[0].token_ids) == first + 2 - LENGTHS[n]
            assert output.outputs[0].stop_reason.startswith("capflow:gate:")
            assert sorted(keeper.rows[f"r{n}"][PROBED]) == list(range(first + 1))
            hold(keeper, f"r{n}", output, reference, {})
        else:
            hold(keeper, f"r{n}", output, reference, {1: (vector(12), events[0].position)} if events else {})
    assert 0 < fired < len(outputs)


def test_a_gate_fires_alike_however_a_prompt_is_cut_and_cached(tiny, tmp_path, tmp_path_factory):
    """A row in the middle of the prompt fires; the second request of the same prompt finds it in the cache."""
    events = []
    for tokens in (16, 64, 128):
        keeper = Keeper()
        address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
        controllers = gates(tmp_path, ":threshold=-1e9,positions=5")
        cut = {"block_size": 32, "max_num_batched_tokens": tokens}
        with running_hub(address, keeper, controllers=controllers), engine(tiny, hub=address, **cut) as llm:
            for n in range(2):
                params = capflow.sampling_params(id=f"r{n}", max_tokens=4, **GREEDY)
                llm.generate(prompts((100,)), params, use_tqdm=False)
            eventually(lambda keeper=keeper: len(keeper.events) == 2)
        events += [(event.request, event.kind, event.position) for event in keeper.events]
    assert events == [("r0", "steer", 100), ("r1", "steer", 100)] * 3
