"""Peers that speak the protocol and mean harm: the hub lives, and a well-behaved worker is acknowledged in time."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from capflow import limits
from capflow.capture.spec import CaptureSpec
from tests.kit.attacks import acknowledged_s, attacking, percentile
from tests.kit.frames import make_frame
from tests.kit.hubs import Recorder, address, raw_peer, running_hub, worker_link
from tests.kit.sources import PROCESSES
from tests.kit.waiting import eventually

__all__ = ["address"]

_CHILD = PROCESSES / "hostile_hub.py"


@contextlib.contextmanager
def hub_in_a_child(address):
    """Run a hub in another process, which an abort of its libraries ends; it must be alive at the end."""
    command = [sys.executable, str(_CHILD), address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.address = process.stdout.readline().strip()
            assert process.address
            yield process
            assert process.poll() is None, f"the hub ended with {process.returncode}"
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("transport", "attacks", "seconds"),
    [
        ("tcp", ["awaits", "beats"], 5),
        pytest.param("ipc", ["awaits", "beats"], 10, marks=pytest.mark.long),
        ("ipc", ["ends", "headers", "beats"], 4),
        ("tcp", ["status", "hellos", "unread"], 4),
    ],
)
def test_a_hub_outlives_floods_and_serves_an_honest_worker(address, transport, attacks, seconds):
    where = address if transport == "ipc" else "tcp://127.0.0.1:0"
    with (
        hub_in_a_child(where) as hub,
        worker_link(hub.address) as link,
        attacking(hub.address, seconds, *attacks) as begin,
    ):
        begin()
        took = acknowledged_s(link, seconds)
    assert percentile(took, 0.99) <= 3.0  # 0.25 where nothing else runs: see benchmarks/hostility.py


def test_a_connection_without_a_session_is_closed(address, monkeypatch):
    """Also one that was made, and says nothing."""
    monkeypatch.setattr(limits, "HANDSHAKE_S_MAX", 0.5)
    with running_hub("tcp://127.0.0.1:0", Recorder()) as hub, raw_peer(hub.address) as peer:
        eventually(lambda: len(hub._router.connections) == 1)
        eventually(lambda: hub._router.connections.closed >= 1)
        with worker_link(hub.address) as link, raw_peer(hub.address) as younger:
            eventually(lambda: hub._router.connections.closed >= 2)
            assert younger
            assert link.connected
            assert not link.reconnects
        assert peer


_ZMTP_1 = b"\x01\0" + b"\x02\x01a" + b"\x02\0b"  # an empty identity, then a message of two parts
_ZMTP_2 = b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + b"\0\0" + b"\x01\x01a" + b"\0\x01b"


@pytest.mark.parametrize("data", [_ZMTP_1, _ZMTP_2], ids=["1.0", "2.0"])
def test_a_peer_of_an_old_version_of_zmtp_is_disconnected_and_the_others_are_served(monkeypatch, caplog, data):
    monkeypatch.setattr(limits, "HANDSHAKE_S_MAX", 0.5)
    with running_hub("tcp://127.0.0.1:0", Recorder()) as hub, worker_link(hub.address) as link:
        with socket.create_connection(("127.0.0.1", int(hub.address.rpartition(":")[2]))) as old:
            old.sendall(data)
            old.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                while old.recv(4096):
                    pass
        frame = make_frame()
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: not link.counters["unacked_frames"])
        assert not link.reconnects
    assert not [record for record in caplog.records if getattr(record, "event", "") == "hub_failed"]


def test_who_is_refused_stays_connected_until_it_is_let_in(monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_S_MAX", 0.5)
    wants = CaptureSpec({"post_block": [99]}, "all")
    with (
        running_hub("tcp://127.0.0.1:0", Recorder(spec=wants)) as hub,
        worker_link(hub.address, wait=False) as link,
    ):
        eventually(lambda: link.refusal)
        with raw_peer(hub.address):
            eventually(lambda: hub._router.connections.closed >= 1)
        assert link.refusal
        assert hub.snapshot().refused == 1


def test_crowds_without_a_session_are_bounded_and_the_oldest_are_closed(monkeypatch):
    monkeypatch.setattr(limits, "CONNECTIONS_IDLE_MAX", 20)
    with (
        running_hub("tcp://127.0.0.1:0", Recorder()) as hub,
        worker_link(hub.address) as link,
        contextlib.ExitStack() as opened,
    ):
        port = int(hub.address.rpartition(":")[2])
        crowd = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        eventually(lambda: hub._router.connections.closed >= 40)
        eventually(lambda: len(hub._router.connections) == 21)
        crowd[0].settimeout(20)
        while crowd[0].recv(4096):
            pass  # the oldest is closed
        frame = make_frame()
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: not link.counters["unacked_frames"])
        assert not link.reconnects
