"""Clamps and patches of single entries of a row: heads, neurons, experts."""

import math
import tracemalloc

import numpy as np
import pytest

from capflow.capture.model import ModelInfo, grouped
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.clamp import Clamp
from capflow.steering.compiler import program_of, with_clamps, with_vectors
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
