"""Clamps and patches of single entries of a row: heads, neurons, experts."""

import math
import tracemalloc

import msgspec
import numpy as np
import pytest

from capflow.capture.model import ModelInfo, grouped
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.clamp import Clamp
from capflow.steering.compiler import program_of, with_clamps, with_vectors
from capflow.steering.feature import SetFeature
from capflow.steering.patch import Patch
from capflow.steering.program import ADD, CLAMP, PATCH
from capflow.steering.request import Steering, Tier

HEADS, NEURONS, STREAM = Site(1, "heads"), Site(1, "neurons"), Site(1, "post_block")
INFO = ModelInfo("m", 2, 4, "float32", (HEADS, NEURONS, STREAM), shapes=grouped({HEADS: (3, 2), NEURONS: (9,)}))
LEFT = np.nan


def program(**fields):
    steering = Steering.parse({f"steering_{name}": value for name, value in fields.items()})
    steering.check(INFO)
    made = program_of(INFO, [steering])
    made.check(INFO)
    return made


def done(made, site, phase="decode"):
    """Return the operations at a site, each with its row."""
    (ops,) = [each.ops for each in getattr(made, phase) if Site(each.layer, each.hook) == site]
    return [(op.kind, made.array()[op.row].tolist(), op) for op in ops]


@pytest.mark.parametrize(
    ("hook", "clamp", "row"),
    [
        ("heads", {"index": 1, "value": 0}, [LEFT, LEFT, 0, 0, LEFT, LEFT, LEFT, LEFT, LEFT]),
        ("heads", {"index": [2, 0], "value": [1, 2]}, [1, 2, LEFT, LEFT, 1, 2, LEFT, LEFT, LEFT]),
        ("heads", {"index": [2, 0], "value": [1, 2, 3, 4]}, [3, 4, LEFT, LEFT, 1, 2, LEFT, LEFT, LEFT]),
        ("neurons", {"index": [8, 3], "value": 5}, [LEFT, LEFT, LEFT, 5, LEFT, LEFT, LEFT, LEFT, 5]),
        ("neurons", {"index": [8, 3], "value": [5, 6]}, [LEFT, LEFT, LEFT, 6, LEFT, LEFT, LEFT, LEFT, 5]),
        ("post_block", {"index": 2, "value": -1}, [LEFT, LEFT, -1, LEFT, LEFT, LEFT, LEFT, LEFT, LEFT]),
    ],
)
def test_entries_are_set_and_the_others_left(hook, clamp, row):
    made = program(clamps={hook: {1: clamp | {"strength": 0.5}}})
    for phase in ("prefill", "decode"):
        ((kind, values, op),) = done(made, Site(1, hook), phase)
        assert kind == PATCH
        assert np.array_equal(values, row, equal_nan=True)
        assert op.amount == 0.5


def test_a_range_bounds_each_number():
    made = program(clamps={"neurons": {1: {"index": [4, 7], "min": -1.0}}})
    for (kind, values, op), number in zip(done(made, NEURONS), (4, 7), strict=True):
        assert (kind, op.low, op.high, op.amount) == (CLAMP, -1.0, math.inf, 1.0)
        assert values == np.eye(9)[number].tolist()


def test_a_range_takes_the_memory_of_its_own_rows():
    site, width = Site(0, "neurons"), 8192
    info = ModelInfo("m", 1, 4, "float32", (site,), shapes=grouped({site: (width,)}))

    def peak(index):
        made = Steering.parse({"steering_clamps": {"neurons": {0: {"index": index, "max": 0}}}})
        tracemalloc.start()
        try:
            program_of(info, [made])
        finally:
            nbytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return nbytes

    assert peak([5, 8191]) < 16 * 4 * width
    with pytest.raises(UsageError, match=r"^steering_clamps.neurons.0: got 4,096 clamps, expected at most 64 at one"):
        peak(list(range(4096)))
    with pytest.raises(UsageError, match=r"got 4,096 clamps"):
        with_clamps(None, info, [Clamp(*site, b"", 0.0, 1.0, index=tuple(range(4096)))])


def test_a_patch_of_entries_leaves_the_others():
    made = program(patches={"heads": {1: {"positions": [0, -1], "vector": [[1, 2], [3, 4]], "index": 2}}})
    rows = {position: made.array()[site.ops[0].row] for position, (site,) in made.patched}
    assert np.array_equal(rows[0], [LEFT] * 4 + [1, 2] + [LEFT] * 3, equal_nan=True)
    assert np.array_equal(rows[-1], [LEFT] * 4 + [3, 4] + [LEFT] * 3, equal_nan=True)


def test_rows_of_several_widths_are_as_wide_as_the_widest():
    made = program(vectors={"post_block": {1: [1, 2, 3, 4]}, "heads": {1: [1, 2, 3, 4, 5, 6]}})
    assert made.width == INFO.steered_width == 9
    assert done(made, STREAM)[0][1] == [1, 2, 3, 4, 0, 0, 0, 0, 0]
    assert done(made, HEADS)[0][1] == [1, 2, 3, 4, 5, 6, 0, 0, 0]


def test_a_site_that_cannot_be_steered_makes_no_row_wider():
    narrow = ModelInfo("m", 2, 4, "float32", INFO.sites, fixed=(NEURONS,), shapes=INFO.shapes)
    assert narrow.steered_width == 6
    none = ModelInfo("m", 2, 4, "float32", INFO.sites, fixed=(NEURONS, HEADS), shapes=INFO.shapes)
    assert none.steered_width == 4


_DIVIDED = {Site(1, "heads"): (4, 2), Site(1, "k"): (2, 2), Site(1, "v"): (1, 2), Site(1, "neurons"): (8,)}
_OVER_RANKS = ModelInfo(
    "m", 2, 4, "float32", (*_DIVIDED, STREAM, Site(0, "post_block")), shapes=grouped(_DIVIDED), ranks=4
)


def _along(hook, *numbers, **more):
    """Return the vector of a hook's row that is 1 at some numbers."""
    values = np.zeros(_OVER_RANKS.width_of(Site(1, hook)))
    values[list(numbers)] = 1.0
    return {hook: {1: {"vector": values, **more}}}


_GATE = {"layer": 0, "vector": [1.0] * 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"vectors": _along("heads", 0, 7, scale=2.0)},
        {"vectors": _along("neurons", 1, 6, gate="g"), "gates": {"g": _GATE}},
        {
            "vectors": _along("v", 0, 1, relative=True, gate="g"),
            "gates": {"g": {"layer": 1, "hook": "v", "vector": [1, 2]}},
        },
        {
            "clamps": {
                "heads": {1: {"index": [0, 3], "value": 0}},
                "neurons": {1: {"index": [0, 7], "min": 0, "max": 1}},
            }
        },
        {"clamps": _along("heads", 2, 3, value=0)},
        {"clamps": _along("k", 2, 3, max=1)},
        {"clamps": _along("v", 0, 1, min=1)},
        {"clamps": _along("post_block", 0, 3, value=0)},
        {"patches": {"heads": {1: {"positions": [0, -1], "vector": [1.0] * 8, "amount": 0.5}}}},
        {"patches": {"k": {1: {"positions": [2], "index": 1, "vector": [1, 2]}}}},
    ],
)
def test_ranks_that_divide_a_row_act_on_its_numbers(fields):
    steering = Steering.parse({f"steering_{name}": value for name, value in fields.items()})
    steering.check(_OVER_RANKS)
    program_of(_OVER_RANKS, [steering]).check(_OVER_RANKS)


_SCORED = {"g": {"layer": 1, "hook": "neurons", "vector": [1.0] * 8}}


@pytest.mark.parametrize(
    ("fields", "field", "got", "operation"),
    [
        ({"vectors": _along("heads", 0, relative=True)}, "vectors.heads.1", "a relative vector at heads:1", "RELATIVE"),
        ({"clamps": _along("heads", 1, 2, value=0)}, "clamps.heads.1", "a clamp along a direction at heads:1", "CLAMP"),
        ({"clamps": _along("neurons", 0, 7, max=0)}, "clamps.neurons.1", "a clamp along a direction at neur", "CLAMP"),
        ({"clamps": _along("k", 1, 2, min=0)}, "clamps.k.1", "a clamp along a direction at k:1", "CLAMP"),
        ({"gates": _SCORED}, "gates.g", "a gate's score at neurons:1", "SCORE_DOT"),
    ],
)
def test_what_needs_a_row_that_ranks_divide_is_refused(fields, field, got, operation):
    steering = Steering.parse({f"steering_{name}": value for name, value in fields.items()})
    with pytest.raises(UsageError) as refused:
        steering.check(_OVER_RANKS)
    assert str(refused.value).startswith(f"steering_{field}: got {got}")
    assert "whose rows 4 tensor-parallel ranks divide, expected what changes each number by itself" in str(
        refused.value
    )
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match=rf"^steering: got an operation {operation} at .*, whose rows 4 tensor-para"):
        program_of(_OVER_RANKS, [steering]).check(_OVER_RANKS)
    alone = msgspec.structs.replace(_OVER_RANKS, ranks=msgspec.UNSET)
    steering.check(alone)
    program_of(alone, [steering]).check(alone)


def test_the_number_of_ranks_travels_with_a_model():
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(_OVER_RANKS), type=ModelInfo)
    assert [decoded.parts_of(site) for site in decoded.sites] == [4, 2, 1, 4, 1, 1]
    assert b"ranks" not in msgspec.msgpack.encode(INFO)
    with pytest.raises(msgspec.ValidationError, match=r"`int` >= 1 - at `\$\.ranks`"):
        msgspec.convert({**msgspec.to_builtins(INFO), "ranks": 0}, ModelInfo)


def test_a_feature_that_is_set_is_refused_where_ranks_divide_rows():
    row = np.ones(8, np.float32).tobytes()
    steering = Steering(base=Tier(features=(SetFeature(1, "heads", row, row, 0.0, 0.0, 1.0),)))
    with pytest.raises(UsageError, match=r"^steering_features\.heads\.1: got a feature that is set at heads:1, whose"):
        steering.check(_OVER_RANKS)
    with pytest.raises(UsageError, match=r"^steering: got an operation ENCODE at heads:1"):
        program_of(_OVER_RANKS, [steering]).check(_OVER_RANKS)


def test_what_controllers_add_comes_before_entries_and_what_they_clamp_after():
    made = program(clamps={"heads": {1: {"index": 0, "value": 0}}})
    vector = Steering.parse({"steering_vectors": {"heads": {1: [1.0] * 6}}}).base.vectors
    clamp = Steering.parse({"steering_clamps": {"heads": {1: {"index": 1, "value": 2}}}}).base.clamps
    made = with_clamps(with_vectors(made, INFO, vector), INFO, clamp)
    made.check(INFO)
    kinds = [(kind, values[0], values[2]) for kind, values, _ in done(made, HEADS)]
    assert str(kinds) == str([(ADD, 1.0, 1.0), (PATCH, 0.0, LEFT), (PATCH, LEFT, 2.0)])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steering_clamps": {"heads": {1: {"index": 3, "value": 0}}}},
         "steering_clamps.heads.1.index: got 3, expected a head of 0..2"),
        ({"steering_clamps": {"neurons": {1: {"index": [1, 9], "value": 0}}}},
         "steering_clamps.neurons.1.index: got 9, expected a number of 0..8"),
        ({"steering_clamps": {"heads": {1: {"index": [0, 1], "value": [1, 2, 3]}}}},
         "steering_clamps.heads.1.value: got 3 numbers, expected 1 or 2 or 4"),
        ({"steering_clamps": {"heads": {1: {"index": 0, "min": 0}}}},
         "steering_clamps.heads.1: got min or max of heads, expected value"),
        ({"steering_clamps": {"heads": {1: {"index": [0, 0], "value": 0}}}},
         r"steering_clamps.heads.1.index: got 0 twice, expected each index once"),
        ({"steering_clamps": {"heads": {1: {"index": [], "value": 0}}}},
         r"steering_clamps.heads.1.index: got 0 numbers, expected a whole number, or a list of 1..4096"),
        ({"steering_clamps": {"heads": {1: {"index": -1, "value": 0}}}},
         "steering_clamps.heads.1.index: got -1, expected an index, 0..65535"),
        ({"steering_clamps": {"heads": {1: {"index": True, "value": 0}}}}, "steering_clamps.heads.1.index: got True"),
        ({"steering_clamps": {"heads": {1: {"index": 0, "value": [math.nan]}}}}, "steering_clamps.heads.1.value"),
        ({"steering_clamps": {"heads": {1: {"index": 0}}}}, "steering_clamps.heads.1: no bound"),
        ({"steering_clamps": {"heads": {1: {"index": 0, "value": 0, "vector": [1.0] * 6}}}},
         "steering_clamps.heads.1.index: given beside vector"),
        ({"steering_vectors": {"heads": {1: [1.0] * 4}}},
         "steering_vectors.heads.1: got 4 numbers, expected 6, 3 heads of 2"),
        ({"steering_patches": {"heads": {1: {"positions": [0], "vector": [1.0] * 3, "index": 1}}}},
         "steering_patches.heads.1.value: got 3 numbers, expected 1 or 2"),
        ({"steering_patches": {"neurons": {1: {"positions": [0], "vector": [1.0] * 4}}}},
         "steering_patches.neurons.1: got 4 numbers, expected 9, the model's width"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_a_line(fields, words):
    with pytest.raises(UsageError, match=f"^{words}"):
        Steering.parse(fields).check(INFO)


@pytest.mark.parametrize("index", [(-4,), (-1,), (0, 0), (3,)], ids=str)
def test_entries_of_an_action_are_checked_too(index):
    """A peer sends them as they are used, not in the form that `parse` reads."""
    values = np.ones(1, np.float32).tobytes()
    for steering in (
        Steering(base=Tier(clamps=(Clamp(1, "heads", values, index=index),))),
        Steering(patches=(Patch(1, "heads", (0,), values, index=index),)),
    ):
        with pytest.raises(UsageError, match=r"^steering_(clamps|patches)\.heads\.1\.index: got "):
            steering.check(INFO)


def test_values_of_an_action_that_are_no_whole_numbers_are_refused():
    broken = Steering(base=Tier(clamps=(Clamp(1, "heads", b"12345", index=(0,)),)))
    with pytest.raises(UsageError, match=r"^steering_clamps\.heads\.1\.value: got 1.25 numbers, expected 1 or 2"):
        broken.check(INFO)
