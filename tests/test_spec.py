"""Specs: what a user writes is checked where it enters, and positions are one run each."""

from __future__ import annotations

import pytest
from frames import make_model
from hypothesis import given
from hypothesis import strategies as st

from capflow.errors import UsageError
from capflow.site import HOOKS, Site
from capflow.spec import POSITION_NAMES, CaptureSpec, Positions, join, span

NAMED = st.sampled_from([Positions.named(name) for name in POSITION_NAMES])


def naive(which, prompt, position):
    return bool(
        (which & Positions.ALL_PROMPT and position < prompt)
        or (which & Positions.LAST_PROMPT and position == prompt - 1)
        or (which & Positions.ALL_GENERATED and position >= prompt)
    )


@given(NAMED, NAMED, st.integers(1, 12), st.integers(0, 20), st.integers(0, 12))
def test_a_span_is_what_a_loop_over_positions_finds(one, other, prompt, start, length):
    which = one | other
    first, end = which.span(prompt, start, start + length)
    assert list(range(first, end)) == [p for p in range(start, start + length) if naive(which, prompt, p)]
    assert span(int(which), prompt, start, start + length) == (first, end)


@given(NAMED, st.integers(1, 12), st.integers(0, 20))
def test_count_is_how_many_rows_a_request_has(which, prompt, computed):
    assert which.count(prompt, computed) == sum(naive(which, prompt, p) for p in range(computed))


def test_no_positions_have_no_rows():
    assert Positions.NONE.span(3, 1, 5) == (1, 1)
    assert Positions.NONE.count(3, 5) == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "capture: got [], expected a mapping"),
        ("post_block", "capture: got post_block, expected a mapping"),
        ({}, "capture.hooks"),
        ({"hooks": {}}, "capture.hooks: got {}"),
        ({"hooks": [1]}, "capture.hooks: got [1]"),
        ({"hooks": {"post_block": "all"}, "layers": 1}, "capture.layers: expected one of hooks, positions"),
        ({"hooks": {"elsewhere": "all"}}, "capture.hooks: got elsewhere, expected a hook, one of pre_attn"),
        ({"hooks": {"post_block": []}}, "capture.hooks.post_block: got []"),
        ({"hooks": {"post_block": "some"}}, "capture.hooks.post_block: got some"),
        ({"hooks": {"post_block": [True]}}, "capture.hooks.post_block"),
        ({"hooks": {"post_block": [1.0]}}, "capture.hooks.post_block"),
        ({"hooks": {"post_block": 3}}, "capture.hooks.post_block: got 3"),
        ({"hooks": {"post_block": list(range(2000))}}, "capture.hooks.post_block"),
        (
            {"hooks": {"post_block": "all"}, "positions": "some"},
            "capture.positions: got some, expected one of last_prompt",
        ),
        ({"hooks": {"post_block": "all"}, "positions": 3}, "capture.positions: got 3"),
    ],
)
def test_a_bad_spec_is_refused_by_its_field(value, message):
    with pytest.raises(UsageError) as error:
        CaptureSpec.parse(value)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_good_spec_is_taken_whole():
    spec = CaptureSpec.parse({"hooks": {"post_block": [3, 1, 1], "mlp_in": "all"}, "positions": "last_prompt"})
    assert spec == CaptureSpec({"post_block": [1, 3], "mlp_in": "all"}, "last_prompt")
    assert CaptureSpec.parse(spec) is spec
    assert CaptureSpec.parse({"hooks": {"post_block": "all"}}).positions == "all"


class TestResolve:
    def test_names_every_site_with_its_positions(self):
        model = make_model(num_layers=3)
        spec = CaptureSpec({"post_block": [0, 2], "mlp_in": "all"}, "all_prompt")
        wanted = spec.resolve(model.sites, num_layers=3)
        assert set(wanted) == {
            Site(0, "post_block"),
            Site(2, "post_block"),
            Site(0, "mlp_in"),
            Site(1, "mlp_in"),
            Site(2, "mlp_in"),
        }
        assert set(wanted.values()) == {Positions.ALL_PROMPT}

    @pytest.mark.parametrize(
        ("hooks", "message"),
        [
            ({"post_block": [3]}, "capture.hooks.post_block: got layer 3, expected 0..2"),
            ({"post_block": [-1]}, "capture.hooks.post_block: got layer -1, expected 0..2"),
            (
                {"mlp_in": [1]},
                "capture.hooks.mlp_in: no tap at mlp_in:1: expected a tapped site (hooks tapped: post_block)",
            ),
            ({"mlp_in": "all"}, "capture.hooks.mlp_in: no tap at mlp_in: expected a tapped site"),
        ],
    )
    def test_refuses_what_is_not_there(self, hooks, message):
        sites = [Site(layer, "post_block") for layer in range(3)]
        with pytest.raises(UsageError) as error:
            CaptureSpec(hooks).resolve(sites, num_layers=3)
        assert str(error.value).startswith(message)

    def test_names_the_flag_that_taps_it(self):
        with pytest.raises(UsageError, match=r"start the engine with --sites mlp_in:1 to tap it"):
            CaptureSpec({"mlp_in": [1]}).resolve([], num_layers=3)


def test_join_wants_what_any_of_them_wants():
    a, b = Site(0, "post_block"), Site(1, "mlp_in")
    joined = join([{a: Positions.LAST_PROMPT}, {a: Positions.ALL_GENERATED, b: Positions.ALL}])
    assert joined == {a: Positions.LAST_PROMPT | Positions.ALL_GENERATED, b: Positions.ALL}
    assert join([]) == {}


class TestSite:
    @pytest.mark.parametrize("hook", HOOKS)
    def test_is_read_as_it_is_written(self, hook):
        assert Site.parse(str(Site(12, hook))) == Site(12, hook)

    @pytest.mark.parametrize(
        "text", ["", "post_block", "post_block:", "post_block:x", "post_block:-1", ":3", "nope:3", "3:mlp_in"]
    )
    def test_that_is_none_is_refused(self, text):
        with pytest.raises(UsageError, match="site: got"):
            Site.parse(text)
