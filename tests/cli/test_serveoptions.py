"""The options of `capflow serve`: help without vLLM's options; errors in one line before vLLM is imported."""

import os
import subprocess
import sys

import pytest

from capflow.errors import UsageError
from capflow.serve_options import HUB_FLAGS, engine_options, flags, help_about, help_text, hub_options


def run(*arguments, **variables):
    command = [sys.executable, "-m", "capflow", "serve", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.parametrize("arguments", [("--help",), ("a-model", "-h")])
def test_help_shows_every_option_of_capflow_in_groups_and_how_to_see_those_of_vllm(arguments):
    done = run(*arguments)
    assert done.returncode == 0
    text = done.stdout
    for flag in flags():
        assert f"  {flag} " in text
    groups = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups == [
        "a hub in the same command:",
        "capture:",
        "when a worker's queue is full:",
        "steering:",
        "server:",
        "Examples:",
        "Every option of `vllm serve` is an option of this command, too:",
    ]
    assert "  capflow serve --help=all  " in text
    assert text.strip() == help_text().strip()


@pytest.mark.parametrize(
    ("name", "expected", "options"),
    [
        ("capture", "capture:\n  --hub ADDRESS  ", 9),
        ("Steering", "steering:\n  --steering-modules NAME=PATH", 6),
        ("spool-dir", "when a worker's queue is full:\n  --spool-dir DIR  ", 1),
        ("--Memory_Bytes_Max", "a hub in the same command:\n  --memory-bytes-max BYTES\n     ", 1),
    ],
)
def test_help_of_one_option_or_group_of_capflow_needs_no_vllm(tmp_path, name, expected, options):
    (tmp_path / "vllm.py").write_text("raise ImportError")
    done = run("m", f"--help={name}", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(expected)
    assert done.stdout.strip() == help_about(name)
    assert done.stdout.count("\n  -") == options


@pytest.mark.parametrize("name", ["max-model-len", "grpc", "Examples", "a", ""])
def test_help_of_other_names_is_left_to_vllm(name):
    assert help_about(name) == ""


@pytest.mark.engine
def test_help_of_everything_is_that_of_capflow_and_then_that_of_vllm():
    text = run("--help=all").stdout
    assert text.startswith(help_text())
    assert "  --max-model-len " in text.partition("The options of vLLM:")[2]


@pytest.mark.engine
def test_an_option_that_neither_has_suggests_the_closest():
    (line,) = [line for line in run("m", "--consumr", "log").stderr.splitlines() if line.startswith("capflow: ")]
    assert line.startswith("capflow: unrecognized arguments: --consumr log; did you mean --consumer or ")


def test_the_options_of_the_hub_are_those_that_need_a_consumer():
    assert tuple(flags()[: len(HUB_FLAGS)]) == HUB_FLAGS
    assert hub_options().parse_known_args(["--hub", "x"])[1] == ["--hub", "x"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "MODEL: got none, expected capflow serve MODEL"),
        (("--sites", "post_block:1"), "MODEL: got none"),
        (("m", "--consumer", "nobody"), "--consumer: got nobody, expected one of "),
        (("m", "--consumer", "log:colour=red"), "colour"),
        (("m", "--metrics-address", "9400"), "--metrics-address: got no --consumer"),
        (("m", "--consumer", "log", "--hub", "ipc:///h"), "--hub: got --consumer with it"),
        (("m", "--consumer", "log", "--address", "nowhere"), "--address: got nowhere"),
        (("m", "--consumer", "log", "--address", "tcp://0.0.0.0:9"), "--address: got tcp://0.0.0.0:9"),
        (("m", "--consumer", "log", "--metrics-address", "far:away"), "--metrics-address"),
        (("m", "--consumer", "log", "--drain-s", "soon"), "--drain-s: got soon, expected 0 to 3600 seconds"),
        (("m", "--consumer-config", "/none.toml"), "/none.toml"),
        (("m", "--shutdown-timeout", "-1"), "--shutdown-timeout: got -1, expected 0 to 3600 seconds"),
        (("m", "--shutdown-timeout", "nan"), "--shutdown-timeout: got nan"),
        (("m", "--capture-wait-s", "0"), "--capture-wait-s: got 0, expected more than 0"),
        (("m", "--capture-wait-s="), "--capture-wait-s: got ''"),
        (("m", "--grpc-port", "65536"), "--grpc-port: got 65536, expected 1..65535"),
        (("m", "--engine-name", "a/b"), "--engine-name: got a/b, expected 1..64 letters, digits"),
        (("m", "--policy", "maybe"), "--policy: invalid choice: 'maybe'"),
        (
            ("m", "--on-divergence", "stop"),
            "--on-divergence: invalid choice: 'stop' (choose from 'warn', 'freeze', 'abort'",
        ),
    ],
)
def test_a_wrong_option_is_one_line(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("capflow: ")
    assert words in line


def test_options_of_vllm_are_left_to_it_in_their_order():
    given = ["model", "-tp", "2", "--hub", "ipc:///h", "-O3", "--seed", "-1", "--config", "vllm.yaml", "--consume"]
    mine, rest = engine_options().parse_known_args(given)
    assert mine.hub == ["ipc:///h"]
    assert rest == ["model", "-tp", "2", "-O3", "--seed", "-1", "--config", "vllm.yaml", "--consume"]
    assert hub_options().parse_known_args(rest)[1] == rest


def test_a_missing_value_is_a_usage_error():
    with pytest.raises(UsageError, match="--hub: expected one argument"):
        engine_options().parse_known_args(["model", "--hub"])
