"""Links and the hub's socket over real sockets: what is accepted arrives, whatever breaks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from capflow import limits
from capflow.capture.frame import Rank
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, HubUnreachableError
from capflow.hub.hub import Hub
from capflow.protocol import message
from capflow.protocol.message import Ack, Await, Beat, Bye, Hello, Refused, Results, Status, Welcome
from capflow.protocol.session import cost
from capflow.steering.action import Abort, ActionApplied
from capflow.transport import sockets
from capflow.transport.client import Client
from capflow.transport.links import link as link_module
from capflow.transport.links.worker import Staged, WorkerLink
from capflow.transport.sockets import Dealer, Router
from capflow.version import __version__
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import (
    Recorder,
    address,
    answer,
    configured,
    free_port,
    raw_peer,
    running_hub,
    scheduler_link,
    worker_link,
)
from tests.kit.waiting import eventually

__all__ = ["address"]


def send(link, *args, **kwargs):
    frame = make_frame(*args, **kwargs)
    return link.send(frame.header, frame.payload)


def send_steps(link, count, *, first=0, request="r1", rows=4):
    return [send(link, [(request, 4, step * rows, rows)], step=step) for step in range(first, first + count)]


_HUB = """
import sys, threading
from capflow.plugins.consumer import Consumer
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from capflow.capture.spec import CaptureSpec

class Writer(Consumer):
    name = "writer"
    def spec(self):
        return CaptureSpec({"post_block": "all"})
    def open(self, context):
        self.file = open(sys.argv[2], "a", buffering=1)
    def on_frame(self, frame):
        self.file.write(f"{frame.header.seq}\\n")

Hub(sys.argv[1], [ConfiguredConsumer.of(Writer(None))]).start()
threading.Event().wait()
"""


@contextlib.contextmanager
def hub_process(address, written):
    """Run a hub in a process of its own, and kill it at the end."""
    process = subprocess.Popen([sys.executable, "-c", _HUB, address, str(written)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["ipc", "tcp"])
def either_address(request, address):
    return address if request.param == "ipc" else f"tcp://127.0.0.1:{free_port()}"


class TestWorkerLink:
    def test_gets_every_frame_to_the_hub_in_order(self, either_address):
        consumer = Recorder()
        with running_hub(either_address, consumer), worker_link(either_address) as link:
            assert send_steps(link, 100) == [None] * 100
            eventually(lambda: consumer.rows["r1"] == 400)
            eventually(lambda: link.counters["unacked_frames"] == 0)
            assert consumer.seqs == list(range(1, 101))
            assert link.counters["frames"] == 100
            assert link.counters["dropped_frames"] == {}

    def test_keeps_frames_for_a_hub_that_is_expected(self, address):
        recorder = Recorder()
        with worker_link(address, wait=False) as link:
            assert send(link) == "no_hub"
            link.expect()
            assert send_steps(link, 3, first=1) == [None] * 3
            assert not link.ever_connected
            with running_hub(address, recorder):
                eventually(lambda: recorder.rows["r1"] == 12)

    def test_drops_at_once_while_no_hub_was_ever_there(self, address):
        with worker_link(address, wait=False) as link:
            before = time.monotonic()
            assert send_steps(link, 3) == ["no_hub"] * 3
            assert time.monotonic() - before < limits.BLOCK_S_MAX / 10
            assert not link.connected
            assert not link.ever_connected
            assert link.counters["dropped_frames"] == {"no_hub": 3}

    def test_connects_to_a_hub_that_comes_later(self, address):
        consumer, welcomes = Recorder(), []
        with worker_link(address, wait=False, on_welcome=welcomes.append) as link:
            assert send(link) == "no_hub"
            with running_hub(address, consumer):
                assert link.wait_welcome(20)
                assert send(link) is None
                eventually(lambda: consumer.rows["r1"] == 4)
                assert [type(w) for w in welcomes] == [Welcome]

    def test_resends_to_the_next_hub_what_the_last_did_not_handle(self, either_address):
        first, second = Recorder(held=True), Recorder()
        hub = Hub(either_address, [configured(first)])
        hub.start()
        with worker_link(either_address) as link:
            send_steps(link, 5)
            assert first.waiting.wait(20)
            eventually(lambda: hub.counts.frames == 5)
            stopping = threading.Thread(target=hub.stop, args=(0,))
            stopping.start()
            eventually(hub.lanes[0]._discarded.is_set)
            first.go.set()
            stopping.join(20)
            assert first.seqs == [1]
            eventually(lambda: not link.connected)
            assert send_steps(link, 5, first=5) == [None] * 5  # kept for the next hub
            with running_hub(either_address, second):
                eventually(lambda: link.counters["unacked_frames"] == 0 and link.counters["queued_bytes"] == 0)
                # The word that the first was handled may be lost with the connection: then that one comes again.
                assert second.seqs in (list(range(2, 11)), list(range(1, 11)))
                assert link.reconnects == 1

    def test_loses_nothing_when_hubs_are_killed(self, address, tmp_path):
        """Each hub writes down what it handled before it acknowledges it, and is killed at some point."""
        acked = 0
        with worker_link(address, wait=False) as link:
            for run in range(3):
                written = tmp_path / f"seqs{run}"
                with hub_process(address, written):
                    eventually(lambda: link.connected)
                    assert send_steps(link, 40, first=run * 40) == [None] * 40
                    eventually(lambda path=written: path.exists() and len(path.read_text().split()) > 3)
                eventually(lambda: not link.connected)
                handled = [int(line) for line in written.read_text().split()]
                # Each hub starts after the acknowledged frames: a frame comes again only if it never was.
                assert handled == list(range(acked + 1, acked + len(handled) + 1))
                counters = link.counters
                last, acked = acked, 40 * (run + 1) - counters["unacked_frames"] - counters["queued_frames"]
                assert last <= acked <= last + len(handled)
            written = tmp_path / "seqs3"
            with hub_process(address, written):
                eventually(lambda: link.counters["unacked_frames"] == 0 and link.counters["queued_bytes"] == 0)
            last = written.read_text().split() if acked < 120 else []  # or the third was killed when it had said all
            assert [int(line) for line in last] == list(range(acked + 1, 121))

    def test_keeps_what_is_sent_while_the_hub_is_away_until_the_queue_is_full(self, address):
        with worker_link(address, wait=False, policy="drop", outbound_bytes_max=3000) as link:
            with running_hub(address, Recorder()):
                assert link.wait_welcome(20)
            eventually(lambda: not link.connected)
            results = send_steps(link, 10)
            kept = results.count(None)
            assert 1 <= kept < 10
            assert results == [None] * kept + ["hub_gone"] * (10 - kept)
            second = Recorder()
            with running_hub(address, second):
                eventually(lambda: len(second.seqs) == kept)

    def test_that_blocks_waits_for_a_hub_that_is_gone_once_and_not_at_every_step(self, address):
        with worker_link(address, wait=False, outbound_bytes_max=1, block_s_max=0.2) as link:
            with running_hub(address, Recorder()):
                assert link.wait_welcome(20)
            eventually(lambda: not link.connected)
            assert send(link) is None  # one always fits
            before = time.monotonic()
            assert send_steps(link, 50) == ["hub_gone"] * 50
            assert 0.2 <= time.monotonic() - before < 8

    def test_takes_the_end_of_a_request_when_it_is_full(self, address):
        with worker_link(address, wait=False, policy="drop", outbound_bytes_max=1) as link:
            with running_hub(address, Recorder()):
                assert link.wait_welcome(20)
            eventually(lambda: not link.connected)
            assert send(link) is None
            assert send(link) == "hub_gone"
            assert send(link, [], finished=[make_finished()]) is None

    def test_keeps_the_end_of_a_request_until_consumers_were_told_of_it(self, address):
        called = threading.Event()

        class Slow(Recorder):
            def on_request_done(self, done):
                called.set()
                assert self.go.wait(60)
                return super().on_request_done(done)

        consumer = Slow()
        with running_hub(address, consumer), worker_link(address) as link:
            send(link)
            eventually(lambda: consumer.rows["r1"] == 4)
            consumer.go.clear()
            send(link, [], finished=[make_finished()])
            assert called.wait(20)
            eventually(lambda: link.counters["unacked_frames"] == 1)
            consumer.go.set()
            eventually(lambda: link.counters["unacked_frames"] == 0)

    def test_never_sends_past_its_credit(self, address):
        consumer = Recorder(held=True)
        each = cost(make_frame().encode())
        window = each * 4
        with running_hub(address, configured(consumer, queue_bytes_max=window)) as hub, worker_link(address) as link:
            assert link.welcome.credit_bytes == window
            send_steps(link, 30)
            assert consumer.waiting.wait(20)
            eventually(lambda: link.counters["unacked_frames"] >= 3)
            worker = next(s for s in hub.status()["sessions"] if s["role"] == "worker")
            assert worker["held_bytes"] <= window
            assert hub.counts.frames <= 4
            consumer.go.set()
            eventually(lambda: len(consumer.seqs) == 30)
            assert hub.counts.protocol_errors == 0

    def test_keeps_no_more_than_its_bounds_when_a_hub_grants_whatever_it_likes(self, address, monkeypatch):
        monkeypatch.setattr(limits, "UNACKED_BYTES_MAX", 50_000)
        with (
            contextlib.closing(Router(address)) as router,
            worker_link(address, wait=False, policy="drop", outbound_bytes_max=20_000) as link,
        ):

            def welcomed():
                router.poll(0.05)
                while (received := router.receive()) is not None:
                    if isinstance(message.decode(received.parts[0]), Hello):
                        router.send(received.peer, [message.encode(Welcome("liar", 2**40))])  # and never an Ack
                return link.connected

            eventually(welcomed)
            refusals = []
            eventually(lambda: refusals.extend(send_steps(link, 1000)) or link._session.unacked_bytes_peak > 40_000)
            assert refusals.count("queue_full") > 500
            counts = link._counts(link._staged())
            each = cost(make_frame(seq=1000).encode())
            assert 40_000 < counts.unacked_bytes_peak <= 50_000 + 2 * each
            assert counts.queue_bytes_peak <= 20_000

    def test_has_read_every_acknowledgement_when_its_hub_stops(self, address, monkeypatch):
        """The next hub does not get frames again that the hub before it acknowledged."""
        monkeypatch.setattr(limits, "LINGER_S", 20.0)
        consumer, busy, go = Recorder(held=True), threading.Event(), threading.Event()

        def staged():
            if link.counters["unacked_frames"] and not consumer.go.is_set():
                busy.set()
                go.wait(20)
            return Staged()

        made = configured(consumer, queue_bytes_max=4 * cost(make_frame().encode()))
        with worker_link(address, wait=False, staged=staged) as link:
            with running_hub(address, made):
                eventually(lambda: link.connected)
                send_steps(link, 3)
                assert busy.wait(20), "the link does not read from here on"
                consumer.go.set()
                eventually(lambda: consumer.seqs == [1, 2, 3])
                threading.Timer(0.5, go.set).start()
            eventually(lambda: not link.connected)
            assert (link.counters["unacked_frames"], link.reconnects) == (0, 1)

    def test_comes_back_after_failures_that_nobody_thought_of(self, address, monkeypatch, caplog):
        """A link survives a lack of descriptors, a bad message from a hub, and a mistake of its own."""
        left = {"made": 3, "served": 2}
        made, served = link_module.Dealer.__init__, WorkerLink._fill

        def make(self, *args, **kwargs):
            left["made"] -= 1
            if left["made"] >= 0:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            made(self, *args, **kwargs)

        def fill(self, dealer, now):
            if self.connected and left["served"] > 0:
                left["served"] -= 1
                raise ValueError("a mistake")
            served(self, dealer, now)

        monkeypatch.setattr(link_module.Dealer, "__init__", make)
        monkeypatch.setattr(WorkerLink, "_fill", fill)
        consumer = Recorder()
        with running_hub(address, consumer), worker_link(address, wait=False) as link:
            eventually(lambda: link.ever_connected)
            assert send_steps(link, 5) == [None] * 5
            eventually(lambda: consumer.seqs == [1, 2, 3, 4, 5])
        failed = [record for record in caplog.records if getattr(record, "event", "") == "link_failed"]
        assert [type(record.exc_info[1]) for record in failed] == [OSError, ValueError], "each kind once in a row"

    def test_that_cannot_be_made_leaves_no_descriptor(self, address, monkeypatch):
        def descriptors():
            return sum(1 for _ in Path("/proc/self/fd").iterdir())

        before = descriptors()
        for _ in range(20):
            with pytest.raises(CapflowError, match=r"cannot connect to tcp://no host:1: got .*, expected .*; "):
                Dealer("tcp://no host:1")
        eventually(lambda: descriptors() <= before + 2)

    def test_blocks_its_sender_when_a_consumer_that_blocks_is_slow_and_loses_nothing(self, address):
        consumer = Recorder(held=True)
        with (
            running_hub(address, configured(consumer, queue_bytes_max=1)),
            worker_link(address, outbound_bytes_max=1) as link,
        ):
            results = []
            thread = threading.Thread(target=lambda: results.extend(send_steps(link, 20)))
            thread.start()
            assert consumer.waiting.wait(20)
            assert thread.is_alive()
            consumer.go.set()
            thread.join(20)
            assert results == [None] * 20
            eventually(lambda: len(consumer.seqs) == 20)

    def test_that_drops_says_so_when_the_hub_takes_less_than_is_sent(self, address):
        consumer = Recorder(held=True)
        with (
            running_hub(address, configured(consumer, queue_bytes_max=1)),
            worker_link(address, policy="drop", outbound_bytes_max=1) as link,
        ):
            results = send_steps(link, 20)
            assert "queue_full" in results
            consumer.go.set()
            eventually(lambda: len(consumer.seqs) == results.count(None))

    def test_close_gets_everything_out_first(self, address):
        consumer = Recorder()
        with running_hub(address, consumer) as hub:
            with worker_link(address) as link:
                send_steps(link, 200)
                link.close(20)
                assert send(link) == "closed"
            assert len(consumer.seqs) == 200
            eventually(lambda: not hub.snapshot().sessions)

    def test_close_leaves_in_time_though_the_hub_is_gone(self, address):
        with worker_link(address, wait=False) as link:
            with running_hub(address, Recorder()):
                assert link.wait_welcome(20)
            eventually(lambda: not link.connected)
            send(link)
            before = time.monotonic()
            link.close(0.2)
            assert time.monotonic() - before < 15

    def test_a_refused_worker_knows_why_and_comes_back_for_another_hub(self, address):
        wants = Recorder(spec=CaptureSpec({"post_block": [9]}))
        with worker_link(address, wait=False) as link:
            with running_hub(address, wants) as hub:
                assert link.wait_welcome(20) is None
                assert (
                    link.refusal == "consumers.recorder.capture.hooks.post_block: got layer 9, "
                    "expected 0..3, or -4..-1 from the last"
                )
                assert send(link) == "refused"
                assert hub.status()["refused"] == {link.refusal: 1}
            with running_hub(address, Recorder()):
                eventually(lambda: link.connected)
                assert send(link) is None

    def test_a_refused_worker_waits_for_its_next_connection(self, address, monkeypatch):
        class FarDealer(Dealer):
            """Learns of its connection after a fifth of a second."""

            def __init__(self, *args, **kwargs):
                self.near_at = time.monotonic() + 0.2
                super().__init__(*args, **kwargs)

            def events(self):
                return super().events() if time.monotonic() >= self.near_at else []

            def poll(self, timeout_s):
                super().poll(min(0.02, 0.02 if timeout_s is None else timeout_s))

        monkeypatch.setattr(link_module, "Dealer", FarDealer)
        monkeypatch.setattr(limits, "REFUSED_S", 0.05)
        with (
            running_hub(address, Recorder()),
            worker_link(address) as first,
            worker_link(address, make_hello(boot="second"), wait=False) as link,
        ):
            eventually(lambda: "a second worker of stage 0" in (link.refusal or ""))
            first.close(0)
            eventually(lambda: link.connected)

    def test_sends_bytes_of_any_contiguous_buffer_and_no_other(self, address):
        frame = make_frame()
        with running_hub(address, Recorder()), worker_link(address) as link:
            assert link.send(frame.header, bytearray(frame.payload)) is None
            with pytest.raises((TypeError, ValueError)):
                link.send(frame.header, memoryview(bytes(64))[::2])

    def test_is_hardly_ever_awake_when_there_is_nothing_to_do(self, address):
        with running_hub(address, Recorder()), worker_link(address) as link:
            woken = []
            poll = link._timeout
            link._timeout = lambda now: (woken.append(now), poll(now))[1]
            eventually(lambda: woken and time.monotonic() - woken[0] > 1.5)
            assert len(woken) < 15


class TestHub:
    def test_takes_a_worker_up_where_it_was_when_its_connection_breaks(self, address):
        consumer = Recorder()
        with running_hub(address, consumer) as hub:
            hello = message.encode(make_hello())
            with raw_peer(address) as peer:
                peer.send(hello)
                assert message.decode(answer(peer)[0]).last_seq == 0
                for seq in (1, 2, 3):
                    peer.send_multipart(make_frame([("r1", 4, seq * 4, 4)], seq=seq).encode())
                eventually(lambda: len(consumer.seqs) == 3)
                eventually(lambda: hub.status()["sessions"][0]["held_bytes"] == 0)
            with raw_peer(address) as peer:
                peer.send(hello)
                assert message.decode(answer(peer)[0]).last_seq == 3
                assert message.decode(answer(peer)[0]) == Ack(3, 0)
                for seq in (2, 3, 4):
                    peer.send_multipart(make_frame([("r1", 4, seq * 4, 4)], seq=seq).encode())
                eventually(lambda: consumer.seqs == [1, 2, 3, 4])
                assert hub.counts.duplicates == 2
                assert hub.status()["requests"]["open"] == 1

    @pytest.mark.parametrize(
        "parts",
        [
            [b""],
            [b"\0" * 100],
            [b"GET / HTTP/1.1\r\n\r\n"],
            [os.urandom(1000)],
            [b"\x81\xa4type\xa5hello"],
            [message.encode(Hello("worker", "e", "b"))],
            [b"\x91" * 100_000],
            [message.encode(msgspec.structs.replace(make_hello(), version=99))],
            [b"a", b"b", b"c"],
        ],
        ids=range(9),
    )
    def test_refuses_garbage_and_serves_the_others(self, address, parts):
        consumer = Recorder()
        with running_hub(address, consumer) as hub, worker_link(address) as link, raw_peer(address) as peer:
            peer.send_multipart(parts)
            assert isinstance(message.decode(answer(peer)[0]), Refused)
            assert send(link) is None
            eventually(lambda: consumer.rows["r1"] == 4)
            assert hub.counts.protocol_errors >= 1
            assert hub.snapshot().sessions == 1

    @pytest.mark.parametrize("spoil", ["payload", "gap", "rank", "shape"])
    def test_cuts_off_a_worker_that_breaks_the_protocol(self, address, spoil):
        consumer = Recorder()
        with running_hub(address, consumer) as hub, raw_peer(address) as peer:
            peer.send(message.encode(make_hello()))
            answer(peer)
            peer.send_multipart(make_frame(seq=1).encode())
            assert isinstance(message.decode(answer(peer)[0]), Ack)
            assert consumer.seqs == [1]
            header, payload = make_frame(seq=3 if spoil == "gap" else 2).encode()
            if spoil == "payload":
                payload = bytes(payload)[:-1] + b"\xff"
            elif spoil == "shape":
                payload = bytes(payload)[:-4]
            elif spoil == "rank":
                header, payload = make_frame(seq=2, rank=Rank(1, 0, 0)).encode()
            peer.send_multipart([header, payload])
            assert isinstance(message.decode(answer(peer)[0]), Refused)
            eventually(lambda: hub.snapshot().sessions == 0)
            eventually(lambda: "r1" in consumer.done)
            assert consumer.done["r1"].status == "error"  # its request does not stay half-done

    def test_disconnects_a_peer_that_sends_a_part_that_is_too_large(self, address):
        consumer = Recorder()
        with running_hub(address, consumer, message_bytes_max=10_000) as hub, worker_link(address) as link:
            with raw_peer(address) as peer:
                peer.send(bytes(20_000))
                assert not peer.poll(300)
            assert send(link) is None
            eventually(lambda: consumer.rows["r1"] == 4)
            assert hub.counts.protocol_errors == 0

    def test_survives_bytes_that_are_not_even_zmq(self):
        import socket

        address = f"tcp://127.0.0.1:{free_port()}"
        consumer = Recorder()
        with running_hub(address, consumer), worker_link(address) as link:
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
                raw.sendall(struct.pack("<Q", 2**63) * 100)
            assert send(link) is None
            eventually(lambda: consumer.rows["r1"] == 4)

    def test_asks_a_peer_it_has_forgotten_to_say_hello_again(self, address):
        with running_hub(address, Recorder()), raw_peer(address) as peer:
            for parts in (make_frame().encode(), [message.encode(Beat())]):
                peer.send_multipart(parts)
                assert message.decode(answer(peer)[0]) == Bye()

    def test_goes_on_after_failures_of_its_socket(self, address, monkeypatch):
        poll, receive, left = Router.poll, Router.receive, {"poll": 2, "receive": 2}

        def failing(name, call):
            def instead(self, *args):
                if left[name] > 0:
                    left[name] -= 1
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                return call(self, *args)

            return instead

        monkeypatch.setattr(Router, "poll", failing("poll", poll))
        monkeypatch.setattr(Router, "receive", failing("receive", receive))
        consumer = Recorder()
        with running_hub(address, consumer), worker_link(address) as link:
            assert send_steps(link, 5) == [None] * 5
            eventually(lambda: consumer.seqs == [1, 2, 3, 4, 5])
            left |= {"poll": 2, "receive": 2}
            assert send_steps(link, 5, first=5) == [None] * 5
            eventually(lambda: len(consumer.seqs) == 10)
        assert left == {"poll": 0, "receive": 0}

    def test_says_goodbye_when_it_stops(self, address):
        with raw_peer(address) as peer:
            with running_hub(address, Recorder()):
                peer.send(message.encode(Hello("client", "", "c")))
                assert isinstance(message.decode(answer(peer)[0]), Welcome)
            assert message.decode(answer(peer)[0]) == Bye()

    def test_two_on_one_address_are_one_too_many(self, either_address):
        with (
            running_hub(either_address, Recorder()),
            pytest.raises(CapflowError, match="is in use"),
            running_hub(either_address, Recorder()),
        ):
            pass

    def test_opens_its_socket_to_nobody_else(self, address):
        with running_hub(address, Recorder()):
            assert Path(address.removeprefix("ipc://")).stat().st_mode & 0o077 == 0


class TestSchedulerLink:
    def test_knows_what_the_hub_wants(self, address):
        spec = CaptureSpec({"post_block": [1]}, "last_prompt")
        with running_hub(address, Recorder(spec=spec)), scheduler_link(address) as link:
            assert link.connected
            assert link.welcome.captures == (spec,)
            assert link.actions() == []

    def test_passes_actions_and_outcomes(self, address):
        with running_hub(address, Recorder()), scheduler_link(address) as link, Client(address) as client:

            def run():
                acts = []
                eventually(lambda: acts.extend(link.actions()) or acts)
                link.outcome(ActionApplied(acts[0].id, 12))

            thread = threading.Thread(target=run)
            thread.start()
            outcome = client.act(Abort("r1"), 20)
            thread.join(20)
            assert outcome.step == 12

    def test_waits_for_a_welcome_only_so_long(self, address):
        with scheduler_link(address, wait=False) as link:
            assert link.wait_welcome(0.05) is None
            assert link.welcome is None
            assert not link.connected

    def test_has_the_new_welcome_of_another_hub(self, address):
        with scheduler_link(address, wait=False) as link:
            with running_hub(address, Recorder()):
                assert link.wait_welcome(20).captures
            with running_hub(address, Recorder(spec=None)):
                eventually(lambda: link.welcome.captures == ())

    def test_of_another_model_than_its_workers_is_refused(self, address):
        with running_hub(address, Recorder()), worker_link(address):
            hello = make_hello(role="scheduler", boot="s", model=make_model(num_layers=5))
            with scheduler_link(address, hello, wait=False) as link:
                assert link.wait_welcome(20) is None
                assert "another model than its other workers" in link.refusal


class TestClient:
    def test_names_the_address_where_no_hub_answers(self, address):
        with pytest.raises(HubUnreachableError, match=f"no hub answers at {address}; start one with"):
            Client(address, timeout=0.1).status()

    def test_sees_that_the_hub_went_away(self, address):
        client = Client(address, timeout=0.2)
        with running_hub(address, Recorder()):
            assert client.status()["sessions"][0]["role"] == "client"
        with pytest.raises(HubUnreachableError):
            client.status()
        with running_hub(address, Recorder()):
            assert client.status()["requests"] == {"open": 0, "done": 0, "failed": 0, "gapped": 0}
        client.close()

    def test_that_paused_is_there_once(self, address, monkeypatch):
        monkeypatch.setattr(limits, "HEARTBEAT_S", 0.0)  # every pause is too long
        with running_hub(address, Recorder()) as hub, Client(address) as client:
            for _ in range(5):
                client.status()
            eventually(lambda: len(hub.roster.peers) == 1)

    def test_does_not_wait_for_results_longer_than_it_is_told_to(self, address):
        consumer = Recorder(held=True)
        with running_hub(address, consumer), worker_link(address) as link, Client(address) as client:
            send(link, finished=[make_finished()])
            assert consumer.waiting.wait(20)
            pending = {"recorder": CaptureResult("pending")}
            assert client.results(["r1", "r2"], timeout=0.05) == {"r1": pending, "r2": {}}
            assert client.results(["r1"], wait=False) == {"r1": pending}
            consumer.go.set()
            assert client.results(["r1"], timeout=20)["r1"]["recorder"].status == "ok"
            assert client.results([]) == {}

    def test_is_answered_when_the_hub_is_done(self, address):
        with running_hub(address, Recorder()), worker_link(address) as link, raw_peer(address) as peer:
            peer.send(message.encode(Hello("client", "", "c")))
            answer(peer)
            peer.send(message.encode(Await(("r1",))))
            peer.send(message.encode(Status()))
            assert isinstance(message.decode(answer(peer)[0]), Status)  # nothing of r1 yet
            send(link, finished=[make_finished()])
            results = message.decode(answer(peer)[0])
            assert isinstance(results, Results)
            assert results.results["recorder"] == CaptureResult("ok", payload={"rows": 4})


def test_an_address_that_cannot_be_listened_at_is_told_with_what_to_do():
    with pytest.raises(CapflowError, match=r"cannot listen at tcp://.*: got .*, expected .*; name another"):
        Router("tcp://192.0.2.1:1")


def test_that_a_hub_went_away_is_told_with_what_to_do(address, caplog):
    with worker_link(address, wait=False) as link:
        with running_hub(address, Recorder()):
            assert link.wait_welcome(20)
        eventually(lambda: link.reconnects)
    expected = f"the hub at {address} went away: got "  # its goodbye, or the end of the connection
    (message,) = {record.message for record in caplog.records if record.message.startswith(expected)}
    assert "expected one that answers; start it again" in message


@pytest.mark.parametrize("limit", ["SPANS_PER_FRAME_MAX", "TOKENS_PER_FRAME_MAX"])
def test_a_worker_counts_a_frame_that_no_hub_would_take_and_goes_on(address, monkeypatch, limit):
    with running_hub(address, Recorder()) as hub, worker_link(address) as link:
        monkeypatch.setattr(limits, limit, 3)
        frame = make_frame([(f"r{number}", 4, 0, 1) for number in range(4)])
        assert link.send(frame.header, frame.payload) == "too_large"
        frame = make_frame([("r", 4, 0, 1)])
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: hub.counts.frames == 1)
        assert hub.counts.protocol_errors == 0


@pytest.mark.parametrize("role", ["worker", "scheduler", "client"])
def test_a_peer_of_another_version_is_refused_with_what_to_do(address, role):
    with running_hub(address, Recorder()), raw_peer(address) as peer:
        peer.send(message.encode(msgspec.structs.replace(make_hello(role=role), version=2)))
        refused = message.decode(answer(peer)[0])
    assert refused == Refused(
        f"{role}: version of the wire protocol: got 2, expected 1, that of capflow {__version__} here; "
        "run one release on both sides"
    )


class TestFinalResults:
    def test_consumers_that_make_progress_are_waited_for(self, address):
        """However long they take."""

        class Slow(Recorder):
            def on_frame(self, frame):
                # Ten of them take longer than the wait without progress.
                time.sleep(0.3)
                super().on_frame(frame)

        with running_hub(address, Slow()), worker_link(address) as link, Client(address) as client:
            send_steps(link, 9)
            send(link, [("r1", 4, 36, 4)], finished=[make_finished("r1", 4, 40)], step=9)
            begun = time.monotonic()
            results = client.final_results(["r1"], 1.5)
            took = time.monotonic() - begun
        assert results["r1"]["recorder"].status == "ok"
        assert took > 2

    def test_one_that_hangs_is_not_while_another_has_other_work(self, address, monkeypatch):
        monkeypatch.setattr(limits, "CALL_S_MAX", 0.5)
        hung, busy = Recorder("hung", held=True), Recorder("busy")
        stop = threading.Event()
        with running_hub(address, hung, busy), worker_link(address) as link, Client(address) as client:
            send(link, [("r1", 4, 0, 4)], finished=[make_finished("r1")])
            eventually(lambda: "r1" in busy.done)

            def others():
                for step in range(10_000):
                    if not stop.wait(0.02):
                        send(link, [("r2", 4, 4 * step, 4)], step=step + 1)

            sending = threading.Thread(target=others)
            sending.start()
            begun = time.monotonic()
            results = client.final_results(["r1"], 1.5)
            took = time.monotonic() - begun
            stop.set()
            sending.join()
            hung.go.set()
        assert {name: result.status for name, result in results["r1"].items()} == {"hung": "pending", "busy": "ok"}
        assert 1.5 <= took < 10

    def test_a_hub_without_consumers_has_none(self, address):
        with running_hub(address), worker_link(address) as link, Client(address) as client:
            send(link, [("r1", 4, 0, 4)], finished=[make_finished("r1")])
            assert client.final_results(["r1"], 60.0) == {"r1": {}}


class TestALocalConnection:
    def test_holds_more_than_the_systems_default(self, address, monkeypatch):
        sizes, widen = [], sockets._widen

        def noted(descriptor):
            widen(descriptor)
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                sizes.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))

        monkeypatch.setattr(sockets, "_widen", noted)
        with running_hub(address, Recorder()), worker_link(address) as link:
            assert send(link) is None
        with socket.socket(socket.AF_UNIX) as usual:
            assert sizes[0] > usual.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    def test_that_is_gone_is_left_alone(self):
        reader, writer = os.pipe()
        before = len(list(Path("/proc/self/fd").iterdir()))
        sockets._widen(writer)
        os.close(reader)
        os.close(writer)
        sockets._widen(writer)
        assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
