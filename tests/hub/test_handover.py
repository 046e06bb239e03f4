"""The handover: a hub that ends loses no request, and gets no new one."""

from __future__ import annotations

import pytest

from capflow import limits
from capflow.hub.health import HubState, problems
from capflow_engine.hubs import HubAt, HubLinks
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import Recorder, address, configured, running_hub, scheduler_link, worker_link
from tests.kit.waiting import eventually, never

__all__ = ["address"]

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch):
    """Let seconds be a fifth of a second."""
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(limits, "HANDOVER_QUIET_S", 0.4)


def test_without_an_engine_there_is_nothing_to_wait_for(address):
    with running_hub(address, Recorder()) as hub:
        assert not hub.handed_over
        hub.hand_over()
        eventually(lambda: hub.handed_over)


def test_it_waits_for_the_requests_that_the_scheduler_has_and_says_that_it_is_not_ready(address):
    requests = ["r1"]
    with (
        running_hub(address, Recorder()) as hub,
        scheduler_link(address, holds=lambda: bool(requests)) as link,
    ):
        assert not link.hands_over
        hub.hand_over()
        eventually(lambda: link.hands_over)
        never(lambda: hub.handed_over)
        assert problems(hub, 0.0) == ["the hub is handing over"]
        requests.clear()
        eventually(lambda: hub.handed_over)
        assert hub.state is HubState.HANDING_OVER


def test_a_request_that_comes_late_is_waited_for(address):
    """It was shared out before, so the scheduler takes back that it has none."""
    requests = []
    with (
        running_hub(address, Recorder()) as hub,
        scheduler_link(address, holds=lambda: bool(requests)) as link,
    ):
        hub.hand_over()
        eventually(lambda: link._handed_over)
        requests.append("r1")
        eventually(lambda: not link._handed_over)
        eventually(lambda: not hub.handed_over)


def test_it_waits_for_the_last_rows_of_a_request(address):
    consumer = Recorder()
    with (
        running_hub(address, consumer) as hub,
        scheduler_link(address) as scheduler,
        worker_link(address) as worker,
    ):
        first = make_frame([("r1", 8, 0, 4)])
        assert worker.send(first.header, first.payload) is None
        eventually(lambda: hub.snapshot().requests_open == 1)
        hub.hand_over()
        eventually(lambda: scheduler._handed_over)
        never(lambda: hub.handed_over)
        last = make_frame([("r1", 8, 4, 4)], finished=[make_finished("r1")])
        assert worker.send(last.header, last.payload) is None
        eventually(lambda: hub.handed_over)
        assert consumer.rows["r1"] == 8
        assert consumer.done["r1"].status == "stop"


def test_it_waits_for_frames_that_a_consumer_has_not_handled(address):
    consumer = Recorder(held=True)
    with (
        running_hub(address, configured(consumer, "block")) as hub,
        scheduler_link(address) as scheduler,
        worker_link(address) as worker,
    ):
        frame = make_frame([("r1", 4, 0, 4)], finished=[make_finished("r1")])
        assert worker.send(frame.header, frame.payload) is None
        assert consumer.waiting.wait(20)
        eventually(lambda: not hub.snapshot().requests_open)
        hub.hand_over()
        eventually(lambda: scheduler._handed_over)
        never(lambda: hub.handed_over)
        consumer.go.set()
        eventually(lambda: hub.handed_over)


def test_a_scheduler_that_connects_meanwhile_is_asked_too(address):
    with running_hub(address, Recorder()) as hub:
        with scheduler_link(address, holds=lambda: True):
            hub.hand_over()
            never(lambda: hub.handed_over)
        # Until the hub knows that it left, another one in its place is refused.
        eventually(lambda: not hub.snapshot().sessions)
        with scheduler_link(address, make_hello(role="scheduler", boot="next")) as link:
            eventually(lambda: link.hands_over)
            eventually(lambda: hub.handed_over)


class TestShares:
    """Which hubs get new requests."""

    @pytest.fixture
    def links(self, address):
        hello = make_hello(role="scheduler", boot="scheduler")
        links = HubLinks([HubAt(f"{address}{name}") for name in "abc"], hello, lambda _: "")
        yield links
        links.close()

    def test_one_that_hands_over_gets_none_until_it_is_back(self, address, links):
        with running_hub(f"{address}a", Recorder()):
            with running_hub(f"{address}b", Recorder()) as second:
                links.wait_welcomes(20, spares=1)
                assert links.in_service(2) == [0, 1]
                second.hand_over()
                eventually(lambda: links.in_service(2) == [0])
            # Gone: as before.
            never(lambda: links.in_service(2) != [0])
            with running_hub(f"{address}b", Recorder()):
                eventually(lambda: links.in_service(2) == [0, 1])

    def test_a_spare_one_may_hand_over(self, address, links):
        with running_hub(f"{address}a", Recorder()), running_hub(f"{address}b", Recorder()):
            links.wait_welcomes(20, spares=1)
            with running_hub(f"{address}c", Recorder()) as spare:
                eventually(lambda: links.in_service(2) == [0, 1, 2])
                spare.hand_over()
                eventually(lambda: links.in_service(2) == [0, 1])

    def test_when_all_hand_over_each_keeps_its_share(self, address, links):
        with running_hub(f"{address}a", Recorder()) as first, running_hub(f"{address}b", Recorder()) as second:
            links.wait_welcomes(20, spares=1)
            first.hand_over()
            eventually(lambda: links.in_service(2) == [1])
            second.hand_over()
            eventually(lambda: links.in_service(2) == [0, 1])
