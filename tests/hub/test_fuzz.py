"""Nearly right messages: each is taken or refused as the peer's fault, for no more memory than what came is worth.

What a hub and a peer read is tried alone, and a hub in a process of its own over its socket. `make proof` tries 100,000
of each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import zmq

from capflow import limits
from capflow.capture.frame import Frame
from capflow.errors import RemoteProtocolError
from capflow.protocol import message
from capflow.protocol.message import Act, Bye, Hello, Refused, Status
from capflow.protocol.session import HubSession, PeerSession
from capflow.steering.action import Abort, Rejected
from capflow.transport.client import Client
from capflow.transport.keys import AllowList, write_key
from capflow.transport.zap import new_key
from tests.kit.frames import make_frame, make_hello
from tests.kit.hubs import Recorder, address, answer, free_port, raw_peer, running_hub, scheduler_link, worker_link
from tests.kit.mutations import CORPUS, SIDES, mutated, role_of
from tests.kit.sessions import open_hub, open_peer
from tests.kit.waiting import eventually

__all__ = ["address"]

SHORT, LONG = 5_000, 100_000
FEW = pytest.param(SHORT, id="few")
MANY = pytest.param(LONG, id="many", marks=[pytest.mark.long, pytest.mark.timeout(1800)])

BYTES_PER_BYTE_MAX = {"hub": 32, "peer": 80}
"""What a message may take of memory while a side reads it, for each of its bytes. A peer takes answers of any shape, in
which an empty object is one byte long and 64 in Python's memory; a hub does not."""

BYTES_FIXED_MAX = 96 * 1024
"""And besides: the error, its traceback and its message."""

HUB_GROWTH_BYTES_MAX = 64 * limits.MIB
"""By how much garbage may make a hub's process grow."""


def session(side):
    """Return one that is about to read what that side reads."""
    kind, _, role = side.partition("/")
    if kind == "hub":
        return HubSession() if role == "new" else open_hub(role)
    if role != "new":
        return open_peer(role)
    peer = PeerSession(make_hello())
    peer.connected(0.0)
    return peer


def worth(side, size):
    """Return what a side may take of memory for a message of that size."""
    return BYTES_PER_BYTE_MAX[side.partition("/")[0]] * size + BYTES_FIXED_MAX


def read(side, parts):
    """Return what became of a message: `refused`, or the type that it was taken for; raise for anything else."""
    reading = session(side)
    try:
        text = reading.receive(parts, 1.0)
    except RemoteProtocolError as e:
        text = e
    if isinstance(text, RemoteProtocolError):
        assert "\n" not in str(text)
        assert len(str(text)) < 2000
        return "refused"
    if isinstance(text, Frame):
        total = 0
        for chunk in text.chunks():
            assert chunk.rows.shape[1] == len(chunk.token_ids)
            total += chunk.rows.nbytes
        assert total <= len(text.payload) * 64  # spans may overlap, and lie inside all the same
    return type(text).__name__


@pytest.mark.parametrize("count", [FEW, MANY])
def test_each_is_taken_or_refused(count):
    became, peak = Counter(), (0.0, 0, 0, 0)
    tracemalloc.start()
    try:
        for seed in range(count):
            parts = mutated(seed)
            side = role_of(seed, parts)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                became[read(side, parts)] += 1
            except Exception as e:  # noqa: BLE001  which it is, is what is asked
                pytest.fail(f"seed {seed}, {side}: {e!r}")
            taken = tracemalloc.get_traced_memory()[1] - before
            size = sum(map(len, parts))
            allowed = worth(side, size)
            assert taken <= allowed, f"seed {seed}: {taken} bytes for {size} that came"
            peak = max(peak, (taken / allowed, taken, size, seed))
    finally:
        tracemalloc.stop()
    print(f"{count} messages: {dict(became)}; nearest to the bound, {peak[0]:.2f}: {peak[1]} bytes for {peak[2]}")
    assert sum(became.values()) == count
    assert became["refused"] > count / 2
    assert count - became["refused"] > count / 20, "hardly any gets past the first check"
    assert {"Frame", "Hello", "Act", "Await", "Status", "Welcome", "Ack", "Results"} <= set(became)


@pytest.mark.parametrize("side", SIDES)
def test_what_it_begins_with_is_right(side):
    """The corpus, unmutated, has something for every side to take."""
    assert any(read(side, parts) != "refused" for parts in CORPUS)


def crowd(unit, count):
    return b"\xdd" + count.to_bytes(4, "big") + unit * count


def entry(key, value):
    return msgspec.msgpack.encode(key) + value


def crowded_hello(unit, count):
    model = b"\x81" + entry("sites", crowd(unit, count))
    return b"\x82" + entry("type", b"\xa5hello") + entry("model", model)


def crowded_frame(key, unit, count):
    return b"\x82" + entry("type", b"\xa5frame") + entry(key, crowd(unit, count))


def crowded_request(key, unit, count):
    return crowded_frame("requests", b"\x81" + entry(key, crowd(unit, count)), 1)


def capture(inner):
    return b"\x81" + entry("capture", inner)


_SIZE = 300_000
CROWDS = {
    "sites of a hello": [crowded_hello(b"\x82\xa4rows\x00\xa6reason\xa0", _SIZE)],
    "counters of a question": [b"\x82" + entry("type", b"\xa6status") + entry("counters", crowd(b"\x90", _SIZE))],
    "names awaited": [b"\x82" + entry("type", b"\xa5await") + entry("requests", crowd(b"\xa2ab", _SIZE // 4))],
    "unknown fields": [b"\x82" + entry("type", b"\xa5await") + entry("new", crowd(b"\x80", _SIZE))],
    "token ids": [crowded_request("token_ids", b"\xcd\x10\x00", _SIZE), b""],
    "texts": [crowded_request("texts", b"\xa2ab", _SIZE), b""],
    "blocks": [crowded_frame("blocks", b"\x93\x90\x00\x90", _SIZE), b""],
    "spans": [crowded_frame("blocks", b"\x93\x90\x00" + crowd(b"\x94\x00\x00\x00\x00", _SIZE), 1), b""],
    "sites of a block": [crowded_frame("blocks", b"\x93" + crowd(b"\x82\xa4rows\x00\xa6reason\xa0", _SIZE), 1), b""],
    "requests": [crowded_frame("requests", b"\x80", _SIZE), b""],
    "hooks": [crowded_frame("requests", capture(b"\x81" + entry("hooks", crowd(b"\x80", _SIZE))), 1), b""],
    "positions": [crowded_frame("requests", capture(b"\x81" + entry("positions", crowd(b"\x80", _SIZE))), 1), b""],
    "deep positions": [crowded_frame("requests", capture(b"\x81" + entry("positions", b"\x91" * _SIZE)), 1), b""],
    "ends": [crowded_frame("finished", b"\x81\xa2id\xa0", _SIZE), b""],
    "reasons": [
        crowded_frame("finished", b"\x81" + entry("dropped", crowd(b"\x82\xa4rows\x00\xa6reason\xa0", _SIZE)), 1),
        b"",
    ],
    "counters of an answer": [
        b"\x82" + entry("type", b"\xa6status") + entry("counters", b"\x81\xa0" + crowd(b"\x80", _SIZE)),
    ],
    "a string that says 4 GiB": [b"\x82" + entry("type", b"\xa7refused") + entry("reason", b"\xdb\xff\xff\xff\xffx")],
    "an array that says 4 Gi": [crowded_request("token_ids", b"", 0)[:-5] + b"\xdd\xff\xff\xff\xff\x01", b""],
    "a map that says 4 Gi": [
        b"\x82" + entry("type", b"\xa6status") + entry("counters", b"\xdf\xff\xff\xff\xff\xa0\x01"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("item", CROWDS)
def test_a_crowd_of_the_smallest_values_takes_no_more_than_its_bytes_are_worth(item):
    parts = CROWDS[item]
    size = sum(map(len, parts))
    peaks = dict.fromkeys(BYTES_PER_BYTE_MAX, 0)
    for side in SIDES:
        tracemalloc.start()
        try:
            read(side, parts)
            reader = side.partition("/")[0]
            peaks[reader] = max(peaks[reader], tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    print(f"{item}: {size} bytes, peak", {reader: f"{peak}, {peak / size:.1f} each" for reader, peak in peaks.items()})
    assert all(peak <= worth(reader, size) for reader, peak in peaks.items())


def test_a_first_message_is_small():
    big = message.encode(Hello("client", "e", "b" * limits.HELLO_BYTES_MAX))
    with pytest.raises(RemoteProtocolError, match=f"expected at most {limits.HELLO_BYTES_MAX}"):
        HubSession().receive([big], 0.0)


_HUB = """
import os, sys, threading
from capflow.plugins.consumer import Consumer
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from capflow.capture.spec import CaptureSpec

class Counter(Consumer):
    name = "counter"
    reads_requests = True
    def spec(self):
        return CaptureSpec({"post_block": "all"})
    def on_frame(self, frame):
        for chunk in frame.chunks():
            assert chunk.rows.shape[1] == len(chunk.token_ids)

with Hub(sys.argv[1], [ConfiguredConsumer.of(Counter(None), policy="drop")], key=sys.argv[2] or None):
    print("up", flush=True)
    sys.stdin.read()
"""


def settled(link):
    """Whether a hub has acknowledged all that was sent."""
    return not link.counters["queued_bytes"] and not link.counters["unacked_frames"]


class HubChild:
    """A hub in a process of its own, whose memory is looked at."""

    def __init__(self, address, log, key=""):
        self.address = address
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HUB, address, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        assert self.process.stdout.readline() == b"up\n"

    def memory(self, which="VmRSS"):
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))

    def close(self):
        """Stop it as a user would; return its exit code."""
        self.process.stdin.close()
        try:
            return self.process.wait(30)
        finally:
            self.process.send_signal(signal.SIGKILL)


def attack(address, seeds):
    """Send mutated messages, on a new connection whenever the hub is about to stop listening to the last.

    Before each next connection it waits until the hub has read all of this one: what a hub has not read yet waits in
    its memory, and how much that is says nothing of what reading leaves behind.
    """
    seeds = list(seeds)
    per_connection = limits.OFFENCES_MAX - 1
    for begin in range(0, len(seeds), per_connection):
        with raw_peer(address) as peer:
            for seed in seeds[begin : begin + per_connection]:
                parts = mutated(seed)
                side = role_of(seed, parts)
                role = side.partition("/")[2] if side.startswith("hub") else "worker"
                if role != "new":
                    model = Hello("client", "", "c") if role == "client" else make_hello(role=role)
                    peer.send(message.encode(model))
                peer.send_multipart(parts)
            peer.send(message.encode(Hello("client", "", "the-last")))
            peer.send(message.encode(Status()))
            while b"uptime_s" not in answer(peer, 120)[0]:
                pass
            # Without a Bye each session stays until it is silent for long; thousands of them leave no room for others.
            peer.set(zmq.LINGER, 1000)
            peer.send(message.encode(Bye()))


_ATTACKER = "import sys; from test_fuzz import attack; attack(sys.argv[1], range(*map(int, sys.argv[2:])))"


def attackers(address, count, many=3):
    """Start processes that between them send so many messages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return [
        subprocess.Popen([sys.executable, "-c", _ATTACKER, address, f"{n}", f"{count}", f"{many}"], env=environment)
        for n in range(many)
    ]


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_hub_that_is_sent_them_serves_the_others(address, tmp_path, count):
    with (tmp_path / "log").open("wb") as log:
        hub = HubChild(address, log)
        # Without keys whoever calls itself by another's name is taken for it: this one's nobody else knows.
        with worker_link(address, make_hello("good", "good")) as link, Client(address, timeout=60) as client:
            client.status()
            frame = make_frame([("good", 4, 0, 4)], engine="good", boot="good")
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: settled(link))
            before = hub.memory()
            attacking = attackers(address, count)
            step, slowest = 1, 0.0
            while any(attacker.poll() is None for attacker in attacking):
                began = time.monotonic()
                frame = make_frame([("good", 4, step * 4, 4)], engine="good", boot="good")
                assert link.send(frame.header, frame.payload) is None
                step += 1
                eventually(lambda: settled(link))
                slowest = max(slowest, time.monotonic() - began)
            assert [attacker.wait() for attacker in attacking] == [0] * len(attacking)
            status = client.status()
            mine = next(s for s in status["sessions"] if s["role"] == "worker" and s["engine"] == "good")
            grown = hub.memory("VmHWM") - before
        code = hub.close()
    text = (tmp_path / "log").read_text(errors="replace")
    print(
        f"{count} messages: {status['protocol_errors']} refused, {grown / limits.MIB:.1f} MiB grown at the most, "
        f"{step} frames beside them, the slowest acknowledged after {slowest:.3f} s, {len(text.splitlines())} log lines"
    )
    assert code == 0
    assert mine["frames"] == step
    assert link.reconnects == 0
    assert status["protocol_errors"] > count / 4
    assert len(status["refused"]) <= limits.REFUSALS_MAX + 1
    assert grown <= HUB_GROWTH_BYTES_MAX
    assert "Traceback" not in text
    assert "the hub failed" not in text


class TestAPeerThatGoesOnAndOn:
    def test_is_ignored_and_the_others_are_not(self, address, caplog):
        consumer = Recorder()
        with running_hub(address, consumer) as hub, worker_link(address) as link, raw_peer(address) as peer:
            for _ in range(limits.OFFENCES_MAX):
                peer.send(b"garbage")
                assert isinstance(message.decode(answer(peer)[0]), Refused)
            for number in range(500):
                peer.send(b"garbage %d" % number)
            eventually(lambda: hub.counts.ignored == 500)
            assert not peer.poll(100)
            assert hub.counts.protocol_errors == limits.OFFENCES_MAX
            peer.send(message.encode(Hello("client", "", "c")))  # nor is it listened to when it is right
            assert not peer.poll(100)
            assert caplog.text.count("cut off") == 1
            assert caplog.text.count("ignoring") == 1
            frame = make_frame()
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: consumer.rows["r1"] == 4)
            assert link.reconnects == 0
            assert hub.status()["ignored_messages"] == 501

    def test_is_listened_to_again_after_a_while(self, address, monkeypatch):
        monkeypatch.setattr(limits, "IGNORED_S", 0.3)
        with running_hub(address, Recorder()) as hub, raw_peer(address) as peer:
            for _ in range(limits.OFFENCES_MAX + 1):
                peer.send(b"garbage")
            eventually(lambda: hub.counts.ignored)

            def heard():
                peer.send(message.encode(Hello("client", "", "c")))
                return peer.poll(50) and isinstance(message.decode(answer(peer)[0]), message.Welcome)

            eventually(heard)

    def test_makes_the_hub_remember_only_so_much_of_it(self, address, monkeypatch):
        monkeypatch.setattr(limits, "OFFENCES_MAX", 10**9)
        with running_hub(address, Recorder()) as hub, raw_peer(address) as peer:
            for number in range(limits.REFUSALS_MAX * 2):
                hello = msgspec.structs.replace(make_hello(), version=number + 2)
                peer.send(message.encode(hello))
            eventually(lambda: hub.counts.protocol_errors == limits.REFUSALS_MAX * 2)
            refused = hub.status()["refused"]
            assert len(refused) == limits.REFUSALS_MAX + 1
            assert refused["other reasons"] == limits.REFUSALS_MAX


def test_a_client_that_became_a_worker_is_not_told_what_it_asked_for_and_nobody_else_suffers(address, caplog):
    with running_hub(address, Recorder()) as hub, raw_peer(address) as peer, Client(address) as client:
        with scheduler_link(address) as scheduler:
            peer.send(message.encode(Hello("client", "", "c")))
            peer.send(message.encode(Act("1", Abort("r1"))))
            acts = []
            eventually(lambda: acts.extend(scheduler.actions()) or acts)
            peer.send(message.encode(make_hello("other")))
            eventually(lambda: any(s["engine"] == "other" for s in client.status()["sessions"]))
            scheduler.outcome(Rejected(acts[0].id, "no such request"))
            eventually(lambda: not hub.status()["actions"]["waiting"])
            assert client.status()
            assert scheduler.connected
            assert scheduler.reconnects == 0
        assert hub.counts.protocol_errors == 0
        assert "the hub failed" not in caplog.text


def test_a_hub_with_a_key_bears_bytes_that_are_no_handshake(tmp_path, monkeypatch):
    """Strangers get as far as ZMQ's handshake: whatever they say there, those with a key are served."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keys = tmp_path / "capflow" / "keys"
    keys.mkdir(parents=True, mode=0o700)
    write_key(keys, "hub", pair := new_key())
    AllowList(keys).allow(new_key().public, ["read"], "other")
    port = free_port()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + os.urandom(32) + bytes(8) + os.urandom(80)
    with (tmp_path / "log").open("wb") as log:
        hub = HubChild(f"tcp://127.0.0.1:{port}", log, key="hub")
        before = hub.memory()
        keyed = f"tcp://{pair.public}@127.0.0.1:{port}"
        with worker_link(keyed, key="hub") as link:
            for number in range(400):
                text = (greeting, greeting + hello, os.urandom(500), greeting[:30], greeting + os.urandom(300))
                with socket.create_connection(("127.0.0.1", port)) as raw, contextlib.suppress(OSError):
                    raw.sendall(text[number % len(text)])
            frame = make_frame()
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: settled(link))
            assert link.reconnects == 0
            grown = hub.memory("VmHWM") - before
        assert hub.close() == 0
    assert grown <= HUB_GROWTH_BYTES_MAX
