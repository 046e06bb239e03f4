"""Events of steering: they ride frames, reach every consumer in order, and reach a durable one once over kills."""

from __future__ import annotations

import msgspec
import pytest

from capflow import limits
from capflow.capture.frame import Acted, ActedOn
from capflow.capture.site import Site
from capflow.transport.client import Client
from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

SITES = (Site(2, "post_block"),)


class Listener(Recorder):
    """Keeps its events, with the number of rows of each request that came before."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.heard = []

    def on_action(self, answered):
        assert answered.request not in self.done or answered.request == "late"
        self.heard.append((answered, self.rows[answered.request]))


def with_events(frame, *on):
    return msgspec.structs.replace(frame.header, acted=on), frame.payload


def gate(step, position, **fields):
    return Acted("gate rude", "gate", SITES, step, step * 100 + position, position, 1.5, 1.0, "rude", **fields)


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_an_event_comes_with_the_frame_of_its_step_and_before_the_request_ends(address, policy, tmp_path):
    listener, deaf = Listener("listener"), Recorder("deaf")
    options = {"spool_dir": tmp_path / "spool"} if policy == "spill" else {}
    with running_hub(address, configured(listener, policy, **options), deaf), worker_link(address) as worker:
        seen, unseen = (ActedOn(name, "i", (gate(1, 2),)) for name in ("seen", "unseen"))
        assert worker.send(*with_events(make_frame([("seen", 3, 0, 3)], step=1), seen, unseen)) is None
        eventually(lambda: len(listener.heard) == 2)
        assert not listener.done
        end = make_frame([("seen", 3, 3, 1)], step=2, finished=[make_finished("seen", 3, 4, rows=4)])
        assert worker.send(*with_events(end, ActedOn("seen", "i", (gate(2, 3), gate(2, 4)), 7))) is None
        eventually(lambda: listener.done.keys() == {"seen"} and len(listener.heard) == 5)
        status = Client(address).status()
    facts = [(e.request, e.kind, e.position, e.score, e.threshold, e.label, e.step, rows) for e, rows in listener.heard]
    assert facts == [
        ("seen", "gate", 2, 1.5, 1.0, "rude", 1, 3),
        ("unseen", "gate", 2, 1.5, 1.0, "rude", 1, 0),
        ("seen", "gate", 3, 1.5, 1.0, "rude", 2, 4),
        ("seen", "gate", 4, 1.5, 1.0, "rude", 2, 4),
        ("seen", "overflow", 4, None, None, "", 2, 4),
    ]
    assert {event.incarnation for event, _ in listener.heard} == {"i"}
    overflow = listener.heard[-1][0]
    assert overflow.reason.startswith(f"events of step 2: got 7 more, expected at most {limits.EVENTS_PER_STEP_MAX}")
    assert (status["steering_events"], status["steering_events_lost"]) == (4, 7)


def test_a_durable_consumer_gets_each_event_once_although_the_hub_is_killed_and_the_worker_repeats(address, tmp_path):
    """Frames without rows are kept and repeated as others are; ids tell what a killed hub had handed on."""
    spool = {"spool_dir": tmp_path / "spool"}
    frames = [
        with_events(make_frame([], step=step), ActedOn("late", "i", (gate(step, 0), gate(step, 1))))
        for step in range(1, 30)
    ]
    ids = []
    with worker_link(address, wait=False) as worker:
        for third in range(3):
            listener = Listener("listener")
            with running_hub(address, configured(listener, "spill", **spool), drain_s=20.0 if third == 2 else 0.1):
                for header, payload in frames[third * 10 : third * 10 + 10]:
                    eventually(lambda header=header, payload=payload: worker.send(header, payload) is None)
                eventually(lambda: worker.drained)
                if third == 2:  # what an earlier hub has not handed on, the next one does
                    missing = 2 * len(frames) - len(ids)
                    eventually(lambda heard=listener.heard, missing=missing: len(heard) >= missing)
            ids += [event.id for event, _ in listener.heard]
    assert len(ids) == len(set(ids)) == 2 * len(frames)


def test_a_full_inbox_that_drops_rows_keeps_their_events(address, tmp_path):
    listener = Listener("listener")
    options = {"spool_dir": tmp_path / "spool", "spool_bytes": 64 * limits.KIB, "spill_fallback": "drop"}
    large = make_frame([("big", 4, 0, 1200)], step=1, hidden=8)
    with running_hub(address, configured(listener, "spill", **options)), worker_link(address) as worker:
        assert worker.send(*with_events(large, ActedOn("big", "i", (gate(1, 2),)))) is None
        eventually(lambda: len(listener.heard) == 1)
    assert not listener.rows["big"]
