"""The bank keeps what is equal once, gives back what nobody holds, and agrees with the scheduler's count of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow.limits import FEATURES_SET_MAX
from capflow.steering.compiler import program_of
from capflow.steering.patch import Patch
from capflow.steering.program import ENCODE, SET, Op, SiteOps, SteeringProgram
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.steering.budget import Holdings, Size, needs_of
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import NONE, NOTHING, Bank
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked

WIDTH = 16
SITES = [Site(layer, "post_block") for layer in range(3)]


def vector(seed, site=SITES[0], scale=1.0):
    return SteeringVector.make(site, np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32), scale)


def program(*base, prefill=(), decode=()):
    return program_of(WIDTH, [Steering(base=Tier(base), prefill=Tier(prefill), decode=Tier(decode))])


def bank(rows=8, ops=32, slots=8, sites=SITES):
    return Bank(Size(rows, ops, slots), {site: n for n, site in enumerate(sites)}, WIDTH, torch.device("cpu"))


def first_row(it, slot, site=0):
    """Return the row of a slot's first operation at a site."""
    return it.rows[it.op_ints[it.heads[slot, site], 1]].numpy()


def test_equal_configurations_share_a_slot_until_the_last_holder_is_gone():
    it = bank()
    first, second = it.acquire(program(vector(1)), 5), it.acquire(program(vector(1)), 9)
    other = it.acquire(program(vector(1, scale=2.0)), 5)
    assert first.prefill == first.decode == second.prefill != other.prefill
    np.testing.assert_array_equal(first_row(it, first.prefill), vector(1).array())
    np.testing.assert_array_equal(first_row(it, other.prefill), 2 * vector(1).array())
    it.release(first)
    assert len(it) == 2
    it.release(second)
    assert len(it) == 1
    it.release(other)
    assert len(it) == 0


def test_more_features_than_an_op_has_places_for_are_refused_and_take_nothing():
    def setting(count):
        ops = (*(Op(ENCODE, 0, low=float(n), high=0.0) for n in range(count)), *(Op(SET, 0) for _ in range(count)))
        sites = (SiteOps(*SITES[0], ops),)
        return SteeringProgram(WIDTH, np.ones(WIDTH, np.float32).tobytes(), (b"x" * 16,), sites, sites)

    it = bank(ops=128)
    with pytest.raises(
        CapflowError, match="got 17 features that are set, expected at most 16 at one site and position"
    ):
        it.acquire(setting(FEATURES_SET_MAX + 1), 5)
    assert len(it) == it.writes == 0
    it.acquire(setting(FEATURES_SET_MAX), 5)


def test_a_row_of_two_configurations_is_kept_once():
    it = bank()
    it.acquire(program(vector(1), decode=(vector(2, SITES[1]),)), 5)
    it.acquire(program(vector(1), decode=(vector(2, SITES[2]),)), 5)
    assert len(it) == 2


def test_a_stage_without_the_sites_of_a_patch_has_no_slot_of_its_position():
    it = bank(sites=SITES[:2])
    row = np.ones(WIDTH, np.float32).tobytes()
    patches = tuple(Patch(layer, "post_block", (position,), row) for layer, position in ((0, 3), (2, 1), (2, 3)))
    only_elsewhere = it.acquire(program_of(WIDTH, [Steering(patches=patches[1:2])]), 5)
    assert only_elsewhere == NOTHING
    everywhere = it.acquire(program_of(WIDTH, [Steering(base=Tier((vector(1, SITES[1]),)), patches=patches)]), 5)
    assert list(everywhere.patched) == [1, 3]
    assert NONE not in everywhere.patched.values()
    planner = Planner(2)
    request = Tracked("1", "r1", 5, planner.nothing, planner.nothing, steered=[SlotRange(0, 5, only_elsewhere)])
    assert planner.plan([Scheduled(request, 0, 0, 5)]).idle
    it.release(only_elsewhere)
    it.release(everywhere)
    assert len(it) == 0


def test_what_a_freed_slot_had_is_taken_again_and_what_is_held_is_not_touched():
    it = bank(rows=2)
    kept, freed = it.acquire(program(vector(1)), 5), it.acquire(program(vector(2)), 5)
    it.release(freed)
    again = it.acquire(program(vector(3)), 5)
    np.testing.assert_array_equal(first_row(it, kept.prefill), vector(1).array())
    np.testing.assert_array_equal(first_row(it, again.prefill), vector(3).array())


def test_a_stage_without_the_sites_of_a_program_has_no_slot_of_it():
    it = bank(sites=SITES[:1])
    steered = it.acquire(program(vector(1, SITES[2])), 5)
    assert steered.prefill == steered.decode == NONE
    it.release(steered)
    assert len(it) == 0


@pytest.mark.parametrize("size", [{"rows": 1}, {"ops": 1}, {"slots": 1}])
def test_a_full_bank_takes_nothing_and_says_what_to_raise(size):
    it = bank(**size)
    held = it.acquire(program(vector(1)), 5)
    with pytest.raises(CapflowError, match="--steering-bank-bytes"):
        it.acquire(program(vector(2), decode=(vector(3),)), 5)
    it.release(held)
    assert len(it) == 0
    it.acquire(program(vector(2)), 5)


_tier = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(SITES)), max_size=3, unique_by=lambda pair: pair[1])
_steps = st.lists(st.tuples(_tier, _tier, _tier, st.integers(0, 5)), max_size=30)


@given(_steps)
@settings(deadline=None)
def test_what_the_scheduler_admits_fits_into_the_bank(steps):
    """The scheduler counts, the worker allocates: the bank is never fuller than the scheduler's count says."""
    it, holdings = bank(rows=6, ops=16, slots=5), Holdings(Size(6, 16, 5))
    running = {}
    for number, (base, prefill, decode, gone) in enumerate(steps):
        if gone in running:
            holdings.release(str(gone))
            it.release(running.pop(gone))
        asked = program(
            *([vector(*one) for one in base]),
            prefill=[vector(*one) for one in prefill],
            decode=[vector(*one) for one in decode],
        )
        if asked is None or number in running:
            continue
        if holdings.hold(str(number), needs_of(asked, 7)):
            running[number] = it.acquire(asked, 7)
        assert len(it) == holdings.used.rows
    for number, steered in running.items():
        holdings.release(str(number))
        it.release(steered)
    assert len(it) == 0
    assert holdings.used == Size(0, 0, 0)
