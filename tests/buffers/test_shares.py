"""The rule by which a bound is shared: an honest owner has its part, whatever the others do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow.buffers.shares import Shares
from capflow.errors import RoomError

OWNERS = 5
HOSTILE = [f"hostile {number}" for number in range(OWNERS - 1)]
TURNS = st.lists(st.tuples(st.sampled_from(HOSTILE), st.integers(1, 2_000), st.booleans()), max_size=60)


@given(TURNS, st.integers(10, 3_000))
def test_whatever_others_do_an_owner_can_take_its_part_and_all_have_no_more_than_there_is(turns, total):
    shares, held = Shares("bytes", total, owners_max=OWNERS), dict.fromkeys(HOSTILE, 0)
    for owner, amount, gives in turns:
        if gives:
            given = min(amount, held[owner])
            shares.give(owner, given)
            held[owner] -= given
        else:
            held[owner] += amount * shares.offer(owner, amount)
        assert shares.used == sum(held.values()) <= total
        assert shares.room("honest") >= shares.least
    assert shares.offer("honest", shares.least)
    for owner in HOSTILE:
        shares.offer(owner, shares.room(owner))
    assert shares.room("honest") >= 0
    assert shares.used <= total


@given(st.integers(1, OWNERS))
def test_who_comes_later_finds_as_much_again_as_each_of_those_before(before):
    shares = Shares("bytes", 100_000, owners_max=OWNERS + 1)
    for number in range(before):
        shares.offer(f"{number}", shares.room(f"{number}"))
    assert shares.room("late") >= shares.least


def test_an_owner_that_gave_everything_back_is_none():
    shares = Shares("bytes", 100, owners_max=2)
    assert shares.offer("a", 10)
    shares.give("a", 10)
    assert shares.owners == 0
    assert shares.held("a") == 0


def test_more_owners_than_there_are_parts_find_no_room():
    shares = Shares("sessions", 8, owners_max=2, unit="sessions", do="close some")
    shares.take("a", 1)
    shares.take("b", 1)
    with pytest.raises(RoomError, match=r"sessions: got 1 more sessions beside 0, expected at most 0 now; close some"):
        shares.take("c", 1)
    assert shares.refused == 1
    shares.take("a", 1)
