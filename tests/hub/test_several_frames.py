"""Several frames in one message: each is checked, taken and acknowledged as if it had come alone."""

from __future__ import annotations

import pytest

from capflow import limits
from capflow.capture import frame_cost
from capflow.capture.frame import Frame
from capflow.hub.effects import Pause
from capflow.hub.peers.turns import Turns
from capflow.protocol.message import Ack, Bye, Refused, Welcome, decode, encode
from capflow.protocol.session import cost, frames_in
from capflow.transport.sockets import Dealer
from tests.kit.exchanges import Desk
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import Recorder, address, answer, raw_peer, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]


def frames(first, count, **kwargs):
    """Return frames in a row, each of one step of one request."""
    return [make_frame([("r1", 4, 4 * seq, 4)], seq=seq, step=seq, **kwargs) for seq in range(first, first + count)]


def joined(several):
    """Return the parts of a message of several frames."""
    return [part for frame in several for part in frame.encode()]


def tell(desk, parts, peer=b"w"):
    desk.sent[peer].clear()
    desk.dispatch.receive(peer, parts)
    desk.turn()


@pytest.fixture
def desk():
    made = Desk(Recorder())
    assert made.hello(b"w").frames_max == limits.MESSAGE_FRAMES_MAX
    return made


def test_are_given_to_the_consumer_in_order_and_acknowledged_at_once(desk):
    several = frames(1, 20)
    tell(desk, joined(several))
    assert desk.sent[b"w"] == []
    desk.handle_all()
    (consumer,) = (lane.consumer for lane in desk.lanes)
    assert consumer.seqs == list(range(1, 21))
    assert consumer.rows["r1"] == 80
    assert desk.sent[b"w"] == [Ack(20, sum(cost(frame.encode()) for frame in several))]


def test_checked_in_this_process_are_taken_as_those_that_came_encoded(desk):
    """Frames with ends, one that came before, and more than go together: all but the encoding is the same."""
    ends = [make_finished("r1", 4, 164, rows=160)]
    several = [*frames(1, 20), *frames(20, 1), *frames(21, 20), make_frame([], finished=ends, seq=41)]
    other = Desk(Recorder())
    other.hello(b"w")
    for at in range(0, len(several), 21):
        tell(desk, joined(several[at : at + 21]))
        decoded = [Frame.decode(*frame.encode()) for frame in several[at : at + 21]]
        other.sent[b"w"].clear()
        other.dispatch.take(b"w", decoded)
        other.turn()
        assert other.sent == desk.sent
    pools = [each.exchange.roster.peers[b"w"].source.intake for each in (desk, other)]
    assert pools[0].held_bytes == pools[1].held_bytes > 0
    assert pools[0].pool.committed_bytes == pools[1].pool.committed_bytes
    assert desk.lanes[0].queue.nbytes == other.lanes[0].queue.nbytes
    for each in (desk, other):
        each.handle_all()
    (one,), (two,) = desk.lanes, other.lanes
    assert one.consumer.seqs == two.consumer.seqs == list(range(1, 41))
    assert (one.rows, one.bytes, one.frames) == (two.rows, two.bytes, two.frames)
    assert list(one.consumer.done) == list(two.consumer.done) == ["r1"]
    assert desk.sent == other.sent
    assert desk.exchange.counts.duplicates == other.exchange.counts.duplicates == 1


def test_checked_in_this_process_and_unwanted_here_are_refused_as_those_that_came_encoded(desk):
    desk.dispatch.take(b"stranger", frames(1, 2))
    desk.turn()
    assert desk.sent[b"stranger"] == [Bye()]
    desk.sent[b"w"].clear()
    desk.dispatch.take(b"w", [*frames(1, 2), *frames(4, 1)])
    desk.turn()
    assert isinstance(desk.sent[b"w"][0], Refused)
    desk.handle_all()
    assert desk.lanes[0].consumer.seqs == [1, 2]


def test_a_consumer_that_is_stopped_between_two_took_the_first(desk):
    """Those that it did not take stay with their worker, for the next hub."""
    (lane,) = desk.lanes
    tell(desk, joined(frames(1, 4)))
    took = lane.consumer.on_frame

    def stopping(frame):
        took(frame)
        if frame.header.seq == 2:
            lane.discard()

    lane.consumer.on_frame = stopping
    desk.handle_all()
    assert lane.consumer.seqs == [1, 2]
    assert lane.dropped == {"shutdown": 8}
    (ack,) = desk.sent[b"w"]
    assert ack.seq == 2


def test_that_came_before_are_not_taken_again(desk):
    tell(desk, joined(frames(1, 3)))
    tell(desk, joined(frames(2, 4)))
    desk.handle_all()
    assert desk.lanes[0].consumer.seqs == [1, 2, 3, 4, 5]
    assert desk.exchange.counts.duplicates == 2


def test_are_taken_up_to_the_first_that_is_wrong(desk):
    several = frames(1, 5)
    broken = Frame(several[2].header, bytes(several[2].nbytes))
    tell(desk, joined([*several[:2], broken, *several[3:]]))
    assert isinstance(desk.sent[b"w"][0], Refused)
    assert "checksum" in desk.sent[b"w"][0].reason
    desk.handle_all()
    assert desk.lanes[0].consumer.seqs == [1, 2]
    assert desk.exchange.counts.frames == 2


@pytest.mark.parametrize("count", [3, 2 * limits.MESSAGE_FRAMES_MAX + 2, 300_000])
def test_of_an_odd_or_too_large_number_of_parts_are_refused_whole(desk, count):
    tell(desk, [*frames(1, 1)[0].encode(), *[b""] * (count - 2)])
    assert isinstance(desk.sent[b"w"][0], Refused)
    assert desk.exchange.counts.frames == 0


def test_beyond_the_credit_are_refused(desk):
    several = frames(1, 3)
    intake = desk.exchange.roster.peers[b"w"].source.intake
    intake.credit_bytes = sum(cost(frame.encode()) for frame in several) - 1
    tell(desk, joined(several))
    assert isinstance(desk.sent[b"w"][0], Refused)
    assert desk.exchange.counts.frames == 2


def test_of_a_session_that_is_over_are_answered_by_one_bye(desk):
    tell(desk, joined(frames(1, 3)), b"stranger")
    assert desk.sent[b"stranger"] == [Bye()]


def test_of_a_client_are_refused(desk):
    desk.hello(b"c", role="client", model=None)
    tell(desk, joined(frames(1, 3)), b"c")
    assert isinstance(desk.sent[b"c"][0], Refused)
    assert desk.exchange.counts.frames == 0


def test_let_others_have_their_turn_after_a_few(desk):
    count = 2 * limits.SLICE_FRAMES + 1
    effects = list(desk.exchange.receive(b"w", joined(frames(1, count)), 0.0))
    assert [type(effect) for effect in effects].count(Pause) == 2
    assert [len(effect.arrivals) for effect in effects[::2]] == [limits.SLICE_FRAMES, limits.SLICE_FRAMES, 1]


def test_with_a_large_header_are_slices_of_their_own(desk, monkeypatch):
    several = frames(1, 3)
    monkeypatch.setattr(frame_cost, "_SMALL_BYTES", len(several[0].encode()[0]) + 40)
    large = make_frame([("r1", 40, 8, 40)], seq=2, step=2)
    several[1] = large
    effects = list(desk.exchange.receive(b"w", joined(several), 0.0))
    assert [type(effect).__name__ for effect in effects] == ["Give", "Pause", "Give"]
    assert [len(effect.arrivals) for effect in effects[::2]] == [1, 2]


def test_of_a_peer_that_leaves_in_between_are_left_alone(desk):
    """Its Hello comes on the same connection while the first message is still handled."""
    count = 2 * limits.SLICE_FRAMES
    steps = desk.dispatch.handle(b"w", joined(frames(1, count)))
    next(steps)
    desk.hello(b"w")
    list(steps)
    assert desk.exchange.counts.frames == limits.SLICE_FRAMES
    tell(desk, joined(frames(limits.SLICE_FRAMES + 1, limits.SLICE_FRAMES)))
    desk.handle_all()
    assert desk.lanes[0].consumer.seqs == list(range(1, count + 1))


def test_end_a_request_after_all_of_them(desk):
    several = frames(1, 3)
    several[2] = make_frame([("r1", 4, 12, 4)], seq=3, step=3, finished=[make_finished("r1", rows=12)])
    tell(desk, joined(several))
    desk.handle_all()
    (done,) = desk.lanes[0].consumer.done.values()
    assert (done.rows, done.dropped) == (12, ())


def test_wait_as_one_message_of_their_peer(desk):
    """What is paid for by credit may wait; the parts of a message are one entry of the peer's line."""
    turns = Turns(desk.dispatch.handle)
    several = frames(1, 4)
    assert turns.put(b"w", joined(several), "", 4096, sum(cost(frame.encode()) for frame in several))
    turns.run(60)
    assert desk.exchange.counts.frames == 4


def test_that_nobody_paid_for_are_not_read(desk):
    """Only one frame may be larger than all credit."""
    turns = Turns(desk.dispatch.handle)
    large = make_frame([("r1", 4000, 0, 4000)], seq=1)
    assert not turns.put(b"w", joined([large, *frames(2, 1)]), "", 4096, 4096)
    assert turns.put(b"w", large.encode(), "", 4096, 4096)


def test_wake_the_consumer_once_a_turn(desk, monkeypatch):
    woken, queue = [], desk.lanes[0].queue
    desk.turn()
    waiting = len(queue)
    monkeypatch.setattr(queue, "wake", lambda: woken.append(len(queue)))
    desk.dispatch.receive(b"w", joined(frames(1, 5)))
    desk.dispatch.receive(b"w", joined(frames(6, 5)))
    assert woken == []
    desk.turn()
    assert woken == [waiting + 2]  # the frames of a slice are one item


def test_arrive_over_a_socket_by_one_message(address):
    consumer = Recorder()
    with running_hub(address, consumer) as hub, raw_peer(address) as peer:
        peer.send(encode(make_hello()))
        welcome = decode(answer(peer)[0])
        assert isinstance(welcome, Welcome)
        assert welcome.frames_max == limits.MESSAGE_FRAMES_MAX
        peer.send_multipart(joined(frames(1, 9)))
        eventually(lambda: consumer.seqs == list(range(1, 10)))
        assert hub.counts.frames == 9


def test_are_sent_by_a_link_for_what_waited(address, monkeypatch):
    """Frames that were queued while there was no hub go in few messages; all arrive, in order."""
    consumer, sizes, send = Recorder(), [], Dealer.send

    def counted(dealer, parts):
        if count := frames_in(parts):
            sizes.append(count)
        send(dealer, parts)

    monkeypatch.setattr(Dealer, "send", counted)
    with worker_link(address, wait=False) as link:
        link.expect()
        for frame in frames(1, 100):
            assert link.send(frame.header, frame.payload) is None
        with running_hub(address, consumer):
            eventually(lambda: consumer.seqs == list(range(1, 101)))
            eventually(lambda: link.counters["unacked_frames"] == 0)
    full, rest = divmod(100, limits.MESSAGE_FRAMES_MAX)
    assert sizes == [limits.MESSAGE_FRAMES_MAX] * full + [rest] * bool(rest)
