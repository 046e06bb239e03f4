"""Attacks on a hub by peers that speak the protocol, each in its own process.

Run as `python attacks.py NAME ADDRESS SECONDS`. It prints a line when it is ready, and begins when it reads one.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import msgspec
import zmq

from capflow import limits
from capflow.capture.frame import Block, Frame, RequestRows, Span
from capflow.capture.site import Site
from capflow.protocol import message
from capflow.protocol.message import Await, Beat, Hello, Status
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import answer, raw_peer


@contextlib.contextmanager
def said_hello(address, hello):
    with raw_peer(address) as peer:
        peer.send(message.encode(hello))
        answer(peer, 5)
        yield peer


def flood(peer, parts, seconds, *, read=False):
    """Send a message for some seconds, as often as it is taken."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(zmq.Again):
            while time.monotonic() < end:
                peer.send_multipart(parts, zmq.NOBLOCK)
        if read:
            with contextlib.suppress(zmq.Again):
                while True:
                    peer.recv_multipart(zmq.NOBLOCK)
        # The pause between two floods.
        time.sleep(0.001)


def awaits(address, seconds):
    """Ask again and again what became of 100,000 requests, and read the answers."""
    asks = message.encode(Await(tuple(f"{number}" for number in range(100_000)), wait=False))
    with said_hello(address, Hello("client", "", "a")) as peer:
        yield
        flood(peer, [asks], seconds, read=True)


def unread(address, seconds):
    """Ask again and again what became of 100,000 requests, and read no answer; be taken up again when given up."""
    asks = message.encode(Await(tuple(f"{number}" for number in range(100_000)), wait=False))
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(AssertionError), said_hello(address, Hello("client", "", "u")) as peer:
            flood(peer, [asks], min(0.5, seconds))


def status(address, seconds):
    """Ask for the status, as often as it is taken, and read nothing."""
    with said_hello(address, Hello("client", "", "s")) as peer:
        yield
        flood(peer, [message.encode(Status())], seconds)


def beats(address, seconds):
    """Send more than the hub has read yet, and close: its library has a full pipe of a connection that is gone."""
    beat = [message.encode(Beat())]
    with contextlib.ExitStack() as left:
        peers = [left.enter_context(contextlib.ExitStack()) for _ in range(8)]
        raw = [peer.enter_context(said_hello(address, Hello("client", "", f"b{n}"))) for n, peer in enumerate(peers)]
        yield
        for peer, each in zip(peers, raw, strict=True):
            flood(each, beat, seconds / len(peers))
            peer.close()


def ends(address, seconds):
    """Send frames with more ends of requests than a frame may have, then frames with as many as it may."""
    finished = tuple(make_finished(f"{number}", 4, 4, rows=0) for number in range(300_000))
    frame = make_frame([], finished=finished, engine="hostile", boot="boot-h")
    large = frame.encode()
    several = []
    for seq in range(1, 500):
        some = finished[seq * limits.FINISHED_PER_FRAME_MAX :][: limits.FINISHED_PER_FRAME_MAX]
        several.append(Frame(msgspec.structs.replace(frame.header, seq=seq, finished=some), b"").encode())
    hello = make_hello("hostile", "boot-h")
    with said_hello(address, hello) as one, said_hello(address, hello) as other:
        yield
        one.send_multipart(large)
        for parts in several:
            other.send_multipart(parts)
        # What the attack is: everything is sent, and the connection stays.
        time.sleep(seconds)


def headers(address, seconds):
    """Send frames with as many spans as a frame may have, whose last span shows that they are to be refused."""
    count = limits.SPANS_PER_FRAME_MAX
    request = RequestRows("r", 4, 0, (1,) * 2 * count)
    spans = tuple(Span(0, 2 * row, 1, min(row, count - 2)) for row in range(count))
    block = Block((Site(0, "post_block"),), count, spans)
    frame = make_frame([], engine="hostile", boot="boot-h")
    header = msgspec.structs.replace(
        frame.header, requests=(request,), blocks=(block,), hidden_size=1, dtype="float16", payload_bytes=2 * count
    )
    parts = [msgspec.msgpack.encode(header), bytes(2 * count)]
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(AssertionError), said_hello(address, make_hello("hostile", "boot-h")) as peer:
            flood(peer, parts, 0.5)


def leaves(address, seconds):
    """Open as many requests as there is room for, restart, which ends them all, and repeat; the same with questions."""
    names = [f"{number}" for number in range(limits.AWAITED_MAX)]
    asks = message.encode(Await(tuple(names), wait=True))
    steps = [
        make_frame([(name, 4, 0, 1) for name in names[first : first + 4000]], engine="hostile", seq=seq).header
        for seq, first in enumerate(range(0, len(names), 4000), 1)
    ]
    payload = bytes(steps[0].payload_bytes)
    encoded = [Frame.seal(header, payload).header for header in steps]
    yield
    end = time.monotonic() + seconds
    for number in range(10**9):
        if time.monotonic() >= end:
            return
        boot = f"boot-{number}"
        with contextlib.suppress(AssertionError), said_hello(address, make_hello("hostile", boot)) as peer:
            for header in encoded:
                peer.send_multipart(Frame(msgspec.structs.replace(header, boot=boot), payload).encode())
            with said_hello(address, Hello("client", "", f"l{number}")) as client:
                client.send(asks)
                # The pace of the attack.
                time.sleep(0.5)


def hellos(address, seconds):
    """Be refused under ever new names."""
    yield
    end = time.monotonic() + seconds
    with raw_peer(address) as peer:
        for number in range(10**9):
            hello = message.encode(make_hello(f"name{number}\nfaked", f"{number}"))
            flood(peer, [hello], 0.0002, read=True)
            if time.monotonic() >= end:
                return


def idle(address, seconds):
    """Open 2,000 connections, again and again, and say nothing."""
    host, _, port = address.rpartition("/")[2].rpartition("@")[2].rpartition(":")
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.ExitStack() as opened:
            with contextlib.suppress(OSError):
                for _ in range(2_000):
                    opened.enter_context(socket.create_connection((host, int(port)), 5))
            # The pace of the attack.
            time.sleep(0.5)


ATTACKS = {each.__name__: each for each in (awaits, unread, status, beats, ends, headers, leaves, hellos, idle)}


@contextlib.contextmanager
def attacking(address, seconds, *names):
    """Run attacks, prepared, each in a process; give what begins them."""
    command = [sys.executable, __file__]
    with contextlib.ExitStack() as started:
        attackers = [
            started.enter_context(
                subprocess.Popen(
                    [*command, name, address, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for name in names
        ]
        try:
            for attacker in attackers:
                assert attacker.stdout.readline() == "ready\n"

            def begin():
                for attacker in attackers:
                    attacker.stdin.write("\n")
                    attacker.stdin.flush()

            yield begin
            for attacker in attackers:
                attacker.wait(60)
        finally:
            for attacker in attackers:
                attacker.kill()


def acknowledged_s(link, seconds):
    """Send a frame every 20 ms without waiting; return the sorted times from each frame to its acknowledgement."""
    sent, took = [], []
    session = link._session
    before = session.acked
    began = time.monotonic()
    while len(took) < len(sent) or time.monotonic() - began < seconds:
        now = time.monotonic()
        assert not link.reconnects, "the hub went away"
        assert now - began < seconds + 60, f"{len(sent) - len(took)} frames are not acknowledged"
        took += [now - at for at in sent[len(took) : session.acked - before]]
        if now - began < seconds and now - began >= 0.02 * len(sent):
            frame = make_frame([("honest", 4, 0, 1)])
            assert link.send(frame.header, frame.payload) is None
            sent.append(now)
        # The pause between two looks.
        time.sleep(0.002)
    return sorted(took)


def percentile(took, share):
    """Return the time within which that share of sorted times lies."""
    return took[min(len(took) - 1, int(len(took) * share))]


if __name__ == "__main__":
    attack = ATTACKS[sys.argv[1]](sys.argv[2], float(sys.argv[3]))
    next(attack)
    print("ready", flush=True)
    sys.stdin.readline()
    next(attack, None)
