"""What leaves a worker for several hubs: each has its own queue, spool and numbers."""

from __future__ import annotations

import logging
import tempfile
import time

import pytest

from capflow import limits
from capflow.transport.outbox import Outbox, left_behind
from capflow_engine.hubs import HubAt
from capflow_engine.settings import Outbound, Settings
from capflow_engine.worker.outlets import Outlets
from capflow_engine.worker.ring import Ring
from tests.kit.frames import FIRST, make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder, running_hub
from tests.kit.waiting import eventually


@pytest.fixture
def addresses():
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        yield [f"ipc://{directory}/{name}" for name in "abc"]


def outlets_of(addresses, **kwargs):
    model = make_model()
    settings = Settings("engine-2", tuple(map(HubAt, addresses)), model.sites, **kwargs)
    ring = Ring(limits.MIB, pinned=False)
    return Outlets(settings, rank=FIRST, info=model, sites=model.sites, ring=ring, text_of=None)


def send(outlets, count):
    """Send frames of four rows to every hub."""
    for step in range(count):
        for way in outlets._sender.ways:
            frame = make_frame([("r1", 4, step * 4, 4)], engine="engine-2", boot=way.boot, step=step)
            assert way.link.send(frame.header, frame.payload) is None


class Slow(Recorder):
    """Takes its time with each frame."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_frame(self, frame):
        # What this consumer is: slow.
        time.sleep(self.seconds)
        super().on_frame(frame)


def leave(root, name):
    """Leave on disk what a worker that is gone had for a hub."""
    outbox = Outbox.of(root, make_hello(), 64 * limits.MIB)
    outbox.open()
    frame = make_frame([(name, 4, 0, 4)], finished=[make_finished(name)])
    assert outbox.put(1, frame.header, frame.payload, 0.0) is None
    outbox.close()


def test_what_was_spilled_for_a_hub_goes_to_it_wherever_it_is_now(addresses, tmp_path, caplog):
    for directory, name in ((tmp_path, "first"), (tmp_path / "hub-1", "second"), (tmp_path / "hub-2", "third")):
        leave(directory, name)
    first, second = Recorder(), Recorder()
    with running_hub(addresses[0], first), running_hub(addresses[2], second), caplog.at_level(logging.ERROR):
        outlets = outlets_of([addresses[0], addresses[2]], outbound=Outbound.of("spill", str(tmp_path), None, None))
        eventually(lambda: first.rows == {"first": 4} and second.rows == {"second": 4})
        eventually(lambda: not any(link.outbox.unacknowledged for link in outlets.former))
        outlets.close()
    (message,) = [record.message for record in caplog.records if "untouched" in record.message]
    spool = tmp_path / "hub-2"
    assert message == f"spool {spool} is for hub 2; this engine has 2 hubs, numbered from 0, and leaves it untouched"
    assert [path.name for path in tmp_path.iterdir() if any(path.iterdir())] == ["hub-2"]


def test_an_engine_ends_in_time_beside_a_hub_that_takes_nothing_and_the_others_get_all(addresses, monkeypatch, caplog):
    monkeypatch.setattr(limits, "HANG_S_MAX", 1.0)
    hung, slow = Recorder(held=True), Slow(0.1)
    with running_hub(addresses[0], hung), running_hub(addresses[1], slow):
        outlets = outlets_of(addresses[:2])
        assert all(link.wait_welcome(20) for link in outlets.links)
        send(outlets, 30)
        assert hung.waiting.wait(20)
        began = time.monotonic()
        outlets.close()
        assert time.monotonic() - began < 10
        assert slow.rows["r1"] == 30 * 4
        (message,) = [record.message for record in caplog.records if "acknowledges nothing" in record.message]
        assert addresses[0] in message


def test_a_flush_waits_for_all_hubs_but_one_that_takes_nothing_and_the_worker_goes_on(addresses, monkeypatch, caplog):
    hung, slow = Recorder(), Slow(0.1)
    with running_hub(addresses[0], hung), running_hub(addresses[1], slow):
        outlets = outlets_of(addresses[:2])
        assert all(link.wait_welcome(20) for link in outlets.links)
        for rows in (40, 80):
            send(outlets, 10)
            outlets.flush()
            assert (hung.rows["r1"], slow.rows["r1"]) == (rows, rows)
        monkeypatch.setattr(limits, "HANG_S_MAX", 1.0)
        hung.go.clear()
        send(outlets, 30)
        began = time.monotonic()
        outlets.flush()
        assert time.monotonic() - began < 10
        assert slow.rows["r1"] == 200
        (message,) = [record.message for record in caplog.records if "nobody waits for it" in record.message]
        assert addresses[0] in message
        hung.go.set()
        outlets.close()
        assert hung.rows["r1"] == 200


def test_what_is_spilled_for_a_hub_that_takes_nothing_is_left_on_disk(addresses, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "HANG_S_MAX", 0.5)
    with running_hub(addresses[0], Recorder(held=True)):
        outbound = Outbound.of("spill", str(tmp_path), None, None)
        outlets = outlets_of(addresses[:1], outbound=outbound, outbound_bytes_max=2000)
        (link,) = outlets.links
        assert link.wait_welcome(20)
        send(outlets, 30)
        began = time.monotonic()
        outlets.close()
        assert time.monotonic() - began < 10
    (left,) = left_behind(tmp_path)
    assert left.unacknowledged > 20
    left.close()


def test_a_worker_has_another_boot_at_each_hub(addresses):
    with running_hub(addresses[0], Recorder()), running_hub(addresses[1], Recorder()):
        outlets = outlets_of(addresses[:2])
        assert all(link.wait_welcome(20) for link in outlets.links)
        outlets.close()
        boots = {way.boot for way in outlets._sender.ways}
    assert len(boots) == 2


def test_room_is_waited_for_once_while_no_hub_is_there_and_again_when_one_is_back(addresses):
    outlets = outlets_of(addresses[:2])
    with running_hub(addresses[0], Recorder()):
        assert outlets.links[0].wait_welcome(20)
        assert outlets.give_up() == "queue_full"
        assert outlets.patient
    eventually(lambda: not outlets.links[0].connected)
    assert outlets.patient
    assert outlets.give_up() == "hub_gone"
    assert not outlets.patient
    with running_hub(addresses[0], Recorder()):
        eventually(lambda: outlets.patient)
    outlets.close()


@pytest.mark.parametrize("policy", ["block", "drop", "spill"])
def test_the_requests_of_a_hub_that_is_away_follow_the_policy_and_those_of_others_go_on(
    addresses, tmp_path, monkeypatch, policy
):
    monkeypatch.setattr(limits, "BLOCK_S_MAX", 0.5)
    outbound = Outbound.of(policy, str(tmp_path) if policy == "spill" else None, None, None)
    here, away = Recorder(), Recorder()
    with running_hub(addresses[0], here):
        with running_hub(addresses[1], Recorder()):
            outlets = outlets_of(addresses[:2], outbound=outbound, outbound_bytes_max=4000)
            assert all(link.wait_welcome(20) for link in outlets.links)
        eventually(lambda: not outlets.links[1].connected)
        began, reasons = time.monotonic(), []
        for step in range(40):
            for way in outlets._sender.ways:
                frame = make_frame([("r1", 4, step * 4, 4)], engine="engine-2", boot=way.boot, step=step)
                reasons.append(way.link.send(frame.header, frame.payload))
            eventually(lambda step=step: here.rows["r1"] == step * 4 + 4)
        took_s = time.monotonic() - began
        assert not any(reasons[::2])
        lost = [reason for reason in reasons[1::2] if reason is not None]
        with running_hub(addresses[1], away):
            eventually(lambda: away.rows["r1"] == (40 - len(lost)) * 4)
            outlets.close()
    assert set(lost) == (set() if policy == "spill" else {"hub_gone"})
    assert len(lost) < 40
    assert took_s >= 0.5 * (policy == "block")
