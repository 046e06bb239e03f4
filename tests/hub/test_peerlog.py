"""The log of peers' faults: bounded by event and by peer; the lines left out are counted and reported."""

from __future__ import annotations

import logging

import pytest

from capflow import limits
from capflow.capture.spec import CaptureSpec
from capflow.hub.peers.log import PeerLog
from capflow.protocol import message
from capflow.transport.client import Client
from tests.kit.frames import make_hello
from tests.kit.hubs import Recorder, address, answer, raw_peer, running_hub

__all__ = ["address"]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return PeerLog(logging.getLogger("capflow.test"))


def say(log, peer, now, event="came"):
    log.say(logging.INFO, peer, now, "%s came", peer, event={"event": event})


def test_one_peer_has_so_many_lines_and_others_have_theirs(log, caplog):
    for _ in range(1_000):
        say(log, b"loud", 0.0)
    say(log, b"quiet", 0.0)
    assert len(caplog.records) == limits.LOG_PEER_LINES_MAX + 1
    assert log.left_out == 1_000 - limits.LOG_PEER_LINES_MAX
    say(log, b"loud", 1 / limits.LOG_PEER_LINES_PER_S)
    assert len(caplog.records) == limits.LOG_PEER_LINES_MAX + 2


def test_an_event_has_so_many_lines_whoever_causes_it(log, caplog):
    for number in range(20_000):
        say(log, f"peer{number}", number / 10_000)
    assert len(caplog.records) <= limits.LOG_KIND_LINES_MAX + 2
    say(log, "another", 2.0, "left")
    assert caplog.records[-1].event == "left"
    log.flush(20.0)
    log.flush(20.1)
    left_out = 20_001 - len(caplog.records) + 1
    assert (caplog.records[-1].event, caplog.records[-1].lines) == ("log_left_out", left_out)
    assert f"{left_out} came" in caplog.records[-1].message
    assert log.left_out == left_out


def test_what_is_known_of_peers_is_bounded(log, monkeypatch):
    monkeypatch.setattr(limits, "SESSIONS_MAX", 10)
    for number in range(100):
        say(log, f"peer{number}", 0.0)
    assert len(log._peers) <= 10


def test_refused_hellos_are_few_lines_however_many_they_are(address, caplog):
    wants = CaptureSpec({"post_block": [99]}, "all")
    with running_hub(address, Recorder(spec=wants)) as hub, raw_peer(address) as peer:
        for number in range(500):
            peer.send(message.encode(make_hello(f"name{number}", f"boot{number}")))
            answer(peer, 60)
        assert hub.snapshot().refused == 500
        lines = [record for record in caplog.records if getattr(record, "event", "") == "session_refused"]
        assert 1 <= len(lines) <= limits.LOG_PEER_LINES_MAX + 5
        with Client(address) as client:
            assert client.status()["log_lines_left_out"] == 500 - len(lines)
