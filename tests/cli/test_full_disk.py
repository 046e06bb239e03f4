"""`capflow run` while its data disk is full, or it has no descriptors: nothing is lost, and everybody can see it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import duckdb
import pytest

import capflow
from capflow.transport.client import Client
from tests.kit.disks import mounted
from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import address, free_port, worker_link
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]

REQUESTS = 40
ROWS = 4


class Hub:
    """A `capflow run` in a process of its own."""

    def __init__(self, address, consumer, log):
        self.port = free_port()
        command = [sys.executable, "-m", "capflow", "run", "--address", address, "--consumer", consumer]
        command += ["--metrics-address", str(self.port), "--log-format", "json"]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stderr=out)
        self.log = log
        eventually(lambda: '"listening"' in log.read_text())

    def problems(self):
        """Return what `/readyz` says, and its status."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                return answer.status, json.load(answer)["problems"]
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)["problems"]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextlib.contextmanager
def running(address, consumer, log):
    hub = Hub(str(address), consumer, log)
    try:
        yield hub
    finally:
        hub.process.kill()
        hub.process.wait()


def send(link, first, count):
    """Send whole requests, two frames and an end each."""
    for number in range(first, first + count):
        name = f"r{number}"
        for step in range(2):
            frame = make_frame([(name, ROWS, step * ROWS, ROWS)], step=3 * number + step)
            assert link.send(frame.header, frame.payload) is None
        end = make_finished(name, ROWS, 2 * ROWS, rows=2 * ROWS)
        frame = make_frame([], finished=[end], step=3 * number + 2)
        assert link.send(frame.header, frame.payload) is None


def statuses(address, count):
    names = [f"r{number}" for number in range(count)]
    with Client(str(address)) as client:
        results = client.results(names, timeout=30)
    return [next(iter(results[name].values())).status for name in names if name in results]


def unread(address):
    """Return how many records of its inbox the consumer was not given."""
    with Client(str(address)) as client:
        return next(iter(client.status()["consumers"].values()))["spool"]["unread"]


def fill(directory):
    """Take up what room there is."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return ballast


def consumer_of(kind, data, spool):
    if kind == "duckdb":
        return f"duckdb:path={data / 'rows.duckdb'},site=post_block:0,vectors=true,flush_s=0.05,spool_dir={spool}"
    return f"filesystem:root={data},layout={kind},hooks=post_block,layers=0,spool_dir={spool}"


def kept(kind, data):
    """Return how many rows of `post_block:0` each request has."""
    if kind == "duckdb":
        with duckdb.connect(str(data / "rows.duckdb"), read_only=True) as database:
            sql = "SELECT request_id, count(*) FROM vectors GROUP BY ALL"
            return dict(database.execute(sql).fetchall())
    dataset = capflow.open(data)
    dataset.verify()
    assert [len(dataset.captures(name, look=False)) for name in dataset.requests()] == [1] * len(dataset)
    return {capture.id: len(capture["post_block:0"].rows) for capture in dataset}


EXPECTED = {f"r{number}": 2 * ROWS for number in range(REQUESTS)}


@pytest.mark.parametrize("kind", ["packed", "per_file", "sharded", "duckdb"])
def test_no_request_is_lost_while_the_data_disk_is_full(address, tmp_path, kind):
    data, log = tmp_path / "data", tmp_path / "log"
    data.mkdir()
    with (
        mounted(data, "24M"),
        running(address, consumer_of(kind, data, tmp_path / "spool"), log) as hub,
        worker_link(address) as link,
    ):
        third = REQUESTS // 4
        send(link, 0, third)
        eventually(lambda: set(statuses(address, third)) == {"ok"})
        ballast = fill(data)
        send(link, third, REQUESTS - 2 * third)
        eventually(lambda: hub.problems()[0] == 503)
        assert "again: " in hub.problems()[1][0]
        with Client(str(address)) as client:
            consumer = next(iter(client.status()["consumers"].values()))
        assert consumer["retrying"]["for_s"] >= 0
        assert consumer["errors"] == 0
        ballast.unlink()
        send(link, REQUESTS - third, third)
        eventually(lambda: statuses(address, REQUESTS) == ["ok"] * REQUESTS)
        eventually(lambda: hub.problems() == (200, []))
        link.close(5)
        assert hub.stop() == 0
        assert kept(kind, data) == EXPECTED
    assert '"consumer_waits"' in log.read_text()
    assert '"consumer_goes_on"' in log.read_text()


@pytest.mark.parametrize("kind", ["packed", "sharded"])
def test_a_hub_that_stops_while_the_data_disk_is_full_leaves_everything_to_the_next(address, tmp_path, kind):
    data = tmp_path / "data"
    data.mkdir()
    consumer = consumer_of(kind, data, tmp_path / "spool")
    with mounted(data, "24M"), worker_link(address, wait=False) as link:
        with running(address, consumer, tmp_path / "log") as hub:
            assert link.wait_welcome(20)
            ballast = fill(data)
            send(link, 0, REQUESTS)
            eventually(lambda: hub.problems()[0] == 503)
            assert hub.stop() == 1
        ballast.unlink()
        with running(address, consumer, tmp_path / "log2") as hub:
            assert link.wait_welcome(20)
            eventually(lambda: unread(address) == 0)
            link.close(5)
            assert hub.stop() == 0
        assert kept(kind, data) == EXPECTED


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("kind", ["packed", "per_file"])
def test_no_request_is_lost_while_there_are_no_descriptors(address, tmp_path, kind, killed):
    data = tmp_path / "data"
    data.mkdir()
    consumer = consumer_of(kind, data, tmp_path / "spool")
    with worker_link(address, wait=False) as link:
        with running(address, consumer, tmp_path / "log") as hub:
            assert link.wait_welcome(20)
            send(link, 0, 5)
            eventually(lambda: set(statuses(address, 5)) == {"ok"})
            pid = hub.process.pid
            limit = resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            send(link, 5, REQUESTS - 5)
            eventually(lambda: "Too many open files" in (tmp_path / "log").read_text())
            if killed:
                hub.process.kill()
            else:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
                eventually(lambda: statuses(address, REQUESTS) == ["ok"] * REQUESTS)
                link.close(5)
                assert hub.stop() == 0
        if killed:
            with running(address, consumer, tmp_path / "log2") as hub:
                assert link.wait_welcome(20)
                eventually(lambda: unread(address) == 0)
                link.close(5)
                assert hub.stop() == 0
    assert kept(kind, data) == EXPECTED


def test_a_recording_waits_for_room_on_its_disk(address, tmp_path):
    data, log = tmp_path / "data", tmp_path / "log"
    data.mkdir()
    with (
        mounted(data, "8M"),
        running(address, f"record:path={data / 'recording'}", log) as hub,
        worker_link(address) as link,
    ):
        send(link, 0, 2)
        eventually(lambda: statuses(address, 2) == ["ok"] * 2)
        ballast = fill(data)
        send(link, 2, REQUESTS - 2)
        eventually(lambda: hub.problems()[0] == 503)
        ballast.unlink()
        eventually(lambda: statuses(address, REQUESTS) == ["ok"] * REQUESTS)
        link.close(5)
        assert hub.stop() == 0


def test_a_test_that_is_killed_leaves_no_mount(tmp_path):
    program = """
import os, signal, sys
from tests.kit import disks
with disks.mounted(sys.argv[1], '64k'):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with mounted(tmp_path, "64k"):
        assert os.path.ismount(tmp_path)  # else this is skipped
    child = subprocess.run([sys.executable, "-c", program, tmp_path], check=False, cwd=ROOT)
    assert child.returncode == -signal.SIGKILL
    eventually(lambda: not os.path.ismount(tmp_path))


@pytest.mark.parametrize("kind", ["packed", "per_file"])
def test_no_request_is_lost_while_the_root_of_a_data_set_is_away(address, tmp_path, kind):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    consumer = consumer_of(kind, data, tmp_path / "spool")
    with running(address, consumer, tmp_path / "log") as hub, worker_link(address) as link:
        third = REQUESTS // 4
        send(link, 0, third)
        eventually(lambda: set(statuses(address, third)) == {"ok"})
        data.rename(elsewhere)
        send(link, third, REQUESTS - 2 * third)
        eventually(lambda: hub.problems()[0] == 503)
        assert f"again: {os.strerror(errno.ENOENT)}" in hub.problems()[1][0]
        elsewhere.rename(data)
        send(link, REQUESTS - third, third)
        eventually(lambda: statuses(address, REQUESTS) == ["ok"] * REQUESTS)
        eventually(lambda: hub.problems() == (200, []))
        link.close(5)
        assert hub.stop() == 0
        assert kept(kind, data) == EXPECTED


def remove(data, elsewhere):
    for hidden in data.glob(".partial-*"):
        shutil.rmtree(hidden)


def move(data, elsewhere):
    for hidden in data.glob(".partial-*"):
        hidden.rename(elsewhere)


def rename(data, elsewhere):
    move(data, data / ".partial-other")


def replace(data, elsewhere):
    for hidden in data.glob(".partial-*"):
        shutil.copytree(hidden, elsewhere)
        shutil.rmtree(hidden)
        elsewhere.rename(hidden)


@pytest.mark.parametrize(
    ("kind", "away"), [("packed", remove), ("sharded", remove), ("sharded", move), ("sharded", rename)]
)
def test_no_request_is_lost_when_somebody_removes_what_a_hub_is_writing(address, tmp_path, kind, away):
    data, log = tmp_path / "data", tmp_path / "log"
    with running(address, consumer_of(kind, data, tmp_path / "spool"), log) as hub, worker_link(address) as link:
        send(link, 0, 10)
        eventually(lambda: set(statuses(address, 10)) == {"ok"})
        away(data, tmp_path / "elsewhere")
        send(link, 10, REQUESTS - 10)
        eventually(lambda: statuses(address, REQUESTS) == ["ok"] * REQUESTS)
        link.close(5)
        assert hub.stop() == 0
        assert kept(kind, data) == EXPECTED


@pytest.mark.parametrize("away", [remove, move, replace])
def test_no_request_is_lost_when_somebody_removes_what_a_hub_has_written_before_it_stops(address, tmp_path, away):
    data, log = tmp_path / "data", tmp_path / "log"
    with running(address, consumer_of("sharded", data, tmp_path / "spool"), log) as hub, worker_link(address) as link:
        send(link, 0, REQUESTS)
        eventually(lambda: statuses(address, REQUESTS) == ["ok"] * REQUESTS)
        away(data, tmp_path / "elsewhere")
        link.close(5)
        assert hub.stop() == 0
        assert kept("sharded", data) == EXPECTED


def test_a_removed_shard_that_finds_no_room_when_its_hub_stops_is_named(address, tmp_path):
    data, log = tmp_path / "data", tmp_path / "log"
    data.mkdir()
    with (
        mounted(data, "24M"),
        running(address, consumer_of("sharded", data, tmp_path / "spool"), log) as hub,
        worker_link(address) as link,
    ):
        send(link, 0, REQUESTS)
        eventually(lambda: statuses(address, REQUESTS) == ["ok"] * REQUESTS)
        remove(data, tmp_path)
        fill(data)
        link.close(5)
        assert hub.stop() == 1
    assert f"cannot be put back: got {REQUESTS} requests in shard~" in log.read_text()
