"""`capflow run` and `capflow serve` as two processes that find each other at the default address."""

import json
import signal
import socket
import subprocess
import sys

import pytest

import capflow
from capflow.capture.site import Site
from tests.kit.engines import LAYERS, WIDTH, relative_error
from tests.kit.hubs import free_port
from tests.kit.servers import environment, healthy, post, process, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.mark.long
@pytest.mark.parametrize("first_to_leave", ["hub", "server"])
def test_a_server_finds_the_hub_and_either_may_leave_first(tiny_with_words, reference, tmp_path, first_to_leave):
    variables = environment(tmp_path)
    port = free_port()
    served = ("serve", tiny_with_words, "--port", str(port), "--dtype", "float32", "--enforce-eager")
    with (
        process("run", "--consumer", f"filesystem:root={tmp_path}/rows", environment=variables) as (hub, lines),
        process(*served, "--max-model-len", "128", "--served-model-name", "tiny", environment=variables) as (server, _),
    ):
        wait_until(lambda: healthy(port), 400, server)
        prompt = "w5 w77 w123 w9 w250"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        answer = post(port, body | {"ignore_eos": True})
        (choice,) = answer["choices"]
        wait_until(lambda: len(list((tmp_path / "rows").glob("*/request.json"))) == 1, 30, server)
        data = capflow.open(tmp_path / "rows")
        (name,) = data.requests()
        tokens = [5, 77, 123, 9, 250, *choice["token_ids"]]
        expected = reference.post_block(tokens)[:, :-1]
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
    assert not any("Traceback" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hub", "tcp://203.0.113.1:9000"), "--insecure"),
        (("--hub", f"tcp://{'ab' * 32}@203.0.113.1:9000"), "--key: got none, expected a key"),
        (("--key", "gpu"), "--key: got the address ipc://"),
        (("--sites", "post_block:99"), "post_block:99"),
        (
            ("--colour", "red"),
            "unrecognized arguments: --colour red; did you mean --consumer? see `capflow serve --help=all`",
        ),
        (("--consumer", "filesystem:root={home}/rows,layers=99"), "layer 99"),
        (("--port", "{port}"), "--port: got :{port}, address already in use"),
        (("--consumer", "log", "--address", "ipc://{home}/open/hub.sock"), "chmod 700"),
        (("--worker-cls", "mine.Worker"), "--worker-cls"),
        (("--steering-modules", "glad"), "--steering-modules: got glad, expected NAME=PATH"),
        (("--steering-modules", "glad=/nowhere.json"), "/nowhere.json: got no such file"),
        (("--steering-bank-bytes", "0"), "--steering-bank-bytes: got 0, expected 1.."),
        (
            ("--steering-modules", "one={home}/one.json", "large={home}/large.json", "--steering-bank-bytes", "512"),
            "large.json: vectors: got 3 different vectors, expected at most 2",
        ),
        (("--grpc-port", "0"), "--grpc-port: got 0, expected 1..65535"),
        (("--capture-wait-s", "soon"), "--capture-wait-s: got soon, expected more than 0"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_starts(tiny_with_words, tmp_path, arguments, words):
    for name, count in (("one", 1), ("large", 3)):
        vectors = {str(layer): [layer + 1.0] * WIDTH for layer in range(count)}
        (tmp_path / f"{name}.json").write_text(json.dumps({"vectors": {"post_block": vectors}}))
    (tmp_path / "open").mkdir(mode=0o755)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = [one.format(home=tmp_path, port=port) for one in arguments]
        command = [sys.executable, "-m", "capflow", "serve", tiny_with_words, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("capflow: ")
    assert words.format(port=port) in last
    assert "Traceback" not in done.stderr
