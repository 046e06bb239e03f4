"""The exchange: what a frame takes of a hub comes back, whatever the frame holds."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc

import msgspec
import pytest

from capflow import limits
from capflow.buffers import shares
from capflow.capture import frame_cost
from capflow.capture.frame import Dropped, Frame, FrameHeader, Gap, Rank, Span
from capflow.capture.frame_cost import decoded_bytes
from capflow.capture.spec import CaptureSpec
from capflow.errors import RetryError
from capflow.hub.peers.turns import Turns
from capflow.hub.requests import request as requests
from capflow.hub.requests.index import RequestIndex, Wish
from capflow.hub.requests.request import KnownEngine
from capflow.protocol.message import Ack, Await, Beat, Bye, Hello, Refused, Results, Welcome, encode
from tests.kit.exchanges import Desk
from tests.kit.frames import BOOT, make_finished, make_frame, make_model
from tests.kit.hubs import EVERYTHING, Recorder

WRONG = CaptureSpec({"post_block": [99]})
"""Of a model with more layers than those of the tests."""


def wrong_in_rows(boot):
    return make_frame(boot=boot, captures={"r1": WRONG})


def wrong_in_an_end(boot):
    return make_frame((), (), boot=boot, finished=[make_finished("r1", capture=WRONG)])


def test_a_late_acknowledgement_goes_to_nobody_who_took_the_connections_name():
    desk = Desk(Recorder())
    desk.hello(b"old")
    desk.say(b"old", make_frame())
    desk.hello(b"new", boot="boot-2")  # of the same worker, which has started again
    desk.hello(b"old", boot="other", engine="engine-2")
    desk.sent[b"old"].clear()
    desk.handle_all()
    assert desk.sent[b"old"] == []


def header_of(spans=1, tokens=4, texts=()):
    """Return a frame of one request with so many spans and tokens."""
    made = make_frame([("r1", 4, 0, 4)], [(0, "post_block")])
    (block,), (part,) = made.header.blocks, made.header.requests
    many = tuple(Span(0, 300 + at, 1, 300 + at) for at in range(spans))
    part = msgspec.structs.replace(part, token_ids=tuple(range(70_000, 70_000 + tokens)), texts=texts)
    return msgspec.structs.replace(made.header, requests=(part,), blocks=(block._replace(spans=many),))


@pytest.mark.parametrize(
    "header", [header_of(spans=5000), header_of(tokens=5000), header_of(tokens=5000, texts=("é",) * 5000)]
)
def test_the_objects_of_a_header_take_no_more_memory_than_is_booked_for_them(header):
    encoded = msgspec.msgpack.encode(header)
    read = msgspec.msgpack.Decoder(FrameHeader)
    read.decode(encoded)
    tracemalloc.start()
    kept = read.decode(encoded)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept == header
    assert len(encoded) < taken <= decoded_bytes(encoded)


def test_a_frame_that_is_held_counts_with_the_memory_of_its_header():
    desk = Desk(Recorder())
    desk.hello(b"w")
    frames = desk.exchange.budget.frames
    before = frames.used
    made = make_frame([("r1", 1000, 0, 1000)])
    desk.say(b"w", made)
    header, _ = made.encode()
    assert frames.used == before + limits.STATE_PER_BYTE_MAX * len(header)
    desk.handle_all()
    assert frames.used == before


@pytest.mark.long
def test_a_worker_whose_frames_take_the_whole_budget_gets_credit_when_they_are_handled():
    desk = Desk(Recorder(), memory_bytes_max=limits.MEMORY_BYTES_MIN)
    desk.hello(b"w", boot=BOOT)
    intake = desk.exchange.roster.peers[b"w"].source.intake
    window = intake.credit_bytes
    seq = 0
    while intake.credit_bytes > window // 2 and seq < 200:
        seq += 1
        desk.say(b"w", make_frame([("r1", 30_000 * seq, 30_000 * (seq - 1), 30_000)], seq=seq))
    desk.handle_all()
    assert intake.held_bytes == 0
    assert intake.credit_bytes == window


def test_an_acknowledgement_that_cannot_be_sent_is_sent_at_the_next_turn(monkeypatch):
    desk = Desk(Recorder())
    for engine in ("one", "two"):
        desk.hello(engine.encode(), engine=engine)
        for seq in (1, 2):
            desk.say(engine.encode(), make_frame([("r1", 8, 4 * seq - 4, 4)], seq=seq, engine=engine))
    monkeypatch.setattr(desk.exchange.roster.peers[b"one"].session, "send", _fail)
    with pytest.raises(MemoryError):
        desk.handle_all()
    monkeypatch.undo()
    desk.turn()
    for peer in (b"one", b"two"):
        intake = desk.exchange.roster.peers[peer].source.intake
        acks = [message for message in desk.sent[peer] if isinstance(message, Ack)]
        assert [ack.seq for ack in acks] == [2]
        assert acks[0].credit_bytes > 0
        assert intake.held_bytes == 0
        assert intake.credit_bytes == desk.exchange.roster.pool.window_of(intake.owner)


@pytest.mark.parametrize(("failing", "statuses"), [(0, ["error", "partial_error"]), (1, ["partial_error", "error"])])
def test_a_request_is_no_success_if_the_hub_fails_at_the_frame_that_ends_it(failing, statuses, monkeypatch):
    desk = Desk(Recorder("one"), Recorder("two"))
    monkeypatch.setattr(desk.lanes[failing], "take", _fail)
    desk.hello(b"w")
    desk.say(b"w", make_frame(finished=[make_finished()]))
    desk.handle_all()
    desk.say(b"c", Hello("client", "", "c"))
    desk.say(b"c", Await(("r1",), False))
    (results,) = (message.results for message in desk.sent[b"c"] if isinstance(message, Results))
    assert [results[name].status for name in ("one", "two")] == statuses


def test_requests_that_end_in_one_frame_take_room_one_after_another():
    desk = Desk(Recorder(), memory_bytes_max=limits.MIB)
    desk.hello(b"w")
    ends = [make_finished(f"r{n}", 4, 1, rows=int(n == 0)) for n in range(200)]
    assert desk.exchange.budget.state.room("engine engine-1") < 200 * requests.REQUEST_BYTES
    desk.say(b"w", make_frame([], finished=ends))
    assert not desk.exchange.roster.engines["engine-1"].full
    assert desk.exchange.index.dropped == {"earlier_hub": 1}


class TestCredit:
    @pytest.mark.parametrize("wrong", [wrong_in_rows, wrong_in_an_end])
    def test_comes_back_of_frames_that_are_refused(self, wrong):
        desk = Desk(Recorder("reader", reads_requests=True))
        pool = desk.exchange.roster.pool
        for turn in range(limits.OFFENCES_MAX - 1):
            desk.hello(b"bad", boot=f"boot-{turn}")
            desk.say(b"bad", wrong(f"boot-{turn}"))
            assert isinstance(desk.sent[b"bad"][-1], Refused)
        assert pool.committed_bytes == 0
        assert desk.exchange.index.requests_open == 0

    def test_comes_back_of_frames_that_the_hub_fails_at(self, monkeypatch):
        desk = Desk(Recorder(), Recorder("second"))
        pool = desk.exchange.roster.pool
        desk.hello(b"w")
        monkeypatch.setattr(desk.lanes[1], "take", _fail)
        desk.say(b"w", make_frame())
        assert isinstance(desk.sent[b"w"][-1], Refused)
        desk.handle_all()
        assert pool.committed_bytes == 0

    def test_of_a_frame_that_is_refused_is_never_taken(self):
        desk = Desk(Recorder("reader", reads_requests=True))
        desk.hello(b"w")
        source = desk.exchange.roster.peers[b"w"].source
        desk.say(b"w", wrong_in_rows(BOOT))
        assert (source.intake.last_seq, source.frames, desk.exchange.counts.frames) == (0, 0, 0)
        assert not desk.lanes[0].queue.nbytes

    def test_does_not_cut_off_who_beats_while_a_frame_larger_than_all_of_it_is_held(self, monkeypatch):
        monkeypatch.setattr(limits, "CREDIT_BYTES_DEFAULT", limits.MIB)
        monkeypatch.setattr(limits, "READ_AHEAD_EACH_BYTES_MAX", limits.MIB)
        desk = Desk(Recorder())
        model = make_model(hidden=4096)
        desk.hello(b"w", model=model)
        frame = make_frame([("r1", 1000, 0, 1000)], seq=1, hidden=4096)
        assert frame.nbytes > 3 * limits.MIB
        turns = Turns(desk.dispatch.handle)
        beat = [encode(Beat())]
        for messages in ([beat, frame.encode(), beat], [beat, beat]):  # it is not handled; it is held by its consumer
            assert all(turns.put(b"w", parts, "", *desk.exchange.share_bytes(b"w")) for parts in messages)
            turns.run(60)
            assert not turns.waiting
        assert desk.lanes[0].queue.nbytes > 3 * limits.MIB


class Stuck(Recorder):
    """Its disk is full, and the hub stops while it waits."""

    def on_frame(self, frame):
        self.lane.discard()
        raise RetryError("no room")


@pytest.mark.parametrize("consumer", [Recorder, Stuck])
def test_a_frame_that_no_consumer_took_when_the_hub_stops_is_not_acknowledged(consumer):
    consumer = consumer()
    desk = Desk(consumer)
    (consumer.lane,) = desk.lanes
    desk.hello(b"w")
    if not isinstance(consumer, Stuck):
        consumer.lane.discard()
    desk.say(b"w", make_frame())
    desk.handle_all()
    assert consumer.lane.dropped["shutdown"] == 4
    assert not any(isinstance(message, Ack) and message.seq for message in desk.sent[b"w"])
    assert desk.exchange.roster.peers[b"w"].source.intake.acked == 0


def test_names_of_which_no_frame_came_keep_no_place_from_others():
    desk = Desk(Recorder(), memory_bytes_max=limits.MEMORY_BYTES_MIN)
    exchange = desk.exchange
    for number in range(limits.OWNERS_MAX):
        assert isinstance(desk.hello(b"bad", engine=f"name{number}"), Welcome)
    assert not exchange.roster._sources.keys() - {("name1023", Rank(0, 0, 0))}
    now = time.monotonic()
    for after_s in (1, limits.MISSED_S + 2):
        desk.dispatch.tick(now + after_s)
    assert list(exchange.roster.engines) == ["name1023"]
    assert isinstance(desk.hello(b"good", engine="good"), Welcome)
    assert exchange.budget.state.owners == 2


def test_a_consumer_is_told_that_an_engine_is_gone_also_when_there_was_no_room_to_tell_that_it_came_back():
    gone = []
    consumer = Recorder()
    consumer.on_engine_gone = gone.append
    desk = Desk(consumer)
    (lane,) = desk.lanes
    desk.hello(b"w")
    desk.handle_all()
    desk.dispatch.give_up(b"w")
    assert lane.notes.admit(limits.NOTES_BYTES_MAX)
    assert isinstance(desk.hello(b"w", boot="boot-2"), Welcome)
    desk.say(b"w", Bye())
    desk.handle_all()
    assert gone == ["engine-1"]
    desk.hello(b"w", engine="engine-2")  # of which it is never told
    desk.say(b"w", Bye())
    desk.handle_all()
    assert gone == ["engine-1"]


def _fail(*_):
    raise MemoryError


MEMORY = 4 * limits.MIB
"""Of a hub for tests: 512 KiB of it for open requests."""


def opened(names, number, **fields):
    return make_frame([(name, 1, 0, 1) for name in names], seq=number, **fields)


class TestOneWhoTakesAllThereIs:
    """Each of these has one peer take as much as it can; the others go on."""

    @pytest.fixture(autouse=True)
    def few_owners(self, monkeypatch):
        monkeypatch.setitem(shares.Shares.__init__.__kwdefaults__, "owners_max", 4)

    @pytest.mark.parametrize("policy", ["block", "drop"])
    def test_of_open_requests_loses_rows_by_name_and_no_other_does(self, policy, caplog):
        consumer = Recorder()
        desk = Desk(consumer, policy=policy, memory_bytes_max=MEMORY)
        desk.hello(b"bad", engine="bad")
        desk.hello(b"good", engine="good")
        for number in range(1, 30):
            desk.say(b"bad", opened([f"{number}-{each}" for each in range(50)], number, engine="bad"))
            desk.handle_all()
        assert desk.exchange.counts.protocol_errors == 0
        assert b"bad" in desk.exchange.roster.peers
        assert 0 < len(desk.exchange.roster.engines["bad"].open) < 29 * 50
        names = [f"good-{each}" for each in range(40)]
        desk.say(b"good", opened(names, 1, engine="good"))
        ends = [make_finished(name, 1, 1) for name in names]
        desk.say(b"good", make_frame((), (), seq=2, engine="good", finished=ends))
        desk.handle_all()
        assert all(consumer.done[name].rows == 1 and not consumer.done[name].dropped for name in names)
        (message,) = [record.message for record in caplog.records if getattr(record, "event", "") == "engine_full"]
        assert message.startswith("engine bad: no room for more of its requests, whose rows are lost: got ")
        assert message.endswith("start the hub with more --memory-bytes-max")
        desk.say(b"bad", make_frame((), (), seq=30, engine="bad", finished=[make_finished("29-49", 1, 1)]))
        desk.handle_all()
        assert [(lost.reason, lost.rows) for lost in consumer.done["29-49"].dropped] == [("hub_full", 1)]

    @pytest.mark.parametrize("room_again", [False, True])
    def test_of_open_requests_loses_rows_by_name_though_stages_end_them_apart(self, room_again):
        consumer, many = Recorder(), [str(number) for number in range(500)]
        desk, seqs = Desk(consumer, memory_bytes_max=MEMORY), (itertools.count(1), itertools.count(1))

        def say(stage, names=(), ends=()):
            parts = [(name, 1, 0, 1) for name in names]
            for batch in [ends[at : at + 200] for at in range(0, len(ends), 200)] or [()]:
                finished = [make_finished(name, 1, rows) for name, rows in batch]
                frame = make_frame(parts, seq=next(seqs[stage]), rank=Rank(stage, 0, 0), finished=finished)
                desk.say(str(stage).encode(), frame)
                desk.handle_all()

        for stage in range(2):
            desk.hello(str(stage).encode(), model=make_model(stages=2), rank=Rank(stage, 0, 0))
        say(0, many)
        say(0, ["late"])
        open_requests = desk.exchange.roster.engines["engine-1"].open
        assert 0 < len(open_requests) < len(many)
        say(0, ends=[("late", 1)])
        if room_again:
            names = list(open_requests)
            for stage in range(2):
                say(stage, ends=[(name, 1 - stage) for name in names])
            assert not open_requests
        say(1, ["late"])
        say(1, ends=[("late", 1)])
        assert [(lost.reason, lost.rows) for lost in consumer.done["late"].dropped] == [("hub_full", 2)]
        assert "late" not in open_requests
        assert desk.exchange.counts.protocol_errors == 0
        say(0, ["late"])  # another of this id
        assert ("late" in open_requests) == room_again

    def test_of_open_requests_gives_all_of_it_back_at_their_ends(self):
        desk = Desk(Recorder(), memory_bytes_max=MEMORY)
        desk.hello(b"w")
        before = desk.exchange.budget.state.used
        names = [f"r{each}" for each in range(50)]
        desk.say(b"w", opened(names, 1))
        assert desk.exchange.budget.state.used > before
        desk.say(b"w", make_frame((), (), seq=2, finished=[make_finished(name, 1, 1) for name in names]))
        assert desk.exchange.budget.state.used == before
        desk.say(b"w", Bye())
        assert desk.exchange.budget.state.used == 0
        assert desk.exchange.budget.state.owners == 0

    def test_of_names_that_it_waits_for_is_told_so_and_may_come_back(self):
        desk = Desk(Recorder(), memory_bytes_max=MEMORY)
        desk.say(b"bad", Hello("client", "", "bad"))
        desk.say(b"good", Hello("client", "", "good"))
        for number in range(20):
            desk.say(b"bad", Await(tuple(f"{number}-{each}" for each in range(100))))
        refusal = next(message for message in desk.sent[b"bad"] if isinstance(message, Refused))
        assert refusal.reason.startswith("requests waited for: got ")
        assert refusal.reason.endswith("--memory-bytes-max")
        assert desk.exchange.counts.protocol_errors == 0
        desk.say(b"good", Await(("r1",)))
        assert not any(isinstance(message, Refused) for message in desk.sent[b"good"])
        desk.say(b"bad", Hello("client", "", "bad"))
        assert isinstance(desk.sent[b"bad"][-1], Welcome)

    @pytest.mark.long
    def test_of_sessions_leaves_some_for_others(self, monkeypatch):
        desk = Desk(Recorder(), memory_bytes_max=64 * limits.MIB)
        answers = [desk.hello(b"%d" % number, "bad", engine=f"e{number}") for number in range(limits.SESSIONS_MAX)]
        refused = [message for message in answers if isinstance(message, Refused)]
        assert refused
        assert desk.exchange.counts.protocol_errors == 0
        assert isinstance(desk.hello(b"good", "good", engine="good"), Welcome)

    def test_of_models_leaves_room_for_others(self):
        desk = Desk(Recorder(), memory_bytes_max=MEMORY)
        model = make_model(limits.LAYERS_MAX)
        answers = [desk.hello(b"%d" % number, "bad", engine=f"e{number}", model=model) for number in range(8)]
        assert isinstance(answers[-1], Refused)
        assert desk.exchange.counts.protocol_errors == 0
        assert isinstance(desk.hello(b"good", "good", engine="good"), Welcome)

    def test_of_places_of_lost_rows_has_them_counted_only(self):
        consumer = Recorder()
        desk = Desk(consumer, memory_bytes_max=MEMORY)
        desk.hello(b"w")
        gaps = tuple(Gap(("post_block:0",), 2 * place, 2 * place + 1) for place in range(limits.GAPS_MAX))
        dropped = tuple(Dropped(limits.GAPS_MAX, f"r{number}", gaps) for number in range(8))
        desk.say(b"w", make_frame((), (), finished=[make_finished("r1", 1, 1, rows=0, dropped=dropped)]))
        desk.handle_all()
        (first, *_), every = consumer.done["r1"].dropped, consumer.done["r1"].dropped
        assert [lost.rows for lost in every] == [limits.GAPS_MAX] * 8
        assert first.gaps == ()

    def test_of_credit_leaves_some_for_others(self):
        desk = Desk(Recorder(), memory_bytes_max=64 * limits.MIB)
        for number in range(100):
            desk.hello(b"%d" % number, "bad", engine=f"e{number}")
        given = desk.hello(b"good", "good", engine="good").credit_bytes
        assert given >= desk.exchange.budget.frames.least > 0

    def test_of_results_has_its_own_forgotten_first(self, monkeypatch):
        monkeypatch.setattr(limits, "RESULTS_KEPT_MAX", 100)
        desk = Desk(Recorder())
        desk.hello(b"good", engine="good")
        desk.say(b"good", make_frame((), (), engine="good", finished=[make_finished(f"g{n}") for n in range(20)]))
        desk.hello(b"bad", engine="bad")
        for number in range(1, 10):
            ends = [make_finished(f"{number}-{each}") for each in range(100)]
            desk.say(b"bad", make_frame((), (), seq=number, engine="bad", finished=ends))
        desk.handle_all()
        assert all(desk.exchange.index.named(f"g{n}") for n in range(20))
        assert len(desk.exchange.index.kept) == 100


def test_a_consumer_that_spills_is_given_every_end_of_a_request_without_room():
    index = RequestIndex([Wish("w", EVERYTHING, reads_requests=False, durable=True)], shares.Shares("state", 0))
    engine = KnownEngine("engine-1", make_model(stages=2))
    rows = make_frame([("r1", 1, 0, 1)])
    ends = [make_frame((), (), rank=Rank(stage, 0, 0), finished=[make_finished("r1", 1, 1)]) for stage in range(2)]
    assert not index.take(rows, engine).concerns(0)
    given = [(index.take(end, engine).concerns(0), len(index.finish(end.header, engine))) for end in ends]
    assert given == [(True, 0), (True, 1)]
    assert index.requests_open == 0


def test_requests_that_a_stage_ended_before_it_fell_silent_are_over_when_nobody_of_their_replica_comes():
    desk = Desk(Recorder())
    exchange, now = desk.exchange, time.monotonic()
    model = make_model(stages=2)
    for replica in range(2):
        rank = Rank(0, replica, 0)
        desk.hello(b"w%d" % replica, model=model, rank=rank)
        frame = make_frame([(f"r{replica}", 1, 0, 1)], rank=rank, finished=[make_finished(f"r{replica}", 1, 1)])
        desk.say(b"w%d" % replica, frame)
    for later in range(1, 3):
        exchange.roster.peers[b"w1"].session._pulse.heard = now + later * limits.SILENCE_S_MAX
        desk.dispatch.tick(now + later * limits.SILENCE_S_MAX + 1)
    assert exchange.roster.peers.keys() == {b"w1"}
    assert exchange.index.requests_open == 2
    desk.dispatch.tick(now + 2 * limits.SILENCE_S_MAX + 1 + limits.MISSED_S)
    assert set(exchange.roster.engines["engine-1"].open) == {"r1"}
    assert exchange.index.named("r0")[0].status == "error"
    desk.hello(b"again", model=model, rank=Rank(0, 0, 0))
    assert exchange.roster.resumed == 1


def test_workers_that_were_killed_are_forgotten_in_the_end_and_take_no_part_of_anything():
    desk = Desk(Recorder(), memory_bytes_max=MEMORY)
    exchange, now = desk.exchange, time.monotonic()
    for number in range(3):
        desk.hello(b"%d" % number, engine=f"e{number}")
        desk.say(b"%d" % number, make_frame(engine=f"e{number}"))
    desk.handle_all()
    for _ in range(2):
        desk.dispatch.tick(now + limits.SILENCE_S_MAX + 1)
    assert not exchange.roster.peers
    desk.dispatch.tick(now + limits.RESUME_S_MAX)
    assert len(exchange.roster.engines) == 3  # they may resume
    for more in (2, 3):
        desk.dispatch.tick(now + limits.RESUME_S_MAX + more * limits.SILENCE_S_MAX)
    assert exchange.roster.engines == {}
    assert exchange.budget.state.owners == 0


def test_a_large_header_is_read_and_checked_in_two_steps(monkeypatch):
    monkeypatch.setattr(frame_cost, "_SMALL_BYTES", 0)
    recorder = Recorder()
    desk = Desk(recorder)
    desk.hello(b"w")
    desk.hello(b"x", engine="other")
    frame = make_frame([("r", 4, 0, 4)], seq=1)
    steps = desk.dispatch.handle(b"w", frame.encode())
    next(steps)
    desk.say(b"x", make_frame([("r", 4, 0, 4)], seq=1, engine="other"))
    desk.handle_all()
    assert [type(message) for message in desk.sent[b"x"]] == [Welcome, Ack]  # it did not wait for the check
    assert list(steps) == []
    desk.handle_all()
    assert desk.sent[b"w"][-1].seq == 1
    steps = desk.dispatch.handle(b"w", make_frame([("r", 4, 4, 1)], seq=2).encode())
    next(steps)
    desk.say(b"w", Bye())
    assert list(steps) == []
    assert desk.exchange.counts.frames == 2


def test_an_engine_waits_for_one_record_of_another_in_a_consumers_queue():
    recorder = Recorder()
    desk = Desk(recorder)
    desk.hello(b"much", engine="much", boot="m")
    desk.hello(b"few", engine="few", boot="f")
    names = [f"r{number}" for number in range(200)]
    for seq in range(1, 5):
        ends = tuple(make_finished(name, 4, 4, rows=0) for name in names[50 * seq - 50 : 50 * seq])
        desk.say(b"much", make_frame([], finished=ends, seq=seq, engine="much", boot="m"))
    desk.say(b"few", make_frame([("r", 4, 0, 4)], seq=1, engine="few", boot="f"))
    lane = desk.lanes[0]
    while not recorder.seqs:
        lane._safely_handle(lane.queue.get(0))
    desk.turn()
    assert desk.sent[b"few"][-1].seq == 1
    assert len(recorder.done) <= 2
    desk.handle_all()
    assert list(recorder.done) == names


@pytest.mark.parametrize("policy", ["drop", "skip"])
def test_frames_without_many_rows_fill_a_queue_by_the_memory_of_their_headers(policy):
    desk = Desk(Recorder(), policy=policy)
    lane = desk.lanes[0]
    desk.hello(b"w", engine="w", boot="w")
    lane.queue.bytes_max = 256 * 1024
    gc.collect()
    tracemalloc.start()
    for seq in range(1, 501):
        desk.say(b"w", make_frame([("r", 500, seq - 1, 1)], seq=seq, step=seq, engine="w", boot="w"))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0 < lane.queue.nbytes <= lane.queue.bytes_max
    assert len(lane.queue) < 100
    assert held < 4 * lane.queue.bytes_max


@pytest.mark.parametrize("policy", ["drop", "skip"])
def test_an_engine_loses_no_row_within_its_part_of_a_slow_consumers_queue_while_another_floods_it(policy):
    recorder = Recorder()
    desk = Desk(recorder, policy=policy)
    lane = desk.lanes[0]
    frame = make_frame([("h", 40, 0, 4)], engine="honest", boot="h")
    rows = sum(frame.counts)
    lane.queue.bytes_max = 10 * (Frame.decode(*frame.encode()).memory_bytes + 512)  # numbers grow by some bytes
    desk.hello(b"flood", engine="flood", boot="f")
    desk.hello(b"honest", engine="honest", boot="h")

    def send(name, seq, start, **kwargs):
        parts = [(name[0], 40, start, 4)]
        desk.say(name.encode(), make_frame(parts, seq=seq, step=seq, engine=name, boot=name[0], **kwargs))

    for seq in range(1, 31):
        send("flood", seq, 4 * seq - 4)
    for seq in range(1, 6):  # half of the queue
        send("honest", seq, 4 * seq - 4)
        for more in range(1, 5):
            send("flood", 26 + 4 * seq + more, 4 * (26 + 4 * seq + more) - 4)
    for name, request, seq, frames in (("flood", "f", 51, 50), ("honest", "h", 6, 5)):
        finished = (make_finished(request, 40, 4 * frames, rows=frames * rows),)
        desk.say(name.encode(), make_frame([], seq=seq, step=seq, engine=name, boot=name[0], finished=finished))
    desk.handle_all()
    reason = {"drop": "consumer_queue_full", "skip": "skipped"}[policy]
    assert recorder.rows["h"] == recorder.done["h"].rows == 5 * rows
    assert not recorder.done["h"].dropped
    assert recorder.rows["f"] == recorder.done["f"].rows == 5 * rows
    lost = 45 * rows
    assert [(each.reason, each.rows) for each in recorder.done["f"].dropped] == [(reason, lost)]
    assert lane.dropped == {reason: lost}
