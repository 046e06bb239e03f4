"""The set of whole numbers, against Python's own."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from capflow.capture.intervals import Intervals

runs = st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 6)), max_size=12)


@given(runs=runs, window=st.tuples(st.integers(0, 50), st.integers(-1, 20)))
def test_it_is_a_set(runs, window):
    numbers, expected = Intervals(), set()
    for first, length in runs:
        if length < 0 or not numbers.append(first, first + length):
            numbers.add(first, first + length)
        expected.update(range(first, first + length + 1))
    assert {n for n in range(60) if n in numbers} == expected
    assert bool(numbers) == bool(expected)
    kept = list(numbers)
    assert {n for first, last in kept for n in range(first, last + 1)} == expected
    assert all(before[1] + 1 < after[0] for before, after in pairwise(kept))
    first, last = window[0], window[0] + window[1]
    missing = [n for start, stop in numbers.missing(first, last) for n in range(start, stop + 1)]
    assert missing == [n for n in range(first, last + 1) if n not in expected]


def test_numbers_in_order_are_one_run():
    numbers = Intervals()
    for number in range(1, 1000):
        numbers.add(number, number)
    assert list(numbers) == [(1, 999)]
