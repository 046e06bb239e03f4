"""Events of a running engine: they come with their step, with the position, and nothing that a cut undid comes."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import capflow
from capflow.capture.site import Site
from capflow.plugins.configure import ConfiguredController, configure, load_plugins, parse
from capflow.probes.probe import Probe
from tests.kit.engines import GREEDY, engine, prompts, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROBED, STEERED = Site(2, "post_block"), Site(1, "post_block")
WEIGHT = vector(11, norm=1.0)
LENGTHS = (60, 61, 62, 63, 58, 59)
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192}
"""Room for about four requests of 160 tokens, so that six which grow to that preempt each other."""


def gate(directory, threshold):
    """Return a gate at generated positions as a hub takes it."""
    Probe.make(PROBED, WEIGHT, names=("p",), threshold=threshold).save(directory / "p.safetensors")
    save_file({"vector": vector(12)}, directory / "v.safetensors", metadata={"site": "post_block:1"})
    option = f"gate:probe={directory}/p.safetensors,vector={directory}/v.safetensors,positions=all_generated"
    configured = configure(*parse(option), load_plugins())
    assert isinstance(configured, ConfiguredController)
    return [configured]


def scores(keeper, name):
    """Return the probe's score of each captured position of a request."""
    return {position: float(row @ WEIGHT) for position, (_, row) in keeper.rows[name][PROBED].items()}


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


@pytest.mark.parametrize("scheduling", ["sync", "async", "preempted"])
def test_each_event_has_the_position_from_which_it_holds(tiny, tmp_path, tmp_path_factory, threshold, scheduling):
    """The last request is captured by nobody."""
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    keeper = Keeper()
    more = CROWDED if scheduling == "preempted" else {"async_scheduling": scheduling == "async"}
    with running_hub(address, keeper, controllers=gate(tmp_path, threshold)), engine(tiny, hub=address, **more) as llm:
        params = [
            capflow.sampling_params(id=f"r{n}", capture=ALL if n < 5 else None, max_tokens=100, **GREEDY)
            for n in range(6)
        ]
        llm.generate(prompts(LENGTHS), params, use_tqdm=False)
        eventually(lambda: len(keeper.done) == 5)
    assert not keeper.late
    fired = 0
    for n in range(5):
        each = scores(keeper, f"r{n}")
        first = next((p for p in sorted(each) if p >= LENGTHS[n] and each[p] >= threshold), None)
        events = keeper.events_of(f"r{n}")
        if first is None:
            assert not events
            continue
        fired += 1
        (event,) = events
        facts = (event.kind, event.asked_by, event.sites, event.position)
        assert facts == ("steer", "controller gate", (STEERED,), first + 1)
        assert event.incarnation
        assert event.step > 0
    assert 0 < fired < 5
    assert all(event.position > LENGTHS[5] for event in keeper.events_of("r5"))


def test_an_event_comes_while_its_request_runs(tiny, tmp_path, tmp_path_factory):
    """The gate fires at once; the consumer has the event when the request still has most of its answer to make."""
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    keeper = Keeper()
    with running_hub(address, keeper, controllers=gate(tmp_path, -1e9)), engine(tiny, hub=address) as llm:
        core = llm.llm_engine
        core.add_request("r", prompts((40,))[0], capflow.sampling_params(id="r", max_tokens=150, **GREEDY))
        steps = 0
        while not keeper.events and core.has_unfinished_requests():
            core.step()
            steps += 1
        assert core.has_unfinished_requests()
        core.abort_request(["r"])
        while core.has_unfinished_requests():
            core.step()
    assert steps < 100
    (event,) = keeper.events
    assert (event.request, event.position) == ("r", 41)


@pytest.mark.parametrize("scheduling", ["sync", "preempted"])
def test_each_row_knows_whether_its_position_was_steered(tiny, tmp_path, tmp_path_factory, threshold, scheduling):
    """By its request's vectors at generated positions and a patch, by nothing, or by a gate from a position on."""
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    keeper = Keeper()
    more = CROWDED if scheduling == "preempted" else {}
    decode = {"decode_steering_vectors": {"post_block": {3: vector(5)}}}
    patch = {"steering_patches": {"post_block": {2: {"positions": [7], "vector": vector(6)}}}}
    with running_hub(address, keeper, controllers=gate(tmp_path, threshold)), engine(tiny, hub=address, **more) as llm:
        params = [
            capflow.sampling_params(
                id=f"r{n}", capture=ALL, max_tokens=100, **(decode if n == 5 else patch if n == 4 else {}), **GREEDY
            )
            for n in range(6)
        ]
        llm.generate(prompts(LENGTHS), params, use_tqdm=False)
        eventually(lambda: len(keeper.done) == 6)
    for n in range(6):
        kept = keeper.steered[f"r{n}"]
        steers = [event for event in keeper.events_of(f"r{n}") if event.asked_by == "controller gate"]
        first = steers[0].position if steers else 1000
        expected = {p for p in kept if p >= first or (n == 5 and p >= LENGTHS[n]) or (n == 4 and p == 7)}
        assert {position for position, steered in kept.items() if steered} == expected
    assert any(keeper.steered["r4"].values())
