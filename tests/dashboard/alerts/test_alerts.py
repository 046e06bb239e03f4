"""Alerts of a dashboard: on its pages, in the log and in the metrics of a real hub, and of `capflow dashboard`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.cli import main
from capflow.errors import UsageError
from capflow.probes.probe import Probe
from tests.kit.captured import write
from tests.kit.dashboards import Pageless, dashboard, open_dashboard
from tests.kit.frames import make_model
from tests.kit.hubs import Recorder, address, running_hub, worker_link
from tests.kit.pages import frame_of
from tests.kit.servers import environment
from tests.kit.waiting import eventually

__all__ = ["address"]

SITE = Site(1, "post_block")
SITES = [(layer, "post_block") for layer in range(4)]


@pytest.fixture
def probe(tmp_path):
    """Return the file of a probe whose score is the norm of a row of `frame_of`; of other rows, less than 100."""
    path = tmp_path / "code.safetensors"
    Probe.make(SITE, np.eye(8)[3:4], names=("code",), threshold=15.0).save(path)
    return str(path)


@contextlib.contextmanager
def running(tmp_path, *arguments, codes=(0,)):
    """Run a command that logs JSON; yield its lines as they come, and the link of its dashboard."""
    command = [sys.executable, "-m", "capflow", *map(str, arguments), "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)) as process:
        lines = []
        # Lines are seen one by one.
        reader = threading.Thread(
            target=lambda: [lines.append(json.loads(line)) for line in process.stderr], daemon=True
        )
        reader.start()
        try:

            def events(name):
                return [line for line in lines if line["event"] == name]

            eventually(lambda: [line for line in events("consumer_listening") if "link_file" in line])
            file = next(line["link_file"] for line in events("consumer_listening") if "link_file" in line)
            link = re.search(r'href="([^"]+)"', Path(file).read_text(encoding="utf-8"))[1]
            shown = SimpleNamespace(link=link, address=link.partition("#")[0])
            yield SimpleNamespace(process=process, lines=lines, events=events, shown=shown)
            process.send_signal(signal.SIGINT)
            process.wait(30)
            reader.join(10)
            assert process.returncode in codes, lines
        finally:
            process.kill()


def send(link, frame):
    assert link.send(frame.header, frame.payload) is None


def metrics(url):
    """Return the dashboard's own counters among a hub's metrics."""
    with urllib.request.urlopen(f"{url.removesuffix('/metrics')}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    pattern = r'^capflow_consumer_counts_total\{consumer="dashboard",name="(\w+)"\} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


def test_what_fires_in_a_hub_is_on_pages_in_the_log_and_in_the_metrics(tmp_path, address, probe):
    rules = tmp_path / "rules.txt"
    rules.write_text("# of this test\nhigh: max(code) > 50 over 3s\nleft: left > 0\n", encoding="utf-8")
    options = f"dashboard:port=0,probes={probe},alerts={rules}"
    with running(tmp_path, "run", "--address", address, "--consumer", options, "--metrics-address", "0") as hub:
        url = hub.events("metrics")[0]["url"]
        # No page is open.
        with worker_link(address) as link:
            frame = frame_of("r1", np.full((4, 4), 60.0))
            send(link, frame)
            eventually(lambda: hub.events("alert_firing"), 15)
            (fired,) = hub.events("alert_firing")
            assert (fired["level"], fired["rule"], fired["engine"], fired["request"], fired["value"]) == (
                "warning",
                "high",
                "engine-1",
                "r1",
                60.0,
            )
            expected = (
                "alert high fires on engine engine-1: the value is 60, request r1; the rule is max(code) > 50 over 3s"
            )
            assert fired["message"] == expected
            eventually(lambda: metrics(url).get("alert_high_seconds", 0) >= 1)
            assert metrics(url)["alert_high"] == 1
            with Pageless(hub.shown) as page:
                page.until(lambda p: p.changes)
                assert [rule["name"] for rule in page.hello["alerts"]] == ["high", "left"]
                assert page.hello["alerts"][0] == {
                    "name": "high",
                    "text": "max(code) > 50 over 3s",
                    "probe": "code",
                    "unit": "",
                    "bound": "> 50",
                    "clear": "≤ 50",
                }
                page.until(lambda p: not p.alerts, 15)
                assert [change["state"] for change in page.changes] == ["firing", "resolved"]
                eventually(lambda: hub.events("alert_resolved"))
                over = hub.events("alert_resolved")[0]
                assert over["level"] == "info"
                assert over["value"] is None
                assert 2 <= over["fired_s"] <= 6
                seconds = metrics(url)["alert_high_seconds"]
                assert 2 <= seconds <= 6
                page.subscribe(alerts=True)
                page.until(lambda p: len(p.alerts) == 2)
                assert {state["state"] for state in page.alerts} == {"inactive"}
                link.close(0.5)
                page.until(lambda p: len(p.changes) == 3, 30)
                assert page.changes[-1]["rule"] == "left"
        assert metrics(url)["alert_high_seconds"] == seconds
        assert metrics(url)["alert_left"] == 1


def test_the_command_logs_what_fires_in_the_hub_that_it_shows(tmp_path, address, probe):
    rules = ["--alert", "many: requests(code > 50) >= 2 over 30s", "--alert", "quiet: silent > 2s"]
    arguments = ["dashboard", address, "--port", "0", "--probe", probe, *rules]
    with running_hub(address, Recorder("keeper")) as hub, running(tmp_path, *arguments) as shown:
        with worker_link(address) as link:
            eventually(lambda: hub.status()["taps"])
            for number, norm in enumerate((60.0, 40.0, 60.0)):
                send(link, frame_of(f"r{number}", np.full((4, 4), norm), seq=number + 1))
            eventually(lambda: shown.events("alert_firing"), 15)
        (fired,) = shown.events("alert_firing")
        assert (fired["rule"], fired["value"], fired["request"]) == ("many", 2.0, "r2")
        hub.stop(1)
        eventually(lambda: len(shown.events("alert_firing")) == 2, 20)
        quiet = shown.events("alert_firing")[1]
        assert (quiet["rule"], quiet["engine"]) == ("quiet", "")


def refusal(monkeypatch, capsys, *arguments):
    """Return the line with which the command refuses options."""
    monkeypatch.setattr(sys, "argv", ["capflow", "dashboard", "--port", "0", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_stored_rows_have_no_alerts(tmp_path, monkeypatch, capsys):
    write(tmp_path / "rows")
    error = refusal(monkeypatch, capsys, str(tmp_path / "rows"), "--alert", "a: lost > 0")
    assert error == f"capflow: --alert: got with {tmp_path}/rows, expected a hub: stored rows come all at once"


def test_the_command_refuses_a_wrong_rule_before_it_starts(monkeypatch, capsys, probe):
    error = refusal(monkeypatch, capsys, "--probe", probe, "--alert", "a: share(coda) > 5%")
    expected = "rule a: got coda, expected one of the probes code; did you mean code?"
    assert error == f"capflow: consumers.dashboard.alerts: {expected}"


def test_rules_are_checked_with_the_other_options(probe):
    for rule, message in (
        ("a: lost > many", "rule a: got `many`"),
        ("nowhere.txt", "No such file"),
        ("a: max(x) > 1", "got x"),
    ):
        with pytest.raises(UsageError, match=message), dashboard(probes=(probe,), alerts=(rule,)):
            pass


def test_a_dashboard_without_rules_evaluates_none():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        page.subscribe(alerts=True)
        page.until(lambda p: len(p.heartbeats) > 2)
        assert page.hello["alerts"] == []
        assert page.alerts == []


def test_rules_go_on_while_the_process_of_the_page_starts_again(tmp_path, address, probe):
    options = f"dashboard:port=0,probes={probe},alerts={tmp_path / 'rules'}"
    (tmp_path / "rules").write_text("high: max(code) > 50 over 1h", encoding="utf-8")
    command = ["run", "--address", address, "--consumer", options]
    # Results of requests that it had are errors.
    with running(tmp_path, *command, codes=(0, 1)) as hub, worker_link(address) as link:
        send(link, frame_of("r1", np.full((4, 4), 60.0)))
        eventually(lambda: hub.events("alert_firing"), 15)
        tasks = Path(f"/proc/{hub.process.pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
        serving = b"capflow_dashboard.serving"
        (page,) = [child for child in children if serving in Path(f"/proc/{child}/cmdline").read_bytes()]
        os.kill(page, signal.SIGKILL)
        for number in range(2, 200):
            send(link, frame_of(f"r{number}", np.full((4, 4), 60.0), seq=number))
            with contextlib.suppress(AssertionError):
                eventually(lambda: len(hub.events("alert_firing")) == 2, 0.5)
                break
        assert len(hub.events("alert_firing")) == 2
