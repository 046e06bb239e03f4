"""`capflow dashboard`: a hub and stored rows, in a real process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.cli import main
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import ActionApplied, Freeze, Steer, Unfreeze
from capflow_dashboard import limits
from tests.kit.captured import write
from tests.kit.completions import completions, usual
from tests.kit.dashboards import Pageless
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import Recorder, address, running_hub, scheduler_link, worker_link
from tests.kit.keyrings import allow, keyed_hub, keys
from tests.kit.recordings import record
from tests.kit.waiting import eventually

__all__ = ["address", "keys"]

SITES = [(layer, "post_block") for layer in range(4)]


@contextlib.contextmanager
def dashboard_of(*arguments, cwd=None, **environment):
    """Run the command; yield what has its link, as a dashboard has. It must end well at Ctrl-C."""
    command = [sys.executable, "-m", "capflow", "dashboard", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=cwd, stderr=subprocess.PIPE, text=True, env=dict(os.environ, **environment)
    ) as process:
        try:
            lines = []
            while not (path := re.search(r"the link is in (\S+html)", "".join(lines))):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            link = re.search(r'href="([^"]+)"', Path(path[1]).read_text())[1]
            yield SimpleNamespace(link=link, address=link.partition("#")[0], process=process, lines=lines)
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=30)
            assert process.returncode == 0, rest
            assert "Traceback" not in rest
        finally:
            process.kill()


def send(link, frame):
    assert link.send(frame.header, frame.payload) is None


def test_it_follows_a_hub_outlives_it_and_finds_the_next_one(address):
    with dashboard_of(address) as shown, Pageless(shown) as page:
        assert "waiting for one" in shown.process.stderr.readline()
        page.until(lambda p: p.heartbeats and p.heartbeats[-1]["state"] == "stale")
        assert page.hello["source"] == {"kind": "live", "name": address}
        with running_hub(address, Recorder("keeper")) as hub:
            page.until(lambda p: p.heartbeats[-1]["state"] == "live")
            with worker_link(address) as link:
                eventually(lambda: hub.status()["taps"])
                send(link, make_frame([("r1", 4, 0, 4)], SITES, texts=True))
                page.until(lambda p: p.requests)
                page.subscribe(request=1, health=True)
                page.until(lambda p: p.columns == 4 and p.health)
                assert set(page.health["status"]["consumers"]) == {"keeper"}
                last = make_frame([("r1", 4, 4, 1)], SITES, seq=2, finished=[make_finished("r1", 4, 5, rows=20)])
                send(link, last)
                page.until(lambda p: p.requests[1]["status"] == "stop")
        page.until(lambda p: p.heartbeats[-1]["state"] == "stale")
        assert page.columns == 5
        with running_hub(address, Recorder("keeper")) as hub, worker_link(address) as link:
            page.until(lambda p: p.heartbeats[-1]["state"] == "live")
            eventually(lambda: hub.status()["taps"])
            send(link, make_frame([("r2", 4, 0, 4)], SITES))
            page.until(lambda p: 2 in p.requests)
            assert page.requests[1]["status"] == "stop"


def test_it_shows_the_requests_of_all_hubs_of_an_engine(address):
    other = f"{address}2"
    with (
        running_hub(address, Recorder("keeper")) as first,
        running_hub(other, Recorder("keeper")) as second,
        dashboard_of(address, other) as shown,
        Pageless(shown) as page,
        worker_link(address, make_hello("e@1", "boot-a")) as near,
        worker_link(other, make_hello("e@1", "boot-b")) as far,
    ):
        eventually(lambda: first.status()["taps"] and second.status()["taps"])
        for number, (link, boot) in enumerate(((near, "boot-a"), (far, "boot-b")), 1):
            last = [make_finished(f"r{number}", 4, 4, rows=16)]
            send(link, make_frame([(f"r{number}", 4, 0, 4)], SITES, engine="e@1", boot=boot, finished=last))
            page.until(lambda p, number=number: p.requests.get(number, {}).get("status") == "stop")


def test_a_hub_that_hangs_is_stale_in_three_seconds(tmp_path):
    command = [sys.executable, "-m", "capflow", "run", "--consumer", "log", "--address", f"ipc://{tmp_path}/h"]
    tmp_path.chmod(0o700)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as hub:
        try:
            assert "listening" in hub.stderr.readline()
            with dashboard_of(f"ipc://{tmp_path}/h") as shown, Pageless(shown) as page:
                page.until(lambda p: p.heartbeats and p.heartbeats[-1]["state"] == "live")
                page.until(lambda p: len(p.heartbeats) >= 3)
                os.kill(hub.pid, signal.SIGSTOP)
                stopped = time.time()
                page.until(lambda p: p.heartbeats[-1]["state"] == "stale")
                assert page.heartbeats[-1]["t"] - stopped < 3
                os.kill(hub.pid, signal.SIGCONT)
                page.until(lambda p: p.heartbeats[-1]["state"] == "live")
        finally:
            os.kill(hub.pid, signal.SIGCONT)
            hub.terminate()


def test_it_watches_with_the_rights_of_its_key(keys):
    with keyed_hub() as hub, worker_link(hub.address, key="gpu") as link:
        with dashboard_of(hub.address, "--key", "ann") as shown, Pageless(shown) as page:
            eventually(lambda: hub.status()["taps"])
            send(link, make_frame([("r1", 4, 0, 4)], SITES))
            page.until(lambda p: p.requests)
            page.subscribe(health=True)
            page.until(lambda p: p.health and p.heartbeats[-1]["state"] == "live")
        for arguments in (["--key", "eve"], ["--key", "nobody"], []):
            command = [sys.executable, "-m", "capflow", "dashboard", "--port", "0", hub.address, *arguments]
            refused = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
            assert refused.returncode in (1, 2)
            assert "Traceback" not in refused.stderr
            assert refused.stderr.splitlines()[-1].startswith("capflow: ")


@contextlib.contextmanager
def obeying(address):
    """Run a scheduler that applies each action in its next step; yield the actions."""
    acts, over = [], threading.Event()

    def step():
        while not over.wait(0.02):
            for act in link.actions():
                acts.append(act.action)
                link.outcome(ActionApplied(act.id, 7, position=5))

    with scheduler_link(address, key="gpu") as link:
        thread = threading.Thread(target=step)
        thread.start()
        try:
            yield acts
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def steerable_hub(calm):
    """Yield a page of `capflow dashboard HUB --allow-steering` with key ann, and the actions that an engine gets."""
    with (
        keyed_hub() as hub,
        worker_link(hub.address, key="gpu") as link,
        obeying(hub.address) as acts,
        dashboard_of(hub.address, "--key", "ann", "--allow-steering", "--vector", f"calm={calm}") as shown,
        Pageless(shown) as page,
    ):
        eventually(lambda: hub.status()["taps"])
        send(link, make_frame([("r1", 4, 0, 5)], SITES))
        page.until(lambda p: p.requests and p.steering)
        page.send(alive="abcd")
        yield page, acts


def ask(page, number, **act):
    """Ask for an action and wait for its answer."""
    page.send(act={"id": number, **act})
    return page.until(lambda p: next((ack for ack in p.acks if ack["id"] == number), None))


@pytest.fixture
def calm(tmp_path):
    save_vector(tmp_path / "calm.safetensors", Site(1, "post_block"), np.ones(8, np.float32))
    return tmp_path / "calm.safetensors"


def test_it_steers_a_hub_with_the_rights_of_its_key(keys, calm):
    allow(keys, "ann", "read", "steer")
    with steerable_hub(calm) as (page, acts):
        ack = ask(page, 1, kind="steer", request=1, name="calm", ratio=0.25)
        assert (ack["state"], ack["step"], ack["position"]) == ("applied", 7, 5)
        (steer,) = acts
        assert (steer.request, steer.lease_s) == ("r1", limits.LEASE_S)
        assert (steer.vectors[0].scale, steer.vectors[0].relative) == (0.25, True)
        # Its lease is renewed while the page says that it is alive, and no longer.
        for _ in range(6):
            page.send(alive="abcd")
            count = len(page.heartbeats)
            page.until(lambda p, count=count: len(p.heartbeats) > count)
        renewed = len(acts)
        assert renewed >= 3
        assert all(isinstance(act, Steer) for act in acts)
        page.until(lambda p: not p.steering["holds"])
        assert len(acts) <= renewed + 3
        assert ask(page, 2, kind="kill")["state"] == "applied"
        assert isinstance(acts[-1], Freeze)
        assert page.steering["frozen"]
        refused = ask(page, 3, kind="steer", request=1, name="calm", ratio=0.25)
        assert (refused["state"], "kill switch" in refused["reason"]) == ("rejected", True)
        assert ask(page, 4, kind="release")["state"] == "applied"
        assert isinstance(acts[-1], Unfreeze)


def test_without_the_right_to_steer_each_action_says_so_and_nothing_is_done(keys, calm):
    with steerable_hub(calm) as (page, acts):
        for number, act in enumerate(
            (
                {"kind": "steer", "request": 1, "name": "calm", "ratio": 0.25},
                {"kind": "abort", "request": 1},
                {"kind": "kill"},
            )
        ):
            ack = ask(page, number, **act)
            assert ack["state"] == "rejected"
            assert "the right to steer" in ack["reason"]
        # The switch that did nothing is not shown as if it held.
        page.until(lambda p: not p.steering["frozen"])
        assert acts == []


def test_a_run_is_logged_with_what_it_ran_and_no_key(address, tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-1234\n")
    key.chmod(0o600)
    options = ["--allow-steering", "--module", "glad", "--server-key-file", key, "--log-format", "json"]
    words = {"plain": ["a", "b"], "steered": ["a", "c"]}
    with (
        completions(usual(words)) as server,
        running_hub(address, Recorder("keeper")) as hub,
        worker_link(address) as link,
        dashboard_of(address, *options, "--server", server.url) as shown,
        Pageless(shown) as page,
    ):
        eventually(lambda: hub.status()["taps"])
        send(link, make_frame([("r1", 4, 0, 4)], SITES))
        page.until(lambda p: p.requests)
        page.send(alive="abcd")
        page.send(again={"id": 7, "request": 1, "kind": "gain", "name": "glad", "ratio": 0.5})
        page.until(lambda p: all(any(news.get(side, {}).get("over") for news in p.again) for side in words))
        lines = [json.loads(line) for line in shown.lines]
        while (line := lines[-1])["event"] != "run_again":
            lines.append(json.loads(shown.process.stderr.readline()))
        assert (line["level"], line["request"], line["label"]) == ("info", "r1", "glad +0.5 by page abcd #7")
        assert line.keys() >= {"engine", "plain", "steered"}
        assert {headers["Authorization"] for _, headers, _ in server.asked} == {"Bearer sk-1234"}
        assert not any("sk-1234" in json.dumps(one) for one in lines)


@pytest.mark.parametrize("layout", ["per_file", "packed", "shards"])
def test_it_shows_a_data_set_whole(tmp_path, layout):
    write(tmp_path / "rows", {f"r{number}": (4, 30 + number) for number in range(30)}, layout=layout)
    with dashboard_of(tmp_path / "rows") as shown, Pageless(shown) as page:
        page.until(lambda p: len(p.requests) == 30 and all(r["status"] == "stop" for r in p.requests.values()))
        assert page.hello["source"] == {"kind": "stored", "name": "rows"}
        assert {r["id"]: r["tokens"] for r in page.requests.values()} == {f"r{n}": 30 + n for n in range(30)}
        assert {(r["started_s"], r["ended_s"], r["rows_lost"]) for r in page.requests.values()} == {(None, None, 0)}
        assert page.heartbeats[-1]["lag_s"] is None


def test_stored_rows_with_labels_have_false_positives(tmp_path):
    write(tmp_path / "rows", {f"r{number}": (4, 30) for number in range(6)})
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(f'{{"request": "r{n}", "label": {"true" if n < 2 else "false"}}}\n' for n in range(5)))
    probe = tmp_path / "truth.safetensors"
    Probe.make(Site(2, "post_block"), np.eye(8)[:1], names=("truth",)).save(probe)
    with dashboard_of(tmp_path / "rows", "--probe", probe, "--labels", labels) as shown, Pageless(shown) as page:
        page.until(lambda p: len(p.requests) == 6 and p.engines)
        page.subscribe(population=page.engines[0]["name"], probe="truth")
        # Without a label, with the negative one, with the positive one.
        page.until(lambda p: [sum(bins) for bins in p.population.get("requests", ())] == [1, 3, 2])
        assert page.population["labels"] == 5


def test_alerts_of_a_hub_beside_it_are_metrics(address):
    arguments = ["--alert", "quiet: silent > 100ms", "--metrics-address", "0"]
    with dashboard_of(address, *arguments) as shown:
        while not (url := re.search(r"metrics at (\S+)", "".join(shown.lines))):
            shown.lines.append(shown.process.stderr.readline())
        eventually(lambda: 'name="alert_quiet"' in urllib.request.urlopen(url[1], timeout=10).read().decode())


def test_it_shows_a_recording_with_its_times(address, tmp_path):
    path = tmp_path / "recording"
    with running_hub(address, record(path)) as hub, worker_link(address) as link:
        last = make_frame([("r1", 4, 0, 5)], SITES, finished=[make_finished("r1", 4, 5, rows=20)])
        send(link, last)
        eventually(lambda: hub.snapshot().requests_done == 1)
    with dashboard_of(path) as shown, Pageless(shown) as page:
        page.until(lambda p: p.counts and p.counts["done"])
        assert page.hello["source"] == {"kind": "stored", "name": "recording"}
        assert all(request["started_s"] for request in page.requests.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "HUB|PATH: got nowhere, which does not exist, expected a hub's address"),
        (["."], "expected a recording (capflow record) or a data set"),
        (["http://127.0.0.1"], "HUB: got http://127.0.0.1, expected"),
        (["tcp://10.0.0.1:5555"], "HUB: got tcp://10.0.0.1:5555"),
        (["hub.sock"], "HUB|PATH: got hub.sock, a socket, expected"),
        (["--probe", "nowhere.safetensors"], "nowhere.safetensors: got no such file"),
        (["--layers", "most"], "consumers.dashboard"),
        (["--hook", "nowhere"], "consumers.dashboard"),
        (["--token-file", "nowhere"], "consumers.dashboard.token_file"),
        (["--labels", "nowhere.csv"], "consumers.dashboard.labels: got nowhere.csv"),
        (["--metrics-address", "no"], "--metrics-address"),
        (["--server", "http://h"], "consumers.dashboard.allow_steering: got false, with server, expected true"),
        (["--allow-steering", "--server", "h"], "consumers.dashboard.server: got h, expected an address such as"),
        (["--port", "70000"], "--port"),
    ],
)
def test_what_it_cannot_show_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("hub.sock")
        monkeypatch.setattr(sys, "argv", ["capflow", "dashboard", "--port", "0", *arguments])
        with pytest.raises(SystemExit) as raised:
            main()
    assert raised.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


def test_a_browser_is_given_a_file_and_not_the_token(tmp_path):
    write(tmp_path / "rows", {"r": (4, 8)}, layout="packed")
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/opened\n')
    browser.chmod(0o700)
    with dashboard_of(tmp_path / "rows", "--open", BROWSER=str(browser)) as shown:
        eventually((tmp_path / "opened").exists)
        eventually((tmp_path / "opened").read_text)
        opened = (tmp_path / "opened").read_text()
        assert opened.startswith("file:///")
        assert shown.link.partition("token=")[2] not in opened
