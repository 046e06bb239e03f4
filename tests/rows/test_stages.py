"""Pipeline stages that leave, or start again, at different times: each request ends with the stages that ran it."""

from __future__ import annotations

import contextlib

import pytest

from capflow import limits
from capflow.capture.frame import Rank
from capflow.protocol import message
from tests.kit.frames import make_frame, make_hello, make_model
from tests.kit.hubs import Recorder, address, answer, configured, raw_peer, running_hub, worker_link
from tests.kit.spills import ROWS, Sender
from tests.kit.waiting import eventually

__all__ = ["address"]


def hello_of(number, boot):
    """Return the Hello of one of two pipeline stages."""
    return make_hello(rank=Rank(number, 0, 0), boot=f"{boot}{number}", model=make_model(stages=2))


@contextlib.contextmanager
def stage(address, number, boot="b"):
    """Yield the sender of one of two pipeline stages."""
    hello = hello_of(number, boot)
    with worker_link(address, hello) as link:
        yield Sender(link, rank=hello.rank, boot=hello.boot)


def killed_stage(address, number, request):
    """Have a stage send rows of a request, and end without a word once they are taken."""
    hello = hello_of(number, "killed")
    frame = make_frame([(request, ROWS, 0, ROWS)], rank=hello.rank, boot=hello.boot)
    with raw_peer(address) as peer:
        peer.send(message.encode(hello))
        answer(peer)  # the Welcome
        peer.send_multipart(frame.encode())
        answer(peer)  # the Ack


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


def test_a_stage_that_starts_again_later_than_the_other_ends_no_new_request(address, recorder, monkeypatch):
    monkeypatch.setattr(limits, "NAME_KEPT_S", 0.0)  # the hub lets in who starts again at once, and need not wait
    monkeypatch.setattr(limits, "SILENCE_S_MAX", 600.0)  # nor does it give up the killed ones before
    for number in (0, 1):
        killed_stage(address, number, "old")
    with stage(address, 0, boot="again") as first:
        first.rows("new")
        eventually(lambda: "old" in recorder.done and recorder.rows["new"] == ROWS)
        with stage(address, 1, boot="again") as last:
            last.rows("new")
            first.end("new")
            last.end("new")
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
