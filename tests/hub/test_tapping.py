"""A tap: a hub that watches what another one takes, and that nothing waits for, whatever it does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from capflow import limits
from capflow.capture.frame import Dropped
from capflow.capture.spec import CaptureSpec
from capflow.cli import main
from capflow.errors import CapflowError
from capflow.hub.watch import Tapping, tap_all
from capflow.protocol import message
from capflow.protocol.message import Hello, Refused, Status, WatchRequest, Welcome
from capflow.steering.action import Abort, Rejected
from capflow.transport.client import Client
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder, address, answer, configured, raw_peer, running_hub, worker_link
from tests.kit.keyrings import allow, keyed_hub, keys
from tests.kit.waiting import eventually

__all__ = ["address", "keys"]


@pytest.fixture
def own():
    """The address of a tap's own hub."""
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        yield f"ipc://{directory}/t"


def live(name="watcher", **kwargs):
    return Recorder(name, **kwargs)


def send(link, frame):
    assert link.send(frame.header, frame.payload) is None


def tapped(address):
    """Wait until a tap is there."""
    with Client(address) as client:
        eventually(lambda: client.status()["taps"])


def heard(peer):
    """Wait until the hub has read what a raw peer said: it answers a later question."""
    peer.send(message.encode(Status()))
    while not isinstance(message.decode(answer(peer)[0]), Status):
        pass


def whole(link, name, steps=3):
    """Send a request of four tokens a step, and its end with the last of them."""
    for step in range(steps):
        last = [make_finished(name, 4, 4 * steps)] if step == steps - 1 else []
        send(link, make_frame([(name, 4, 4 * step, 4)], finished=last))


class TestWhatATapSees:
    def test_every_row_from_when_it_joined_and_what_it_misses_is_counted(self, address, own):
        durable, watcher = Recorder(), live()
        with running_hub(address, durable), worker_link(address) as link:
            send(link, make_frame([("early", 4, 0, 4)]))
            eventually(lambda: durable.rows["early"] == 4)
            with running_hub(own, configured(watcher, "drop")) as hub, Tapping(address, hub):
                with Client(address) as client:
                    eventually(lambda: client.status()["taps"])
                send(link, make_frame([("early", 4, 4, 2)], finished=[make_finished("early", 4, 6)]))
                whole(link, "late")
                eventually(lambda: set(watcher.done) == {"early", "late"})
                with Client(own) as client:
                    result = client.results(["early", "late"])
                whole(link, "later")
                eventually(lambda: "later" in watcher.done)
            eventually(lambda: len(durable.done) == 3)
            with Client(address) as client:
                eventually(lambda: not client.status()["taps"])
                results = client.results(["early", "late", "later"])
        assert watcher.rows == {"early": 2, "late": 12, "later": 12}
        assert [p for r, _, p in watcher.positions if r == "late"] == list(range(12))
        assert watcher.done["early"].dropped == (Dropped(4, "not_tapped"),)
        assert result["early"]["watcher"].status == "partial_error"
        assert result["early"]["watcher"].error == "4 rows lost: not_tapped"
        assert result["late"]["watcher"].status == "ok"
        assert durable.rows == {"early": 6, "late": 12, "later": 12}
        assert {done["recorder"].status for done in results.values()} == {"ok"}

    def test_an_engine_with_several_hubs_is_one_engine(self, address, own):
        """Each hub has some of its requests, and one hub that goes away takes no other's along."""
        other, watcher = f"{address}2", live()
        hellos = [make_hello("e@1", f"boot-{number}") for number in range(2)]
        with (
            running_hub(own, configured(watcher, "drop")) as hub,
            contextlib.ExitStack() as stack,
            running_hub(other, Recorder()),
        ):
            first = contextlib.ExitStack()
            first.enter_context(running_hub(address, Recorder()))
            tap_all(stack, [address, other], hub, key=None, own_key=None, insecure=False)
            near, far = (
                stack.enter_context(worker_link(each, hello))
                for each, hello in zip((address, other), hellos, strict=True)
            )
            for each in (address, other):
                tapped(each)
            for step in range(4):
                for link, name, hello in ((near, "near", hellos[0]), (far, "far", hellos[1])):
                    if step == 3 and link is near:
                        first.close()
                        continue
                    finished = [make_finished(name, 4, 4 * step + 4)] if step > 1 else []
                    if step < 3 and link is far:
                        finished = []
                    frame = make_frame(
                        [(name, 4, 4 * step, 4)], engine="e@1", boot=hello.boot, step=step, finished=finished
                    )
                    send(link, frame)
                    eventually(lambda name=name, step=step: watcher.rows[name] == 4 * step + 4)
            eventually(lambda: set(watcher.done) == {"near", "far"})
        assert watcher.rows == {"near": 12, "far": 16}
        assert [done.dropped for done in watcher.done.values()] == [(), ()]
        assert len([event for event in watcher.events if event == ("session", "e@1")]) == 1

    def test_what_its_consumers_want_and_nobody_captures_is_said(self, address, own, caplog):
        durable = Recorder(spec=CaptureSpec({"post_block": [0, 1]}, "last_prompt"))
        watchers = [
            configured(live("less", spec=CaptureSpec({"post_block": [1]}, "last_prompt")), "drop"),
            configured(live("more", spec=CaptureSpec({"post_block": [1, 2]}, "all_prompt")), "drop"),
        ]
        with (
            running_hub(address, durable),
            running_hub(own, *watchers) as hub,
            worker_link(address),
            Tapping(address, hub),
        ):
            eventually(lambda: [r for r in caplog.records if getattr(r, "event", "") == "tap_misses"])
        (text,) = [record for record in caplog.records if getattr(record, "event", "") == "tap_misses"]
        assert (text.consumer, text.sites) == ("more", ["post_block:1", "post_block:2"])

    def test_several_workers_of_several_engines(self, address, own):
        watcher = live()
        hellos = [make_hello(f"engine-{n}") for n in range(3)]
        with (
            running_hub(address, Recorder()),
            running_hub(own, configured(watcher, "drop")) as hub,
            worker_link(address, hellos[0]) as first,
            Tapping(address, hub),
            worker_link(address, hellos[1]) as second,
            worker_link(address, hellos[2]) as third,
        ):
            tapped(address)
            for number, link in enumerate((first, second, third)):
                parts = {"engine": f"engine-{number}", "finished": [make_finished(f"r{number}")]}
                send(link, make_frame([(f"r{number}", 4, 0, 4)], **parts))
            eventually(lambda: len(watcher.done) == 3)
            assert watcher.rows == {"r0": 4, "r1": 4, "r2": 4}
            sessions = {event[1] for event in watcher.events if event[0] == "session"}
            assert sessions == {hello.engine for hello in hellos}

    def test_requests_end_when_their_engine_does(self, address, own):
        watcher = live()
        with (
            running_hub(address, Recorder()),
            running_hub(own, configured(watcher, "drop")) as hub,
            Tapping(address, hub),
        ):
            tapped(address)
            with worker_link(address) as link:
                send(link, make_frame([("cut", 4, 0, 4)]))
                eventually(lambda: watcher.rows["cut"] == 4)
            eventually(lambda: "cut" in watcher.done)
            assert watcher.done["cut"].status == "error"
            with worker_link(address, make_hello(boot="boot-2")) as link:
                frame = make_frame([("next", 4, 0, 4)], boot="boot-2", finished=[make_finished("next")])
                send(link, frame)
                eventually(lambda: "next" in watcher.done)
            assert watcher.done["next"].dropped == ()

    def test_it_goes_on_when_the_tapped_hub_comes_back(self, address, own):
        watcher = live()
        with running_hub(own, configured(watcher, "drop")) as hub, worker_link(address, wait=False) as link:
            with running_hub(address, Recorder()), Client(address) as client:
                assert link.wait_welcome(20)
                tapping = Tapping(address, hub)
                tapping.start()
                eventually(lambda client=client: client.status()["taps"])
                whole(link, "before")
                send(link, make_frame([("cut", 4, 0, 4)]))
                eventually(lambda: watcher.rows["cut"] == 4)
            eventually(lambda: "cut" in watcher.done)
            with running_hub(address, Recorder()), Client(address) as client:
                eventually(lambda: client.status()["taps"])
                eventually(lambda: link.connected)
                whole(link, "after")
                eventually(lambda: "after" in watcher.done)
                tapping.close()
        assert watcher.rows["before"] == watcher.rows["after"] == 12
        assert watcher.done["before"].dropped == watcher.done["after"].dropped == ()


class TestNothingWaitsForATap:
    def test_one_that_reads_nothing_costs_the_others_nothing_and_is_sent_no_more_than_its_bound(
        self, address, monkeypatch
    ):
        monkeypatch.setattr(limits, "TAP_BYTES_MAX", 64 * 1024)
        durable = Recorder()
        with running_hub(address, durable), raw_peer(address) as peer, worker_link(address) as link:
            peer.send(message.encode(Hello("client", "", "tap")))
            assert isinstance(message.decode(answer(peer)[0]), Welcome)
            peer.send(message.encode(WatchRequest(2**40)))  # whatever it says, the hub has a bound
            tapped = message.decode(answer(peer)[0])
            assert (tapped.engine, tapped.model) == ("engine-1", make_hello().model)
            for step in range(400):
                send(link, make_frame([("r1", 4, 4 * step, 4)], hidden=8))
            send(link, make_frame([], finished=[make_finished("r1", 4, 1600)]))
            eventually(lambda: "r1" in durable.done)
            assert durable.rows["r1"] == 1600
            with Client(address) as client:
                (tap,) = client.status()["taps"]
            got = []
            while peer.poll(200):
                got.append(peer.recv_multipart())
            frames = [parts for parts in got if len(parts) == 2]
            assert sum(len(part) for parts in frames for part in parts) == tap["bytes"] <= 64 * 1024
            assert tap["frames"] == len(frames) > 10
            assert tap["skipped_frames"] == 401 - len(frames)
            peer.send(message.encode(WatchRequest(tap["bytes"])))  # it has taken them: the newest comes next
            heard(peer)
            send(link, make_frame([("r2", 4, 0, 4)]))
            newest = answer(peer)
            while len(newest) < 2:
                newest = answer(peer)
            assert b"r2" in newest[0]

    def test_a_process_that_stands_still_is_left_behind_and_goes_on_with_the_newest(self, address, tmp_path):
        durable = Recorder()
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "capflow", "run", "--tap", address, "--log-format", "json"]
        wide = make_hello("wide", model=make_model(hidden=65_536))
        with (
            running_hub(address, durable) as hub,
            worker_link(address) as link,
            worker_link(address, wide) as wide_link,
        ):
            running = subprocess.Popen(
                [*command, "--consumer", "log:policy=drop,positions=all"], env=environment, stderr=subprocess.PIPE
            )
            try:
                with Client(address) as client:
                    eventually(lambda: client.status()["taps"], 60)
                    whole(link, "first")
                    eventually(lambda: client.status()["taps"][0]["frames"] == 3)
                running.send_signal(signal.SIGSTOP)
                sites = [(n, "post_block") for n in range(4)]
                big = make_frame([("big", 4, 0, 4)], sites, hidden=65_536, engine="wide")
                assert big.nbytes == 4 * limits.MIB
                begun = time.monotonic()
                for _ in range(100):  # of which a tap is sent at most 64 MiB
                    send(wide_link, big)
                eventually(lambda: durable.rows["big"] == 100 * 16, 60)
                took_s = time.monotonic() - begun
                (tap,) = hub.status()["taps"]
                assert tap["bytes"] <= limits.TAP_BYTES_MAX
                running.send_signal(signal.SIGCONT)
                eventually(lambda: hub.status()["taps"], 60)
                whole(link, "last")
                text = []
                eventually(
                    lambda: text.append(json.loads(running.stderr.readline())) or text[-1].get("request") == "last", 60
                )
                assert text[-1]["rows"] == 12
                running.send_signal(signal.SIGINT)
                running.communicate(timeout=60)
            finally:
                running.kill()
                running.communicate()
        assert took_s < 60
        assert durable.rows["first"] == durable.rows["last"] == 12


class TestWhoMayTap:
    def test_a_key_with_the_right_to_read(self, keys, own):
        watcher = live()
        with (
            keyed_hub() as hub,
            running_hub(own, configured(watcher, "drop")) as mine,
            worker_link(hub.address, key="gpu") as link,
            Tapping(hub.address, mine, key="ann"),
        ):
            eventually(lambda: hub.status()["taps"])
            whole(link, "r1")
            eventually(lambda: watcher.rows["r1"] == 12)

    def test_no_other(self, keys, own):
        allow(keys, "ann", "steer")
        watcher = live()
        with (
            keyed_hub() as hub,
            running_hub(own, configured(watcher, "drop")) as mine,
            worker_link(hub.address, key="gpu") as link,
            contextlib.closing(Tapping(hub.address, mine, key="ann")) as tapping,
        ):
            with contextlib.suppress(CapflowError):  # it is let in, and refused when it asks: soon or at once
                tapping.start()
            eventually(lambda: tapping.link.refusal)
            assert "got the right to steer, expected the right to read" in tapping.link.refusal
            whole(link, "r1")
            assert hub.status()["taps"] == []
        assert watcher.rows == {}

    def test_more_than_the_hub_bears_are_refused(self, address, monkeypatch):
        monkeypatch.setattr(limits, "TAPS_MAX", 2)
        with running_hub(address, Recorder()), raw_peer(address) as first, raw_peer(address) as second:
            for peer in (first, second):
                peer.send(message.encode(Hello("client", "", "tap")))
                answer(peer)
                peer.send(message.encode(WatchRequest(1000)))
                if peer is first:
                    heard(first)
            assert message.decode(answer(second)[0]) == Refused(
                "taps: got 1 more taps beside 0, expected at most 0 now; try again later"
            )


class TestTheCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--consumer", "log"],
                "--consumer log with --tap: got policy block, expected policy drop or skip; log:policy=drop",
            ),
            (["--consumer", "filesystem:root=x"], "--consumer filesystem with --tap: got policy"),
            (["--consumer", "dashboard:port=0", "--model", "m", "--prompts", "p"], "--tap: got --model with it"),
            (["--consumer", "dashboard:port=0", "--handover-s", "5"], "--handover-s: got --tap with it"),
            (["--consumer", "dashboard:port=0"], "no hub answers at ipc:///"),
        ],
    )
    def test_says_what_is_wrong(self, address, tmp_path, monkeypatch, capsys, arguments, message):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(limits, "HUB_WAIT_S_DEFAULT", 0.3)
        monkeypatch.setattr(sys, "argv", ["capflow", "run", "--tap", address, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (1, 2)
        assert message in capsys.readouterr().err


class Hearing(Recorder):
    """Also keeps the events of steering."""

    def __init__(self, name):
        super().__init__(name)
        self.heard = []

    def on_action(self, answered):
        self.heard.append((answered.request, answered.kind, answered.outcome, answered.asked_by, answered.label))


def test_a_tap_hears_of_the_actions_that_the_watched_hub_answers(address, own):
    near, far = Hearing("near"), Hearing("far")
    with (
        running_hub(address, near) as hub,
        running_hub(own, configured(far, "drop")) as its_own,
        Tapping(address, its_own),
        Client(address) as client,
    ):
        eventually(lambda: hub.status()["taps"])
        for number in range(20):
            assert isinstance(client.act(Abort(f"r{number}", label="mine")), Rejected)
        eventually(lambda: len(near.heard) == len(far.heard) == 20)
        assert far.heard == [(f"r{number}", "abort", "rejected", "client", "mine") for number in range(20)]
        assert near.heard == far.heard


def test_a_client_that_watches_without_events_hears_of_none(address):
    with running_hub(address, Recorder()), raw_peer(address) as peer, Client(address) as client:
        peer.send(message.encode(Hello("client", "", "b")))
        assert isinstance(message.decode(answer(peer)[0]), Welcome)
        peer.send(message.encode(WatchRequest(1000)))
        heard(peer)
        client.act(Abort("r"))
        heard(peer)  # nothing came between
        peer.send(message.encode(WatchRequest(0, events=True)))
        heard(peer)
        client.act(Abort("r"))
        event = message.decode(answer(peer)[0])
        assert event.answered.request == "r"
