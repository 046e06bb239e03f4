"""The session protocol: one table of messages drives both sides; a message that is not allowed is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow import limits
from capflow.capture.frame import Frame, Rank
from capflow.errors import LocalProtocolError, RemoteProtocolError
from capflow.protocol import message
from capflow.protocol.credit import Intake, Pool
from capflow.protocol.message import (
    Ack,
    Act,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    FollowSteering,
    HeldSteering,
    Refused,
    Results,
    SharedSteering,
    Status,
    Version,
    Watched,
    WatchRequest,
    Welcome,
    WorkerCounts,
)
from capflow.protocol.session import HubSession, PeerSession, State, cost, frames_in
from capflow.steering.action import Abort, ActionApplied
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.sessions import HELLOS, encoded, open_hub, open_peer

ACT = Act("1", Abort("r1"))
OUTCOME = ActionOutcome(ActionApplied("1", 3))

# The role, the sender, the message, and whether the session allows it when it is open.
CASES = [
    ("worker", "peer", make_frame(), True),
    ("worker", "peer", Beat(), True),
    ("worker", "peer", Beat(WorkerCounts(sent_frames=1)), True),
    ("worker", "peer", Bye(), True),
    ("worker", "peer", OUTCOME, False),
    ("worker", "peer", Await(("r1",)), False),
    ("worker", "peer", ACT, False),
    ("worker", "peer", Welcome("h", 1), False),
    ("worker", "peer", Ack(0, 1), False),
    ("scheduler", "peer", OUTCOME, True),
    ("scheduler", "peer", Beat(), True),
    ("scheduler", "peer", Bye(), True),
    ("scheduler", "peer", make_frame(), False),
    ("scheduler", "peer", Status(), False),
    ("client", "peer", ACT, True),
    ("client", "peer", Await(("r1",)), True),
    ("client", "peer", Status(), True),
    ("client", "peer", WatchRequest(1), True),
    ("worker", "peer", WatchRequest(1), False),
    ("client", "peer", FollowSteering("e"), True),
    ("client", "peer", SharedSteering("e", "", Version(1, "w")), True),
    ("client", "peer", HeldSteering("e"), True),
    ("worker", "peer", SharedSteering("e", "", Version(1, "w")), False),
    ("client", "hub", SharedSteering("e", "", Version(1, "w")), True),
    ("client", "hub", HeldSteering("e"), True),
    ("client", "hub", FollowSteering("e"), False),
    ("scheduler", "hub", SharedSteering("e", "", Version(1, "w")), False),
    ("client", "hub", Watched("e"), True),
    ("client", "hub", make_frame(), True),
    ("worker", "hub", Watched("e"), False),
    ("scheduler", "hub", make_frame(), False),
    ("client", "peer", Bye(), True),
    ("client", "peer", make_frame(), False),
    ("client", "peer", OUTCOME, False),
    ("worker", "hub", Ack(0, 1), True),
    ("worker", "hub", Beat(), True),
    ("worker", "hub", Bye(), True),
    ("worker", "hub", Refused("no"), True),
    ("worker", "hub", ACT, False),
    ("worker", "hub", Results("r1", {}), False),
    ("worker", "hub", Welcome("h", 1), False),
    ("worker", "hub", make_frame(), False),
    ("scheduler", "hub", ACT, True),
    ("scheduler", "hub", Ack(0, 1), False),
    ("client", "hub", OUTCOME, True),
    ("client", "hub", Results("r1", {}), True),
    ("client", "hub", Status({"a": 1}), True),
    ("client", "hub", Ack(0, 1), False),
]


def push(peer: PeerSession, count=1, **kwargs) -> None:
    for _ in range(count):
        frame = make_frame(**kwargs)
        peer.push(frame.header, frame.payload)


def sent(peer: PeerSession) -> list[Frame]:
    frames = []
    while (parts := peer.next_frame(0.0)) is not None:
        frames.append(Frame.decode(*parts))
    return frames


@pytest.mark.parametrize("role, speaker, thing, allowed", CASES, ids=lambda c: type(c).__name__)
class TestWhoMaySayWhat:
    def test_whole(self, role, speaker, thing, allowed):
        session = open_hub(role) if speaker == "peer" else open_peer(role)
        if allowed:
            got = session.receive(encoded(thing), 1.0)
            assert got.header == thing.header if isinstance(thing, Frame) else got == thing
        else:
            with pytest.raises(RemoteProtocolError):
                session.receive(encoded(thing), 1.0)

    def test_cut_short_anywhere(self, role, speaker, thing, allowed):
        parts = encoded(thing)
        for length in range(len(parts[0])):
            session = open_hub(role) if speaker == "peer" else open_peer(role)
            with pytest.raises(RemoteProtocolError):
                session.receive([parts[0][:length], *parts[1:]], 1.0)

    def test_with_trailing_junk(self, role, speaker, thing, allowed):
        session = open_hub(role) if speaker == "peer" else open_peer(role)
        with pytest.raises(RemoteProtocolError):
            session.receive([bytes(encoded(thing)[0]) + b"\0", *encoded(thing)[1:]], 1.0)
        with pytest.raises(RemoteProtocolError):
            session.receive([*encoded(thing), b"", b""], 1.0)

    def test_before_the_session_is_open(self, role, speaker, thing, allowed):
        if speaker == "peer":
            session = HubSession()
        else:
            session = PeerSession(HELLOS[role])
            session.connected(0.0)
            if isinstance(thing, Refused | Bye | Welcome):
                return
        with pytest.raises(RemoteProtocolError):
            session.receive(encoded(thing), 1.0)

    def test_saying_it_oneself(self, role, speaker, thing, allowed):
        if isinstance(thing, Frame | Refused):
            return
        session = open_peer(role) if speaker == "peer" else open_hub(role)
        if allowed:
            assert session.send(thing, 1.0) == encoded(thing)
        else:
            with pytest.raises(LocalProtocolError):
                session.send(thing, 1.0)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_garbage_is_the_peers_fault_and_nothing_worse(parts):
    for session in (HubSession(), open_hub(), open_peer()):
        with pytest.raises(RemoteProtocolError):
            session.receive(parts, 1.0)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_valid_msgpack_that_is_no_message_is_refused(value):
    try:
        part = msgspec.msgpack.encode({"type": "hello", "role": value, "engine": value, "boot": value})
    except OverflowError:
        return
    with pytest.raises(RemoteProtocolError):
        HubSession().receive([part], 1.0)


def several(peer: PeerSession, more=()) -> list[list[int]]:
    """Return the numbers of the frames in each message that a peer sends now. more: frames that it has not pushed."""
    more = list(more)

    def fill():
        if more:
            frame = more.pop(0)
            peer.push(frame.header, frame.payload)
            return True
        return False

    numbers = []
    while (parts := peer.next_frames(0.0, fill)) is not None:
        assert frames_in(parts) == len(parts) / 2
        numbers.append([Frame.decode(*parts[at : at + 2]).header.seq for at in range(0, len(parts), 2)])
    return numbers


class TestSeveralFramesInAMessage:
    def test_are_those_that_wait_and_those_that_come_meanwhile(self):
        peer = open_peer(frames_max=4)
        push(peer, 3)
        assert several(peer, [make_frame()] * 3) == [[1, 2, 3, 4], [5, 6]]
        assert several(peer, [make_frame()]) == [[7]]

    @pytest.mark.parametrize("frames_max", [msgspec.UNSET, 0, 1])
    def test_are_not_sent_to_a_hub_that_takes_one(self, frames_max):
        peer = open_peer(frames_max=frames_max)
        push(peer, 2)
        assert several(peer) == [[1], [2]]

    def test_are_at_most_as_many_as_every_hub_takes(self):
        peer = open_peer(frames_max=10 * limits.MESSAGE_FRAMES_MAX)
        push(peer, limits.MESSAGE_FRAMES_MAX + 1)
        assert [len(numbers) for numbers in several(peer)] == [limits.MESSAGE_FRAMES_MAX, 1]

    def test_are_small_together_and_a_large_one_goes_alone(self, monkeypatch):
        push(probe := open_peer())
        each = cost(probe.next_frame(0.0))
        monkeypatch.setattr(limits, "MESSAGE_FRAMES_BYTES_MAX", 2 * each)
        peer = open_peer(frames_max=9)
        push(peer, 3)
        push(peer, requests=[("r1", 90, 0, 90)])
        push(peer, 2)
        assert several(peer) == [[1, 2], [3], [4], [5, 6]]

    def test_cost_no_more_than_the_credit(self):
        push(probe := open_peer())
        each = cost(probe.next_frame(0.0))
        peer = open_peer(credit=each * 3 + each // 2, frames_max=2)
        push(peer, 5)
        assert several(peer) == [[1, 2], [3]]
        peer.receive(encoded(Ack(2, each * 2)), 0.0)
        assert several(peer) == [[4, 5]]
        assert peer.credit_bytes >= 0

    def test_are_sent_again_after_a_reconnect(self):
        peer = open_peer(frames_max=2)
        push(peer, 3)
        assert several(peer) == [[1, 2], [3]]
        peer.connected(0.0)
        peer.receive(encoded(Welcome("hub", 1_000_000, 1, frames_max=9)), 0.0)
        assert several(peer, [make_frame()]) == [[2, 3, 4]]

    def test_are_no_message_of_another_kind(self):
        parts = encoded(make_frame())
        assert [frames_in(parts * count) for count in (0, 1, 2)] == [0, 1, 2]
        assert frames_in(parts * limits.MESSAGE_FRAMES_MAX) == limits.MESSAGE_FRAMES_MAX
        assert frames_in(parts * (limits.MESSAGE_FRAMES_MAX + 1)) == 0
        assert frames_in([*parts, b""]) == 0
        for count in (2, limits.MESSAGE_FRAMES_MAX + 1):
            with pytest.raises(RemoteProtocolError, match="2 for each frame"):
                open_hub().receive(parts * count, 0.0)


class TestFramesOfAPeer:
    def test_are_numbered_from_one_without_a_gap(self):
        peer = open_peer()
        push(peer, 5, seq=77)
        assert [frame.header.seq for frame in sent(peer)] == [1, 2, 3, 4, 5]

    def test_are_not_sent_before_a_welcome(self):
        peer = PeerSession(HELLOS["worker"])
        push(peer)
        assert peer.next_frame(0.0) is None
        peer.connected(0.0)
        assert peer.next_frame(0.0) is None

    def test_never_cost_more_than_the_credit(self):
        push(probe := open_peer())
        each = cost(probe.next_frame(0.0))
        peer = open_peer(credit=each * 2 + each // 2)
        push(peer, 5)
        assert len(sent(peer)) == 2
        peer.receive(encoded(Ack(1, each)), 0.0)
        assert [frame.header.seq for frame in sent(peer)] == [3]
        assert peer.credit_bytes >= 0

    def test_larger_than_all_credit_go_one_at_a_time(self):
        peer = open_peer(credit=1)
        push(peer, 2)
        assert [frame.header.seq for frame in sent(peer)] == [1]
        peer.receive(encoded(Ack(1, 10)), 0.0)
        assert [frame.header.seq for frame in sent(peer)] == [2]

    def test_are_kept_up_to_a_bound_whatever_a_hub_grants(self, monkeypatch):
        monkeypatch.setattr(limits, "UNACKED_BYTES_MAX", 5000)
        peer = open_peer(credit=2**40)
        push(peer, 100)
        assert peer.credit_bytes <= 5000
        for turn in range(20):  # it grants without acknowledging, and has the worker connect again
            sent(peer)
            peer.receive(encoded(Ack(0, 2**62)), 0.0)
            sent(peer)
            assert peer._sent_bytes <= 5000
            last = peer._sent[-1].seq
            peer.connected(float(turn))
            peer.receive(encoded(Welcome("hub", 2**40, last_seq=last)), float(turn))
        assert last < 100

    def test_that_cannot_be_sealed_leave_no_gap(self):
        peer = open_peer()
        with pytest.raises(TypeError):
            peer.push(make_frame().header, object())
        push(peer, 2)
        assert [frame.header.seq for frame in sent(peer)] == [1, 2]

    def test_are_kept_until_acknowledged(self):
        peer = open_peer()
        push(peer, 3)
        sent(peer)
        assert peer.unacked == 3
        peer.receive(encoded(Ack(2, 0)), 0.0)
        assert peer.unacked == 1
        peer.receive(encoded(Ack(1, 0)), 0.0)  # an older one changes nothing
        assert peer.unacked == 1

    def test_the_hub_lacks_are_sent_again_in_order(self):
        peer = open_peer()
        push(peer, 4)
        sent(peer)
        push(peer, 1)
        peer.lost()
        peer.connected(1.0)
        peer.receive(encoded(Welcome("hub", 1_000_000, last_seq=2)), 1.0)
        assert [frame.header.seq for frame in sent(peer)] == [3, 4, 5]
        assert peer.unacked == 5  # what the hub has and has not acknowledged is kept for its successor
        peer.receive(encoded(Ack(5, 0)), 1.0)
        assert peer.unacked == 0

    def test_all_go_to_a_hub_that_has_none(self):
        peer = open_peer()
        push(peer, 3)
        sent(peer)
        peer.receive(encoded(Ack(1, 0)), 0.0)
        peer.receive(encoded(Bye()), 0.0)
        assert peer.state is State.LOST
        peer.connected(1.0)
        peer.receive(encoded(Welcome("another", 1_000_000)), 1.0)
        assert [frame.header.seq for frame in sent(peer)] == [2, 3]

    @pytest.mark.parametrize("ack", [Ack(4, 0), Ack(1, -1)])
    def test_acks_of_what_was_not_sent_are_refused(self, ack):
        peer = open_peer()
        push(peer, 3)
        sent(peer)
        with pytest.raises(RemoteProtocolError):
            peer.receive(encoded(ack), 0.0)

    @pytest.mark.parametrize(
        "welcome", [Welcome("h", 1, last_seq=1), Welcome("h", 1, last_seq=-1), Welcome("h", 1, version=9)]
    )
    def test_welcomes_that_cannot_be_are_refused(self, welcome):
        peer = PeerSession(HELLOS["worker"])
        peer.connected(0.0)
        with pytest.raises(RemoteProtocolError):
            peer.receive(encoded(welcome), 0.0)

    def test_of_a_client_are_its_own_bug(self):
        with pytest.raises(LocalProtocolError):
            push(open_peer("client"))


class TestIntake:
    def test_refuses_a_gap(self):
        intake = Intake(Pool(1000))
        intake.grant()
        assert intake.take(1, 10)
        with pytest.raises(RemoteProtocolError, match="frame number: got 3, expected 2"):
            intake.take(3, 10)

    def test_starts_wherever_an_earlier_hub_stopped(self):
        intake = Intake(Pool(1000))
        intake.grant()
        assert intake.take(7, 10)
        assert intake.release(7).seq == 7

    def test_takes_a_frame_once(self):
        intake = Intake(Pool(1000))
        intake.grant()
        assert intake.take(1, 10)
        assert not intake.take(1, 10)
        assert intake.refund().credit_bytes == 10
        assert intake.credit_bytes == 990

    def test_acknowledges_up_to_the_first_frame_that_is_held(self):
        intake = Intake(Pool(1000))
        intake.grant()
        for seq in (1, 2, 3):
            intake.take(seq, 10)
        assert intake.release(2) == Ack(0, 10)
        assert intake.release(1) == Ack(2, 10)
        assert intake.release(3) == Ack(3, 10)

    def test_several_frames_are_released_with_one_acknowledgement(self):
        intake = Intake(Pool(1000))
        intake.grant()
        for seq in (1, 2, 3):
            intake.take(seq, 10)
        assert intake.release(3, 1) == Ack(1, 20)
        assert intake.release(2) == Ack(3, 10)
        assert intake.held_bytes == 0

    def test_refuses_what_was_not_paid_for(self):
        intake = Intake(Pool(100))
        intake.grant()
        intake.take(1, 90)
        with pytest.raises(RemoteProtocolError, match="credit"):
            intake.take(2, 20)

    def test_admits_one_frame_larger_than_the_window(self):
        intake = Intake(Pool(100))
        intake.grant()
        assert intake.take(1, 500)
        assert intake.release(1) == Ack(1, 500)
        assert intake.credit_bytes == 100

    def test_grants_less_while_frames_are_held(self):
        intake = Intake(Pool(100))
        intake.grant()
        intake.take(1, 60)
        assert intake.grant() == 40


class TestPool:
    def test_many_workers_share_what_a_hub_holds(self):
        pool = Pool(1000, 4000)
        intakes = [Intake(pool) for _ in range(10)]
        assert [intake.grant() for intake in intakes] == [1000, 1000, 1000, 1000, 0, 0, 0, 0, 0, 0]
        for intake in intakes:
            for seq in range(1, 8):
                if intake.credit_bytes >= 300 or not intake.held_bytes:
                    intake.take(seq, 300)
        for intake in intakes:
            while intake.held_bytes:
                intake.release(next(iter(intake._held)))
        for intake in intakes:
            assert intake.take(intake.last_seq + 1, 300)
            intake.release(intake.last_seq)
        assert [intake.credit_bytes for intake in intakes] == [400] * 10
        assert pool.committed_bytes == 4000

    def test_what_is_held_of_workers_that_are_gone_counts(self):
        pool = Pool(1000, 1000)
        gone, here = Intake(pool), Intake(pool)
        gone.grant()
        gone.take(1, 700)
        gone.revoke()
        assert here.grant() == 300
        gone.release(1)
        here.take(1, 100)
        assert here.release(1) == Ack(1, 800)
        assert pool.committed_bytes == here.credit_bytes == 1000

    def test_a_worker_that_leaves_makes_room(self):
        pool = Pool(1000, 1000)
        first, second = Intake(pool), Intake(pool)
        assert first.grant() == 1000
        assert second.grant() == 0
        first.revoke()
        assert second.grant() == 1000

    @given(
        st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["take", "release", "grant", "revoke"])), max_size=200)
    )
    def test_no_more_is_committed_than_there_is_but_for_one_frame_of_each(self, turns):
        pool = Pool(1000, 2500)
        intakes = [Intake(pool) for _ in range(6)]
        for number, call in turns:
            intake = intakes[number]
            if call == "take" and intake.connected and (intake.credit_bytes >= 150 or not intake.held_bytes):
                assert intake.take(intake.last_seq + 1, 150)
            elif call == "release" and intake.held_bytes:
                intake.release(next(iter(intake._held)))
            elif call == "grant":
                intake.grant()
            elif call == "revoke":
                intake.revoke()
            assert sum(one.credit_bytes + one.held_bytes for one in intakes) == pool.committed_bytes
            assert sum(one.held_bytes for one in intakes) <= 2500 + 6 * 150
            assert pool.workers == sum(one.connected for one in intakes)


@given(
    st.lists(st.sampled_from(["push", "deliver", "release", "break", "new_hub"]), max_size=60), st.integers(200, 3000)
)
def test_every_frame_arrives_once_and_in_order_whatever_breaks(events, window):
    """The two sides against each other: nothing past credit, nothing lost, nothing twice."""
    peer, taken, hub_acked = PeerSession(HELLOS["worker"]), [], 0
    intake, wire, held = Intake(Pool(window)), [], []

    def connect():
        wire.clear()
        peer.lost()
        session = HubSession()
        session.receive(peer.connected(0.0), 0.0)
        for parts in session.welcome(Welcome("hub", window), 0.0, intake):
            peer.receive(parts, 0.0)
        return session

    hub = connect()

    def turn(event):
        nonlocal hub, intake, hub_acked
        if event == "push":
            push(peer)
        elif event == "deliver":
            while (parts := peer.next_frame(0.0)) is not None:
                wire.append(parts)
            while wire:
                parts = wire.pop(0)
                header = hub.receive(parts, 0.0).header
                if intake.take(header.seq, cost(parts)):
                    taken.append(header.seq)
                    held.append(header.seq)
                else:
                    peer.receive(hub.send(intake.refund(), 0.0), 0.0)
        elif event == "release" and held:
            peer.receive(hub.send(intake.release(held.pop(0)), 0.0), 0.0)
        elif event == "break":
            hub = connect()
        elif event == "new_hub":  # what was taken and not released is lost with the old one, and comes again
            del taken[len(taken) - len(held) :]
            held.clear()
            intake = Intake(Pool(window))
            hub = connect()

    for event in events:
        turn(event)
    for _ in range(peer.seq * 2 + 2):
        turn("deliver")
        turn("release")
    assert taken == list(range(1, peer.seq + 1))
    assert peer.unacked == 0


class TestTime:
    def test_a_beat_is_due_when_nothing_else_was_said(self):
        peer, hub = open_peer(now=0.0), open_hub()
        for session in (peer, hub):
            assert session.tick(limits.HEARTBEAT_S * 0.9) is None
            assert session.tick(limits.HEARTBEAT_S) == [message.encode(Beat())]
            assert session.tick(limits.HEARTBEAT_S * 1.5) is None

    def test_silence_ends_a_session(self):
        peer, hub = open_peer(now=0.0), open_hub()
        for session in (peer, hub):
            assert not session.silent(limits.SILENCE_S_MAX * 0.9)
            session.receive(encoded(Beat()), limits.SILENCE_S_MAX * 0.9)
            assert not session.silent(limits.SILENCE_S_MAX * 1.5)
            assert session.silent(limits.SILENCE_S_MAX * 2)

    def test_a_peer_knows_when_it_must_look_again(self):
        peer = PeerSession(HELLOS["worker"])
        assert peer.due() is None
        peer.connected(5.0)
        assert peer.due() == 5.0 + limits.SILENCE_S_MAX
        peer.receive(encoded(Welcome("h", 1)), 5.0)
        assert peer.due() == 5.0 + limits.HEARTBEAT_S


class TestHello:
    @pytest.mark.parametrize(
        "hello",
        [
            make_hello(role="worker").__class__("worker", "e", "b"),
            msgspec.structs.replace(make_hello(), version=2),
            msgspec.structs.replace(make_hello(), engine="e" * 600),
            make_hello(rank=Rank(1, 0, 0)),
            msgspec.structs.replace(make_hello(), model=msgspec.structs.replace(make_hello().model, stages=0)),
        ],
    )
    def test_that_cannot_be_is_refused(self, hello):
        with pytest.raises(RemoteProtocolError):
            HubSession().receive(encoded(hello), 0.0)

    def test_may_come_again_on_the_same_connection(self):
        hub = open_hub()
        hub.receive(encoded(HELLOS["worker"]), 1.0)
        assert hub.state is State.HELLO

    @pytest.mark.parametrize("other", [{"engine": "other"}, {"boot": "other"}, {"rank": Rank(1, 0, 0)}])
    def test_binds_the_frames_to_their_sender(self, other):
        with pytest.raises(RemoteProtocolError, match="expected the peer's own"):
            open_hub().receive(make_frame(**other).encode(), 0.0)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"hidden": 16}, "frame rows: got float32 of 16, expected float32 of 8, as the Hello says"),
            ({"dtype": "float16"}, "frame rows: got float16 of 8, expected float32 of 8, as the Hello says"),
            ({"sites": [(0, "post_block"), (4, "post_block")]}, "frame site: got post_block:4, expected a site of the"),
        ],
    )
    def test_binds_the_frames_to_its_model(self, other, message):
        hub = open_hub()
        with pytest.raises(RemoteProtocolError, match=message):
            hub.receive(make_frame(**other).encode(), 0.0)
        hub.receive(make_frame().encode(), 0.0)

    def test_that_comes_again_binds_the_frames_to_its_own_model(self):
        hub = open_hub()
        hub.receive(encoded(make_hello(model=make_model(hidden=16))), 1.0)
        list(hub.welcome(Welcome("hub", 1_000_000), 1.0, Intake(Pool(1_000_000))))
        hub.receive(make_frame(hidden=16).encode(), 1.0)
        with pytest.raises(RemoteProtocolError, match="float32 of 8, expected float32 of 16"):
            hub.receive(make_frame(seq=2).encode(), 1.0)


def test_a_refused_peer_says_nothing_until_the_connection_is_new():
    peer = open_peer()
    peer.receive(encoded(Refused("wrong model")), 0.0)
    assert (peer.state, peer.refusal) == (State.REFUSED, "wrong model")
    peer.receive(encoded(Bye()), 0.0)
    assert peer.state is State.REFUSED
    push(peer, finished=[make_finished()])
    assert peer.next_frame(0.0) is None
    peer.connected(1.0)
    assert (peer.state, peer.refusal) == (State.HELLO, None)


def test_what_a_hub_holds_of_a_process_that_is_gone_counts_against_the_credit():
    """Else the next process would send a frame beyond its credit, as the only one under way, and be refused."""
    peer = PeerSession(HELLOS["worker"], seq=9)
    peer.connected(0.0)
    peer.receive(encoded(Welcome("hub", 1, last_seq=9)), 0.0)
    push(peer)
    assert peer.next_frame(0.0) is None
    peer.receive(encoded(Ack(8, 1)), 0.0)
    assert peer.next_frame(0.0) is None
    peer.receive(encoded(Ack(9, 1)), 0.0)
    assert peer.next_frame(0.0) is not None
