"""Steering of a running request: the position from which it applies, and the same position after a preemption."""

import importlib
import itertools
import os
import sys
import threading
import time
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import capflow
from capflow.capture.site import Site
from capflow.hub.health import problems
from capflow.plugins.configure import ConfiguredController
from capflow.probes.probe import Probe
from capflow.steering.action import ActionApplied, Steer, Unsteer
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from tests.kit.engines import GREEDY, LAYERS, answers, engine, prompts, relative_error, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, FLOAT32_BOUND, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LENGTHS = (60, 61, 62, 63, 58, 59)
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192}
"""Room for about four requests of 160 tokens, so that six which grow to that preempt each other."""

PROBED, STEERED = 2, 1
WEIGHT = vector(11, norm=1.0)


class Held(NamedTuple):
    """A vector is added after a layer at positions `first .. stop`."""

    layer: int
    vector: np.ndarray
    first: int
    stop: int


def expected(reference, tokens, held):
    """Return `[layers, tokens, hidden]`: the stream after each layer, before the vector is added."""
    caught = {}

    def hook_of(number):
        def hook(module, inputs, output):
            import torch

            hidden = output[0] if isinstance(output, tuple) else output
            caught[number] = hidden[0].detach().float().clone()
            for layer, added, first, stop in held:
                if layer == number:
                    hidden[0, first:stop] += torch.as_tensor(added)

        return hook

    import torch

    hooks = [layer.register_forward_hook(hook_of(n)) for n, layer in enumerate(reference.layers)]
    try:
        with torch.no_grad():
            reference.model(torch.tensor([list(tokens)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return np.stack([caught[n].numpy() for n in range(LAYERS)])


def rows_of(root, name):
    """Return the captured rows of a request, `[layers, positions, hidden]`."""
    data = capflow.open(root)[name]
    return np.stack([data[Site(layer, "post_block")].rows for layer in range(LAYERS)])


def hold(reference, root, name, output, held):
    """Hold every row of a request against the reference with these vectors."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    got = rows_of(root, name)
    assert got.shape[1] == len(tokens) - 1
    right = expected(reference, tokens, held)[:, :-1]
    error = relative_error(got, right)
    assert error < FLOAT32_BOUND, f"{name} is off by {error:.1e}"
    logits = reference.model.lm_head(reference.model.model.norm(_tensor(right[-1, len(output.prompt_token_ids) - 1 :])))
    assert logits.argmax(-1).tolist() == list(output.outputs[0].token_ids)


def _tensor(rows):
    import torch

    return torch.as_tensor(rows)


def gate_of(directory, threshold, *, seed=12, name="v", more=""):
    """Return the gate's option: a vector at layer 1 from the position after the probe at layer 2 reaches a score."""
    Probe.make(Site(PROBED, "post_block"), WEIGHT, names=("p",), threshold=threshold).save(directory / "p.safetensors")
    save_file({"vector": vector(seed)}, directory / f"{name}.safetensors", metadata={"site": f"post_block:{STEERED}"})
    return f"gate:probe={directory}/p.safetensors,vector={directory}/{name}.safetensors{more}"


def fires(reference, tokens, threshold, first):
    """Return the first position from `first` on at which the gate's probe fires; None where none does."""
    scores = reference.post_block(tokens)[PROBED] @ WEIGHT
    return next((p for p in range(first, len(tokens)) if scores[p] >= threshold), None)


def test_a_gate_s_vector_holds_from_the_same_position_after_a_preemption(tiny, reference, tmp_path):
    """Six requests that fire at different positions; the ones that are preempted compute all of it again."""
    given = prompts(LENGTHS)
    with engine(tiny) as llm:
        plain = answers(llm.generate(given, capflow.sampling_params(max_tokens=100, **GREEDY), use_tqdm=False))
    scores = [
        reference.post_block([*p["prompt_token_ids"], *a])[PROBED, len(p["prompt_token_ids"]) + 20 :] @ WEIGHT
        for p, a in zip(given, plain, strict=True)
    ]
    threshold = float(np.median([each.max() for each in scores])) - 1e-3
    root = tmp_path / "rows"
    consumers = [gate_of(tmp_path, threshold, more=",positions=all_generated")]
    consumers.append(f"filesystem:root={root},capture=requests")
    with engine(tiny, consumers=consumers, **CROWDED) as llm:
        preempted = preemptions(llm)
        params = [capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=100, **GREEDY) for n in range(6)]
        outputs = llm.generate(given, params, use_tqdm=False)
    fired = {}
    for n, output in enumerate(outputs):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        at = fires(reference, tokens[:-1], threshold, LENGTHS[n])
        fired[n] = at
        held = [] if at is None else [Held(STEERED, vector(12), at + 1, len(tokens))]
        hold(reference, root, f"r{n}", output, held)
    again = [n for n, computed in preempted.items() if fired[n] is not None and computed > fired[n] + 2]
    assert again, "no request was preempted after the position at which its gate fired"


def test_what_a_hub_s_actions_add_holds_from_the_same_positions_after_a_preemption(tiny, reference, tmp_path):
    """Each of six requests is steered, then otherwise, then not, then again; meanwhile they preempt each other."""
    root = tmp_path / "rows"
    one, other = (Site(1, "post_block"), vector(3)), (Site(0, "post_block"), vector(4))
    script = [(10, one), (25, other), (40, None), (45, one), (70, None)]
    with engine(tiny, consumers=[f"filesystem:root={root},capture=requests"], **CROWDED) as llm:
        preempted = preemptions(llm)
        acting = Acting(llm)
        for n, prompt in enumerate(prompts(LENGTHS)):
            params = capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=100, **GREEDY)
            llm.llm_engine.add_request(f"r{n}", prompt, params)
        outputs, held, due = {}, {n: [] for n in range(6)}, {n: list(script) for n in range(6)}
        while llm.llm_engine.has_unfinished_requests():
            for n, waiting in due.items():
                if waiting and acting.answered(n) >= waiting[0][0]:
                    _, item = waiting.pop(0)
                    at = acting.act(n, Unsteer(f"r{n}") if item is None else Steer(f"r{n}", (made(*item),)))
                    held[n] = [each._replace(stop=min(each.stop, at)) for each in held[n]]
                    if item is not None:
                        held[n].append(Held(item[0].layer, item[1], at, 1000))
            outputs |= {output.request_id: output for output in llm.llm_engine.step()}
        compat.flush(llm.llm_engine)
        acting.close()
        with Client(llm.capflow_settings.hubs[0].address) as client:
            client.results([f"r{n}" for n in range(6)], wait=True, timeout=60)
    for n in range(6):
        hold(reference, root, f"r{n}", outputs[f"r{n}"], held[n])
    assert any(computed > held[n][1].first for n, computed in preempted.items())


def made(site, values):
    """Return a vector for an action."""
    return SteeringVector.make(site, values)


class Acting:
    """Has actions that were asked of a hub done in the very next step of an engine of this process."""

    def __init__(self, llm):
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._hub = llm.capflow_settings.hubs[0].address
        self._computed, self._answered = {}, {}
        self._threads, self.outcomes = [], []
        schedule = self.scheduler.schedule

        def watched(*args, **kwargs):
            made = schedule(*args, **kwargs)
            for key, request in self.scheduler.requests.items():
                number = int(self.scheduler.capflow._names[key].removeprefix("r"))
                self._computed[number] = max(self._computed.get(number, 0), request.num_computed_tokens)
                self._answered[number] = request.num_output_tokens
            return made

        self.scheduler.schedule = watched

    def answered(self, number):
        """Return how many tokens a request had when the last step was scheduled."""
        return self._answered.get(number, 0)

    def act(self, number, action):
        """Return the position from which an action must hold."""
        link = self.scheduler.capflow.links._links[0]
        waiting = len(link.waiting)

        def send():
            with Client(self._hub) as client:
                self.outcomes.append(client.act(action, timeout=60))

        thread = threading.Thread(target=send)
        thread.start()
        eventually(lambda: len(link.waiting) > waiting)
        self._threads.append(thread)
        return self._computed[number]

    def close(self):
        for thread in self._threads:
            thread.join(60)
        assert len(self.outcomes) == len(self._threads)
        assert all(isinstance(outcome, ActionApplied) for outcome in self.outcomes), self.outcomes


def preemptions(llm):
    """Return, as it fills, how many positions each request that is preempted had computed, by its number."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    original, result = scheduler._preempt_request, {}

    def preempt(request, *args, **kwargs):
        number = int(scheduler.capflow._names[request.request_id].removeprefix("r"))
        result[number] = max(result.get(number, 0), request.num_computed_tokens)
        return original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return result


def test_consumers_hear_of_a_gated_request_that_nobody_captures_and_of_no_other(tiny, reference, tmp_path):
    """The gate fires on one of two requests; neither brings a capture, and no consumer has one of its own."""
    import duckdb

    given = prompts((9, 11))
    with engine(tiny) as llm:
        plain = answers(llm.generate(given, capflow.sampling_params(max_tokens=12, **GREEDY), use_tqdm=False))
    highest = [
        float(
            np.max(
                (reference.post_block([*p["prompt_token_ids"], *a])[PROBED] @ WEIGHT)[len(p["prompt_token_ids"]) : -1]
            )
        )
        for p, a in zip(given, plain, strict=True)
    ]
    gate = gate_of(tmp_path, sum(highest) / 2, more=",positions=all_generated")
    with engine(tiny, consumers=[gate, f"duckdb:path={tmp_path}/a.duckdb"]) as llm:
        params = [capflow.sampling_params(id=name, max_tokens=12, **GREEDY) for name in ("a", "b")]
        llm.generate(given, params, use_tqdm=False)
        static = capflow.sampling_params(
            id="c",
            max_tokens=4,
            steering_vectors={"post_block": {0: vector(3)}},
            n=2,
            seed=1,
            **{**GREEDY, "temperature": 1.0},
        )
        reports = [output.steering_applied for output in llm.generate(given[0], static, use_tqdm=False)]
        (mine,) = llm.generate(given[0], params[0], use_tqdm=False)
    # Which of them the gate fired on, the answers do not say; nor do they say that nothing steered them.
    assert (mine.steering_applied.key, mine.steering_applied.controllers) == ("dynamic", ("gate",))
    assert mine.kv_transfer_params is None
    assert reports[0].key.endswith("+dynamic")
    assert reports[0].actions == ()
    fired = "a" if highest[0] > highest[1] else "b"
    with duckdb.connect(f"{tmp_path}/a.duckdb") as result:
        status = result.execute("SELECT request_id, kind, asked_by, outcome FROM actions").fetchall()
    assert {one for one in status if one[2] != "request"} >= {(fired, "steer", "controller gate", "applied")}
    assert {one[0] for one in status if one[0] in ("a", "b")} == {fired}


# --- what a gate does depends on rows, and on nothing else ---

CUTS = {
    "chunks of 64": {"max_num_batched_tokens": 64},
    "chunks of 96": {"max_num_batched_tokens": 96},
    "chunks of 128": {"max_num_batched_tokens": 128},
    "one chunk": {"max_num_batched_tokens": 256},
}


def gated(llm, given, name, **more):
    """Return the answer of a request that captures everything."""
    params = capflow.sampling_params(id=name, capture=ALL, max_tokens=12, **GREEDY, **more)
    return llm.generate(given, params, use_tqdm=False)[0]


@pytest.fixture(scope="module")
def prompted(reference):
    """A prompt of 150 tokens, and a threshold that rows in its middle alone reach: none of them the last of a step."""
    (prompt,) = prompts((150,), seed=21)
    scores = reference.post_block(prompt["prompt_token_ids"])[PROBED] @ WEIGHT
    ends = {63, 95, 127, 149, *range(100, 112)}  # of chunks, of what is cached, of a chunk beside another request
    best = max(range(40, 148), key=lambda p: scores[p] if p not in ends else -np.inf)
    assert all(scores[p] < scores[best] - 1e-3 for p in ends)
    return prompt, float(scores[best]) - 1e-4


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=[pytest.mark.long] if cut in ("chunks of 96", "one chunk") else []) for cut in CUTS]
)
def test_a_prompt_row_that_fires_steers_the_whole_answer_however_the_prompt_is_cut(
    tiny, reference, prompted, tmp_path, cut
):
    """Alone, beside another request that takes a part of the step's budget, and again where the prompt is cached."""
    prompt, threshold = prompted
    root = tmp_path / "rows"
    consumers = [gate_of(tmp_path, threshold), f"filesystem:root={root},capture=requests"]
    with engine(tiny, consumers=consumers, block_size=32, **CUTS[cut]) as llm:
        alone = gated(llm, [prompt], "alone")
        core = llm.llm_engine
        for name, given in (("mate", prompts((45,), seed=5)[0]), ("beside", prompt)):
            core.add_request(name, given, capflow.sampling_params(id=name, capture=ALL, max_tokens=12, **GREEDY))
        done = {}
        while core.has_unfinished_requests():
            done |= {output.request_id: output for output in core.step()}
        again = gated(llm, [prompt], "again")
        plain = llm.generate([prompt], capflow.sampling_params(max_tokens=12, **GREEDY), use_tqdm=False)[0]
        assert plain.num_cached_tokens == again.num_cached_tokens == 0  # its rows are scored, so they are computed
        compat.flush(core)
        with Client(llm.capflow_settings.hubs[0].address) as client:
            client.results(["alone", "beside", "again"], wait=True, timeout=60)
    held = [Held(STEERED, vector(12), 150, 1000)]
    for name, output in (("alone", alone), ("beside", done["beside"]), ("again", again)):
        hold(reference, root, name, output, held)


def test_a_gate_that_scores_the_answer_alone_leaves_prompts_to_the_cache(tiny, reference, prompted, tmp_path):
    prompt, threshold = prompted
    consumers = [gate_of(tmp_path, threshold, more=",positions=all_generated")]
    with engine(tiny, consumers=consumers, block_size=32) as llm:
        params = capflow.sampling_params(max_tokens=4, **GREEDY)
        llm.generate([prompt], params, use_tqdm=False)
        assert llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens == 128


def test_two_gates_and_what_the_request_brings_add_up(tiny, reference, prompted, tmp_path):
    prompt, threshold = prompted
    root = tmp_path / "rows"
    first = gate_of(tmp_path, threshold)
    second = gate_of(tmp_path, threshold, seed=31, name="w").replace("gate:", "gate@other:")
    with engine(tiny, consumers=[first, second, f"filesystem:root={root},capture=requests"]) as llm:
        steering = {"post_block": {0: vector(5)}}
        output = gated(llm, [prompt], "both", decode_steering_vectors=steering)
    held = [Held(0, vector(5), 150, 1000), Held(STEERED, vector(12), 150, 1000), Held(STEERED, vector(31), 150, 1000)]
    hold(reference, root, "both", output, held)


# --- plugins that do wrong ---

PLUGIN = """
import msgspec
from capflow import hookimpl
from capflow.steering.action import Steer, Unsteer
from capflow.plugins.consumer import Controller
from capflow.capture.spec import CaptureSpec
from capflow.steering.vector import SteeringVector


class Faulty(Controller):
    name = "faulty"

    class State(msgspec.Struct, frozen=True):
        vector: SteeringVector
        rank: int
        at: int = 0

    Config = State

    @classmethod
    def load(cls, config):
        return config

    def spec(self):
        return CaptureSpec({"post_block": [2]}, "all_generated")

    def on_step(self, view):
        from vllm.distributed import get_tp_group

        if get_tp_group().rank_in_group == self.state.rank:
            raise ValueError("a fault of one rank")
        return [Steer(rows.request, (self.state.vector,)) for rows in view.rows() if rows.start >= self.state.at]


@hookimpl
def capflow_consumers():
    return [Faulty]
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Return the class of a plugin that is installed for the processes that are started."""
    (tmp_path / "faulty_plugin.py").write_text(PLUGIN)
    info = tmp_path / "faulty_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[capflow]\nfaulty = faulty_plugin\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("faulty_plugin").Faulty
    del sys.modules["faulty_plugin"]


def added(layer, seed=12):
    return made(Site(layer, "post_block"), vector(seed))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_plugin_s_fault_on_one_rank_is_that_of_all_or_of_none(tiny, reference, faulty, tmp_path_factory, rank):
    """On the first it does nothing, and the hub says so; on another it is not even asked."""
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    controller = ConfiguredController("faulty", faulty, faulty.State(added(1), rank, 45))
    keeper = Keeper()
    with running_hub(address, keeper, controllers=[controller]) as hub:
        with engine(tiny, hub=address, tensor_parallel_size=2, in_process=False) as llm:
            output = gated(llm, prompts((40,)), "r")
            if rank == 0:
                eventually(lambda: problems(hub, time.monotonic()))
                message = problems(hub, time.monotonic())
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        hold_kept(keeper, reference, tokens, [Held(1, vector(12), 46, 1000)] if rank else [])
    if rank == 0:
        assert "controller faulty: failed in its last" in message[0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_controller_runs_on_the_stage_of_what_it_reads_and_is_refused_what_lies_on_another(
    tiny, reference, faulty, tmp_path_factory
):
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    controllers = [
        ConfiguredController(f"faulty@{layer}", faulty, faulty.State(added(layer, layer), 1, 45)) for layer in (1, 3)
    ]
    keeper = Keeper()
    with running_hub(address, keeper, controllers=controllers) as hub:
        with engine(tiny, hub=address, pipeline_parallel_size=2, in_process=False, enforce_eager=False) as llm:
            output = gated(llm, prompts((40,)), "r")
            eventually(lambda: problems(hub, time.monotonic()))
            (message,) = problems(hub, time.monotonic())
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        hold_kept(keeper, reference, tokens, [Held(3, vector(3), 46, 1000)])
        eventually(lambda: "r" in keeper.done)
        acted = [event.asked_by for event in keeper.events_of("r")]
    assert "controller faulty@1: " in message
    assert (
        "it steers at: got post_block:1, expected sites of one pipeline stage, such as this one with layers 2..3"
        in message
    )
    assert set(acted) == {"controller faulty@3"}
    # The worker of the first stage does not know the actions of a controller on the second; its rows have the marks.
    assert [position for position, steered in sorted(keeper.steered["r"].items()) if steered] == [*range(46, 51)]


def hold_kept(keeper, reference, tokens, held):
    """Hold every row that a keeper has of request `r` against the reference with these vectors."""
    right = expected(reference, tokens, held)[:, :-1]
    for layer in range(LAYERS):
        kept = keeper.rows["r"][Site(layer, "post_block")]
        got = np.stack([kept[position][1] for position in range(len(tokens) - 1)])
        error = relative_error(got, right[layer])
        assert error < FLOAT32_BOUND, f"layer {layer} is off by {error:.1e}"


def test_a_plugin_that_does_wrong_in_every_way_ends_neither_a_step_nor_the_engine(
    tiny, faulty, tmp_path_factory, monkeypatch
):
    """The answers are those without it, and the hub says what it cannot do."""
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    wrong = msgspec.structs.replace(added(1), layer="1")
    steps = itertools.cycle([[Steer("r0", (wrong,))], ["steer"], [Steer([], ())], [Steer("r0", (np.ones(3),))], None])

    def on_step(self, view):
        step = next(steps)
        if step is None:
            raise SystemExit(3)
        return step

    def on_request_done(self, request):
        raise ValueError("a fault at the end")

    monkeypatch.setattr(faulty, "on_step", on_step)
    monkeypatch.setattr(faulty, "on_request_done", on_request_done)
    controller = ConfiguredController("faulty", faulty, faulty.State(added(1), 0))
    params = [capflow.sampling_params(id=f"r{n}", max_tokens=12, **GREEDY) for n in range(3)]
    with engine(tiny) as llm:
        plain = answers(llm.generate(prompts((9, 5, 70)), params, use_tqdm=False))
    with running_hub(address, controllers=[controller]) as hub, engine(tiny, hub=address) as llm:
        for _ in range(2):
            assert answers(llm.generate(prompts((9, 5, 70)), params, use_tqdm=False)) == plain
        eventually(lambda: problems(hub, time.monotonic()))
        assert "controller faulty: " in problems(hub, time.monotonic())[0]
