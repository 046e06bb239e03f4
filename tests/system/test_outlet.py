"""Standard error that nobody reads holds up nobody: what is not read is bounded, dropped and counted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from capflow import limits
from capflow.cli.logs import dropped_as_text
from capflow.system.stderr import Outlet
from capflow.transport.client import Client
from tests.kit.frames import make_frame, make_hello
from tests.kit.hubs import address, worker_link
from tests.kit.servers import environment
from tests.kit.waiting import eventually

__all__ = ["address"]


@pytest.fixture
def pipe():
    """The two ends of a pipe: what reads, and what is written to."""
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            continue


def read_all(reader):
    read = b""
    while piece := os.read(reader, 65536):
        read += piece
    return read.decode()


def test_what_is_written_is_there_in_order_at_the_end(pipe):
    reader, writer = pipe
    outlet = Outlet(writer, dropped_as_text)
    for number in range(1000):
        outlet.write(f"{number}\n")
    outlet.close()
    os.close(writer)
    assert read_all(reader) == "".join(f"{number}\n" for number in range(1000))
    assert outlet.lines_dropped == 0


def test_a_reader_that_comes_late_is_told_how_much_it_missed(pipe, monkeypatch):
    monkeypatch.setattr(limits, "LOG_UNREAD_BYTES_MAX", 10_000)
    reader, writer = pipe
    outlet = Outlet(writer, dropped_as_text)
    began = time.monotonic()
    for number in range(20_000):
        outlet.write(f"line {number} {'x' * 90}\n")
    assert time.monotonic() - began < 5
    assert outlet.lines_dropped > 15_000
    dropped = outlet.lines_dropped
    read = os.read(reader, 4096)
    while outlet._bytes:
        # The last piece may be read before it is counted as written.
        if select.select([reader], [], [], 0.05)[0]:
            read += os.read(reader, 4096)
    outlet.write("again\n")
    outlet.close()
    os.close(writer)
    lines = (read.decode() + read_all(reader)).splitlines()
    counts = [int(line.split()[1]) for line in lines if line.startswith("capflow: ")]
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert lines[-1] == "again"
    assert lines[-2].endswith("lines of the log are dropped: nobody read them in time")
    assert sum(counts) == dropped
    assert numbers == sorted(set(numbers))
    assert len(numbers) + dropped == 20_000


def test_an_end_does_not_wait_for_who_never_reads(pipe, monkeypatch):
    monkeypatch.setattr(limits, "LOG_END_S_MAX", 0.3)
    _, writer = pipe
    outlet = Outlet(writer, dropped_as_text)
    outlet.write("x" * 200_000)
    began = time.monotonic()
    outlet.close()
    outlet.write("more")
    assert time.monotonic() - began < 5
    assert not outlet._thread.is_alive()


def test_a_reader_that_is_gone_costs_nothing(pipe):
    reader, writer = pipe
    os.close(reader)
    outlet = Outlet(writer, dropped_as_text)
    outlet.write("to nobody\n")
    eventually(lambda: outlet._gone)
    outlet.write("to nobody\n")
    assert outlet.lines_dropped == 1
    outlet.close()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_hub_goes_on_while_nobody_reads_what_it_says(address, tmp_path, log_format):
    """The pipe of its standard error is full before the engines come."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    command = [sys.executable, "-m", "capflow", "run", "--address", address, "--consumer", "log"]
    hub = subprocess.Popen([*command, "--log-format", log_format], env=environment(tmp_path), stderr=writer)
    os.close(writer)
    try:
        for name in ("one", "two"):
            with worker_link(address, make_hello(name)) as link:
                frame = make_frame(engine=name)
                assert link.send(frame.header, frame.payload) is None
                eventually(lambda link=link: not link.counters["unacked_frames"])
        with Client(address) as client:
            assert client.status()["frames"] == 2
        hub.send_signal(signal.SIGINT)
        assert hub.wait(30) == 0
    finally:
        hub.kill()
        hub.wait()
        os.close(reader)


def test_lines_that_are_dropped_are_counted_by_the_hub(address, tmp_path):
    """A consumer logs a line for each request, more than the pipe and the bound hold."""
    program = "from capflow import limits; limits.LOG_UNREAD_BYTES_MAX = 20_000\nfrom capflow.cli import main; main()"
    command = [sys.executable, "-c", program, "run", "--address", address, "--consumer", "log", "--log-format", "json"]
    hub = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    try:
        with worker_link(address) as link, Client(address) as client:
            for number in range(6):
                ends = [f"r{number}-{each}" for each in range(200)]
                frame = make_frame([(end, 1, 0, 1) for end in ends], finished=[ended(end) for end in ends])
                assert link.send(frame.header, frame.payload) is None
                eventually(lambda: not link.counters["unacked_frames"])
            eventually(lambda: client.status()["log_lines_dropped"] > 0)
        hub.send_signal(signal.SIGINT)
        errors = hub.communicate(timeout=30)[1].splitlines()
    finally:
        hub.kill()
        hub.communicate()
    lines = [json.loads(line) for line in errors]
    dropped = sum(line["lines"] for line in lines if line["event"] == "log_dropped")
    requests = sum(line["event"] == "request" for line in lines)
    assert dropped > 0
    assert requests + dropped >= 1_200
    assert re.search("nobody read them", next(line["message"] for line in lines if line["event"] == "log_dropped"))


def ended(request):
    from tests.kit.frames import make_finished

    return make_finished(request, 1, 1, rows=1)
