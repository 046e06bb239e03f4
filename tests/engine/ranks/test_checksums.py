"""Checksums of steps: equal for ranks that do the same, and the first step that differs is found."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from capflow import limits
from capflow.capture.frame import Rank
from capflow_engine.ranks.agreement import Agreement, differing_requests
from capflow_engine.ranks.checksums import Checksums, Difference, StepLog, compared
from capflow_engine.scheduler.orders import Divergence
from capflow_engine.taps.acting import Acts, SlotRange
from capflow_engine.taps.bank import NONE, Steered
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
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


def test_the_gates_of_a_settled_step_are_folded_with_the_next_one():
    first, second = Engine(held(0, 3, 7)).run(20), Engine(held(0, 3, 7)).run(20)
    margins = np.array([[0.5, -np.inf, -1.0]], np.float32)
    waits = []
    for each, score in ((first, 0.5), (second, 0.7)):
        for step, changed in ((20, score), (21, -score if each is second else score)):
            margins = margins.copy()
            margins[0, 0] = changed
            each.checksums.add_gates(step, margins, lambda step=step: waits.append(step))
    assert compare(s0r0=first.run(1), s0r1=second.run(1)) == (21, None)
    assert not waits
    for each in (first, second):
        each.checksums.settle(20)
    assert compare(s0r0=first.run(1), s0r1=second.run(1)) == (22, None)
    for each in (first, second):
        each.checksums.settle(21)
    assert compare(s0r0=first.run(1), s0r1=second.run(1)) == (23, Difference(23, ("0.1",)))
    assert len(waits) == 4


class Batch:
    """A rank that plans decode steps of several requests."""

    def __init__(self, count=5):
        self.planner = Planner(2)
        nothing = self.planner.nothing
        self.requests = [
            Tracked(f"k{n}", f"r{n}", 4, nothing, nothing, steered=[held(0, n, n + 1)]) for n in range(count)
        ]
        self.requests.append(Tracked("plain", "plain", 4, nothing, nothing))
        self.checksums = Checksums()
        self.step = 0

    def run(self, steps=1):
        for _ in range(steps):
            self.step += 1
            parts = [Scheduled(request, row, 3 + self.step, 1) for row, request in enumerate(self.requests)]
            self.checksums.fold(self.step, self.planner.plan(parts))
        return self


@pytest.mark.parametrize("change", ["slot", "program", "order", "fewer", "unsteered", "later"])
def test_every_change_of_a_batch_that_goes_on_is_folded(change):
    first, second = Batch().run(10), Batch().run(10)
    request = second.requests[2]
    match change:
        case "slot":
            request.steered = [held(0, 4, 3)]
        case "program":
            request.steered = [held(0, 2, 9)]
        case "order":
            second.requests[:2] = second.requests[1::-1]
        case "fewer":
            del second.requests[2]
        case "unsteered":
            request.steered = None
        case "later":
            request.steered = [*request.steered, held(16, 7, 8)]
    assert compare(s0r0=first.run(10), s0r1=second.run(10))[1].step == (13 if change == "later" else 11)


def test_the_requests_that_differ_are_named_while_a_step_is_recent():
    first, second = Batch().run(10), Batch().run(10)
    assert "plain" not in first.checksums.requests(10)
    assert len(first.checksums.requests(10)) == 5
    second.requests[3].steered = [held(0, 9, 4)]
    first.run(), second.run()
    sums = {(0, 0): first.checksums.requests(11), (0, 1): second.checksums.requests(11)}
    assert differing_requests(sums) == ("k3",)
    first.run(limits.CHECKSUM_PARTS_MAX)
    assert first.checksums.requests(11) is None
    assert differing_requests({(0, 0): None, (0, 1): sums[0, 1]}) == ()


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


def agreements_of(ranks, shelf, reaction="warn"):
    """Return the agreements of two stages of two ranks each, and run all ranks for a comparison."""

    def run():
        for each, agreement in zip(ranks, agreements, strict=True):
            each.run(limits.CHECKSUM_STEPS)
            agreement.compare()

    agreements = [
        Agreement(each.checksums, Rank(n // 2, 0, n % 2), stages=2, ranks=2, store=lambda: shelf, reaction=reaction)
        for n, each in enumerate(ranks)
    ]
    return agreements, run


def taken(agreement):
    """Return what an agreement has for the scheduler, as soon as it has something."""
    divergences = []
    eventually(lambda: divergences.append(agreement.take()) or divergences[-1])
    return divergences[-1]


@pytest.fixture
def closing():
    """Return a list; the agreements in it are closed at the end."""
    agreements = []
    yield agreements
    for agreement in agreements:
        agreement.close()


def test_the_first_rank_learns_of_a_difference_and_goes_on(closing):
    ranks = [Engine(held(0, 3, 7)) for _ in range(4)]
    agreements, run = agreements_of(ranks, Shelf())
    closing += agreements
    for agreement in agreements:
        agreement.start()
    run()
    eventually(lambda: agreements[0].result.step == limits.CHECKSUM_STEPS)
    eventually(lambda: agreements[0].result.ranks == ("0.0", "0.1", "1.0", "1.1"))
    assert agreements[0].result.consistent
    assert agreements[0].trouble is None
    ranks[3].request.steered = [held(0, 9, 7)]
    run()
    eventually(lambda: not agreements[0].result.consistent)
    result = agreements[0].result
    assert (result.first_mismatch, result.differing) == (limits.CHECKSUM_STEPS + 1, ("1.1",))
    assert agreements[0].trouble == ("ranks steer differently since step 65: 1.1 (stage.rank) differ from the others")
    assert not any(agreement.take() for agreement in agreements)


@pytest.mark.parametrize(
    ("faulty", "wrong", "reaction", "differing", "requests"),
    [
        ((3,), held(0, 9, 7), "freeze", ("1.1",), ()),
        ((3,), held(0, 9, 7), "abort", ("1.1",), ("k",)),
        ((2, 3), held(0, 3, 8), "abort", ("1.0", "1.1"), ()),
    ],
    ids=["freeze", "abort", "a whole stage"],
)
def test_the_rank_that_returns_the_outputs_tells_the_scheduler_once(
    closing, faulty, wrong, reaction, differing, requests
):
    ranks = [Engine(held(0, 3, 7)) for _ in range(4)]
    shelf = Shelf()
    agreements, run = agreements_of(ranks, shelf, reaction)
    closing += agreements
    for number in faulty:
        ranks[number].request.steered = [wrong]
    run()
    for number in (0, 1, 3, 2):  # it compares the logs that are there
        agreements[number].start()
        eventually(lambda n=number: any(key.endswith(f"/{n // 2}.{n % 2}") for key in shelf.values))
    assert taken(agreements[2]) == Divergence(1, differing, requests)
    eventually(lambda: not agreements[0].result.consistent)
    reactions = {"freeze": "the engine was frozen for it", "abort": "requests were aborted for it"}
    assert agreements[0].trouble.endswith(reactions[reaction])
    assert not any(agreement.take() for agreement in agreements)


def test_no_request_is_named_if_a_rank_does_not_answer(closing, monkeypatch):
    monkeypatch.setattr(limits, "CHECKSUM_ANSWERS_S", 0.2)
    ranks = [Engine(held(0, 3, 7)) for _ in range(4)]
    agreements, run = agreements_of(ranks, Shelf(), "abort")
    closing += agreements
    monkeypatch.setattr(agreements[1], "_answer", lambda store: None)
    ranks[1].request.steered = [held(0, 9, 7)]
    for agreement in agreements:
        agreement.start()
    run()
    assert taken(agreements[2]) == Divergence(1, ("0.1",))


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
