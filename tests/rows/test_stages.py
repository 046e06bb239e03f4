"""Pipeline stages that leave, or start again, at different times: each request ends with the stages that ran it."""

from __future__ import annotations

import contextlib

import pytest

from capflow.capture.frame import Rank
from tests.kit.frames import make_hello, make_model
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.spills import ROWS, Sender
from tests.kit.waiting import eventually

__all__ = ["address"]


@contextlib.contextmanager
def stage(address, number, boot="b"):
    """Yield the sender of one of two pipeline stages."""
    rank, boot = Rank(number, 0, 0), f"{boot}{number}"
    with worker_link(address, make_hello(rank=rank, boot=boot, model=make_model(stages=2))) as link:
        yield Sender(link, rank=rank, boot=boot)


@pytest.fixture(params=["block", "spill"])
def recorder(request, address, tmp_path):
    """Return the recorder of a running hub, behind a lane of each kind."""
    recorder = Recorder()
    spool = {"spool_dir": tmp_path / "spool"} if request.param == "spill" else {}
    with running_hub(address, configured(recorder, request.param, **spool)):
        yield recorder


def test_a_stage_that_leaves_first_takes_no_request_that_it_ended_with_it(address, recorder):
    with stage(address, 1) as last:
        with stage(address, 0) as first:
            for sender in (first, last):
                sender.rows("r1", "r2")
            first.end("r1")
            eventually(lambda: first.acknowledged and last.acknowledged)
        eventually(lambda: "r2" in recorder.done)
        last.rows("r1")
        last.end("r1")
        eventually(lambda: "r1" in recorder.done)
    assert {name: (done.status, done.rows) for name, done in recorder.done.items()} == {
        "r1": ("stop", 3 * ROWS),
        "r2": ("error", 2 * ROWS),
    }


def test_a_stage_that_comes_when_the_other_has_left_still_ends_its_requests(address, recorder):
    with stage(address, 0) as first:
        first.rows("r1")
        first.end("r1")
        eventually(lambda: first.acknowledged and recorder.rows["r1"] == ROWS)
    with stage(address, 1) as last:
        last.rows("r1")
        last.end("r1")
        eventually(lambda: "r1" in recorder.done)
    assert (recorder.done["r1"].status, recorder.done["r1"].rows) == ("stop", 2 * ROWS)


def test_a_stage_that_starts_again_later_than_the_other_ends_no_new_request(address, recorder):
    with stage(address, 0) as first, stage(address, 1) as last:
        for sender in (first, last):
            sender.rows("old")
        eventually(lambda: first.acknowledged and last.acknowledged)
        with stage(address, 0, boot="again") as first_again:
            first_again.rows("new")
            eventually(lambda: "old" in recorder.done and recorder.rows["new"] == ROWS)
            with stage(address, 1, boot="again") as last_again:
                last_again.rows("new")
                first_again.end("new")
                last_again.end("new")
                eventually(lambda: "new" in recorder.done)
    assert recorder.done["old"].status == "error"
    assert (recorder.done["new"].status, recorder.done["new"].rows) == ("stop", 2 * ROWS)


def test_an_engine_of_which_one_stage_never_comes_is_missed(address, recorder, monkeypatch):
    monkeypatch.setattr("capflow.limits.MISSED_S", 0.5)
    with stage(address, 0) as first:
        first.rows("r1")
        first.end("r1")
        eventually(lambda: first.acknowledged and recorder.rows["r1"] == ROWS)
    eventually(lambda: "r1" in recorder.done)
    assert recorder.done["r1"].status == "error"
