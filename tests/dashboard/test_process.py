"""The process that serves the page of the dashboard, beside a hub: what reaches it, and how each outlives the other."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

import capflow
from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.capture.wanted import wanted_rows
from capflow_dashboard import limits
from tests.kit.captured import write
from tests.kit.dashboards import Pageless, cookie_of, dashboard, norm_of
from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]

SITES = tuple(Site(layer, "post_block") for layer in range(4))


@pytest.mark.parametrize("positions", [None, "last_prompt", "all_generated"])
def test_the_process_gets_the_rows_that_the_dashboard_wants_and_no_others(positions):
    """Of a frame whose rows are in several blocks, for several requests."""
    sites = (Site(0, "post_block"), Site(1, "post_block"), Site(1, "mlp_in"))
    frame = make_frame([("a", 4, 0, 6), ("b", 3, 2, 3)], sites, dtype="bfloat16", texts=True)
    wants = None
    if positions is not None:
        spec = CaptureSpec({"post_block": [0, 1]}, positions)
        wanted_at = spec.resolve(sites, num_layers=2)
        wants = lambda _: wanted_at  # noqa: E731
    wanted = frame.narrowed(wants)
    header, rows = wanted_rows(wanted)
    sent = Frame(header, b"".join(bytes(part) for part in rows))
    sent.check(hashed=False)

    def rows_in(frame):
        return {
            (chunk.request.id, site, chunk.start + at): chunk.rows[number, at].tobytes()
            for chunk in frame.chunks()
            for number, site in enumerate(chunk.sites)
            for at in range(chunk.rows.shape[1])
        }

    assert rows_in(sent) == rows_in(wanted)
    assert len(rows_in(sent)) == {None: 3 * 9, "last_prompt": 2 * 2, "all_generated": 2 * (2 + 2)}[positions]


def test_a_hub_feeds_it_and_answers_with_it(address):
    before = set(threading.enumerate())
    with dashboard(port=0, token="t" * 20) as consumer, running_hub(address, consumer) as hub:
        with Pageless(consumer) as page, worker_link(address) as link:
            page.until(lambda p: p.engines)
            first = make_frame([("r1", 4, 0, 4)], SITES)
            link.send(first.header, first.payload)
            last = make_frame([("r1", 4, 4, 1)], SITES, seq=2, finished=[make_finished("r1", 4, 5, rows=20)])
            link.send(last.header, last.payload)
            page.until(lambda p: p.requests and p.requests[1]["status"] == "stop")
            page.subscribe(request=1, health=True)
            page.until(lambda p: p.columns == 5)
            expected = [[norm_of("r1", site, position) for position in range(5)] for site in SITES]
            np.testing.assert_allclose(page.values, expected, rtol=2e-6)
            page.until(lambda p: p.health and p.counts["done"] == 1)
            assert page.counts["rows"] == 20
            assert page.health["status"]["consumers"]["dashboard"]["rows"] == 20
        assert hub.status()["consumers"]["dashboard"]["errors"] == 0
    eventually(lambda: not set(threading.enumerate()) - before)


def test_a_process_that_is_killed_is_started_again_and_pages_come_back(address):
    with dashboard() as consumer, running_hub(address, consumer) as hub, worker_link(address) as link:
        cookie = cookie_of(consumer)
        with Pageless(consumer, cookie) as page:
            page.until(lambda p: p.engines)
            os.kill(consumer._process.pid, signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                page.drain(20)
        for seq in range(1, 4):
            frame = make_frame([(f"r{seq}", 4, 0, 4)], SITES, seq=seq)
            link.send(frame.header, frame.payload)
        eventually(lambda: hub.status()["consumers"]["dashboard"]["restarts"] == 1)
        with Pageless(consumer, cookie_of(consumer)) as page:
            page.until(lambda p: p.engines and p.requests)
            assert cookie_of(consumer) == cookie


def test_a_process_that_hangs_holds_up_nothing_but_its_own_rows(address):
    other = Recorder()
    with (
        dashboard() as consumer,
        running_hub(address, configured(consumer, "skip"), other) as hub,
        worker_link(address) as link,
        Pageless(consumer) as page,
    ):
        page.until(lambda p: p.engines)
        os.kill(consumer._process.pid, signal.SIGSTOP)
        try:
            for seq in range(1, 20):
                frame = make_frame([(f"r{seq}", 2000, 0, 2000)], SITES, seq=seq)
                link.send(frame.header, frame.payload)
            eventually(lambda: len(other.seqs) == 19)
            eventually(lambda: hub.status()["consumers"]["dashboard"]["lag_s"] > limits.SILENCE_S)
        finally:
            os.kill(consumer._process.pid, signal.SIGCONT)
        eventually(lambda: hub.status()["consumers"]["dashboard"]["dropped_rows"].get("skipped"))
        page.until(lambda p: p.requests)
        assert hub.snapshot().rows_lost == 0


STOPPED_HUB = """
import sys
from tests.kit.dashboards import open_dashboard
with open_dashboard(near=False) as consumer:
    print(consumer.link, flush=True)
    while not sys.stdin.closed:
        consumer.on_idle()
        __import__("time").sleep(0.05)
"""


def test_a_hub_that_hangs_is_stale_in_three_seconds_and_a_hub_that_is_killed_takes_the_page_along():
    command = [sys.executable, "-c", STOPPED_HUB]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            consumer = SimpleNamespace(link=process.stdout.readline().strip())
            consumer.address = consumer.link.partition("#")[0]
            with Pageless(consumer) as page:
                page.until(lambda p: len(p.heartbeats) >= 3)
                assert {beat["state"] for beat in page.heartbeats} == {"live"}
                os.kill(process.pid, signal.SIGSTOP)
                stopped = time.time()
                page.until(lambda p: p.heartbeats[-1]["state"] == "stale")
                assert page.heartbeats[-1]["t"] - stopped < 3
                os.kill(process.pid, signal.SIGCONT)
                page.until(lambda p: p.heartbeats[-1]["state"] == "live")
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises(ConnectionClosed) as raised:
                    page.drain(20)
                assert raised.value.rcvd.code == 1001
        finally:
            process.kill()


def test_the_token_is_in_no_command_line_no_environment_and_no_log(tmp_path):
    token = tmp_path / "token"
    token.write_text("a-secret-of-20-chars")
    token.chmod(0o600)
    environment = dict(os.environ, CAPFLOW_DASHBOARD_TOKEN="b-secret-of-20-chars")
    for log_format, option in (("text", f"dashboard:port=0,token_file={token}"), ("json", "dashboard:port=0")):
        command = [sys.executable, "-m", "capflow", "run", "--consumer", option, "--log-format", log_format]
        command += ["--address", f"ipc://{tmp_path}/hub.sock", "--until-eof"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        ) as process:
            seen = ""
            while "link" not in seen:
                seen += process.stderr.readline()
            tasks = Path(f"/proc/{process.pid}/task").iterdir()
            children = [one for task in tasks for one in (task / "children").read_text().split()]
            (child,) = [one for one in children if "serving" in Path(f"/proc/{one}/cmdline").read_text()]
            assert "secret" not in Path(f"/proc/{child}/environ").read_text()
            for one in (process.pid, int(child)):
                assert "secret" not in Path(f"/proc/{one}/cmdline").read_text()
            _, rest = process.communicate(timeout=60)
        assert process.returncode == 0, rest
        assert "secret" not in seen + rest
        assert seen.count("\n") <= 2  # the address stands in one line


@pytest.mark.parametrize(
    ("requests", "sockets"), [(40, 700), pytest.param(500, 5000, marks=pytest.mark.long)], ids=["700", "5000"]
)
def test_a_flood_costs_other_consumers_no_rows(tmp_path, requests, sockets):
    """In a hub with 128 descriptors, of which a flood would take all."""
    write(tmp_path / "rows", {f"r{n}": (4, 30) for n in range(requests)}, layout="packed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "capflow", "replay", tmp_path / "rows", "--steps-per-s", "300"]
    command += ["--consumer", "filesystem:root=again,layout=per_file,fsync=false"]
    command += ["--consumer", f"dashboard:port={port}"]
    limited = ["/bin/sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *command]
    with (
        subprocess.Popen(limited, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as opened,
    ):
        opened.callback(process.kill)
        peers = collections.deque(maxlen=400)
        count = 0
        while process.poll() is None and count < sockets:
            peer = opened.enter_context(socket.socket())
            peer.setblocking(False)
            # Not waited for: the kernel makes as many connections as the server takes.
            if peer.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS):
                peer.close()
            if len(peers) == peers.maxlen:
                peers[0].close()
            peers.append(peer)
            count += 1
            # The pause between two.
            time.sleep(0.003)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "Too many open files" not in errors
    assert len(capflow.open(tmp_path / "again").requests()) == requests
    assert count == sockets
