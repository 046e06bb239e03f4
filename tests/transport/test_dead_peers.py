"""Connections on which nobody answers: each side notices in time, and nothing that was promised is lost with them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest

from capflow import limits
from capflow.protocol import message
from capflow.protocol.message import Await, Hello, Welcome
from capflow.transport.address import hub_key, with_key
from capflow.transport.client import Client
from capflow.transport.keys import write_key
from capflow.transport.outbox import Outbox
from capflow.transport.zap import new_key
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder, address, answer, configured, free_port, raw_peer, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]


class Wire:
    """A TCP address that leads to another. Once quiet, it takes all bytes, passes none on and closes nothing."""

    def __init__(self, address):
        self.target = int(address.rpartition(":")[2])
        self.quiet = threading.Event()
        self.sockets = []
        self._listen(0)
        self.address = f"tcp://127.0.0.1:{self.server.getsockname()[1]}"
        if hub_key(address):
            self.address = with_key(self.address, hub_key(address))

    def _listen(self, port):
        self.server = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, args=(self.server,), daemon=True).start()

    def _accept(self, server):
        with contextlib.suppress(OSError):
            while True:
                near, _ = server.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self.sockets += [near, far]
                quiet = self.quiet  # those made later pass again
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, sink, quiet), daemon=True).start()

    def _copy(self, source, sink, quiet):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not quiet.is_set():
                    sink.sendall(data)
            if not quiet.is_set():
                sink.close()

    def go_quiet(self):
        """Pass nothing more on the connections that are there; new ones work."""
        was, self.quiet = self.quiet, threading.Event()
        was.set()

    def cut(self):
        """Be gone: pass nothing more, and refuse every connection until `mend`."""
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.go_quiet()

    def mend(self):
        """Take connections again, at the same address."""
        self._listen(int(self.address.rpartition(":")[2]))

    def close(self):
        self.server.close()
        for one in self.sockets:
            one.close()


@contextlib.contextmanager
def hub_on_tcp(consumer, **kwargs):
    with running_hub(f"tcp://127.0.0.1:{free_port()}", consumer, **kwargs) as hub:
        yield hub


@pytest.fixture
def quick(monkeypatch):
    """Have both sides give up sooner."""
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(limits, "SILENCE_S_MAX", 0.6)


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "key"])
def test_a_worker_notices_that_its_hub_is_not_reached_any_more_and_loses_nothing(quick, keyed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keys = tmp_path / "capflow" / "keys"
    keys.mkdir(parents=True, mode=0o700)
    write_key(keys, "hub", new_key())
    key = "hub" if keyed else None
    consumer = Recorder()
    with (
        hub_on_tcp(consumer, key=key) as hub,
        contextlib.closing(Wire(hub.address)) as wire,
        worker_link(wire.address, key=key) as link,
    ):
        frames = [make_frame([("r1", 4, step * 4, 4)]) for step in range(30)]
        for frame in frames[:10]:
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: len(consumer.seqs) == 10 and not link.counters["unacked_frames"])
        wire.go_quiet()
        began = time.monotonic()
        for frame in frames[10:]:
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: link.reconnects)
        assert time.monotonic() - began < 15
        eventually(lambda: consumer.seqs == list(range(1, 31)))
        eventually(lambda: not link.counters["unacked_frames"])


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_a_worker_that_spills_loses_nothing_however_long_the_network_is_gone(quick, tmp_path, policy):
    """Both sides have given each other up long before it is back, and everything since then waited on disk."""
    hello = make_hello()
    outbox = Outbox.of(tmp_path / "outbox", hello, limits.SPOOL_BYTES_DEFAULT)
    consumer = Recorder()
    spill = {"spool_dir": tmp_path / "inbox"} if policy == "spill" else {}
    with (
        hub_on_tcp(configured(consumer, policy, **spill)) as hub,
        contextlib.closing(Wire(hub.address)) as wire,
        Client(hub.address, 20) as client,
        worker_link(wire.address, hello, policy="spill", outbox=outbox, outbound_bytes_max=20_000) as link,
    ):
        frames = [make_frame([("r1", 4, step * 4, 4)], step=step) for step in range(100)]
        frames += [make_frame([("r2", 4, step * 4, 4)], step=step) for step in range(100, 200)]
        frames.append(make_frame([], finished=[make_finished("r2", computed_length=400, rows=400)], step=200))
        for frame in frames[:50]:
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: consumer.rows["r1"] == 200)
        wire.cut()
        began = time.monotonic()
        for frame in frames[50:]:
            assert link.send(frame.header, frame.payload) is None
            # The pace of the worker: it sends for longer than the silence that the hub bears.
            time.sleep(3 * limits.SILENCE_S_MAX / 150)
        eventually(lambda: hub.counts.sessions_lost == 1 and not link.connected)
        eventually(lambda: time.monotonic() - began > 5 * limits.SILENCE_S_MAX)
        assert link.outbox.waiting > 100
        wire.mend()
        assert client.results(["r2"], timeout=20)["r2"]["recorder"].status == "ok"
        assert consumer.rows == {"r1": 400, "r2": 400}
        assert consumer.seqs == list(range(1, 201))
        eventually(lambda: not link.outbox.unacknowledged)


def test_a_hub_that_moves_is_found_behind_the_address_that_it_has_kept(quick):
    """A name of a machine or a service may lead to another machine and port after a reconnect."""
    before, after = Recorder(), Recorder()
    with hub_on_tcp(before) as hub, contextlib.closing(Wire(hub.address)) as wire, worker_link(wire.address) as link:
        first = make_frame([("r1", 4, 0, 4)])
        assert link.send(first.header, first.payload) is None
        eventually(lambda: before.rows["r1"] == 4 and not link.counters["unacked_frames"])
        with hub_on_tcp(after) as moved:
            assert port_of(moved) != port_of(hub)
            wire.target = port_of(moved)
            wire.go_quiet()
            second = make_frame([("r2", 4, 0, 4)], finished=[make_finished("r2")])
            assert link.send(second.header, second.payload) is None
            eventually(lambda: "r2" in after.done)
            assert link.reconnects == 1
    assert before.rows == {"r1": 4}
    assert after.rows == {"r2": 4}


def test_a_client_notices(quick):
    with (
        hub_on_tcp(Recorder()) as hub,
        contextlib.closing(Wire(hub.address)) as wire,
        Client(wire.address, 20) as client,
    ):
        assert client.status()
        wire.go_quiet()
        began = time.monotonic()
        with pytest.raises(Exception, match="no hub answers"):
            client.results(["r1"], timeout=30)
        assert time.monotonic() - began < 20


def test_a_hub_notices_a_worker_that_is_not_reached_any_more(quick):
    consumer = Recorder()
    with (
        hub_on_tcp(consumer) as hub,
        contextlib.closing(Wire(hub.address)) as wire,
        worker_link(wire.address) as link,
    ):
        frame = make_frame()
        link.send(frame.header, frame.payload)
        eventually(lambda: consumer.rows["r1"] == 4)
        wire.server.shutdown(socket.SHUT_RDWR)  # nor can it come back
        wire.go_quiet()
        eventually(lambda: consumer.done)
        assert consumer.done["r1"].status == "error"
        assert hub.counts.sessions_lost == 1


def closed_after(raw, limit_s):
    """Return after how many seconds the other side closed a socket."""
    began = time.monotonic()
    raw.settimeout(limit_s)
    with contextlib.suppress(ConnectionError):
        while raw.recv(4096):
            pass
    return time.monotonic() - began


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY_BODY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_READY = b"\x04" + bytes([len(_READY_BODY)]) + _READY_BODY


@pytest.mark.parametrize("greeting", [b"", _GREETING[:20], _GREETING], ids=["nothing", "half a greeting", "no more"])
def test_a_hub_closes_a_connection_that_is_never_made(monkeypatch, greeting):
    monkeypatch.setattr(limits, "HANDSHAKE_S_MAX", 0.5)
    with hub_on_tcp(Recorder()) as hub, socket.create_connection(("127.0.0.1", port_of(hub))) as raw:
        raw.sendall(greeting)
        assert closed_after(raw, 20) < 18


def test_a_hub_closes_a_connection_on_which_nobody_answers(monkeypatch):
    """A peer that was let in, said Hello and is gone without a word leaves no descriptor behind."""
    monkeypatch.setattr(limits, "SILENCE_S_MAX", 3.0)
    monkeypatch.setattr(limits, "HANDSHAKE_S_MAX", 3.0)
    with hub_on_tcp(Recorder()) as hub, socket.create_connection(("127.0.0.1", port_of(hub))) as raw:
        raw.sendall(_GREETING + _READY)
        raw.settimeout(20)
        received = b""
        while b"READY" not in received:
            received += raw.recv(4096)
        hello = message.encode(Hello("client", "", "c"))
        raw.sendall(bytes([0, len(hello)]) + hello)
        eventually(lambda: hub.snapshot().sessions == 1)
        assert closed_after(raw, 20) < 18


def port_of(hub):
    return int(hub.address.rpartition(":")[2])


def test_a_hub_gives_up_a_peer_that_takes_nothing_of_what_is_sent_to_it(address, monkeypatch):
    """It asks and asks and never reads: what waits for it is bounded, and the others notice nothing."""
    monkeypatch.setattr(limits, "MESSAGES_UNSENT_MAX", 1000)
    consumer = Recorder()
    with running_hub(address, consumer) as hub, worker_link(address) as link, raw_peer(address) as peer:
        peer.send(message.encode(Hello("client", "", "c")))
        assert isinstance(message.decode(answer(peer)[0]), Welcome)
        asks = message.encode(Await(tuple(f"{number}" + "x" * 400 for number in range(200)), wait=False))
        for _ in range(200):
            peer.send(asks)
        eventually(lambda: hub.snapshot().sessions == 1)
        frame = make_frame()
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: consumer.rows["r1"] == 4)
        assert link.reconnects == 0
        assert hub.counts.protocol_errors == 0


def test_a_worker_that_does_not_read_its_acknowledgements_is_given_up_and_taken_up_again(address, monkeypatch):
    monkeypatch.setattr(limits, "MESSAGES_UNSENT_MAX", 8)
    consumer = Recorder()
    hello = make_hello(model=make_model(hidden=1))
    with running_hub(address, consumer) as hub:
        with raw_peer(address) as peer:
            peer.send(message.encode(hello))
            answer(peer)
            # Acknowledgements are some 40 bytes: they fill socket buffers first.
            for seq in range(1, 20_001):
                peer.send_multipart(make_frame([("r1", 4, 0, 1)], hidden=1, seq=seq).encode())
                if not seq % 500 and hub.counts.sessions_lost:
                    break
            eventually(lambda: hub.counts.sessions_lost == 1)
            assert hub.snapshot().sessions == 0
        with raw_peer(address) as peer:
            peer.send(message.encode(hello))
            assert message.decode(answer(peer)[0]).last_seq == hub.counts.frames
