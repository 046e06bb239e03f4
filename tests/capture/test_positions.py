"""Sets of positions against a loop over every position: what is in them, what is counted, what a budget leaves."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow import limits
from capflow.capture.places import FOREVER
from capflow.capture.positions import POSITION_NAMES, Positions, normalise
from capflow.errors import UsageError
from tests.kit.selectors_model import budgets, forms, meant

asked = st.lists(st.tuples(forms, budgets), min_size=1, max_size=3)
prompts = st.integers(1, 14)
FAR = 60


def made(parts):
    union = Positions.NONE
    for form, max_rows in parts:
        union |= Positions.parse(form, max_rows=max_rows)
    return union


def model(parts, prompt, computed):
    return sorted({p for form, max_rows in parts for p in meant(form, prompt, computed, max_rows)})


def listed(runs):
    return [p for first, end in runs for p in range(first, end)]


@given(asked, prompts, st.integers(0, 40), st.integers(0, 20))
@settings(max_examples=500, deadline=None)
def test_a_window_has_what_a_loop_over_positions_finds(parts, prompt, start, length):
    places = made(parts).at(prompt)
    expected = [p for p in model(parts, prompt, FAR) if start <= p < start + length]
    runs = list(places.runs(start, start + length))
    assert listed(runs) == expected
    assert all(first < end for first, end in runs)
    assert all(end < after for (_, end), (after, _) in itertools.pairwise(runs)), "runs that touch are one"
    assert places.count(start, start + length) == len(expected)
    assert [p for p in range(start, start + length) if p in places] == expected


@given(asked, prompts, st.integers(0, FAR))
@settings(deadline=None)
def test_a_stretch_is_of_one_kind_up_to_its_end(parts, prompt, position):
    inside, stop = made(parts).at(prompt).stretch(position)
    expected = set(model(parts, prompt, FAR))
    assert stop > position
    assert all((p in expected) == inside for p in range(position, min(stop, FAR)))


@given(asked, prompts)
@settings(deadline=None)
def test_the_first_position_is_the_first(parts, prompt):
    first = made(parts).at(prompt).first()
    expected = model(parts, prompt, FAR)
    assert first == (expected[0] if expected else FOREVER)


@given(forms, st.integers(1, 12), prompts, st.integers(0, FAR))
@settings(deadline=None)
def test_a_budget_takes_the_first_positions_and_says_when_it_left_some_out(form, rows, prompt, computed):
    limited = Positions.parse(form, max_rows=rows)
    whole = meant(form, prompt, computed)
    assert listed(limited.at(prompt).runs(0, computed)) == whole[:rows]
    assert limited.count(prompt, computed) == min(rows, len(whole))
    assert limited.cut(prompt, computed) == (len(whole) > rows)
    assert not Positions.parse(form).cut(prompt, computed)


@given(asked, asked)
def test_a_union_does_not_depend_on_its_order(one, other):
    assert made(one) | made(other) == made(other) | made(one)
    assert hash(made([*one, *other])) == hash(made([*other, *one]))


def test_named_sets_are_plain():
    prompt, generated = Positions.ALL_PROMPT, Positions.ALL_GENERATED
    assert prompt | generated == Positions.ALL
    assert Positions.LAST_PROMPT | prompt == prompt
    assert Positions.ALL | Positions.parse([3, {"every": 2}]) == Positions.ALL
    assert generated | Positions.parse({"generated": [4, 9]}) == generated
    assert prompt | Positions.parse({"last": 4}) == prompt
    assert Positions.parse(["all_prompt", "all_generated"]) == Positions.ALL
    assert not Positions.NONE
    assert Positions.NONE | prompt == prompt | Positions.NONE == prompt
    assert all(Positions.named(name) for name in POSITION_NAMES)


def test_a_long_stride_with_a_budget_costs_no_loop():
    places = Positions.parse({"every": 1_000_000}, max_rows=limits.POSITION_MAX).at(5)
    assert places.count(0, FOREVER) == limits.POSITION_MAX
    assert places.stretch(1) == (False, 1_000_000)


@pytest.mark.parametrize(
    ("form", "kept"),
    [
        ("all", "all"),
        ([5, -1, 5, 2], [-1, 2, 5]),
        (7, [7]),
        ("-1", [-1]),
        ("0+-1+last:16", [-1, 0, {"last": 16}]),
        ("every:8", {"every": 8}),
        ("generated:10:20", {"generated": [10, 20]}),
        ("generated:10:", {"generated": [10, None]}),
        (["last_prompt", {"every": 4}, 9], [9, "last_prompt", {"every": 4}]),
        ({"generated": (3, None)}, {"generated": [3, None]}),
    ],
)
def test_a_form_is_kept_in_one_way(form, kept):
    assert normalise(form) == kept
    assert normalise(kept) == kept


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("some", "positions: got some, expected one of last_prompt, all_prompt, all_generated, all, a position"),
        ("last:0", "positions.last: got 0, expected a whole number of 1.."),
        ("last:16+some", "positions: got last:16+some, expected one of"),
        ("", "positions: got "),
        (1.5, "positions: got 1.5, expected one of"),
        (True, "positions: got True, expected one of"),
        (None, "positions"),
        ([], "positions: got [], expected one of"),
        ([1, 2.0], "positions[1]: got 2.0, expected one of"),
        ([True], "positions[0]: got True"),
        ([[1]], "positions[0]: got [1]"),
        ([0, "some"], "positions[1]: got some"),
        ([2**31], "positions[0]: got 2147483648, expected a whole number of -2147483647..2147483647"),
        (list(range(2000)), "positions: got 2000 positions, expected at most 1024"),
        ({}, "positions: got {}, expected one of {"),
        ({"first": 3}, "positions: got {'first': 3}, expected one of"),
        ({"last": 3, "every": 2}, "positions: got {'last': 3, 'every': 2}, expected one of"),
        ({"last": "3"}, "positions.last: got 3, expected a whole number of 1.."),
        ({"every": 0}, "positions.every: got 0, expected a whole number of 1.."),
        ({"generated": 5}, "positions.generated: got 5, expected [A, B]"),
        ({"generated": [5]}, "positions.generated: got [5], expected [A, B]"),
        ({"generated": [5, 5]}, "positions.generated: got 5, expected a whole number of 6.."),
        ({"generated": [-1, 5]}, "positions.generated: got -1, expected a whole number of 0.."),
        ([{"every": 2}, {"every": 3}], 'positions: got several {"every": N}, expected one'),
    ],
)
def test_what_is_no_form_is_refused_by_its_field(form, message):
    with pytest.raises(UsageError) as error:
        normalise(form)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_set_from_another_process_is_the_same_key():
    """The hash of a set depends on the process, so a pickled set brings none."""
    forms = ["all", {"every": 2}, [0, 3, -1], {"last": 4}, {"generated": [1, 5]}]
    program = (
        "import pickle, sys; from capflow.capture.positions import Positions; "
        f"sys.stdout.buffer.write(pickle.dumps([Positions.parse(form) for form in {forms!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=True)
    mine = [Positions.parse(form) for form in forms]
    keys = set(mine)
    assert all(other in keys for other in pickle.loads(done.stdout))  # noqa: S301  written just now
