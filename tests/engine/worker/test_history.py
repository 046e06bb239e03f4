"""The steering of a request by position: owners add up, earlier steering stays, actions on rejected rows are undone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow.limits import SITE_OPS_MAX
from capflow.steering.action import Steer, Unsteer
from capflow.steering.compiler import program_of, with_vectors
from capflow.steering.program import SiteOps
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.budget import Holdings, Size, needs_of
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.history import HUB, Histories, Owner
from tests.kit.frames import make_model

WIDTH = 8
SITE = Site(1, "post_block")
FIRST, SECOND = Owner(0, "first"), Owner(1, "second")
LARGE = Size(64, 256, 64)


def vector(seed):
    return SteeringVector.make(SITE, np.eye(WIDTH, dtype=np.float32)[seed])


def steer(*seeds, request="r"):
    return Steer(request, tuple(vector(seed) for seed in seeds))


class Worker:
    """Histories with a bank, and requests whose prompts have four tokens."""

    def __init__(self, size=LARGE, reserve=LARGE):
        self.bank = Bank(size.plus(reserve), {SITE: 0}, WIDTH, torch.device("cpu"))
        self.histories = Histories(self.bank, reserve, make_model(hidden=WIDTH))
        self.planner = Planner(1)

    def request(self, name="r", base=None, computed=4):
        tracked = Tracked(name, name, 4, self.planner.nothing, self.planner.nothing, computed=computed)
        if base is not None:
            self.histories.admit(tracked, program_of(WIDTH, [Steering(base=Tier((vector(base),)))]))
        return tracked

    def added(self, tracked, stop):
        """Return which vectors are added at positions `0 .. stop`, as one step would."""
        tracked.computed = max(tracked.computed, stop)
        slots = self.planner.plan([Scheduled(tracked, 0, 0, stop)]).slots(stop)
        added = []
        for slot in slots:
            here, op = [], -1 if slot < 0 else int(self.bank.heads[slot, 0])
            while op >= 0:
                _, row, op_after, _ = self.bank.op_ints[op].tolist()
                here.append(int(self.bank.rows[row].argmax()))
                op = op_after
            added.append(tuple(here))
        return added


def test_an_action_holds_from_the_next_position_and_what_held_before_stays():
    worker = Worker()
    tracked = worker.request(base=7)
    for computed, action in ((5, steer(0)), (7, steer(1)), (9, Unsteer("r"))):
        tracked.computed = computed
        assert worker.histories.act(tracked, HUB, action)
    assert worker.added(tracked, 11) == [(7,)] * 5 + [(7, 0)] * 2 + [(7, 1)] * 2 + [(7,)] * 2
    worker.histories.forget(tracked)
    assert len(worker.bank) == 0


def test_an_action_on_a_prompt_holds_from_its_end_wherever_the_prompt_is_cut():
    for computed in (0, 1, 3, 4):
        worker = Worker()
        tracked = worker.request(computed=computed)
        worker.histories.act(tracked, FIRST, steer(0))
        assert worker.added(tracked, 6) == [()] * 4 + [(0,)] * 2


def test_owners_add_up_in_their_order_with_the_hub_last_and_each_takes_back_its_own():
    worker = Worker()
    tracked = worker.request(base=7)
    for owner, action in ((HUB, steer(0)), (SECOND, steer(1)), (FIRST, steer(2)), (FIRST, steer(3))):
        assert worker.histories.act(tracked, owner, action)
    tracked.computed = 5
    worker.histories.act(tracked, SECOND, Unsteer("r"))
    tracked.computed = 6
    worker.histories.act(tracked, HUB, Unsteer("r"))
    assert worker.added(tracked, 7) == [(7,)] * 4 + [(7, 3, 1, 0), (7, 3, 0), (7, 3)]


def test_an_action_that_changes_nothing_is_none():
    worker = Worker()
    tracked = worker.request()
    assert not worker.histories.act(tracked, FIRST, Unsteer("r"))
    assert worker.histories.act(tracked, FIRST, steer(0))
    tracked.computed = 5
    before = tracked.steered
    assert not worker.histories.act(tracked, FIRST, steer(0))
    assert tracked.steered == before


def test_what_was_decided_by_rows_that_are_nobody_s_is_undone_and_what_a_hub_ordered_is_not():
    worker = Worker()
    tracked = worker.request()
    for computed, owner, action in ((5, FIRST, steer(0)), (7, FIRST, Unsteer("r")), (8, HUB, steer(1))):
        tracked.computed = computed
        worker.histories.act(tracked, owner, action)
    tracked.computed = 6
    worker.histories.cut(tracked, 6)
    assert dict(worker.histories.vectors("r")) == {FIRST: (vector(0),)}
    assert worker.added(tracked, 10) == [()] * 5 + [(0,)] * 3 + [(0, 1)] * 2
    worker.histories.cut(tracked, 5)
    assert worker.histories.vectors("r")[FIRST] == (vector(0),)
    worker.histories.cut(tracked, 4)
    assert worker.added(tracked, 10) == [()] * 8 + [(1,)] * 2


def test_more_input_is_steered_as_a_prompt_and_what_was_generated_as_it_was():
    worker = Worker()
    tracked = worker.request()
    worker.histories.act(tracked, FIRST, steer(0))
    tracked.computed, tracked.prompt_length = 7, 9
    worker.histories.lengthen(tracked)
    assert worker.added(tracked, 11) == [()] * 4 + [(0,)] * 3 + [()] * 2 + [(0,)] * 2
    worker.histories.forget(tracked)
    assert len(worker.bank) == 0
    assert worker.histories.reserve.used == Size(0, 0, 0)


def test_a_controller_for_which_the_reserve_has_no_room_changes_nothing():
    worker = Worker(reserve=Size(1, 8, 8))
    tracked = worker.request(base=7)
    worker.histories.act(tracked, FIRST, steer(0))
    tracked.computed = 5
    with pytest.raises(CapflowError, match=r"steering bank: got no room for more rows .* --steering-bank-bytes"):
        worker.histories.act(tracked, FIRST, steer(1))
    assert worker.added(tracked, 6) == [(7,)] * 4 + [(7, 0)] * 2


def test_a_controller_that_goes_to_and_fro_takes_no_more_room_than_one_that_does_once():
    worker = Worker(reserve=Size(1, 2, 1))
    tracked = worker.request(base=7)
    for computed in range(4, 400, 2):
        tracked.computed = computed
        worker.histories.act(tracked, FIRST, steer(0))
        tracked.computed = computed + 1
        worker.histories.act(tracked, FIRST, Unsteer("r"))
    assert worker.added(tracked, 400) == [(7,)] * 4 + [(7, 0), (7,)] * 198


def test_what_a_hub_orders_has_room_whatever_controllers_hold():
    """There, controllers lose what they added to the request; what they added before stays where it was."""
    worker = Worker(size=Size(2, 3, 2), reserve=Size(1, 2, 1))
    tracked = worker.request(base=7)
    worker.histories.act(tracked, FIRST, steer(0))
    tracked.computed = 5
    assert worker.histories.act(tracked, HUB, steer(1))
    assert worker.added(tracked, 6) == [(7,)] * 4 + [(7, 0), (7, 1)]
    assert dict(worker.histories.vectors("r")) == {HUB: (vector(1),)}


def test_what_a_hub_ordered_has_room_too_where_it_is_kept_of_what_was_undone():
    worker = Worker(reserve=Size(8, 64, 3))
    both = worker.request("r", base=7), worker.request("other", base=7)
    for computed, owner, action in ((5, FIRST, steer(0)), (8, FIRST, steer(1)), (9, HUB, steer(2))):
        for tracked in both:  # what one gives back, the other still holds
            tracked.computed = computed
            worker.histories.act(tracked, owner, action)
    tracked = both[0]
    tracked.computed = 6
    worker.histories.cut(tracked, 6)
    assert worker.added(tracked, 11) == [(7,)] * 5 + [(7, 0)] * 4 + [(7, 2)] * 2
    for each in both:
        worker.histories.forget(each)
    assert len(worker.bank) == 0
    assert worker.histories.reserve.used == Size(0, 0, 0)


def test_more_controllers_than_a_site_has_operations_are_refused_and_take_nothing():
    worker = Worker(size=Size(64, 16_384, 64), reserve=Size(64, 16_384, 512))
    tracked = worker.request(base=7)
    for number in range(SITE_OPS_MAX - 1):
        worker.histories.act(tracked, Owner(number, "many"), steer(0))
    used = worker.histories.reserve.used
    with pytest.raises(CapflowError, match=f"got {SITE_OPS_MAX + 1} operations"):
        worker.histories.act(tracked, Owner(SITE_OPS_MAX, "many"), steer(0))
    assert worker.histories.reserve.used == used
    assert worker.added(tracked, 5)[4] == (7, *[0] * (SITE_OPS_MAX - 1))


def test_a_program_that_the_bank_does_not_take_costs_its_request_and_no_other(caplog):
    worker = Worker(size=Size(64, 16_384, 64))
    program = program_of(WIDTH, [Steering(base=Tier((vector(7),)))])
    ops = tuple(SiteOps(*SITE, site.ops * (SITE_OPS_MAX + 1)) for site in program.decode)
    tracked = worker.request()
    worker.histories.admit(tracked, replace(program, decode=ops))
    assert f"request r: steering bank: got {SITE_OPS_MAX + 1} operations" in caplog.text
    assert caplog.text.strip().endswith("nothing steers it")
    assert worker.added(tracked, 6) == [()] * 6
    assert len(worker.bank) == 0
    assert worker.added(worker.request("other", base=3), 6) == [(3,)] * 6
    worker.histories.forget(tracked)


_owners = st.sampled_from([FIRST, SECOND, HUB])
_actions = st.lists(
    st.tuples(st.integers(0, 2), _owners, st.lists(st.integers(0, 4), max_size=1), st.integers(0, 12)), max_size=40
)


@given(_actions)
@settings(deadline=None)
def test_the_bank_always_has_room_for_what_was_counted(actions):
    """The scheduler counts what requests bring and what a hub orders, the reserve what controllers add."""
    size, reserve = Size(4, 12, 6), Size(2, 6, 3)
    worker, counted, held = Worker(size, reserve), Holdings(size), {}
    for number, (name, owner, seeds, gone) in enumerate(actions):
        key = str(name)
        if gone == 0 and key in held:
            tracked, _, names = held.pop(key)
            for each in names:
                counted.release(each)
            worker.histories.forget(tracked)
        if key not in held:
            tracked = worker.request(key)
            program = program_of(WIDTH, [Steering(base=Tier((vector(5 + name),)))])
            if not counted.hold(f"{number}", needs_of(program, 4)):
                continue
            worker.histories.admit(tracked, program)
            held[key] = tracked, program, [f"{number}"]
        tracked, program, names = held[key]
        tracked.computed += 1
        action = steer(*seeds) if seeds else Unsteer("r")
        if owner == HUB:
            ordered = program_of(WIDTH, [Steering(base=Tier((vector(5 + name),)))])
            if seeds:
                ordered = with_vectors(ordered, WIDTH, action.vectors)
            if not counted.hold(f"{number} more", needs_of(ordered, 4)):
                continue
            names.append(f"{number} more")
            worker.histories.act(tracked, HUB, action)
        else:
            try:
                worker.histories.act(tracked, owner, action)
            except CapflowError as e:
                if "part for controllers" not in str(e):  # the bank itself is full, which must never happen
                    raise
    for tracked, _, _ in held.values():
        worker.histories.forget(tracked)
    assert len(worker.bank) == 0
