"""Consumers that spill: the frames are on disk, and each next hub gives its consumer those that were not handled."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import InvalidStateError

import msgspec
import pytest

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.capture.frame import Acted, Dropped, Gap, Rank
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.hub.lanes import inbox, writer
from capflow.hub.lanes.durable import DurableLane
from capflow.hub.lanes.lane import HubCalls
from capflow.hub.lanes.writer import InboxWriter
from capflow.plugins.configure import Spill
from capflow.transport.client import Client
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Later, Recorder, address, running_hub, worker_link
from tests.kit.spills import ROWS, Sender, once, spills, waiting
from tests.kit.waiting import eventually

__all__ = ["address", "spills"]


def test_a_frame_is_acknowledged_when_it_is_on_disk_however_slow_the_consumer(address, spills):
    slow = Recorder(held=True)
    with running_hub(address, spills(slow)) as hub, worker_link(address) as link:
        worker = Sender(link)
        for _ in range(50):
            worker.rows("r1")
        eventually(lambda: worker.acknowledged)
        assert hub.status()["consumers"]["recorder"]["spool"]["frames_spilled"] == 50
        assert slow.rows == {}
        worker.end("r1")
        slow.go.set()
        eventually(lambda: slow.rows["r1"] == 50 * ROWS)
        eventually(lambda: "r1" in slow.done)
        assert slow.seqs == list(range(1, 51))
        assert slow.done["r1"].rows == slow.done["r1"].rows_promised == 50 * ROWS
        with Client(hub.address) as client:
            assert client.results(["r1"], timeout=20)["r1"]["recorder"] == CaptureResult("ok", payload={"rows": 200})


def test_the_next_hub_goes_on_where_the_last_stopped_and_no_row_is_given_twice_in_it(address, spills):
    first, second, third = Recorder(), Recorder(), Recorder()
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with running_hub(address, spills(first)):
            assert link.wait_welcome(20)
            worker.rows("old", "open")
            worker.rows("open", "over")
            worker.end("old")
            worker.rows("open")
            worker.rows("over")
            worker.end("over")
            eventually(lambda: set(first.done) == {"old", "over"})
            eventually(lambda: worker.acknowledged)
        assert first.events[-1] == "close"
        assert "open" not in first.done
        worker.rows("open", "new")
        with running_hub(address, spills(second)) as hub:
            eventually(lambda: second.rows["open"] == 4 * ROWS)
            worker.rows("new")
            worker.end("open", "new")
            eventually(lambda: set(second.done) == {"open", "new"})
            assert second.done["open"].rows == 4 * ROWS
            assert second.done["open"].dropped == second.done["new"].dropped == ()
            assert set(second.rows) == {"open", "new"}  # not what is done, although an open one holds its frames back
            once(second.positions)
            assert hub.snapshot().rows_lost == 0
            eventually(lambda: worker.acknowledged)
        with running_hub(address, spills(third)):
            assert link.wait_welcome(20)
            worker.rows("after")
            eventually(lambda: third.rows["after"] == ROWS)
            assert set(third.rows) == {"after"}


class Forgetful(Later):
    """Leaves requests without a result at its close."""

    def close(self):
        self._note("close")


def test_a_request_without_a_result_is_given_again(address, spills):
    first, second, third = Forgetful(), Recorder(), Recorder()
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with running_hub(address, spills(first)):
            assert link.wait_welcome(20)
            worker.rows("told", "untold")
            worker.end("told", "untold")
            eventually(lambda: set(first.futures) == {"told", "untold"})
            first.futures["told"].set_result(CaptureResult("ok"))
            eventually(lambda: worker.acknowledged)
        with running_hub(address, spills(second)):
            eventually(lambda: "untold" in second.done)
            assert second.rows == {"untold": ROWS}
            assert second.done["untold"].rows == second.done["untold"].rows_promised == ROWS
        with running_hub(address, spills(third)):
            assert link.wait_welcome(20)
            worker.rows("after")
            eventually(lambda: third.rows["after"] == ROWS)
            assert set(third.rows) == {"after"}


def test_a_request_without_a_result_is_given_again_although_its_engine_is_gone(address, spills):
    first, second = Forgetful(), Recorder()
    with running_hub(address, spills(first)) as hub:
        with worker_link(address) as link:
            worker = Sender(link)
            worker.rows("told")
            worker.rows("untold")
            worker.end("told", "untold")
            eventually(lambda: len(first.futures) == 2)
        eventually(lambda: hub.lanes[0].inbox.engines == [])
        first.futures["told"].set_result(
            CaptureResult("ok")
        )  # its frames are forgotten, by a checkpoint that is made now
        hub.stop(5)
    with running_hub(address, spills(second)):
        eventually(lambda: "untold" in second.done)
        assert second.rows == {"untold": ROWS}
        assert second.done["untold"].dropped == ()


def test_what_an_engine_sends_that_was_gone_is_given_also_when_its_going_is_in_the_inbox(address, spills):
    first, second = Recorder(held=True), Recorder(held=True)
    with running_hub(address, spills(first)) as hub:
        with worker_link(address) as link:
            Sender(link).rows("r1")
            eventually(first.waiting.is_set)
            entry = hub.lanes[0].inbox.spool.last
        eventually(lambda: hub.lanes[0].inbox.spool.last > entry)
        hub.lanes[0]._discarded.set()
        first.go.set()
        hub.stop(5)
    with running_hub(address, spills(second)) as hub, worker_link(address, make_hello(boot="boot-2")) as link:
        worker = Sender(link, boot="boot-2")
        worker.rows("r2")
        worker.end("r2")
        eventually(lambda: worker.acknowledged)
        second.go.set()
        eventually(lambda: "r2" in second.done)
        assert second.rows == {"r1": ROWS, "r2": ROWS}


class Told(Forgetful):
    """Keeps the actions that it sees, and how many results it had been asked for by then."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_action(self, answered):
        self.told.append((answered, len(self.futures)))


def test_what_was_done_inside_a_worker_is_told_before_the_end_and_again_by_the_same_id(address, spills):
    first, second = Told(), Told()
    acted = (
        Acted("request", "steer", (Site(1, "post_block"),), 3, 30),
        Acted("controller gate", "unsteer", (), 9, 90),
    )
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        for consumer in (first, second):
            with running_hub(address, spills(consumer)):
                assert link.wait_welcome(20)
                if consumer is first:
                    worker.rows("r1")
                    worker.end("r1", acted=acted)
                eventually(lambda consumer=consumer: "r1" in consumer.futures)
                eventually(lambda: worker.acknowledged)
        message = [(a.request, a.asked_by, a.kind, a.sites, a.step, a.time_ns, before) for a, before in first.told]
    assert message == [
        ("r1", "request", "steer", (Site(1, "post_block"),), 3, 30, 0),
        ("r1", "controller gate", "unsteer", (), 9, 90, 0),
    ]
    assert second.told == first.told
    assert len({answered.id for answered, _ in first.told}) == 2


def test_an_id_may_come_again_before_its_first_result(address, spills):
    first, second = Later(), Recorder()
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with running_hub(address, spills(first)) as hub:
            assert link.wait_welcome(20)
            worker.rows("r1")
            worker.rows("r1")
            worker.end("r1")
            eventually(lambda: "r1" in first.futures)
            worker.sent.clear()
            worker.rows("r1")
            eventually(lambda: waiting(hub) == 0)
            first.futures["r1"].set_result(CaptureResult("ok"))
            eventually(lambda: first.rows["r1"] == 3 * ROWS)
            eventually(lambda: worker.acknowledged)
        with running_hub(address, spills(second)):
            worker.end("r1")
            eventually(lambda: "r1" in second.done)
            assert second.rows["r1"] == second.done["r1"].rows == ROWS  # of the second, and all of it
            assert second.done["r1"].dropped == ()


def test_what_the_worker_sends_again_is_known(address, spills, tmp_path):
    """The hub is killed between writing a frame and saying so: here, by a worker that never hears it."""
    first, second = Recorder(), Recorder()
    hello = make_hello()
    with running_hub(address, spills(first)), worker_link(address, hello) as link:
        worker = Sender(link)
        for _ in range(5):
            worker.rows("r1")
        eventually(lambda: first.rows["r1"] == 5 * ROWS)
    with (
        running_hub(address, spills(second)) as hub,
        worker_link(address, hello) as link,
    ):  # the same boot, from the start
        worker = Sender(link)
        for _ in range(8):
            worker.rows("r1")
        worker.end("r1")
        eventually(lambda: "r1" in second.done)
        assert hub.counts.duplicates == 0  # this hub never had them
        assert second.rows["r1"] == second.done["r1"].rows == 8 * ROWS
        once(second.positions)


def test_a_hub_that_no_engine_reached_leaves_the_next_what_it_knows(address, spills):
    """No frame of the worker is acknowledged, and between two hubs that it reaches is one that it does not reach."""
    first, third = Recorder(), Recorder()
    hello = make_hello()
    with running_hub(address, spills(first)) as hub, worker_link(address, hello) as link:
        worker = Sender(link)
        worker.rows("r1")
        worker.end("r1")
        eventually(lambda: "r1" in first.done)
        hub.stop(5)  # while the worker is there
    with running_hub(address, spills(Recorder())):
        pass
    with running_hub(address, spills(third)), worker_link(address, hello) as link:  # the same boot, from the start
        worker = Sender(link)
        worker.rows("r1")
        worker.end("r1")
        worker.rows("r2")
        worker.end("r2")
        eventually(lambda: "r2" in third.done)
    assert set(third.done) == {"r2"}


def test_a_request_whose_engine_does_not_come_back_is_over(address, spills, monkeypatch):
    monkeypatch.setattr(limits, "MISSED_S", 0.3)
    first, second, third = Recorder(), Recorder(), Recorder()
    with running_hub(address, spills(first)) as hub, worker_link(address) as link:
        Sender(link).rows("r1")
        eventually(lambda: first.rows["r1"] == ROWS)
        hub.stop(5)  # while the worker is there
    assert first.done == {}
    with running_hub(address, spills(second)):
        eventually(lambda: "r1" in second.done)
        assert second.done["r1"].status == "error"
        assert second.done["r1"].rows == ROWS
    with running_hub(address, spills(third)):
        # More than MISSED_S: nothing may come in this time.
        time.sleep(0.5)
        assert third.events == ["open"]


def test_a_worker_that_goes_ends_its_requests(address, spills, tmp_path):
    recorder = Recorder()
    with running_hub(address, spills(recorder)):
        with worker_link(address) as link:
            Sender(link).rows("r1")
            eventually(lambda: recorder.rows["r1"] == ROWS)
        eventually(lambda: "r1" in recorder.done)
        assert recorder.done["r1"].status == "error"
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_worker_that_starts_again_while_no_hub_is_there_ends_its_requests(address, spills):
    first, second = Recorder(), Recorder()
    with running_hub(address, spills(first)) as hub, worker_link(address) as link:
        Sender(link).rows("r1")
        eventually(lambda: first.rows["r1"] == ROWS)
        hub.stop(5)
    with running_hub(address, spills(second)), worker_link(address, make_hello(boot="boot-2")) as link:
        worker = Sender(link, boot="boot-2")
        worker.rows("r2")
        worker.end("r2")
        eventually(lambda: set(second.done) == {"r1", "r2"})
        assert second.done["r1"].status == "error"
        assert second.done["r2"].status == "stop"


def test_an_engine_that_comes_back_with_another_model_ends_its_requests(address, spills):
    first, second = Recorder(), Recorder()
    with running_hub(address, spills(first)) as hub, worker_link(address) as link:
        Sender(link).rows("r1")
        eventually(lambda: first.rows["r1"] == ROWS)
        hub.stop(5)
    hello = make_hello(boot="boot-2", model=msgspec.structs.replace(make_model(), name="another"))
    with running_hub(address, spills(second)), worker_link(address, hello) as link:
        worker = Sender(link, boot="boot-2")
        worker.rows("r1")
        worker.rows("r1")
        worker.end("r1")
        eventually(lambda: second.events.count(("done", "r1")) == 2)
        assert second.rows["r1"] == 3 * ROWS
        assert second.done["r1"].rows == 2 * ROWS


def test_a_frame_at_which_the_writer_of_an_inbox_fails_goes_in_before_those_behind_it(address, spills, monkeypatch):
    """Or else their marks would vouch for it: its worker would be told, when it sends it again, that it is there."""
    put = InboxWriter._put_frame
    failing = [MemoryError(), MemoryError()]

    def fails(self, frame, taken, fallback, model=None):
        if frame.header.seq == 2 and failing:
            raise failing.pop()
        return put(self, frame, taken, fallback, model)

    monkeypatch.setattr(InboxWriter, "_put_frame", fails)
    monkeypatch.setattr(writer, "_RETRY_S", 0.05)
    recorder = Recorder()
    with running_hub(address, spills(recorder)), worker_link(address) as link:
        worker = Sender(link)
        for _ in range(4):
            worker.rows("r1")
        worker.end("r1")
        eventually(lambda: worker.acknowledged)
        eventually(lambda: "r1" in recorder.done)
    assert recorder.seqs == [1, 2, 3, 4]
    assert recorder.done["r1"].problems == []


@pytest.mark.parametrize("fallback", ["block", "drop"])
def test_an_inbox_that_is_full_blocks_or_drops(address, spills, fallback):
    slow = Recorder(held=True)
    made = spills(slow, spool_bytes=40_000, spill_fallback=fallback, queue_bytes_max=20_000)
    hello = make_hello(model=make_model(hidden=64))
    with (
        running_hub(address, made) as hub,
        worker_link(address, hello, outbound_bytes_max=10_000, policy="drop") as link,
    ):
        worker = Sender(link)
        refused = 0
        for number in range(150):
            frame = make_frame([("r1", 4, number * 4, 4)], step=number, hidden=64)
            refused += link.send(frame.header, frame.payload) is not None
            if fallback == "drop":
                eventually(lambda: not link.counters["queued_bytes"])
            else:
                # The pace of the worker, which the hub keeps up with.
                time.sleep(0.002)
        lane = hub.lanes[0]
        if fallback == "drop":
            assert refused == 0
            eventually(lambda: link.counters["unacked_frames"] == 0)
            assert lane.dropped["spool_full"] > 0
        else:
            assert refused > 0
            assert lane.dropped == {}
            assert lane.status()["queued_bytes"] <= 20_000 + 10_000
        assert lane.inbox.spool.nbytes <= 40_000
        slow.go.set()
        eventually(lambda: link.counters["unacked_frames"] == 0)
        lost = lane.dropped["spool_full"]
        sent = (150 - refused) * ROWS
        worker.steps = 150
        end = make_finished("r1", 4, 600, rows=sent)
        frame = make_frame(finished=[end], requests=(), step=150, hidden=64)
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: "r1" in slow.done)
        assert slow.rows["r1"] == slow.done["r1"].rows == sent - lost
        assert {lost.reason: lost.rows for lost in slow.done["r1"].dropped} == ({"spool_full": lost} if lost else {})
        once(slow.positions)


def test_the_ends_of_more_requests_than_half_of_an_inbox_holds_are_given(address, spills):
    """In one frame, which has no room, and whose ends are owed."""
    recorder = Recorder()
    names = [f"r{number}" for number in range(100)]
    with running_hub(address, spills(recorder, spool_bytes=20_000)) as hub, worker_link(address) as link:
        worker = Sender(link)
        for name in names:
            worker.rows(name)
            eventually(lambda: worker.acknowledged and not waiting(hub))
        worker.end(*names)
        worker.rows("next")
        worker.end("next")
        eventually(lambda: set(recorder.done) == {*names, "next"})
        eventually(lambda: worker.acknowledged)
        assert all(done.rows == done.rows_promised == ROWS for done in recorder.done.values())


def test_an_end_with_more_places_of_losses_than_half_of_an_inbox_holds_is_given(address, spills):
    recorder = Recorder()
    gaps = tuple(Gap(("post_block:0",), 3 * place, 3 * place + 1) for place in range(limits.GAPS_MAX))
    dropped = (Dropped(limits.GAPS_MAX, "queue_full", gaps),)
    with running_hub(address, spills(recorder, spool_bytes=8_000)), worker_link(address) as link:
        worker = Sender(link)
        worker.rows("r1")
        worker.end("r1", dropped=dropped)
        eventually(lambda: "r1" in recorder.done)
        assert [(lost.reason, lost.rows) for lost in recorder.done["r1"].dropped] == [("queue_full", limits.GAPS_MAX)]


class Lagging(Later):
    """Has the results of requests, each a little after its end, from a thread of its own."""

    def on_request_done(self, done):
        future = super().on_request_done(done)
        threading.Timer(0.3, self._settle, [future]).start()
        return future

    @staticmethod
    def _settle(future):
        with contextlib.suppress(InvalidStateError):  # it was closed meanwhile
            future.set_result(CaptureResult("ok"))


@pytest.mark.parametrize(
    ("kind", "fallback", "unkept"), [(Lagging, "block", False), (Later, "block", True), (Later, "drop", True)]
)
def test_the_frames_of_a_request_that_is_over_are_kept_while_results_come(
    address, spills, monkeypatch, kind, fallback, unkept
):
    monkeypatch.setattr(limits, "RESULT_S_MAX", 1.0)
    lagging = kind()
    made = spills(lagging, spool_bytes=100_000, spill_fallback=fallback)
    with running_hub(address, made) as hub, worker_link(address) as link:
        lane, worker = hub.lanes[0], Sender(link)
        for number in range(100):
            worker.rows(f"r{number}")
            worker.rows(f"r{number}")
            worker.end(f"r{number}")
            if fallback == "drop":  # else it would be the consumer's turns that have no room
                eventually(lambda: worker.acknowledged and not waiting(hub))
        eventually(lambda: len(lagging.done) == 100)
        assert bool(lane.requests_unkept) == unkept
        assert lane.dropped == {}


def test_behind_a_frame_without_room_nothing_is_taken_when_the_hub_stops(address, spills):
    """A smaller one would have had room; the worker would be believed to have sent what was before it, too."""
    first, second = Recorder(held=True), Recorder()
    with worker_link(address, wait=False) as link:
        with running_hub(address, spills(first, spool_bytes=10_000)) as hub:
            assert link.wait_welcome(20)
            start = 0
            for length in (4, 130, 130, 4):
                frame = make_frame([("r1", 4, start, length)])
                assert link.send(frame.header, frame.payload) is None
                start += length
            eventually(lambda: first.waiting.is_set() and hub.counts.frames == 4)
            assert hub.lanes[0].inbox.frames < 4
            hub.stop(5)
        with running_hub(address, spills(second)):
            frame = make_frame(finished=[make_finished("r1", 4, 268)], requests=())
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: "r1" in second.done)
            assert second.done["r1"].rows == 268
            assert second.done["r1"].dropped == ()
            once(second.positions)


def test_a_frame_that_no_inbox_of_its_size_can_hold_is_refused_and_named(address, spills):
    recorder = Recorder()
    with (
        running_hub(address, spills(recorder, spool_bytes=64 * limits.KIB, spill_fallback="block")) as hub,
        worker_link(address) as link,
    ):
        for start, length in ((0, 4), (4, 1000), (1004, 4)):
            frame = make_frame([("r1", 4, start, length)])
            assert link.send(frame.header, frame.payload) is None
        frame = make_frame(finished=[make_finished("r1", 4, 1008)], requests=())
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: "r1" in recorder.done)
        (dropped,) = recorder.done["r1"].dropped
        assert (dropped.reason, dropped.rows) == ("too_large", 1000)
        assert recorder.rows["r1"] == 8
        assert hub.lanes[0].dropped == {"too_large": 1000}


def test_frames_of_two_stages_that_no_inbox_of_its_size_can_hold_are_named_by_each(address, spills):
    recorder, model = Recorder(), make_model(stages=2)
    ranks = [Rank(stage, 0, 0) for stage in range(2)]
    with (
        running_hub(address, spills(recorder, spool_bytes=64 * limits.KIB, spill_fallback="block")) as hub,
        worker_link(address, make_hello(rank=ranks[0], boot="b0", model=model)) as first,
        worker_link(address, make_hello(rank=ranks[1], boot="b1", model=model)) as last,
    ):
        for link, rank in zip((first, last), ranks, strict=True):
            frame = make_frame([("r1", 4, 0, 1000)], rank=rank, boot=f"b{rank.pp}")
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: hub.lanes[0].dropped == {"too_large": 2000})
        for link, rank in zip((first, last), ranks, strict=True):
            end = make_frame(finished=[make_finished("r1", 4, 1000)], requests=(), rank=rank, boot=f"b{rank.pp}")
            assert link.send(end.header, end.payload) is None
        eventually(lambda: "r1" in recorder.done)
        (dropped,) = recorder.done["r1"].dropped
        assert (recorder.done["r1"].status, dropped.reason, dropped.rows) == ("stop", "too_large", 2000)


def test_open_requests_make_room_for_a_frame_that_waits_for_it(address, spills):
    recorder = Recorder()
    with (
        running_hub(address, spills(recorder, spool_bytes=64 * limits.KIB, spill_fallback="block")),
        worker_link(address) as link,
    ):
        for start, length in ((0, 4), (4, 900), (904, 900)):  # twice 28.8 KB, and the first is held by its request
            frame = make_frame([("r1", 4, start, length)])
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: recorder.rows["r1"] == 1804)
        frame = make_frame(finished=[make_finished("r1", 4, 1804)], requests=())
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: "r1" in recorder.done)
        assert recorder.done["r1"].dropped == ()


def test_requests_that_are_open_since_a_large_record_make_room_for_another(address, spills):
    recorder = Recorder()
    with (
        running_hub(address, spills(recorder, spool_bytes=64 * limits.KIB, spill_fallback="block")),
        worker_link(address) as link,
    ):
        names = ["r1", "r2", "r3"]
        for name in names:
            frame = make_frame([(name, 4, 0, 560)])
            assert 56 * limits.KIB / 3 < frame.nbytes + len(frame.encode()[0]) < 20 * limits.KIB
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: recorder.rows["r3"] == 560)
        frame = make_frame(finished=[make_finished(name, 4, 560) for name in names], requests=())
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: recorder.done.keys() == set(names))
        assert not any(recorder.done[name].dropped for name in names)


def test_open_requests_make_room_for_a_frame_of_which_only_the_header_is_large(address, spills):
    recorder = Recorder()
    sites = ("post_block:0", "post_block:1")
    gaps = tuple(Gap(sites, 100_000 + at, 100_001 + at) for at in range(0, 2 * limits.GAPS_MAX, 2))
    dropped = tuple(Dropped(len(gaps), reason, gaps) for reason in ("queue_full", "spool_full"))
    with (
        running_hub(address, spills(recorder, spool_bytes=64 * limits.KIB, spill_fallback="block")) as hub,
        worker_link(address) as link,
    ):
        for parts in ([("r1", 4, 0, 4), ("r2", 4, 0, 4)], [("r1", 4, 4, 840)]):
            frame = make_frame(parts)
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: recorder.rows["r1"] == 844)
        frame = make_frame(finished=[make_finished("r2", 4, 4, dropped=dropped)], requests=())
        assert hub.lanes[0].inbox.bytes_max * 3 // 8 < len(frame.encode()[0]) < hub.lanes[0].inbox.bytes_max // 2
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: "r2" in recorder.done)
        assert recorder.done["r2"].dropped == dropped


@pytest.mark.parametrize(("layers", "lost"), [(250, 0), (700, 8)])
def test_open_requests_make_room_for_an_engine_of_a_large_model_unless_it_never_fits(address, spills, layers, lost):
    recorder = Recorder()
    large = make_hello("engine-2", model=make_model(layers))
    size = len(msgspec.msgpack.encode(large.model))
    with (
        running_hub(address, spills(recorder, spool_bytes=64 * limits.KIB, spill_fallback="block")) as hub,
        worker_link(address) as link,
    ):
        for parts in ([("r1", 4, 0, 4)], [("r1", 4, 4, 840)]):
            frame = make_frame(parts)
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: recorder.rows["r1"] == 844)
        assert (size > hub.lanes[0].inbox.bytes_max // 2) == bool(lost)
        with worker_link(address, large) as other:
            frame = make_frame([("r2", 4, 0, 8)], engine="engine-2")
            assert other.send(frame.header, frame.payload) is None
            eventually(lambda: recorder.rows["r2"] == 8 - lost and hub.lanes[0].dropped["too_large"] == lost)
        frame = make_frame(finished=[make_finished("r1", 4, 844)], requests=())
        assert link.send(frame.header, frame.payload) is None
        eventually(lambda: "r1" in recorder.done)
        assert recorder.done["r1"].dropped == ()


def test_a_consumer_that_spills_tells_of_what_waits_for_its_inbox(address, spills):
    held = Recorder(held=True)
    frame = make_frame([("r1", 4, 0, 400)])
    spilling = spills(held, spool_bytes=4 * frame.nbytes)
    with running_hub(address, spilling) as hub, worker_link(address) as link:
        for _ in range(6):
            assert link.send(frame.header, frame.payload) is None
        (lane,) = hub.lanes

        def agree():
            queued = (5 - lane.inbox.frames) * frame.nbytes
            return hub.status()["consumers"]["recorder"]["queued_bytes"] == hub.snapshot().queued_bytes == queued > 0

        # One frame is at the inbox, which has no room for it; the others wait behind it. The three are read one after
        # another.
        eventually(lambda: lane.inbox.frames > 0 and agree())
        held.go.set()


def test_an_engine_that_was_there_is_missed_from_when_it_went(spills, monkeypatch):
    monkeypatch.setattr(limits, "MISSED_S", 5.0)
    lane = DurableLane(0, spills(Recorder()), HubCalls(print, print, print), state=Shares("state", 2**20))
    lane.inbox.left = {("engine-1", 0): 0.0}
    here = {("engine-1", 0)}
    assert not list(lane.missed(here, 1000.0))
    assert not list(lane.missed(here, 2000.0))
    assert not list(lane.missed(set(), 2000.5))
    assert not list(lane.missed(set(), 2004.0))
    assert list(lane.missed(set(), 2005.0)) == [("engine-1", 0)]


def test_a_request_that_is_longer_than_the_inbox_goes_on(address, spills, caplog):
    recorder = Recorder()
    with running_hub(address, spills(recorder, spool_bytes=40_000)) as hub, worker_link(address) as link:
        worker = Sender(link)
        for _ in range(400):
            worker.rows("r1")
            # The pace of the worker, which the hub keeps up with.
            time.sleep(0.001)
        worker.end("r1")
        eventually(lambda: "r1" in recorder.done)
        assert recorder.done["r1"].rows == 400 * ROWS
        assert recorder.done["r1"].dropped == ()
        assert hub.status()["consumers"]["recorder"]["spool"]["requests_unkept"] >= 1
    assert "the spool is too small for the open requests" in caplog.text


def test_what_is_lost_of_a_request_that_is_longer_than_the_inbox_is_counted(address, spills):
    """Of its beginning no record is left when the hub goes; the next one says so all the same, when it is over."""
    first, second = Recorder(), Recorder()
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with running_hub(address, spills(first, spool_bytes=40_000)):
            assert link.wait_welcome(20)
            for _ in range(400):
                worker.rows("r1")
                # The pace of the worker, which the hub keeps up with.
                time.sleep(0.001)
            eventually(lambda: first.rows["r1"] == 400 * ROWS)
        with running_hub(address, spills(second, spool_bytes=40_000)) as hub:
            worker.end("r1")
            eventually(lambda: "r1" in second.done)
            ((lost, reason),) = [(each.rows, each.reason) for each in second.done["r1"].dropped]
            assert reason == "earlier_hub"
            assert second.done["r1"].rows == second.rows.get("r1", 0) == 400 * ROWS - lost
            assert hub.snapshot().dropped_rows == {"earlier_hub": lost}


def test_a_request_without_any_record_left_still_has_an_end(address, spills, monkeypatch):
    monkeypatch.setattr(limits, "MISSED_S", 0.5)
    first, second = Recorder(), Recorder()
    with running_hub(address, spills(first, spool_bytes=40_000)) as hub, worker_link(address) as link:
        worker = Sender(link)
        for _ in range(150):
            worker.rows("long")
            # The pace of the worker, which the hub keeps up with.
            time.sleep(0.001)
        for number in range(300):
            worker.rows(f"r{number}")
            worker.end(f"r{number}")
            # The pace of the worker, which the hub keeps up with.
            time.sleep(0.002)
        eventually(lambda: len(first.done) == 300)
        hub.stop(5)
    with running_hub(address, spills(second, spool_bytes=40_000)):
        eventually(lambda: "long" in second.done)
        assert second.done["long"].status == "error"
        assert sum(lost.rows for lost in second.done["long"].dropped) + second.done["long"].rows == 150 * ROWS


def test_hubs_that_live_for_a_moment_find_out_together_that_an_engine_is_gone(address, spills, monkeypatch):
    monkeypatch.setattr(limits, "MISSED_S", 2.5)
    with running_hub(address, spills(Recorder())) as hub, worker_link(address) as link:
        worker = Sender(link)
        worker.rows("r1")
        eventually(lambda: worker.acknowledged)
        hub.stop(5)
    for _ in range(10):
        recorder = Recorder()
        with running_hub(address, spills(recorder)):
            # The life of this hub: two of them are longer than MISSED_S, and one is not.
            time.sleep(1.3)
        if recorder.done:
            break
    assert recorder.done["r1"].status == "error"


def test_two_hubs_with_the_same_consumer_have_an_inbox_each(address, spills, tmp_path, monkeypatch):
    monkeypatch.setattr(inbox, "_WAIT_S", 0.3)
    one, two = Recorder(), Recorder()
    with (
        running_hub(address, spills(one)),
        running_hub(f"{address}2", spills(two)),
        worker_link(address) as link,
        worker_link(f"{address}2", make_hello("engine-2")) as other,
    ):
        Sender(link).rows("r1")
        Sender(other, engine="engine-2").rows("r2")
        eventually(lambda: one.rows == {"r1": ROWS} and two.rows == {"r2": ROWS})
        name = spills(one).spill.name
        assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == [name, f"{name}.2"]


def test_rows_that_the_disk_does_not_give_back_are_counted(address, spills, tmp_path):
    first, second = Recorder(held=True), Recorder()
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with running_hub(address, spills(first), drain_s=0.1) as hub:
            assert link.wait_welcome(20)
            for _ in range(5):
                worker.rows("r1")
            eventually(lambda: worker.acknowledged)
            hub.lanes[0].discard()
            first.go.set()
        (segment,) = (tmp_path / "spool").rglob("*.spool")
        data = bytearray(segment.read_bytes())
        payload = make_frame([("r1", 4, 8, 4)]).payload
        place = data.find(bytes(payload))
        assert place > 0
        data[place + 3] ^= 16
        segment.write_bytes(data)
        with running_hub(address, spills(second)) as hub:
            worker.end("r1")
            eventually(lambda: "r1" in second.done)
            assert second.rows["r1"] == second.done["r1"].rows == 4 * ROWS
            assert [(lost.rows, lost.reason) for lost in second.done["r1"].dropped] == [(ROWS, "spool_damaged")]
            assert hub.snapshot().dropped_rows == {"spool_damaged": ROWS}


def test_a_consumer_that_takes_too_long_at_the_end_leaves_the_rest_to_the_next_hub(address, spills):
    slow, second = Recorder(held=True), Recorder()
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with running_hub(address, spills(slow)) as hub:
            assert link.wait_welcome(20)
            for _ in range(20):
                worker.rows("r1")
            eventually(lambda: worker.acknowledged)
            assert slow.waiting.wait(20)
            threading.Timer(0.5, slow.go.set).start()
            assert not hub.stop(0.1)
            assert slow.rows["r1"] < 20 * ROWS
        with running_hub(address, spills(second)):
            worker.end("r1")
            eventually(lambda: "r1" in second.done)
            assert second.rows["r1"] == 20 * ROWS
            assert second.done["r1"].dropped == ()


def test_stages_that_end_a_request_under_two_hubs(address, spills):
    """One pipeline stage ended the request under the first hub, the other does so under the second."""
    first, second = Recorder(), Recorder()
    hellos = [make_hello(rank=Rank(stage, 0, 0), boot=f"b{stage}", model=make_model(stages=2)) for stage in range(2)]
    with (
        worker_link(address, hellos[0], wait=False) as link_0,
        worker_link(address, hellos[1], wait=False) as link_1,
    ):
        stages = [Sender(link, rank=Rank(n, 0, 0), boot=f"b{n}") for n, link in enumerate((link_0, link_1))]
        with running_hub(address, spills(first)):
            assert link_0.wait_welcome(20)
            assert link_1.wait_welcome(20)
            stages[0].rows("r1")
            stages[0].end("r1")
            eventually(lambda: stages[0].acknowledged and first.rows["r1"] == ROWS)
        assert first.done == {}
        with running_hub(address, spills(second)):
            stages[1].rows("r1")
            stages[1].end("r1")
            eventually(lambda: "r1" in second.done)
            assert second.done["r1"].rows == 2 * ROWS
            assert second.done["r1"].dropped == ()


def test_consumers_beside_it_are_not_held_up(address, spills):
    slow, quick = Recorder("slow", held=True), Recorder("quick")
    with running_hub(address, spills(slow), quick) as hub, worker_link(address) as link:
        worker = Sender(link)
        for _ in range(100):
            worker.rows("r1")
        worker.end("r1")
        eventually(lambda: "r1" in quick.done)
        assert quick.rows["r1"] == 100 * ROWS
        assert slow.done == {}
        assert set(hub.index.results_of(hub.index.named("r1")[0])[0]) == {"slow", "quick"}


def test_a_place_is_one_for_each_configuration():
    recorder = Recorder()
    assert Spill.of(recorder, None, None, None) == Spill.of(recorder, None, None, None)
