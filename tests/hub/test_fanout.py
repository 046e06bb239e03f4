"""The queue of a stuck consumer: it is bounded for every kind of item, and rows without room are counted and named."""

from __future__ import annotations

import gc
import time
from collections import Counter

import msgspec
import pytest

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.hub.effects import Hold
from capflow.hub.lanes.lane import HubCalls
from capflow.hub.lanes.memory import MemoryLane
from capflow.hub.requests.index import RequestIndex, Wish
from capflow.hub.requests.request import KnownEngine, Request
from capflow.plugins.consumer import Consumer
from capflow.steering.action import Answered
from capflow.transport.client import Client
from tests.kit.frames import make_finished, make_frame, make_model
from tests.kit.hubs import EVERYTHING, Recorder, address, configured, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

UNTOLD = "the consumer did not get its end: consumer_queue_full"
POLICIES = ("block", "drop", "skip")


class Listener(Consumer):
    """Notes what it is told."""

    name = "listener"

    def __init__(self):
        super().__init__(None)
        self.told = []

    def spec(self):
        return EVERYTHING

    def on_session(self, engine, model):
        self.told.append((engine, model.name))

    def on_engine_gone(self, engine):
        self.told.append((engine, "gone"))

    def on_frame(self, frame):
        self.told.append(frame.header.engine)

    def on_action(self, answered):
        self.told.append(answered.id)


def lane_of(policy, results=None):
    """Return a lane whose consumer gets nothing before it is opened, and that consumer."""
    consumer = Listener()
    results = [] if results is None else results
    calls = HubCalls(lambda request, _, result: results.append((request.id, result)), lambda *_: None, list)
    lane = MemoryLane(0, configured(consumer, policy), calls)
    return lane, consumer


def close(lane):
    """Have the consumer handle what waits for it."""
    lane.open()
    lane.close()
    assert lane.join(20)


def answered(number):
    return Answered(f"a{number}", "e", "r", "abort", (), "client", time.time_ns(), 1, "")


def requests_alive():
    gc.collect()
    return sum(type(result) is Request for result in gc.get_objects())


@pytest.mark.parametrize("policy", ["drop", "skip"])
def test_thousands_of_requests_beside_a_consumer_that_hangs_keep_no_more_than_there_is_room_for(
    address, monkeypatch, policy
):
    monkeypatch.setattr(limits, "NOTES_BYTES_MAX", 256 * limits.KIB)
    monkeypatch.setattr(limits, "RESULTS_KEPT_MAX", 50)
    hung, good = Recorder("hung", held=True), Recorder("good")
    with (
        running_hub(address, configured(hung, policy, make_frame().nbytes * 2), good) as hub,
        worker_link(address) as link,
        Client(address) as client,
    ):

        def run(first, last):
            for number in range(first, last):
                name = f"r{number}"
                frame = make_frame([(name, 1, 0, 1)], finished=[make_finished(name, 1, 1)], step=number)
                assert link.send(frame.header, frame.payload) is None
            eventually(lambda: len(good.done) == last, 60)
            eventually(lambda: not link.counters["unacked_frames"])

        run(0, 1)
        assert hung.waiting.wait(20)
        before = requests_alive()
        for first, last in ((1, 1000), (1000, 3000)):
            run(first, last)
            eventually(lambda: requests_alive() - before <= 256 // 2 + 60)  # a note weighs 2 KiB or more
        notes = hub.lanes[0].notes
        assert 0 < notes.bytes_peak <= limits.NOTES_BYTES_MAX
        assert notes.lost["end"] > 2000
        untold = client.results(["r2999"], timeout=20)["r2999"]["hung"]
        assert (untold.status, untold.error) == ("error", UNTOLD)
        hung.go.set()
        eventually(lambda: not notes.nbytes)
        run(3000, 3001)
        assert client.results(["r3000"], timeout=20)["r3000"]["hung"].status == "ok"
        assert len(hung.done) + notes.lost["end"] == 3001


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_comes_and_goes_is_told_once_to_a_consumer_that_hangs(policy):
    lane, consumer = lane_of(policy)
    other = msgspec.structs.replace(make_model(), name="other")
    for model in (make_model(), other):
        for _ in range(1000):
            lane.greet("e", model)
    assert len(lane.queue) == 2
    close(lane)
    assert consumer.told == [("e", "test-model"), ("e", "other")]
    assert lane.notes.nbytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_consumer_is_told_that_an_engine_is_gone_and_of_it_again_when_it_comes_back(policy):
    lane, consumer = lane_of(policy)
    for engine in ("e", "f", "e"):
        lane.greet(engine, make_model())
        lane.lose(engine)
    lane.greet("e", make_model())
    close(lane)
    of = {engine: [item for name, item in consumer.told if name == engine] for engine in "ef"}  # engines take turns
    assert of == {"e": ["test-model", "gone", "test-model", "gone", "test-model"], "f": ["test-model", "gone"]}
    assert list(lane._met) == ["e"]
    assert lane.notes.nbytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_consumer_is_told_nothing_of_an_engine_that_is_gone_if_it_was_not_told_of_the_engine(policy, monkeypatch):
    monkeypatch.setattr(limits, "NOTES_BYTES_MAX", 1)
    lane, consumer = lane_of(policy)
    for engine in ("e", "f"):  # one alone has room
        lane.greet(engine, make_model())
        lane.lose(engine)
    close(lane)
    assert consumer.told == [("e", "test-model"), ("e", "gone")]
    assert lane._unmet == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_of_an_engine_that_it_could_not_be_told_of_a_consumer_is_given_nothing(policy, monkeypatch):
    monkeypatch.setattr(limits, "NOTES_BYTES_MAX", 64 * limits.KIB)
    results = []
    lane, consumer = lane_of(policy, results)
    model = make_model(1)
    names = [f"e{number}" for number in range(1000)]
    for name in names:
        lane.greet(name, model)
    met = len(lane.queue)
    assert 0 < met < 64
    assert lane.notes.lost == {"session": 1000 - met}
    index = RequestIndex([Wish("listener", EVERYTHING, reads_requests=False)], Shares("state", 2**30))
    for name in (names[0], names[-1]):
        engine = KnownEngine(name, model)
        frame = make_frame([(name, 4, 0, 4)], finished=[make_finished(name)], engine=name)
        hold = Hold(name, 1)
        lane.take([index.take(frame, engine)], [hold])
        assert hold.left == 1 + (policy == "block" and name == names[0])
        (request,) = index.finish(frame.header, engine)
        lane.finish(request, lambda: None)
    assert dict(lane.dropped) == {"consumer_queue_full": 4}
    (untold,) = [result for name, result in results if name == names[-1]]
    assert (untold.status, untold.error) == ("error", UNTOLD)
    close(lane)
    assert Counter(type(status) for status in consumer.told) == {tuple: met, str: 1}
    assert names[0] in consumer.told


@pytest.mark.parametrize("policy", POLICIES)
def test_of_answers_that_wait_the_oldest_make_room_for_the_newest(policy, monkeypatch):
    monkeypatch.setattr(limits, "NOTES_BYTES_MAX", 64 * limits.KIB)
    lane, consumer = lane_of(policy)
    for number in range(1000):
        lane.tell(answered(number))
    waiting = len(lane.queue)
    assert 0 < waiting < 64
    assert lane.notes.lost == {"action": 1000 - waiting}
    close(lane)
    assert consumer.told == [f"a{number}" for number in range(1000 - waiting, 1000)]
    assert lane.notes.nbytes == 0


def test_a_consumer_that_skips_gets_no_rows_that_waited_too_long(address, monkeypatch):
    live, hung = Recorder("live", held=True), Recorder("hung", held=True)
    monkeypatch.setattr(limits, "SKIP_AGE_S", 0.2)
    with (
        running_hub(address, configured(live, "skip"), configured(hung, "drop")) as hub,
        worker_link(address) as link,
        Client(address) as client,
    ):
        frame = make_frame([("r1", 8, 0, 1)])
        link.send(frame.header, frame.payload)
        assert live.waiting.wait(20)
        assert hung.waiting.wait(20)
        for position in range(1, 4):
            frame = make_frame([("r1", 8, position, 1)], seq=position + 1)
            link.send(frame.header, frame.payload)
        eventually(lambda: len(hub.lanes[0].queue) == 3)
        eventually(lambda: hub.lanes[0].pace.lag_s(time.monotonic()) > 3 * limits.SKIP_AGE_S)
        for consumer in (live, hung):
            consumer.go.set()
        eventually(lambda: hub.lanes[0].dropped["skipped"] == 3 * frame.counts[0])
        last = make_frame([("r1", 8, 4, 1)], seq=5, finished=[make_finished("r1", 4, 5, rows=5 * frame.counts[0])])
        link.send(last.header, last.payload)
        result = client.results(["r1"], timeout=20)["r1"]
        assert live.seqs == [1, 5]
        assert hung.seqs == [1, 2, 3, 4, 5]
        assert (result["live"].status, result["hung"].status) == ("partial_error", "ok")
        assert hub.snapshot().rows_lost == 0
