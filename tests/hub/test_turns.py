"""The turns: messages of a peer in order, and no peer waits for more than one step of another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from capflow import limits
from capflow.hub.peers import turns
from capflow.hub.peers.turns import Turns


class Desk:
    """Handles messages that say how many slices they take, each of a few milliseconds, and notes whose turn it was."""

    def __init__(self):
        # The time in seconds, on the clock of the turns.
        self.now = 0.0
        self.turns = Turns(self.handle)
        self.order = []
        self.done = []

    def handle(self, peer, parts, user):
        slices = parts[0][0]
        for number in range(slices):
            self.order.append(peer)
            self.now += 0.002
            if number < slices - 1:
                yield
        self.done.append((peer, bytes(parts[1]), user))

    def put(self, peer, slices, text=b""):
        assert self.turns.put(peer, [bytes([slices]), text], "key", limits.READ_AHEAD_EACH_BYTES_MAX, 0)


@pytest.fixture
def desk(monkeypatch):
    made = Desk()
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_messages_of_a_peer_are_handled_in_order_and_whole(desk):
    for number in range(5):
        desk.put(b"a", 3, str(number).encode())
    desk.turns.run(60)
    assert desk.done == [(b"a", str(number).encode(), "key") for number in range(5)]
    assert desk.order == [b"a"] * 15
    assert not desk.turns.waiting
    assert b"a" not in desk.turns


def test_who_sends_little_waits_for_one_step_of_who_sends_much(desk):
    desk.put(b"much", 100)
    desk.put(b"more", 100)
    for _ in range(10):
        desk.turns.run(0)
        before = len(desk.order)
        desk.put(b"little", 1)
        while b"little" in desk.turns:
            desk.turns.run(0)
        assert len(desk.order) - before <= 3  # one of each of the others, and its own


def test_who_waited_for_nothing_for_long_has_no_more_than_its_share_afterwards(desk):
    desk.put(b"busy", 50)
    desk.turns.run(0.05)
    desk.put(b"late", 50)
    desk.order.clear()
    desk.turns.run(0.1)
    assert min(desk.order.count(b"busy"), desk.order.count(b"late")) >= 5


def test_a_run_takes_no_longer_than_it_may_and_one_step(desk):
    desk.put(b"a", 200)
    desk.turns.run(0.02)
    assert 0.02 <= desk.now < 0.03
    assert b"a" in desk.turns


def test_a_message_that_fails_is_over_and_the_next_one_is_handled():
    done = []

    def handle(peer, parts, user):
        if parts[0] == b"bad":
            raise ValueError("bad")
        done.append(parts[0])
        yield

    made = Turns(handle)
    made.put(b"a", [b"bad"], "", 100_000, 0)
    made.put(b"a", [b"good"], "", 100_000, 0)
    with pytest.raises(ValueError, match="bad"):
        made.run(1)
    made.run(1)
    assert done == [b"good"]
    assert not made.waiting


def test_who_sends_more_at_once_than_its_share_is_found_out(desk):
    put = [desk.turns.put(b"much", [bytes([1]), bytes(2_000)], "", 10_000, 0) for _ in range(10)]
    assert put == [True] * 3 + [False] * 7
    assert desk.turns.put(b"little", [bytes([1]), bytes(20_000)], "", 10_000, 0)  # one message may be larger
    assert all(desk.turns.put(b"worker", [bytes([1]), bytes(2_000)], "", 10_000, 50_000) for _ in range(15))
    desk.turns.drop(b"much")
    desk.turns.run(1)
    assert {peer for peer, _, _ in desk.done} == {b"little", b"worker"}
    assert not desk.turns.waiting


@pytest.mark.parametrize("first", ["beat", "frame"])
def test_a_frame_larger_than_all_credit_waits_beside_a_beat_of_its_worker(desk, first):
    beat, frame = [bytes([1]), bytes(200)], [bytes([1]), bytes(50_000)]
    messages = [beat, frame, beat] if first == "beat" else [frame, beat, beat]
    assert all(desk.turns.put(b"worker", parts, "", 10_000, 1_000) for parts in messages)
    assert not desk.turns.put(b"worker", frame, "", 10_000, 1_000), "one at a time"
    desk.turns.run(1)
    assert len(desk.done) == 3
    assert all(desk.turns.put(b"worker", parts, "", 10_000, 1_000) for parts in messages)


def test_a_crowd_shares_what_may_be_read_ahead(monkeypatch, desk):
    monkeypatch.setattr(limits, "READ_AHEAD_BYTES_MAX", 100_000)
    monkeypatch.setattr(limits, "READ_AHEAD_EACH_BYTES_MIN", 0)
    taken = [desk.turns.put(str(n % 20).encode(), [bytes([1]), bytes(1_000)], "", 50_000, 0) for n in range(400)]
    assert 20 <= sum(taken) <= 60


def test_what_is_known_of_peers_is_bounded(desk, monkeypatch):
    monkeypatch.setattr(limits, "SESSIONS_MAX", 10)
    for number in range(50):
        desk.put(str(number).encode(), 1)
        desk.turns.run(1)
    assert len(desk.turns._used_s) <= 11
