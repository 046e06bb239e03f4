"""`capflow run` and `capflow serve` as two processes that find each other at the default address."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from engines import LAYERS, Reference, relative_error, save_tiny, save_words

import capflow
from capflow.site import Site

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    save_tiny(directory)
    save_words(directory)
    return str(directory)


@contextlib.contextmanager
def process(*arguments, environment):
    """Run a capflow command; it must be gone, by itself, when the block is over."""
    running = subprocess.Popen(
        [sys.executable, "-m", "capflow", *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines = []
    try:
        yield running, lines
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        raise
    try:
        lines += running.communicate(timeout=60)[1].splitlines()
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        raise


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(port, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def wait_until(condition, seconds, running):
    deadline = time.monotonic() + seconds
    while not condition():
        assert running.poll() is None, "the process ended"
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


def healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.parametrize("first_to_leave", ["hub", "server"])
def test_a_server_finds_the_hub_and_either_may_leave_first(model, tmp_path, first_to_leave):
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(tmp_path),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("CAPFLOW_HUB", None)
    port = free_port()
    served = ("serve", model, "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "128")
    with (
        process("run", "--consumer", f"filesystem:root={tmp_path}/rows", environment=environment) as (hub, said),
        process(*served, "--served-model-name", "tiny", environment=environment) as (server, _),
    ):
        wait_until(lambda: healthy(port), 200, server)
        prompt = "w5 w77 w123 w9 w250"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        answer = post(port, body | {"ignore_eos": True})
        (choice,) = answer["choices"]
        wait_until(lambda: len(list((tmp_path / "rows").glob("*/request.json"))) == 1, 30, server)
        data = capflow.open(tmp_path / "rows")
        (name,) = data.requests()
        tokens = [5, 77, 123, 9, 250, *choice["token_ids"]]
        expected = Reference(model).post_block(tokens)[:, :-1]
        for layer in range(LAYERS):
            got = data[name][Site(layer, "post_block")]
            assert got.token_ids.tolist() == tokens[:-1]
            assert relative_error(got.rows, expected[layer]) < 1e-5
        assert list(data[name].texts.values()) == [f"w{t}" for t in tokens[:-1]]
        if first_to_leave == "hub":
            hub.send_signal(signal.SIGINT)
            assert hub.wait(60) == 0
            assert post(port, body)["choices"][0]["text"]  # serving goes on without a hub
            server.send_signal(signal.SIGINT)
            server.wait(90)
        else:
            server.send_signal(signal.SIGINT)
            server.wait(90)
            hub.send_signal(signal.SIGINT)
            assert hub.wait(60) == 0
    assert not any("Traceback" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hub", "tcp://203.0.113.1:9000"), "--insecure"),
        (("--sites", "post_block:99"), "post_block:99"),
        (("--worker-cls", "mine.Worker"), "--worker-cls"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_starts(model, arguments, words):
    command = [sys.executable, "-m", "capflow", "serve", model, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("capflow: ")
    assert words in last
    assert "Traceback" not in done.stderr
