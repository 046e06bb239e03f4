"""Engines of several processes: pipeline stages with their own layers, and replicas with their own requests."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import capflow
from capflow.capture.site import Site
from tests.kit.engines import GREEDY, LAYERS, answers, engine, prompts, relative_error, save_tiny, vector
from tests.kit.entries import LLAMA_HOOKS, shape_of
from tests.kit.experts import ExpertReference, taken
from tests.kit.hubs import free_port
from tests.kit.rows import ALL, SITES
from tests.kit.selectors_model import meant
from tests.kit.servers import environment, healthy, post, wait_until
from tests.kit.steered import SteeredReference
from tests.kit.steered import vector as steered_vector
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("added", "steer_sites"),
    [({1: 3, 3: 4}, None), ({0: 3}, ["post_block:0"])],
    ids=["all can be steered", "one can be steered"],
)
def test_two_pipeline_stages_each_tell_of_their_layers(tiny_with_words, reference, keeper, added, steer_sites):
    """With compiled graphs; a stage that ships nothing of a request still ends it."""
    first = {"hooks": {"post_block": [0]}, "positions": "all"}  # a site of the first stage only
    steering = {"post_block": {layer: vector(seed) for layer, seed in added.items()}}
    arguments = {"pipeline_parallel_size": 2, "in_process": False, "enforce_eager": False, "steer_sites": steer_sites}
    with engine(tiny_with_words, hub=keeper.address, **arguments) as llm:
        asked = [(ALL, None), (ALL, steering), (first, None), (ALL, None)]
        params = [
            capflow.sampling_params(id=f"r{n}", capture=capture, steering_vectors=steering, max_tokens=6 + n, **GREEDY)
            for n, (capture, steering) in enumerate(asked)
        ]
        began = time.monotonic()
        outputs = llm.generate(prompts((5, 40, 3, 70)), params, use_tqdm=False)
        assert time.monotonic() - began < 60  # no wait for a result timed out
        assert [o.capture_results["keeper"].status for o in outputs] == ["ok"] * 4
        for n, (output, tokens) in enumerate(zip(outputs, answers(outputs), strict=True)):
            steered = added if n == 1 else None
            sites = [Site(0, "post_block")] if n == 2 else SITES
            keeper.hold(f"r{n}", [*output.prompt_token_ids, *tokens], reference, steered, sites=sites)
            for site, ranks in keeper.ranks[f"r{n}"].items():
                assert [rank.pp for rank in ranks] == [2 * site.layer // LAYERS]
            assert len(keeper.done[f"r{n}"].finished) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enforce_eager": False},
        {"pipeline_parallel_size": 2, "enforce_eager": False},
    ],
    ids=["ranks", "compiled ranks", "stages"],
)
def test_every_hook_of_a_model_in_two_processes(tiny_with_words, tmp_path, arguments):
    """The second rank has the same key and value head as the first, and the other head of all else.

    The last turn captures the end of prompts that are cached.
    """
    entries = {"heads": {1: {"index": 0, "value": 0}}, "neurons": {3: {"index": [5, 90], "min": 0.1}}}
    reference = SteeredReference(tiny_with_words)
    given = [prompt["prompt_token_ids"] for prompt in prompts((9, 70, 3), seed=4)]
    turns = [
        ({}, "all"),
        (
            {
                "steering_vectors": {"attn_in": {2: vector(1)}, "attn_out": {1: vector(2)}},
                "decode_steering_vectors": {"final": {LAYERS - 1: vector(3)}},
            },
            "all",
        ),
        ({"steering_clamps": entries, "steering_vectors": {"v": {2: steered_vector(4, hook="v")}}}, "all"),
        ({}, [{"last": 20}, "all_generated"]),
    ]
    consumers = [f"filesystem:root={tmp_path},capture=requests"]
    small = {"block_size": 32, "num_gpu_blocks_override": 40}
    with engine(tiny_with_words, sites=["*:*"], consumers=consumers, in_process=False, **small, **arguments) as llm:
        model = llm.capflow_model
        assert {site.hook for site in model.sites} == set(LLAMA_HOOKS)
        assert model.fixed == ()
        for fields, positions in turns:
            asked = {**GREEDY, **fields}
            cache = capflow.cache(llm, given, hooks=LLAMA_HOOKS, positions=positions, max_tokens=5, **asked)
            assert set(cache) == set(model.sites)
            for number, (prompt, answer) in enumerate(zip(given, answers(cache.outputs), strict=True)):
                tokens = [*prompt, *answer[:-1]]
                _, rows = reference.run(tokens, len(prompt), fields)
                at = meant(positions, len(prompt), len(tokens))
                for site in cache:
                    shape = (len(at), *shape_of(site.hook))
                    got = cache[site][number, : len(at)]
                    assert got.shape == shape, site
                    error = relative_error(got.reshape(len(at), -1), rows[site][at])
                    assert error < 1e-5, f"{site} of prompt {number}: {error:.1e}"
        assert cache.outputs[1].num_cached_tokens == 32


@pytest.mark.long
def test_experts_are_chosen_and_read_with_two_ranks(tmp_path):
    model = save_tiny(tmp_path / "mixtral", "mixtral")
    reference = ExpertReference(model)
    given = [prompt["prompt_token_ids"] for prompt in prompts((9, 70), seed=4)]
    consumers = [f"filesystem:root={tmp_path / 'rows'},capture=requests"]
    forced = {"steering_clamps": {"router": {1: {"index": 3, "value": 1e4}, 2: {"index": [0, 2], "value": -1e4}}}}
    hooks = ("router", "heads", "k", "post_block")
    with engine(model, sites=["*:*"], consumers=consumers, in_process=False, tensor_parallel_size=2) as llm:
        for fields in ({}, forced):
            cache = capflow.cache(llm, given, hooks=hooks, positions="all", max_tokens=4, **GREEDY, **fields)
            for number, (prompt, answer) in enumerate(zip(given, answers(cache.outputs), strict=True)):
                tokens = [*prompt, *answer[:-1]]
                with taken(reference.layers) as experts:
                    _, rows = reference.run(tokens, len(prompt), fields)
                for layer in (0, 3):  # whose routers are not steered
                    ids, weights = cache.experts(layer, number)
                    assert ids.tolist() == experts[layer][0][0].tolist()
                    assert abs(weights - experts[layer][0][1]).max() < 1e-5
                for site in cache:
                    got = cache[site][number, : len(tokens)].reshape(len(tokens), -1)
                    error = relative_error(got, rows[site])
                    assert error < 1e-5, f"{site} of prompt {number}: {error:.1e}"


@pytest.mark.long
def test_two_replicas_each_deliver_their_own_requests_once(tiny_with_words, reference, keeper, tmp_path):
    port = free_port()
    # From 0.33 on, a replica on a CPU has only the memory of the NUMA node with its number, unless this is set.
    variables = environment(tmp_path, VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_SIM_MULTI_NUMA="0")
    command = [sys.executable, "-m", "capflow", "serve", tiny_with_words, "--port", str(port), "--hub", keeper.address]
    command += ["--data-parallel-size", "2", "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "128", "--max-num-seqs", "8"]
    server = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        wait_until(lambda: healthy(port), 300, server)
        choices = {}

        def ask(n):
            words = " ".join(f"w{t}" for t in prompts((9 + 3 * n,), seed=n)[0]["prompt_token_ids"])
            asked = {"id": f"r{n}", "capture": ALL}
            if n == 3:
                asked["steering_vectors"] = {"post_block": {"1": vector(3).tolist()}}
            body = {"model": "tiny", "prompt": words, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            body |= {"return_token_ids": True, "vllm_xargs": {"capflow": json.dumps(asked)}}
            (choices[n],) = post(port, body, **{"X-data-parallel-rank": str(n % 2)})["choices"]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        eventually(lambda: len(keeper.done) >= 6, 30)
        for n in range(6):
            tokens = prompts((9 + 3 * n,), seed=n)[0]["prompt_token_ids"] + choices[n]["token_ids"]
            keeper.hold(f"r{n}", tokens, reference, {1: 3} if n == 3 else None)
            assert {rank.dp for ranks in keeper.ranks[f"r{n}"].values() for rank in ranks} == {n % 2}
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise
