"""The exchange: what a frame takes of a hub comes back, whatever the frame holds."""

from __future__ import annotations

import pytest
from exchanges import Desk
from frames import BOOT, make_finished, make_frame
from hubs import Recorder

from capflow import limits
from capflow.message import Refused
from capflow.spec import CaptureSpec

WRONG = CaptureSpec({"post_block": [99]})
"""Of a model with more layers than those of the tests."""


def wrong_in_rows(boot):
    return make_frame(boot=boot, captures={"r1": WRONG})


def wrong_in_an_end(boot):
    return make_frame((), (), boot=boot, finished=[make_finished("r1", capture=WRONG)])


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
        assert desk.exchange.ledger.requests_open == 0

    def test_comes_back_of_frames_that_the_hub_fails_at(self, monkeypatch):
        desk = Desk(Recorder(), Recorder("second"))
        pool = desk.exchange.roster.pool
        desk.hello(b"w")
        monkeypatch.setattr(desk.exchange.lanes[1], "deliver", _fail)
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
        assert not desk.exchange.lanes[0].queue.nbytes


def _fail(*_):
    raise MemoryError
