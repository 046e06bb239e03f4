"""Descriptors: a hub has as many as the system lets it, and idle connections leave enough of them for its consumers."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from capflow import limits
from capflow.system import descriptors
from capflow.transport.client import Client
from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import free_port, worker_link
from tests.kit.servers import environment
from tests.kit.waiting import eventually


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(256, 4_096, 4_096), (256, 256, 256), (256, 1_000_000, limits.DESCRIPTORS_WANTED), (100_000, 1_000_000, 100_000)],
)
def test_the_limit_is_raised_and_never_lowered(monkeypatch, soft, hard, raised):
    now = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: now.__setitem__(slice(None), limit))
    descriptors.raise_limit()
    assert now == [raised, hard]
    assert 0 < descriptors.connections_max() < min(raised, limits.DESCRIPTORS_WANTED)


def test_idle_connections_cost_a_hub_with_few_descriptors_no_row(tmp_path):
    """Three times as many connections as it has descriptors, while its consumer opens files for each request."""
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "capflow", "run", "--address", address, "--log-format", "json"]
    command += ["--consumer", f"filesystem:root={tmp_path / 'rows'},layout=per_file,fsync=false"]
    limited = ["/bin/sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]
    with (
        subprocess.Popen(limited, env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as hub,
        contextlib.ExitStack() as opened,
    ):
        try:
            assert json.loads(hub.stderr.readline())["event"] == "listening"
            sites = [(layer, "post_block") for layer in range(4)]
            port = int(address.rpartition(":")[2])
            with worker_link(address) as link, Client(address, 20) as client:
                for number in range(60):
                    for _ in range(10):
                        opened.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                    # The pace of the connections.
                    time.sleep(0.02)
                    ends = [make_finished(f"r{number}", 4, 4, rows=16)]
                    frame = make_frame([(f"r{number}", 4, 0, 4)], sites, finished=ends, step=number)
                    assert link.send(frame.header, frame.payload) is None
                eventually(lambda: not link.counters["unacked_frames"])
                results = client.results([f"r{number}" for number in range(60)], timeout=60)
                assert {
                    (by_consumer["filesystem"].status, by_consumer["filesystem"].error)
                    for by_consumer in results.values()
                } == {("ok", None)}
                assert client.status()["consumers"]["filesystem"]["errors"] == 0
                assert not link.reconnects
            hub.send_signal(signal.SIGINT)
            hub.communicate(timeout=60)
            assert hub.returncode == 0
        finally:
            hub.kill()
