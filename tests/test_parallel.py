"""Engines of several processes: pipeline stages that each tell of their layers, and replicas that each have their requests."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from children import vector
from engines import GREEDY, LAYERS, WIDTH, Reference, answers, engine, prompts, save_tiny, save_words
from hubs import address, running_hub  # noqa: F401 - a fixture
from rows import ALL, SITES, Keeper

import capflow
from capflow.site import Site

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    save_tiny(directory)
    save_words(directory)
    return str(directory)


@pytest.fixture(scope="module")
def reference(tiny):
    return Reference(tiny)


def test_two_pipeline_stages_each_tell_of_their_layers(tiny, reference, address):  # noqa: F811
    """With compiled graphs; a stage that ships nothing of a request still ends it."""
    keeper = Keeper()
    first = {"hooks": {"post_block": [0]}, "positions": "all"}  # a site of the first stage only
    steering = {"post_block": {1: vector(3, WIDTH), 3: vector(4, WIDTH)}}
    with running_hub(address, keeper):
        arguments = {"pipeline_parallel_size": 2, "in_process": False, "enforce_eager": False}
        with engine(tiny, hub=address, **arguments) as llm:
            asked = [(ALL, None), (ALL, steering), (first, None), (ALL, None)]
            params = [
                capflow.sampling_params(id=f"r{n}", capture=capture, steering=steering, max_tokens=6 + n, **GREEDY)
                for n, (capture, steering) in enumerate(asked)
            ]
            began = time.monotonic()
            outputs = llm.generate(prompts((5, 40, 3, 70)), params, use_tqdm=False)
            assert time.monotonic() - began < 60  # no result was waited for in vain
            assert [o.capture_results["keeper"].status for o in outputs] == ["ok"] * 4
            for n, (output, tokens) in enumerate(zip(outputs, answers(outputs), strict=True)):
                steered = {1: 3, 3: 4} if n == 1 else None
                sites = [Site(0, "post_block")] if n == 2 else SITES
                keeper.hold(f"r{n}", [*output.prompt_token_ids, *tokens], reference, steered, sites=sites)
                for site, ranks in keeper.ranks[f"r{n}"].items():
                    assert [rank.pp for rank in ranks] == [2 * site.layer // LAYERS]
                assert len(keeper.done[f"r{n}"].finished) == 2


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(port, body, replica):
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(replica)}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_two_replicas_each_deliver_their_own_requests_once(tiny, reference, address, tmp_path):  # noqa: F811
    keeper = Keeper()
    port = free_port()
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "capflow", "serve", tiny, "--port", str(port), "--hub", address]
    command += ["--data-parallel-size", "2", "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "128", "--max-num-seqs", "8"]
    with running_hub(address, keeper):
        server = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            deadline = time.monotonic() + 300
            while not healthy(port):
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
            found = {}

            def ask(n):
                words = " ".join(f"w{t}" for t in prompts((9 + 3 * n,), seed=n)[0]["prompt_token_ids"])
                asked = {"id": f"r{n}", "capture": ALL}
                if n == 3:
                    asked["steering"] = {"post_block": {"1": vector(3, WIDTH).tolist()}}
                body = {"model": "tiny", "prompt": words, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
                body |= {"return_token_ids": True, "vllm_xargs": {"capflow": json.dumps(asked)}}
                (found[n],) = post(port, body, n % 2)["choices"]

            threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            deadline = time.monotonic() + 30
            while len(keeper.done) < 6:
                assert time.monotonic() < deadline, keeper.done
                time.sleep(0.05)
            for n in range(6):
                tokens = prompts((9 + 3 * n,), seed=n)[0]["prompt_token_ids"] + found[n]["token_ids"]
                keeper.hold(f"r{n}", tokens, reference, {1: 3} if n == 3 else None)
                assert {rank.dp for ranks in keeper.ranks[f"r{n}"].values() for rank in ranks} == {n % 2}
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                raise
