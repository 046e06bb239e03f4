"""The log of `capflow run` as JSON: one object a line from start to end, with the documented fields."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from rich.console import Console

from capflow.cli.logs import JsonFormatter, logs_to
from capflow.protocol import message
from capflow.transport.client import Client
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import address, raw_peer, worker_link
from tests.kit.servers import environment
from tests.kit.sources import ROOT, modules
from tests.kit.waiting import eventually

__all__ = ["address"]

COMMON = {"time", "level", "logger", "event", "message"}


def lines_of(text):
    """Return the objects of a log; every line is one."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert set(line) >= COMMON, line
        assert datetime.fromisoformat(line["time"]).tzinfo == UTC
        assert line["level"] in ("info", "warning", "error", "critical")
        assert line["logger"].startswith("capflow")
    return lines


def documented():
    """Return the events in the docs, and all fields that are named beside them."""
    text = (
        (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").partition("\n## Logs\n")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", text, re.MULTILINE)
    events = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    return events, {field for _, fields in rows for field in re.findall(r"`(\w+)`", fields)}


def command(home, *arguments):
    return {
        "args": [sys.executable, "-m", "capflow", "run", "--log-format", "json", *arguments],
        "env": environment(home),
        "stderr": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
    }


def test_every_line_of_a_hub_is_an_event(address, tmp_path):
    running = subprocess.Popen(
        **command(tmp_path, "--address", address, "--consumer", "log", "--metrics-address", "0.0.0.0:0")
    )
    lines = []
    try:
        while not lines or lines[-1]["event"] != "metrics_open":
            lines += lines_of(running.stderr.readline())
        with worker_link(address) as link, Client(address) as client:
            for step in range(3):
                frame = make_frame([("r1", 4, step * 4, 4)], step=step)
                assert link.send(frame.header, frame.payload) is None
            frame = make_frame([], finished=[make_finished("r1", 4, 12)])
            link.send(frame.header, frame.payload)
            eventually(lambda: client.results(["r1"])["r1"])
        with raw_peer(address) as peer:
            peer.send(message.encode(make_hello("rogue\x1b[31m")))
            assert peer.poll(20_000)
            peer.send(b"junk")
            assert peer.poll(20_000)
        eventually(lambda: lines.extend(lines_of(running.stderr.readline())) or lines[-1]["event"] == "session_refused")
        running.send_signal(signal.SIGINT)
        output, rest = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    lines += lines_of(rest)
    assert (running.returncode, output) == (0, "")
    by_event = {line["event"]: line for line in lines}
    assert [line["event"] for line in lines][:3] == ["listening", "metrics", "metrics_open"]
    assert by_event["listening"]["address"] == address
    assert by_event["metrics"]["url"].startswith("http://0.0.0.0:")
    opened = next(line for line in lines if line["event"] == "session_opened")
    assert (opened["role"], opened["engine"], opened["rank"], opened["model"]) == (
        "worker",
        "engine-1",
        [0, 0, 0],
        "test-model",
    )
    request = by_event["request"]
    assert (request["request"], request["rows"], request["sites"], request["level"]) == ("r1", 1, 1, "info")
    assert by_event["session_refused"]["engine"] == "rogue\x1b[31m"
    assert by_event["session_refused"]["level"] == "error"
    assert lines[-1]["event"] == "stopped"
    assert (lines[-1]["exit_code"], lines[-1]["rows"], lines[-1]["drained"]) == (0, 12, True)
    assert lines[-1]["consumers"]["log"]["dropped_rows"] == {}
    events, fields = documented()
    assert set(by_event) <= events
    counts = set(lines[-1])
    assert {field for line in lines for field in line} - COMMON - counts <= fields


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--consumer", "nope"], 2, "--consumer: got nope"),
        (["--consumer", "log", "--metrics-address", "nowhere"], 2, "--metrics-address: got nowhere"),
        (["--consumer", "log", "--metrics-address", "192.0.2.1:80"], 1, "--metrics-address: got 192.0.2.1:80"),
        (
            ["--consumer", "log", "--model", "no/such/model/anywhere", "--prompts", "/no/such"],
            2,
            "/no/such: got No such",
        ),
    ],
)
def test_what_the_command_failed_with_is_the_last_line(tmp_path, address, arguments, code, message):
    done = subprocess.run(
        **command(tmp_path, "--address", address, *arguments) | {"stderr": None, "stdout": None},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    *_, last = lines_of(done.stderr)
    assert (last["event"], last["level"]) == ("failed", "error")
    assert message in last["message"]


def test_a_metrics_port_in_use_is_one_line_before_anything_is_opened(tmp_path, address):
    taken = subprocess.Popen(**command(tmp_path, "--address", address, "--consumer", "log", "--metrics-address", "0"))
    try:
        assert json.loads(taken.stderr.readline())["event"] == "listening"
        port = json.loads(taken.stderr.readline())["url"].rpartition(":")[2]
        asked = [*command(tmp_path)["args"], "--address", f"{address}2", "--consumer", "log", "--metrics-address", port]
        done = subprocess.run(
            [word for word in asked if word not in ("--log-format", "json")],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        got = f"got 127.0.0.1:{port}, in use, expected a free port"
        do = "stop what listens there, or use port 0 for any free one"
        assert (done.returncode, done.stderr) == (1, f"capflow: --metrics-address: {got}; {do}\n")
    finally:
        taken.kill()
        taken.communicate()


def test_every_event_in_the_sources_is_documented_and_no_other():
    sources = "".join(path.read_text(encoding="utf-8") for path in modules().values())
    used = set(re.findall(r'"event": "(\w+)"|\.(?:tell|_log)\(\s*"(\w+)"', sources))
    used = {event for pair in used for event in pair if event} | {"log"}
    assert used == documented()[0]


def test_an_error_has_its_traceback():
    try:
        int("wrong\x1b")
    except ValueError:
        record = logging.getLogger("capflow.x").makeRecord(
            "capflow.x", 40, "f", 1, "it %s", ("failed",), sys.exc_info()
        )
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "it failed"
    assert line["exception"].endswith("ValueError: invalid literal for int() with base 10: 'wrong\\x1b'")
    assert line["event"] == "log"


HOSTILE = "\x1b[2J\x07evil\x9b31m\x7f\ncapflow: all is well\u2028\u2029\u202e\r\udc80é"


def test_nothing_that_a_peer_says_moves_the_terminal_or_begins_a_line(capsys):
    with logs_to(Console(width=80), "text"):
        logging.getLogger("capflow.hub").error("refused %s", HOSTILE)
        logging.getLogger("capflow.hub").error("failed", exc_info=ValueError(HOSTILE))
    refused, failed, *trace = capsys.readouterr().out.splitlines()
    escaped = r"\x1b[2J\x07evil\x9b31m\x7f\ncapflow: all is well\u2028\u2029\u202e\r\udc80é"
    assert refused == f"capflow: refused {escaped}"
    assert failed == "capflow: failed"
    assert all(line.startswith("  ") and line.isprintable() for line in trace)


def test_a_line_of_json_is_ascii_whatever_peers_say(capfd):
    with logs_to(Console(quiet=True), "json"):
        logging.getLogger("capflow.hub").error("refused %s", HOSTILE, extra={"event": "log", "engine": HOSTILE})
    (line,) = capfd.readouterr().err.splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["engine"] == HOSTILE


def test_what_other_libraries_warn_of_is_in_it_too(capfd):
    with logs_to(Console(quiet=True), "json"):
        logging.getLogger("plugin").warning("look out")
        logging.getLogger("plugin").info("not this")
    (line,) = capfd.readouterr().err.splitlines()
    assert (json.loads(line)["logger"], json.loads(line)["event"]) == ("plugin", "log")
    assert not logging.getLogger("capflow").handlers
