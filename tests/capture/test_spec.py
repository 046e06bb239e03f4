"""Specs: what a user writes is checked where it enters, and names sites, positions and a dtype."""

from __future__ import annotations

import msgspec
import pytest

from capflow.capture.positions import Positions
from capflow.capture.site import HOOKS, Site
from capflow.capture.spec import CaptureSpec, Want, join
from capflow.errors import UsageError
from tests.kit.frames import make_model


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "capture: got [], expected a mapping"),
        ("post_block", "capture: got post_block, expected a mapping"),
        ({}, "capture.hooks"),
        ({"hooks": {}}, "capture.hooks: got {}"),
        ({"hooks": [1]}, "capture.hooks[0]: got 1, expected HOOK:LAYER"),
        (
            {"hooks": {"post_block": "all"}, "layers": 1},
            "capture.layers: expected one of hooks, positions, max_rows, dtype",
        ),
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
        ({"hooks": {"post_block": "all"}, "positions": 3.5}, "capture.positions: got 3.5"),
        ({"hooks": {"post_block": "all"}, "positions": {"last": 0}}, "capture.positions.last: got 0"),
        ({"hooks": {"post_block": "all"}, "positions": [1, "x"]}, "capture.positions[1]: got x"),
        ({"hooks": {"post_block": "4-x"}}, 'capture.hooks.post_block: got 4-x, expected "all", layer numbers'),
        ({"hooks": {"post_block": [0, "all"]}}, "capture.hooks.post_block: got [0, 'all']"),
        ({"hooks": {"post_block": [0, None]}}, "capture.hooks.post_block: got [0, None]"),
        ({"hooks": {"post_block": "all"}, "max_rows": 0}, "capture.max_rows: got 0, expected a whole number of 1.."),
        ({"hooks": {"post_block": "all"}, "max_rows": True}, "capture.max_rows: got True"),
        ({"hooks": {"post_block": "all"}, "max_rows": "9"}, "capture.max_rows: got 9"),
        (
            {"hooks": {"post_block": "all"}, "dtype": "bfloat16"},
            "capture.dtype: got bfloat16, expected one of model, float32, float16",
        ),
        ({"hooks": {"post_block": "all"}, "dtype": ["float32"]}, "capture.dtype: got ['float32']"),
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
        assert set(wanted.values()) == {Want(Positions.ALL_PROMPT, "model")}

    @pytest.mark.parametrize(
        ("layers", "numbers"),
        [
            ("all", [0, 1, 2, 3, 4, 5, 6, 7]),
            ("2-4", [2, 3, 4]),
            ("3-3", [3]),
            ("5-", [5, 6, 7]),
            ("0-7:3", [0, 3, 6]),
            ("1-:4", [1, 5]),
            ([-1], [7]),
            ([-8, 3], [0, 3]),
            ([5, "0-1", "1-2", -1], [0, 1, 2, 5, 7]),
            ("0+-1+2-3", [0, 2, 3, 7]),
        ],
    )
    def test_takes_layers_in_every_form(self, layers, numbers):
        spec = CaptureSpec.parse({"hooks": {"post_block": layers}})
        wanted = spec.resolve(make_model(num_layers=8).sites, num_layers=8)
        assert sorted(wanted) == [Site(n, "post_block") for n in numbers]
        assert CaptureSpec.parse({"hooks": spec.hooks}) == spec

    def test_carries_the_budget_and_the_dtype(self):
        spec = CaptureSpec.parse(
            {"hooks": {"mlp_in": [0]}, "positions": "all_prompt", "max_rows": 2, "dtype": "float16"}
        )
        (want,) = spec.resolve(make_model().sites, num_layers=4).values()
        assert want.dtype == "float16"
        assert list(want.positions.at(5).runs(0, 9)) == [(0, 2)]

    @pytest.mark.parametrize(
        "spec",
        [
            CaptureSpec({"post_block": "all"}, "some"),
            CaptureSpec({"post_block": "all"}, {"last": 0}),
            CaptureSpec({"post_block": "all"}, ["some"]),
            CaptureSpec({"post_block": "9-1"}),
            CaptureSpec({"post_block": ["x"]}),
            CaptureSpec({"post_block": "all"}, max_rows=-1),
            CaptureSpec({"elsewhere": "all"}),
        ],
    )
    def test_refuses_what_a_peer_sent_unchecked(self, spec):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=CaptureSpec)
        with pytest.raises(UsageError):
            again.resolve(make_model().sites, num_layers=4)

    @pytest.mark.parametrize(
        ("hooks", "message"),
        [
            ({"post_block": [3]}, "capture.hooks.post_block: got layer 3, expected 0..2"),
            ({"post_block": [-4]}, "capture.hooks.post_block: got layer -4, expected 0..2, or -3..-1 from the last"),
            ({"post_block": "1-3"}, "capture.hooks.post_block: got layers 1-3, expected a range within 0..2"),
            ({"post_block": "2-1"}, "capture.hooks.post_block: got layers 2-1, expected a range within 0..2"),
            ({"post_block": "0-2:0"}, "capture.hooks.post_block: got layers 0-2:0, expected a range within 0..2"),
            ({"post_block": "7-"}, "capture.hooks.post_block: got layers 7-, expected a range within 0..2"),
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
    last, generated = Want(Positions.LAST_PROMPT), Want(Positions.ALL_GENERATED)
    joined = join([{a: last}, {a: generated, b: Want(Positions.ALL, "float16")}])
    assert joined == {a: Want(Positions.LAST_PROMPT | Positions.ALL_GENERATED), b: Want(Positions.ALL, "float16")}
    assert join([]) == {}


@pytest.mark.parametrize(
    ("one", "other", "stored"),
    [
        ("model", "model", "model"),
        ("float16", "float16", "float16"),
        ("model", "float16", "float32"),
        ("float32", "float16", "float32"),
        ("float32", "model", "float32"),
    ],
)
def test_a_site_wanted_in_two_dtypes_is_stored_in_one_that_holds_both(one, other, stored):
    a = Site(0, "post_block")
    assert join([{a: Want(Positions.ALL, one)}, {a: Want(Positions.ALL, other)}])[a].dtype == stored


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
