"""Gates that a hub gives to its requests, in real engines, against a float64 reference of `steering_gates`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.plugins.configure import ConfiguredController, configure, load_plugins, parse
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import Freeze, Unfreeze
from capflow.steering.request import Steering
from tests.kit.engines import GREEDY, engine, prompts, relative_error, save_tiny
from tests.kit.gated import APART, BOUND, GatedReference
from tests.kit.hubs import running_hub
from tests.kit.rows import Keeper
from tests.kit.steered import RAW, vector
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOKENS, PROMPT = 9, 70
_MODES = ("latch", "positions", "sharpness")
EVERYTHING = {"hooks": {"post_block": "all"}, "positions": "all"}
SADNESS = {"layer": 0, "probe": 31, "vector": 32, "at": 2, "latch": True, "positions": "generated"}
RUDENESS = {"layer": 1, "probe": 21, "vector": 22, "at": 1, "sharpness": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model):
    return GatedReference(model)


@pytest.fixture(scope="module")
def thresholds(reference):
    """The middle of the scores of an unsteered answer, by the seed of the probe."""
    prompt = prompts([PROMPT], seed=3)[0]["prompt_token_ids"]
    tokens = [*prompt, *reference.generate(prompt, TOKENS, {"steering_gates": {}})]
    seen = reference.run(tokens, PROMPT, {"steering_gates": {}})[1]
    medians = {}
    for each in (SADNESS, RUDENESS):
        rows = seen[Site(each["layer"], "post_block")]
        rows = rows[PROMPT:] if each.get("positions") == "generated" else rows
        ordered = np.sort(rows @ vector(each["probe"]))
        low = len(ordered) // 3
        widest = low + int(np.argmax(np.diff(ordered[low : 2 * len(ordered) // 3 + 2])))
        medians[each["probe"]] = float(ordered[widest : widest + 2].mean())
    return medians


def gate(directory, name, given, threshold, more=""):
    """Return a gate as a hub takes it."""
    place = directory / str(given["probe"])
    place.mkdir(exist_ok=True)
    Probe.make(Site(given["layer"], "post_block"), vector(given["probe"]), names=("p",)).save(place / "p.safetensors")
    save_vector(place / "v.safetensors", Site(given["at"], "post_block"), vector(given["vector"]))
    options = [f"probe={place}/p.safetensors,vector={place}/v.safetensors,tier=in-graph,scale=2,threshold={threshold}"]
    options += [f"{key}={str(given[key]).lower()}" for key in _MODES if key in given]
    configured = configure(*parse(f"gate{name}:{','.join([*options, *filter(None, [more])])}"), load_plugins())
    assert isinstance(configured, ConfiguredController)
    return configured


def fields(**gates):
    """Return the fields that ask for gates: for each name, what it is and its threshold."""
    asked = {"steering_gates": {}, "steering_vectors": {"post_block": {}}}
    for name, (given, threshold) in gates.items():
        more = {"score": "dot", "positions": "all", **{k: given[k] for k in _MODES if k in given}}
        probe = {
            "hook": "post_block",
            "layer": given["layer"],
            "vector": vector(given["probe"]),
            "threshold": threshold,
            **more,
        }
        asked["steering_gates"][name] = probe
        part = {"vector": vector(given["vector"]), "scale": 2.0, "gate": name}
        asked["steering_vectors"]["post_block"].setdefault(given["at"], []).append(part)
    return asked


@contextlib.contextmanager
def gated(model, tmp_path_factory, *controllers, **arguments):
    """Run a hub with gates and an engine of it; yield the engine, the hub and the keeper of its rows."""
    keeper, address = Keeper(), f"ipc://{tmp_path_factory.mktemp('h')}/h"
    settings = {"sites": ["post_block:*"], **RAW, **arguments}
    with running_hub(address, keeper, controllers=controllers) as hub, engine(model, hub=address, **settings) as llm:
        yield llm, hub, keeper


def generate(llm, keeper, names, own=None, seed=3):
    """Generate requests with the same prompt, and return their outputs when their rows are there."""
    asked = {"capture": EVERYTHING, "max_tokens": TOKENS, **GREEDY, **(own or {})}
    params = [capflow.sampling_params(id=name, **asked) for name in names]
    outputs = llm.generate(prompts([PROMPT], seed=seed) * len(names), params, use_tqdm=False)
    eventually(lambda: all(name in keeper.done for name in names))
    return outputs


def hold(reference, keeper, name, output, asked):
    """Hold a request's rows against the reference; return the values of the gates."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    _, seen, margins, values = reference.run(tokens, PROMPT, asked)
    for each in margins.values():
        assert np.abs(each[each > -np.inf]).min() > APART
    for site, kept in keeper.rows[name].items():
        assert sorted(kept) == list(range(len(tokens)))
        error = relative_error(np.stack([kept[p][1] for p in sorted(kept)]), seen[site])
        assert error < BOUND, f"{name}: rows at {site} are off by {error:.1e}"
    return values


NONE = {"steering_gates": {}}


def test_two_gates_of_a_hub_steer_as_if_each_request_asked_for_them(
    model, reference, thresholds, tmp_path, tmp_path_factory
):
    sad, rude = (SADNESS, thresholds[31]), (RUDENESS, thresholds[21])
    given = gate(tmp_path, "@sad", *sad, "requests=chat-*,label=why"), gate(tmp_path, "@rude", *rude)
    with gated(model, tmp_path_factory, *given) as (llm, hub, keeper):
        chat, job = generate(llm, keeper, ["chat-1", "job-1"])
        assert not hub.status()["problems"]
    values = hold(reference, keeper, "chat-1", chat, fields(sad=sad, rude=rude))
    assert 0 < values["sad"].sum() < TOKENS - 1
    hold(reference, keeper, "job-1", job, fields(rude=rude))
    assert chat.steering_applied.controllers == ("gate@sad", "gate@rude")
    assert job.steering_applied.controllers == ("gate@rude",)
    opened = [event for event in keeper.events_of("chat-1") if event.asked_by == "controller gate@sad"]
    assert [(event.kind, event.position, event.label) for event in opened] == [
        ("gate", int(np.argmax(values["sad"] > 0)), "why")
    ]
    owners = {event.asked_by for event in keeper.events_of("job-1")}
    assert owners == {"controller gate@rude"}


def test_a_gate_of_a_hub_acts_beside_those_of_a_request(model, reference, thresholds, tmp_path, tmp_path_factory):
    sad, rude = (SADNESS, thresholds[31]), (RUDENESS, thresholds[21])
    own = fields(rude=rude)
    own["steering_vectors"]["post_block"][2] = [{"vector": vector(40), "scale": 0.5}]
    own["steering_clamps"] = {"post_block": {2: [{"vector": vector(41), "min": -0.2, "max": 0.2}]}}
    both = fields(rude=rude, sad=sad)
    both["steering_vectors"]["post_block"][2] += own["steering_vectors"]["post_block"][2]
    both["steering_clamps"] = own["steering_clamps"]
    with gated(model, tmp_path_factory, gate(tmp_path, "@sad", *sad)) as (llm, hub, keeper):
        (output,) = generate(llm, keeper, ["r"], own)
        assert not hub.status()["problems"]
    values = hold(reference, keeper, "r", output, both)
    assert 0 < values["sad"].sum() < TOKENS - 1
    owners = {event.asked_by for event in keeper.events_of("r")}
    assert owners == {"request", "gate rude", "controller gate@sad"}


def test_cache_blocks_are_shared_by_requests_that_the_gate_steers_alike(
    model, reference, thresholds, tmp_path, tmp_path_factory
):
    small = {"block_size": 32, "enable_prefix_caching": True}
    given = gate(tmp_path, "@rude", RUDENESS, thresholds[21], "requests=chat-*")
    asked = {"max_tokens": TOKENS, **GREEDY}
    cached = []
    with gated(model, tmp_path_factory, given, **small) as (llm, _, keeper):
        for name, own in (
            ("chat-1", {}),
            ("chat-2", {}),
            ("job-1", {}),
            ("job-2", fields(mine=(RUDENESS, thresholds[21]))),
            ("chat-3", fields(mine=(SADNESS, thresholds[31]))),
        ):
            params = capflow.sampling_params(id=name, **asked, **own)
            (output,) = llm.generate(prompts([PROMPT], seed=3), params, use_tqdm=False)
            cached.append((name, output.num_cached_tokens))
        (held,) = generate(llm, keeper, ["chat-4"])
    assert cached == [("chat-1", 0), ("chat-2", 64), ("job-1", 0), ("job-2", 64), ("chat-3", 64)]
    hold(reference, keeper, "chat-4", held, fields(rude=(RUDENESS, thresholds[21])))


def test_a_latch_over_the_prompt_is_computed_and_never_cached(model, thresholds, tmp_path, tmp_path_factory):
    small = {"block_size": 32, "enable_prefix_caching": True}
    latch = {**SADNESS, "positions": "all"}
    with gated(model, tmp_path_factory, gate(tmp_path, "", latch, 0.0), **small) as (llm, _, _keeper):
        for _ in range(2):
            (output,) = llm.generate(
                prompts([PROMPT], seed=3), capflow.sampling_params(max_tokens=3, **GREEDY), use_tqdm=False
            )
    assert output.num_cached_tokens == 0


def test_a_gate_that_does_not_fit_is_a_problem_of_the_hub_and_costs_no_request(
    model, reference, thresholds, tmp_path, tmp_path_factory
):
    wrong = gate(tmp_path, "@far", {**RUDENESS, "layer": 99, "at": 99, "probe": 50}, 0.0)
    crowd = {f"g{n}": (RUDENESS, thresholds[21] + n) for n in range(8)}
    with gated(model, tmp_path_factory, wrong, gate(tmp_path, "@sad", SADNESS, thresholds[31])) as (llm, hub, keeper):
        (plain,) = generate(llm, keeper, ["r"])
        eventually(lambda: len(hub.status()["problems"]) == 1)
        (first,) = hub.status()["problems"]
        (crowded,) = generate(llm, keeper, ["crowded"], fields(**crowd))
        eventually(lambda: len(hub.status()["problems"]) == 2)
        problems = hub.status()["problems"]
    assert "controller gate@far: no request gets its steering: controllers.gate@far.steering_" in first
    assert "layer 99" in first
    assert "controller gate@sad: request crowded runs without its steering: steering_gates: got 9 gates" in problems[1]
    hold(reference, keeper, "r", plain, fields(sad=(SADNESS, thresholds[31])))
    hold(reference, keeper, "crowded", crowded, fields(**crowd))


def test_a_freeze_takes_the_gate_back(model, reference, thresholds, tmp_path, tmp_path_factory):
    rude = RUDENESS, thresholds[21]
    with gated(model, tmp_path_factory, gate(tmp_path, "@rude", *rude)) as (llm, hub, keeper):
        with capflow.Client(hub.address) as client:
            client.act([Freeze()])
            (frozen,) = generate(llm, keeper, ["frozen"])
            client.act([Unfreeze()])
        (steered,) = generate(llm, keeper, ["steered"])
    hold(reference, keeper, "frozen", frozen, NONE)
    hold(reference, keeper, "steered", steered, fields(rude=rude))


@pytest.mark.long
def test_two_tensor_parallel_ranks_steer_alike(model, reference, thresholds, tmp_path, tmp_path_factory):
    sad = SADNESS, thresholds[31]
    more = {"tensor_parallel_size": 2, "in_process": False}
    with gated(model, tmp_path_factory, gate(tmp_path, "@sad", *sad), **more) as (llm, hub, keeper):
        (output,) = generate(llm, keeper, ["r"])
        assert not hub.status()["problems"]
    values = hold(reference, keeper, "r", output, fields(sad=sad))
    assert 0 < values["sad"].sum() < TOKENS - 1


def test_gates_of_a_module_and_of_the_global_state_act_as_those_of_a_request(
    model, reference, thresholds, tmp_path_factory
):
    rude, sad = ("rude", RUDENESS), ("sad", SADNESS)
    asked = [fields(**{name: (each, thresholds[each["probe"]]) for name, each in some}) for some in ([rude], [sad])]
    both = fields(**{name: (each, thresholds[each["probe"]]) for name, each in (rude, sad)})
    with gated(model, tmp_path_factory) as (llm, _, keeper):
        llm.steering.register("calm", Steering.parse(asked[0]))
        (module,) = generate(llm, keeper, ["module"], {"steering_name": "calm"})
        llm.steering.set_global(Steering.parse(asked[1]))
        (everywhere,) = generate(llm, keeper, ["everywhere"])
        (joined,) = generate(llm, keeper, ["joined"], {"steering_name": "calm"})
    for name, output, expected in (
        ("module", module, asked[0]),
        ("everywhere", everywhere, asked[1]),
        ("joined", joined, both),
    ):
        values = hold(reference, keeper, name, output, expected)
        assert all(0 < (value > 0.5).sum() < len(value) for value in values.values()), name
