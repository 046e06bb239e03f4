"""Rows, steering and actions through the whole system: real vLLM, the hub, the files; tiny random models."""

import threading
import time

import duckdb
import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow.steering.action import Abort, ActionApplied, Rejected, Steer
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from capflow.transport.hub_process import HubProcess
from capflow_engine.compat import engine as compat
from tests.kit.engines import (
    GREEDY,
    LAYERS,
    Reference,
    answers,
    engine,
    prompts,
    relative_error,
    save_tiny,
    vector,
)
from tests.kit.rows import ALL, FLOAT32_BOUND, check_rows
from tests.kit.waiting import eventually

pytestmark = pytest.mark.engine

LENGTHS = (5, 1, 40, 3, 90, 17, 2, 65)


@pytest.fixture(scope="module")
def plain(tiny):
    """The answers of vLLM without capflow."""
    with engine(tiny, capflow_on=False) as llm:
        from vllm import SamplingParams

        return answers(llm.generate(prompts(LENGTHS), SamplingParams(max_tokens=12, **GREEDY), use_tqdm=False))


@pytest.fixture
def files(tmp_path):
    """The consumer that writes what requests ask for, and what it wrote."""
    return f"filesystem:root={tmp_path / 'rows'},capture=requests", lambda: capflow.open(tmp_path / "rows")


def check_files(data, outputs, reference, steering=None):
    """Hold every captured row against the reference; each request must have all its rows, in order."""
    for number, output in enumerate(outputs):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        check_rows(data[f"r{number}"], tokens, reference, (steering or {}).get(number))


@pytest.mark.parametrize(
    ("architecture", "eager"),
    [("llama", True), ("gemma3", True), pytest.param("llama", False, marks=pytest.mark.long), ("gemma3", False)],
    ids=["eager-llama", "eager-gemma3", "compiled-llama", "compiled-gemma3"],
)
def test_captured_rows_equal_transformers_row_by_row(tmp_path, files, architecture, eager):
    model = save_tiny(tmp_path / "model", architecture)
    consumer, read = files
    with engine(model, consumers=[consumer], enforce_eager=eager) as llm:
        params = [
            capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=12, **GREEDY) for n in range(len(LENGTHS))
        ]
        outputs = llm.generate(prompts(LENGTHS), params, use_tqdm=False)
        assert [o.capture_results["filesystem"].status for o in outputs] == ["ok"] * len(LENGTHS)
        check_files(read(), outputs, Reference(model))


def test_each_positions_name_delivers_its_positions_and_no_others(tiny, reference, files):
    consumer, read = files
    cases = [
        ("last_prompt", lambda p, g: [p - 1]),
        ("all_prompt", lambda p, g: list(range(p))),
        ("all_generated", lambda p, g: list(range(p, p + g - 1))),
        ("all", lambda p, g: list(range(p + g - 1))),
    ]
    with engine(tiny, consumers=[consumer]) as llm:
        params = [
            capflow.sampling_params(
                id=name, capture={"hooks": {"post_block": [n % LAYERS]}, "positions": name}, max_tokens=7, **GREEDY
            )
            for n, (name, _) in enumerate(cases)
        ]
        outputs = llm.generate(prompts((9, 70, 33, 4)), params, use_tqdm=False)
        data = read()
        for n, ((name, positions), output) in enumerate(zip(cases, outputs, strict=True)):
            got = data[name][Site(n % LAYERS, "post_block")]
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            expected = positions(len(output.prompt_token_ids), 7)
            assert got.positions.tolist() == expected
            assert relative_error(got.rows, reference.post_block(tokens)[n % LAYERS, expected]) < FLOAT32_BOUND


def test_batch_mates_that_ask_for_nothing_answer_as_plain_vllm_does(tiny, plain, reference, files):
    consumer, read = files
    from vllm import SamplingParams

    with engine(tiny, consumers=[consumer]) as llm:
        nothing = SamplingParams(max_tokens=12, **GREEDY)
        mixed = []
        for n in range(len(LENGTHS)):
            if n % 2:
                mixed.append(nothing)
            else:
                steering = {"post_block": {1: vector(n), 2: {"vector": vector(n + 50), "scale": 1.5}}}
                mixed.append(
                    capflow.sampling_params(id=f"r{n}", capture=ALL, steering_vectors=steering, max_tokens=12, **GREEDY)
                )
        alone = answers(llm.generate(prompts(LENGTHS), nothing, use_tqdm=False))
        together = llm.generate(prompts(LENGTHS), mixed, use_tqdm=False)
        assert alone == plain
        got = answers(together)
        assert [got[n] for n in range(1, len(LENGTHS), 2)] == [plain[n] for n in range(1, len(LENGTHS), 2)]
        assert all(got[n] != plain[n] for n in range(0, len(LENGTHS), 2))
        # Steered rows are those of the model with the vectors added, at every position.
        for n in range(0, len(LENGTHS), 2):
            tokens = [*together[n].prompt_token_ids, *got[n]]
            expected = reference.post_block(tokens, {1: (vector(n), 0), 2: (1.5 * vector(n + 50), 0)})
            for layer in range(LAYERS):
                rows = read()[f"r{n}"][Site(layer, "post_block")].rows
                assert relative_error(rows, expected[layer, :-1]) < FLOAT32_BOUND


def test_a_steering_vector_of_scale_zero_changes_nothing(tiny, plain):
    with engine(tiny) as llm:
        steering = {"post_block": {1: {"vector": vector(1), "scale": 0.0}}}
        params = capflow.sampling_params(steering_vectors=steering, max_tokens=12, **GREEDY)
        assert answers(llm.generate(prompts(LENGTHS), params, use_tqdm=False)) == plain


def test_steered_cache_blocks_are_nobody_elses(tiny):
    prompt = prompts((100,), seed=5) * 1
    with engine(tiny, enable_prefix_caching=True, block_size=32) as llm:
        plain = capflow.sampling_params(max_tokens=8, **GREEDY)
        steered = capflow.sampling_params(steering_vectors={"post_block": {0: vector(7)}}, max_tokens=8, **GREEDY)
        first = llm.generate(prompt, steered, use_tqdm=False)[0]
        cold = llm.generate(prompt, plain, use_tqdm=False)[0]
        warm = llm.generate(prompt, plain, use_tqdm=False)[0]
        again = llm.generate(prompt, steered, use_tqdm=False)[0]
        assert cold.num_cached_tokens == 0
        assert warm.num_cached_tokens >= 64
        assert again.num_cached_tokens >= 64
        assert answers([cold]) == answers([warm]) != answers([first]) == answers([again])


def test_prompt_captures_compute_the_prompt_and_other_captures_keep_the_cache(tiny, files):
    consumer, read = files
    prompt = prompts((100,), seed=6)
    with engine(tiny, consumers=[consumer], enable_prefix_caching=True, block_size=32) as llm:
        llm.generate(prompt, capflow.sampling_params(max_tokens=4, **GREEDY), use_tqdm=False)
        cached = {}
        for name in ("all_prompt", "last_prompt", "all_generated"):
            capture = {"hooks": {"post_block": [2]}, "positions": name}
            params = capflow.sampling_params(id=name, capture=capture, max_tokens=4, **GREEDY)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert output.capture_results["filesystem"].status == "ok"
            cached[name] = output.num_cached_tokens
        assert cached["all_prompt"] == 0
        assert cached["last_prompt"] >= 64
        assert cached["all_generated"] >= 64
        data, site = read(), Site(2, "post_block")
        assert len(data["all_prompt"][site].rows) == 100
        np.testing.assert_allclose(
            data["last_prompt"][site].rows[0], data["all_prompt"][site].rows[99], rtol=0, atol=1e-4
        )


def test_a_preempted_request_delivers_each_row_once(tiny, reference, files):
    consumer, read = files
    lengths = (60, 61, 62, 63, 58, 59)
    # Room for about four requests of 160 tokens, so six that grow to it must preempt each other.
    limits = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192, "enable_prefix_caching": False}
    with engine(tiny, consumers=[consumer], **limits) as llm:
        preempted = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            original(request, *a, **k),
        )
        params = [
            capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=100, **GREEDY) for n in range(len(lengths))
        ]
        outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
        assert preempted
        check_files(read(), outputs, reference)


@pytest.fixture(scope="module")
def shared(tiny, tmp_path_factory):
    """One engine for the tests that do not mind what ran on it before."""
    root = tmp_path_factory.mktemp("shared") / "rows"
    with engine(tiny, consumers=[f"filesystem:root={root},capture=requests"]) as llm:
        yield llm, root


def act_when_running(llm, action, answer):
    """Send an action from another thread as soon as the request it names runs; put the outcome into `answer`."""

    def send():
        with Client(llm.capflow_settings.hubs[0].address) as client:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                outcome = client.act(action, timeout=60)
                if isinstance(outcome, ActionApplied):
                    break
                # The pause between two tries: an engine that does not run the request rejects the action at once.
                time.sleep(0.01)
            answer.append(outcome)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_an_action_from_the_hub_steers_a_running_request_from_a_step_on(shared, reference):
    llm, root = shared
    (alone,) = llm.generate(prompts((9,)), capflow.sampling_params(max_tokens=200, **GREEDY), use_tqdm=False)
    steer = Steer("steered", (SteeringVector.make(Site(1, "post_block"), vector(3)),))
    answer = []
    thread = act_when_running(llm, steer, answer)
    params = capflow.sampling_params(id="steered", capture=ALL, max_tokens=200, **GREEDY)
    (output,) = llm.generate(prompts((9,)), params, use_tqdm=False)
    thread.join(60)
    assert isinstance(answer[0], ActionApplied)
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    data = capflow.open(root)["steered"]
    got = np.stack([data[Site(layer, "post_block")].rows for layer in range(LAYERS)])
    # The first row of layer 2 that differs from the unsteered model's says where the steering began …
    unsteered = reference.post_block(tokens)[:, :-1]
    differs = np.linalg.norm(got[2] - unsteered[2], axis=-1) > 1e-3 * np.linalg.norm(unsteered[2], axis=-1)
    assert differs.any()
    begin = int(np.flatnonzero(differs)[0])
    assert begin >= 9
    assert answers([alone])[0][: begin - 8] == answers([output])[0][: begin - 8]
    # … and from there on every row is that of the model with the vector added.
    expected = reference.post_block(tokens, {1: (vector(3), begin)})[:, :-1]
    assert relative_error(got, expected) < FLOAT32_BOUND


def test_an_action_aborts_a_running_request(shared):
    llm, root = shared
    answer = []
    thread = act_when_running(llm, Abort("doomed"), answer)
    params = capflow.sampling_params(id="doomed", capture=ALL, max_tokens=240, **GREEDY)
    (output,) = llm.generate(prompts((9,)), params, use_tqdm=False)
    thread.join(60)
    assert isinstance(answer[0], ActionApplied)
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) < 240
    request = capflow.open(root)["doomed"]
    assert request.sidecar.status == "abort"


def test_a_request_that_ends_before_it_is_scheduled_has_results(shared):
    llm, root = shared
    params = capflow.sampling_params(id="early", capture=ALL, max_tokens=4, **GREEDY)
    llm.llm_engine.add_request("early", prompts((9,))[0], params)
    llm.llm_engine.abort_request(["early"])
    compat.flush(llm.llm_engine)
    with Client(llm.capflow_settings.hubs[0].address) as client:
        (result,) = client.results(["early"], wait=True, timeout=20)["early"].values()
    assert result.status == "ok"
    assert capflow.open(root)["early"].sidecar.status == "abort"


def test_what_a_worker_counts_reaches_the_hub(shared):
    llm, _ = shared
    params = capflow.sampling_params(id="counted", capture=ALL, max_tokens=4, **GREEDY)
    llm.generate(prompts((9,)), params, use_tqdm=False)

    def told():
        with Client(llm.capflow_settings.hubs[0].address) as client:
            (worker,) = [session for session in client.status()["sessions"] if session["role"] == "worker"]
        return worker["worker"] or {}, worker["frames"]

    eventually(lambda: told()[0].get("sent_frames") == told()[1])
    eventually(lambda: told()[0]["unacked_frames"] == 0)
    eventually(lambda: told()[0]["staged_bytes"] == 0)
    counts, _ = told()
    assert counts["staged_bytes_max"] == counts["queue_bytes_max"] == llm.capflow_settings.outbound_bytes_max
    assert counts["dropped_rows"] == {}


def test_an_action_for_a_request_that_does_not_run_is_rejected(shared):
    llm, _ = shared
    llm.generate(prompts((4,)), capflow.sampling_params(max_tokens=2, **GREEDY), use_tqdm=False)
    answer = []

    def send():
        with Client(llm.capflow_settings.hubs[0].address) as client:
            answer.append(client.act(Abort("nobody"), timeout=60))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(60)  # the engine idles all the while
    assert isinstance(answer[0], Rejected)
    assert "nobody" in answer[0].reason


WAITED = {
    "steer": Steer("again", (SteeringVector.make(Site(1, "post_block"), vector(3)),)),
    "abort": Abort("again"),
}


@pytest.mark.parametrize("kind", WAITED)
def test_an_action_that_was_rejected_does_nothing_to_a_later_request_of_the_same_id(shared, kind):
    llm, _ = shared
    params = capflow.sampling_params(id="again", capture=ALL, max_tokens=20, **GREEDY)
    (alone,) = llm.generate(prompts((9,)), params, use_tqdm=False)
    with Client(llm.capflow_settings.hubs[0].address) as client:
        assert isinstance(client.act(WAITED[kind], timeout=60), Rejected)
    (again,) = llm.generate(prompts((9,)), params, use_tqdm=False)
    assert answers([again]) == answers([alone])


def test_steering_that_waits_for_a_request_s_first_step_ends_with_the_request(shared):
    llm, _ = shared
    engine_ = llm.llm_engine
    params = capflow.sampling_params(id="again", max_tokens=20, **GREEDY)
    (alone,) = llm.generate(prompts((9,)), params, use_tqdm=False)
    answer = []
    links = engine_.engine_core.engine_core.scheduler.capflow.links
    engine_.add_request("early", prompts((9,))[0], params)

    def send():
        with Client(llm.capflow_settings.hubs[0].address) as client:
            answer.append(client.act(WAITED["steer"], timeout=60))

    thread = threading.Thread(target=send)
    thread.start()
    waits = []
    eventually(lambda: links.actions(lambda act: bool(waits.append(act))) or waits)
    engine_.abort_request(["early"])
    compat.flush(engine_)
    (again,) = llm.generate(prompts((9,)), params, use_tqdm=False)
    thread.join(60)
    assert isinstance(answer[0], Rejected)
    assert answers([again]) == answers([alone])


def test_two_engines_of_one_name_keep_their_requests_apart(tiny, tmp_path):
    hub = HubProcess([f"filesystem:root={tmp_path / 'rows'},on_collision=overwrite"])
    hub.start(60)
    try:
        results = []
        for name, tokens in (("prod", 2), ("test", 3), ("prod", 4)):
            with engine(tiny, hub=hub.address, engine_name=name) as llm:
                params = capflow.sampling_params(max_tokens=tokens, id="same", capture=ALL, **GREEDY)
                (output,) = llm.generate(prompts((5,)), params, use_tqdm=False)
                results.append(output.capture_results["filesystem"])
    finally:
        hub.stop()
    assert [result.status for result in results] == ["ok"] * 3
    data = capflow.open(tmp_path / "rows")
    kept = {capture.engine.partition("@")[0]: capture.computed_length for capture in data.captures("same")}
    assert kept == {"prod": 5 + 4 - 1, "test": 5 + 3 - 1}
    assert data["prod", "same"].computed_length == 8
    data.verify()


def test_the_gate_steers_from_the_step_after_its_probe_fired(tiny, reference, tmp_path):
    """A probe that fires at the first generated token whose score passes; the next step is steered, and all after."""
    (prompt,) = prompts((12,), seed=3)
    from vllm import SamplingParams

    with engine(tiny, capflow_on=False) as llm:
        (unsteered,) = answers(llm.generate([prompt], SamplingParams(max_tokens=24, **GREEDY), use_tqdm=False))
    tokens = [*prompt["prompt_token_ids"], *unsteered]
    weight = vector(11, norm=1.0)
    scores = reference.post_block(tokens)[2, :-1] @ weight
    at = 12 + 6
    threshold = float(scores[at]) - 1e-4
    fires = next(p for p in range(12, len(scores)) if scores[p] >= threshold)
    assert fires <= at
    probe = Probe.make(Site(2, "post_block"), weight, names=("p",), threshold=threshold)
    probe.save(tmp_path / "p.safetensors")
    from safetensors.numpy import save_file

    save_file({"vector": vector(12)}, tmp_path / "v.safetensors", metadata={"site": "post_block:1"})
    gate = f"probe={tmp_path}/p.safetensors,vector={tmp_path}/v.safetensors,positions=all_generated"
    consumers = [
        f"gate:{gate},threshold=1e6",  # never fires
        f"gate@rude:{gate}",
        f"filesystem:root={tmp_path}/rows,capture=requests",
    ]
    consumers.append(f"duckdb:path={tmp_path}/store.duckdb")
    with engine(tiny, consumers=consumers) as llm:
        params = capflow.sampling_params(id="gated", capture=ALL, max_tokens=24, **GREEDY)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.capture_results["duckdb"].status == "ok"
    gated = answers([output])[0]
    with duckdb.connect(str(tmp_path / "store.duckdb"), read_only=True) as store:
        done = store.sql("SELECT request_id, kind, sites, asked_by, outcome, step > 1 FROM actions").fetchall()
    assert done == [("gated", "steer", ["post_block:1"], "controller gate@rude", "applied", True)]
    assert gated[: fires - 11] == unsteered[: fires - 11]
    data = capflow.open(tmp_path / "rows")["gated"]
    got = np.stack([data[Site(layer, "post_block")].rows for layer in range(LAYERS)])
    every = [*prompt["prompt_token_ids"], *gated]
    expected = reference.post_block(every, {1: (vector(12), fires + 1)})[:, :-1]
    assert relative_error(got, expected) < FLOAT32_BOUND


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param({"steer_sites": ["post_block:1"]}, marks=pytest.mark.long),
        pytest.param({"steer_sites": ["post_block:1"], "enforce_eager": False}, marks=pytest.mark.long),
    ],
    ids=["all can be steered", "one can be steered", "one can be steered, compiled"],
)
def test_two_tensor_parallel_ranks_capture_and_steer_as_one_does(tiny, reference, files, arguments):
    consumer, read = files
    arguments = {"tensor_parallel_size": 2, "in_process": False, **arguments}
    with engine(tiny, consumers=[consumer], **arguments) as llm:
        steering = {"post_block": {1: vector(1)}}
        params = [
            capflow.sampling_params(
                id=f"r{n}", capture=ALL, steering_vectors=steering if n % 2 else None, max_tokens=8, **GREEDY
            )
            for n in range(4)
        ]
        outputs = llm.generate(prompts((5, 40, 3, 70)), params, use_tqdm=False)
        assert [o.capture_results["filesystem"].status for o in outputs] == ["ok"] * 4
        check_files(read(), outputs, reference, steering={n: {1: 1} for n in (1, 3)})


def test_the_generation_survives_its_hub(tiny, plain):
    """The hub is killed while requests run: the answers are those of plain vLLM, and no result says ok."""
    from vllm import SamplingParams

    hub = HubProcess(["log"])
    hub.start(60)
    try:
        with engine(tiny, hub=hub.address) as llm:
            nothing = SamplingParams(max_tokens=12, **GREEDY)
            assert answers(llm.generate(prompts(LENGTHS), nothing, use_tqdm=False)) == plain
            hub._process.kill()
            hub._process.wait()
            params = [
                capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=12, **GREEDY) for n in range(len(LENGTHS))
            ]
            outputs = llm.generate(prompts(LENGTHS), params, use_tqdm=False)
            assert answers(outputs) == plain
            assert all(r.status != "ok" for o in outputs for r in o.capture_results.values())
    finally:
        hub.stop()
