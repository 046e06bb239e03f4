"""What a consumer has yet to deliver: shown while it waits, and waited for at the end as long as it makes progress."""

import threading

import pytest

from capflow import limits
from capflow.hub.health import problems
from capflow.hub.monitor.metrics import registry_of
from capflow.plugins.consumer import Backlog
from capflow.testing import MemoryHub
from tests.kit.hubs import Recorder


class Delivering(Recorder):
    """A consumer that delivers slowly, and whose `close` waits for that."""

    waiting_now = Backlog(3, 4096, "uploads fail and are tried again: ACCESS_DENIED")
    works = True

    def backlog(self):
        return self.waiting_now

    def close(self):
        self.left_s = self.context.left_s()
        for _ in range(20):
            threading.Event().wait(0.05)
            if self.works:
                self.context.working()


def test_what_waits_and_why_is_in_status_health_and_metrics():
    with MemoryHub(Delivering()) as hub:
        lane = hub.lanes[0]
        assert lane.left_s() is None
        assert lane.status()["backlog"] == {"items": 3, "nbytes": 4096, "trouble": lane.consumer.waiting_now.trouble}
        assert problems(hub.hub, 0.0) == ["consumer recorder: uploads fail and are tried again: ACCESS_DENIED"]
        registry = registry_of(hub.hub)
        labels = {"consumer": "recorder"}
        assert registry.get_sample_value("capflow_consumer_backlog_items", labels) == 3
        assert registry.get_sample_value("capflow_consumer_backlog_bytes", labels) == 4096
        assert registry.get_sample_value("capflow_consumer_up", labels) == 0
        lane.consumer.waiting_now = Backlog()
        assert problems(hub.hub, 0.0) == []


@pytest.mark.parametrize("works", [True, False])
def test_the_end_waits_for_a_call_that_makes_progress(monkeypatch, works):
    monkeypatch.setattr(limits, "HANG_S_MAX", 0.3)
    monkeypatch.setattr(limits, "GIVE_UP_S", 0.1)
    consumer = Delivering()
    consumer.works = works
    hub = MemoryHub(consumer)
    with hub:
        pass
    assert hub.drained is works
    assert 0 < consumer.left_s <= limits.DRAIN_S_MAX
