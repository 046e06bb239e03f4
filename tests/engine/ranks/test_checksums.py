"""Checksums of steps: equal for ranks that do the same, and the first step that differs is found."""

from __future__ import annotations

import threading

import msgspec
import pytest

from capflow import limits
from capflow.capture.frame import Rank
from capflow_engine.ranks.agreement import Agreement
from capflow_engine.ranks.checksums import Checksums, StepLog, compared
from capflow_engine.taps.acting import Acts, SlotRange
from capflow_engine.taps.bank import NONE, Steered
from capflow_engine.taps.plan import Planner, Scheduled, Tracked
from tests.kit.waiting import eventually


def held(first, slot, key, shared=None):
    return SlotRange(first, 4, Steered(slot, slot, {}), Acts(1, 1), key, key if shared is None else shared)


class Engine:
    """A rank that plans decode steps of one request."""

    def __init__(self, *ranges):
        self.planner = Planner(2)
        self.request = Tracked("k", "r", 4, self.planner.nothing, self.planner.nothing, steered=list(ranges) or None)
        self.checksums = Checksums()
        self.step = 0

    def run(self, steps):
        for _ in range(steps):
            self.step += 1
            part = Scheduled(self.request, 0, 3 + self.step, 1)
            self.checksums.fold(self.step, self.planner.plan([part]))
        return self


def compare(**ranks):
    """Compare ranks given as `s0r1=Engine`."""
    return compared({(int(name[1]), int(name[3])): each.checksums.log() for name, each in ranks.items()})


def test_ranks_that_do_the_same_agree():
    first, second = Engine(held(0, 3, 7)).run(50), Engine(held(0, 3, 7)).run(40)
    assert compare(s0r0=first, s0r1=second) == (40, None)
    assert first.checksums.folds == 50


@pytest.mark.parametrize(
    "change", [held(0, 4, 7), held(0, 3, 8), held(30, 3, 9), None], ids=["slot", "program", "position", "nothing"]
)
def test_the_first_step_with_another_slot_program_or_position_is_named(change):
    first, second = Engine(held(0, 3, 7)).run(20), Engine(held(0, 3, 7)).run(20)
    second.request.steered = None if change is None else [held(0, 3, 7), change] if change.first else [change]
    first.run(30), second.run(30)
    step, difference = compare(s0r0=first, s0r1=second)
    assert step == 50
    assert difference == (27 if change is not None and change.first else 21, ("0.1",))


def test_stages_share_programs_and_not_slots_nor_what_controllers_add():
    plain, other = Engine(held(0, 3, 7)).run(60), Engine(held(0, NONE, 7), held(20, 5, 9, shared=7)).run(60)
    assert compare(s0r0=plain, s1r0=other) == (60, None)
    wrong = Engine(held(0, NONE, 8)).run(60)
    assert compare(s0r0=plain, s1r0=wrong) == (60, (1, ("1.0",)))
    watched, unwatched = Engine(held(20, 5, 9, shared=0)).run(60), Engine().run(60)
    assert compare(s0r0=watched, s1r0=unwatched, s0r1=Engine(held(20, 5, 9, shared=0)).run(60)) == (60, None)


def test_a_log_keeps_the_latest_steps_and_is_compared_from_there():
    more = limits.CHECKSUM_STEPS_MAX + 100
    first, second = Engine(held(0, 3, 7)).run(more), Engine(held(0, 3, 7)).run(more + 50)
    log = msgspec.msgpack.decode(msgspec.msgpack.encode(second.checksums.log()), type=StepLog)
    assert len(log.folded) == limits.CHECKSUM_STEPS_MAX
    assert compared({(0, 0): first.checksums.log(), (0, 1): log}) == (more, None)
    wrong = Engine(held(0, 4, 7)).run(more)
    assert compare(s0r0=first, s0r1=wrong) == (more, (100, ("0.1",)))


class Shelf:
    """A store in memory."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


def test_the_first_rank_learns_of_a_difference_and_goes_on(caplog):
    shelf = Shelf()
    ranks = [Engine(held(0, 3, 7)) for _ in range(4)]
    agreements = [
        Agreement(each.checksums, Rank(n // 2, 0, n % 2), stages=2, ranks=2, store=lambda: shelf)
        for n, each in enumerate(ranks)
    ]
    try:
        for agreement in agreements:
            agreement.start()
        for each, agreement in zip(ranks, agreements, strict=True):
            each.run(limits.CHECKSUM_STEPS)
            agreement.stepped(each.step)
        eventually(lambda: agreements[0].result.step == limits.CHECKSUM_STEPS)
        eventually(lambda: agreements[0].result.ranks == ("0.0", "0.1", "1.0", "1.1"))
        assert agreements[0].result.consistent
        assert agreements[0].trouble is None
        ranks[3].request.steered = [held(0, 9, 7)]
        for each, agreement in zip(ranks, agreements, strict=True):
            each.run(limits.CHECKSUM_STEPS)
            agreement.stepped(each.step)
        eventually(lambda: not agreements[0].result.consistent)
    finally:
        for agreement in agreements:
            agreement.close()
    result = agreements[0].result
    assert (result.first_mismatch, result.differing) == (limits.CHECKSUM_STEPS + 1, ("1.1",))
    assert agreements[0].trouble.startswith("ranks steer differently since step 65: 1.1 (stage.rank)")


def test_a_store_that_fails_ends_the_comparison_only(caplog):
    class Broken(Shelf):
        def set(self, key, value):
            raise ConnectionError("gone")

    rank = Engine(held(0, 3, 7)).run(5)
    agreement = Agreement(rank.checksums, Rank(0, 0, 0), stages=1, ranks=2, store=Broken)
    agreement.start()
    eventually(lambda: "cannot be compared any more: ConnectionError: gone" in caplog.text)
    eventually(lambda: threading.active_count() and not agreement._thread.is_alive())
    assert agreement.result.consistent
    agreement.close()
