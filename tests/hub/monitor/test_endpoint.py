"""The endpoint over real HTTP: what it says of a hub in every state, and what nonsense costs it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from capflow import limits
from capflow.errors import CapflowError, UsageError
from capflow.hub.hub import Hub
from capflow.hub.monitor.endpoint import Endpoint, parse_listen
from tests.kit.frames import make_frame
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]


@pytest.fixture
def serve():
    """Start an endpoint of a hub; all of them are stopped at the end."""
    started = []

    def start(hub, host="127.0.0.1", port=0):
        endpoint = Endpoint(hub, host, port)
        endpoint.start()
        started.append(endpoint)
        return endpoint

    yield start
    for endpoint in started:
        endpoint.stop()


def ask(endpoint, path, method="GET"):
    """Return status, headers and body of an answer."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def health(endpoint, path):
    status, headers, body = ask(endpoint, path)
    assert headers["Content-Type"] == "application/json"
    report = json.loads(body)
    word = "ready" if path == "/readyz" else "alive"
    assert report[word] == (status == 200) == (not report["problems"])
    return status, report


def send(link, request="r1", step=0):
    frame = make_frame([(request, 4, step * 4, 4)], step=step)
    assert link.send(frame.header, frame.payload) is None


class TestHealth:
    def test_while_all_is_well(self, address, serve):
        with running_hub(address, Recorder()) as hub:
            endpoint = serve(hub)
            assert health(endpoint, "/readyz") == (200, {"ready": True, "state": "running", "problems": []})
            assert health(endpoint, "/healthz") == (200, {"alive": True, "state": "running", "problems": []})

    def test_from_its_start_to_its_end(self, address, serve):
        opening, go = threading.Event(), threading.Event()

        class Slow(Recorder):
            def open(self, context):
                super().open(context)
                opening.set()
                assert go.wait(60)

        consumer = Slow(held=True)
        hub = Hub(address, [configured(consumer)])
        endpoint = serve(hub)
        assert health(endpoint, "/readyz")[1]["problems"] == ["the hub is starting"]
        starting = threading.Thread(target=hub.start)
        starting.start()
        assert opening.wait(20)
        assert health(endpoint, "/readyz")[0] == 503
        assert health(endpoint, "/healthz")[0] == 200
        go.set()
        starting.join(20)
        assert health(endpoint, "/readyz")[0] == 200
        with worker_link(address) as link:
            send(link)
            assert consumer.waiting.wait(20)
            stopping = threading.Thread(target=hub.stop)
            stopping.start()
            eventually(lambda: health(endpoint, "/readyz")[1]["problems"] == ["the hub is draining"])
            assert health(endpoint, "/healthz")[0] == 200
            consumer.go.set()
            stopping.join(20)
        assert health(endpoint, "/readyz") == (
            503,
            {"ready": False, "state": "stopped", "problems": ["the hub is stopped"]},
        )

    def test_of_a_consumer_that_fails_until_it_does_better(self, address, serve):
        consumer = Recorder(fails_on=["bad"])
        with running_hub(address, consumer, Recorder("other")) as hub, worker_link(address) as link:
            endpoint = serve(hub)
            for step in range(limits.FRAMES_FAILED_MAX):
                assert health(endpoint, "/readyz")[0] == 200
                send(link, "bad", step)
                eventually(lambda n=step: hub.lanes[0].errors > n)
            eventually(lambda: hub.lanes[0].frames == limits.FRAMES_FAILED_MAX)
            (problem,) = health(endpoint, "/readyz")[1]["problems"]
            assert problem.startswith("consumer recorder: failed at each of its last 3 frames")
            send(link, "good", limits.FRAMES_FAILED_MAX)
            eventually(lambda: health(endpoint, "/readyz")[0] == 200)

    def test_of_a_consumer_that_hangs(self, address, serve, monkeypatch):
        monkeypatch.setattr(limits, "CALL_S_MAX", 0.2)
        consumer = Recorder(held=True)
        with running_hub(address, consumer) as hub, worker_link(address) as link:
            endpoint = serve(hub)
            send(link)
            eventually(lambda: health(endpoint, "/readyz")[0] == 503)
            assert health(endpoint, "/readyz")[1]["problems"] == ["consumer recorder: in one call for more than 0.2 s"]
            assert health(endpoint, "/healthz")[0] == 200
            consumer.go.set()
            eventually(lambda: health(endpoint, "/readyz")[0] == 200)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_of_a_consumer_whose_thread_dies(self, address, serve, monkeypatch):
        """A consumer cannot end it, not even with `sys.exit`; a fault of the lane's own can."""
        with running_hub(address, Recorder()) as hub, worker_link(address) as link:
            endpoint = serve(hub)
            monkeypatch.setattr(hub.lanes[0], "_handle", lambda item: sys.exit())
            send(link)
            eventually(lambda: health(endpoint, "/readyz")[1]["problems"] == ["consumer recorder: its thread ended"])
            assert b'capflow_consumer_up{consumer="recorder"} 0.0' in ask(endpoint, "/metrics")[2]

    def test_of_a_hub_that_stands_still_whose_metrics_are_told_all_the_same(self, address, serve, monkeypatch):
        go = threading.Event()
        with running_hub(address, Recorder()) as hub:
            endpoint = serve(hub)
            monkeypatch.setattr(limits, "SILENCE_S_MAX", 0.2)
            hub.post(lambda: go.wait(60))
            eventually(lambda: health(endpoint, "/healthz")[0] == 503)
            assert health(endpoint, "/readyz")[1]["problems"] == ["the hub's thread stands still"]
            assert ask(endpoint, "/metrics")[0] == 200
            monkeypatch.undo()
            go.set()
            eventually(lambda: health(endpoint, "/healthz")[0] == 200)


class TestHttp:
    @pytest.fixture
    def endpoint(self, address, serve):
        with running_hub(address, Recorder()) as hub:
            yield serve(hub)

    def test_what_there_is(self, endpoint):
        status, headers, body = ask(endpoint, "/metrics?x=1")
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
        assert int(headers["Content-Length"]) == len(body)
        for path in ("/metrics", "/healthz", "/readyz"):
            assert path.encode() in ask(endpoint, "/")[2]
            status, headers, body = ask(endpoint, path, "HEAD")
            assert (status, body) == (200, b"")
            assert int(headers["Content-Length"]) > 0

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("GET", "/nope", 404), ("GET", "/../etc/passwd", 404), ("POST", "/metrics", 501), ("DELETE", "/", 501)],
    )
    def test_what_there_is_not(self, endpoint, method, path, status):
        assert ask(endpoint, path, method)[0] == status

    @pytest.mark.parametrize(
        "junk",
        [
            b"\x00\xff\xfe\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
            b"GET /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"",
        ],
        ids=["bytes", "no path", "version", "long", "headers", "body", "tls", "nothing"],
    )
    def test_junk_hurts_nobody(self, endpoint, junk, capfd):
        with (
            socket.create_connection((endpoint.host, endpoint.port), 20) as peer,
            contextlib.suppress(OSError),  # it may hang up before it was told all
        ):
            peer.sendall(junk)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
        assert ask(endpoint, "/readyz")[0] == 200
        assert "Traceback" not in capfd.readouterr().err

    def test_a_client_that_dawdles_is_cut_off(self, address, serve, monkeypatch):
        monkeypatch.setattr(limits, "HTTP_S_MAX", 0.3)
        with running_hub(address, Recorder()) as hub:
            endpoint = serve(hub)
            with socket.create_connection((endpoint.host, endpoint.port), 20) as peer:
                began = time.monotonic()
                with contextlib.suppress(OSError):
                    while time.monotonic() < began + 20:  # a byte at a time never lets a read time out
                        peer.sendall(b"G")
                        # The pace of the client: it dawdles.
                        time.sleep(0.02)
                assert time.monotonic() < began + 15

    def test_too_many_clients_wait_for_nothing(self, endpoint):
        idle = [socket.create_connection((endpoint.host, endpoint.port), 20) for _ in range(limits.HTTP_CLIENTS_MAX)]
        try:
            eventually(lambda: endpoint._server._places._value == 0)
            with socket.create_connection((endpoint.host, endpoint.port), 20) as peer:
                assert peer.recv(1) == b""
        finally:
            for peer in idle:
                peer.close()
        eventually(lambda: endpoint._server._places._value == limits.HTTP_CLIENTS_MAX)
        assert ask(endpoint, "/readyz")[0] == 200

    def test_ipv6(self, address, serve):
        with running_hub(address, Recorder()) as hub:
            endpoint = serve(hub, "::1")
            assert endpoint.url == f"http://[::1]:{endpoint.port}"
            assert ask(endpoint, "/readyz")[0] == 200

    def test_a_port_in_use(self, endpoint, serve):
        with pytest.raises(
            CapflowError, match=r"--metrics-address: got 127\.0\.0\.1:\d+, in use, expected a free port"
        ):
            serve(Hub("ipc:///tmp/never-started.sock", []), port=endpoint.port)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("9400", "127.0.0.1", 9400),
        ("localhost:0", "127.0.0.1", 0),
        ("0.0.0.0:9400", "0.0.0.0", 9400),
        ("[::1]:9400", "::1", 9400),
        ("[::]:1", "::", 1),
    ],
)
def test_where_to_listen(address, host, port):
    assert parse_listen(address, "--metrics-address") == (host, port)


@pytest.mark.parametrize(
    "address", ["", "x", "-1", "65536", ":9400", "::1:9400", "[1.2.3.4]:1", "host:80", "1.2.3.4:", "1.2.3.4:5:6", "٣"]
)
def test_where_not_to_listen(address):
    with pytest.raises(UsageError, match=r"--metrics-address: got .*expected PORT, HOST:PORT or"):
        parse_listen(address, "--metrics-address")


def test_crowds_that_say_nothing_take_no_place_from_who_asks(address, serve):
    """More of them than there are places, all of them there at once, and some that send a byte now and then."""
    with running_hub(address, Recorder()) as hub, contextlib.ExitStack() as opened:
        endpoint = serve(hub)
        for _ in range(3 * limits.HTTP_CLIENTS_MAX):
            idle = opened.enter_context(socket.create_connection((endpoint.host, endpoint.port), 20))
            idle.sendall(b"GET /readyz HT")
        for path in ("/healthz", "/readyz", "/metrics"):
            began = time.monotonic()
            assert ask(endpoint, path)[0] == 200
            assert time.monotonic() - began < 5
        eventually(lambda: endpoint._server._places._value == limits.HTTP_CLIENTS_MAX)
        assert not endpoint._server._asking


def test_an_inbox_that_is_removed_is_a_problem(address, serve, tmp_path):
    with running_hub(address, configured(Recorder(), "spill", spool_dir=tmp_path / "inbox")) as hub:
        endpoint = serve(hub)
        assert health(endpoint, "/readyz")[0] == 200
        directory = hub.lanes[0].inbox.directory
        directory.rename(tmp_path / "elsewhere")
        status, report = health(endpoint, "/readyz")
        assert (status, report["problems"]) == (503, ["consumer recorder: the directory of its inbox is gone"])
        (tmp_path / "elsewhere").rename(directory)
        assert health(endpoint, "/readyz")[0] == 200


def test_an_inbox_whose_disk_does_not_answer_is_a_problem(address, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "HANG_S_MAX", 0.5)
    frozen, sync = threading.Event(), os.fdatasync
    go = threading.Event()

    def hang(descriptor):
        frozen.set()
        assert go.wait(60)
        sync(descriptor)

    with (
        running_hub(address, configured(Recorder(), "spill", spool_dir=tmp_path / "inbox")) as hub,
        worker_link(address) as link,
    ):
        endpoint = serve(hub)
        send(link)
        eventually(lambda: not link.counters["unacked_frames"])
        monkeypatch.setattr(os, "fdatasync", hang)
        try:
            send(link, step=1)
            assert frozen.wait(20)
            eventually(lambda: health(endpoint, "/readyz")[0] == 503)
            assert "has taken nothing for" in health(endpoint, "/readyz")[1]["problems"][0]
        finally:
            monkeypatch.setattr(os, "fdatasync", sync)
            go.set()
        eventually(lambda: health(endpoint, "/readyz")[0] == 200)


WITHOUT_DESCRIPTORS = """
import http.client, os, resource, sys, tempfile, threading, time
from tests.kit.hubs import Recorder, running_hub
from capflow.hub.monitor.endpoint import Endpoint
from capflow_consumers.duckdb.port import SqlPort, port_path
from pathlib import Path

with tempfile.TemporaryDirectory() as directory, running_hub(f"ipc://{directory}/h", Recorder()) as hub:
    endpoint = Endpoint(hub, "127.0.0.1", 0)
    endpoint.start()
    port = SqlPort(Path(directory, "rows.duckdb"), lambda sql: None)
    port.open()
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    print(endpoint.port, port.path, flush=True)
    sys.stdin.readline()
    used = time.process_time()
    # The time in which the use of the processor is measured.
    time.sleep(1)
    used = time.process_time() - used
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    print(used, port._threads[0].is_alive(), flush=True)
    sys.stdin.readline()
    port.close()
    endpoint.stop()
"""


def test_a_process_without_descriptors_does_not_spin_and_answers_later():
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process, contextlib.ExitStack() as opened:
        port, path = process.stdout.readline().split()
        for _ in range(5):
            opened.enter_context(socket.create_connection(("127.0.0.1", int(port)), 20))
        unix = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        unix.connect(path)
        process.stdin.write("\n")
        process.stdin.flush()
        used, lives = process.stdout.readline().split()
        assert float(used) < 0.5
        assert lives == "True"
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        unix.settimeout(20)
        unix.sendall(b"nonsense\n")
        assert b"error" in unix.recv(4096)
        process.communicate("\n", timeout=30)
