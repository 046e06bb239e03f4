"""Steering vectors: made of what users have, and refused where they cannot fit."""

from __future__ import annotations

import ml_dtypes
import msgspec
import numpy as np
import pytest

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.vector import SteeringVector, parse_steering

SITE = Site(2, "post_block")


@pytest.mark.parametrize(
    "vector", [[1.0, 2.0, -3.0], (1, 2, -3), np.array([1, 2, -3], np.float64), np.array([1, 2, -3], np.float16)]
)
def test_a_vector_of_anything_like_an_array(vector):
    made = SteeringVector.make(SITE, vector, 2.0)
    assert made.site == SITE
    np.testing.assert_array_equal(made.array(), np.array([2, 4, -6], np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_of_the_wire(dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    vector = SteeringVector(2, "post_block", np.array([0.5, -2], kind).tobytes(), dtype, 0.5)
    assert vector.array().tolist() == [0.25, -1.0]
    assert vector.array().dtype == np.float32
    vector.check([SITE], 2)


def test_round_trip():
    made = SteeringVector.make(SITE, [1, 2], 0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SteeringVector) == made


@pytest.mark.parametrize(
    ("vector", "scale", "message"),
    [
        ([], 1.0, "steering.post_block.2: got shape [0], expected [hidden_size]"),
        ([[1.0]], 1.0, "steering.post_block.2: got [1.0] at index 0, expected a number"),
        (3.0, 1.0, "steering.post_block.2: got shape []"),
        (["a"], 1.0, "steering.post_block.2: got 'a' at index 0, expected a number"),
        ([1.0, float("nan")], 1.0, "steering.post_block.2: got nan at index 1"),
        ([float("inf")], 1.0, "steering.post_block.2: got inf at index 0"),
        ([1.0], float("nan"), "steering.post_block.2.scale: got nan"),
        (np.zeros(limits.HIDDEN_SIZE_MAX + 1), 1.0, "steering.post_block.2: got shape [65537]"),
    ],
)
def test_a_vector_that_is_none_is_refused(vector, scale, message):
    with pytest.raises(UsageError) as error:
        SteeringVector.make(SITE, vector, scale)
    assert str(error.value).startswith(message)


class TestCheck:
    def test_refuses_a_site_without_a_tap(self):
        with pytest.raises(UsageError, match="start the engine with --sites post_block:2 to tap it"):
            SteeringVector.make(SITE, [1, 2]).check([Site(1, "post_block")], 2)

    def test_refuses_another_width(self):
        with pytest.raises(UsageError, match="got 2 numbers, expected 3, the model's width"):
            SteeringVector.make(SITE, [1, 2]).check([SITE], 3)

    def test_refuses_bytes_that_do_not_fit_the_dtype(self):
        with pytest.raises(UsageError, match=r"got 1\.25 numbers"):
            SteeringVector(2, "post_block", b"12345").check([SITE], 2)

    def test_refuses_another_dtype(self):
        with pytest.raises(UsageError, match="dtype: got int8"):
            SteeringVector(2, "post_block", b"12", "int8").check([SITE], 2)

    def test_refuses_numbers_that_are_not_finite_on_the_wire(self):
        data = np.array([1, np.nan], np.float32).tobytes()
        with pytest.raises(UsageError, match="NaN or infinity"):
            SteeringVector(2, "post_block", data).check([SITE], 2)


class TestParse:
    def test_takes_plain_values(self):
        vectors = parse_steering({"post_block": {"2": [1, 2], 3: {"vector": [3, 4], "scale": 2}}})
        assert [(v.site, v.array().tolist()) for v in vectors] == [
            (Site(2, "post_block"), [1, 2]),
            (Site(3, "post_block"), [6, 8]),
        ]
        assert parse_steering(vectors) == vectors

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({}, "steering: got {}"),
            (3, "steering: got 3"),
            ({"nope": {1: [1]}}, "steering: got nope, expected a hook"),
            ({"post_block": {}}, "steering.post_block: got {}"),
            ({"post_block": [1]}, "steering.post_block: got [1]"),
            ({"post_block": {"x": [1]}}, "steering.post_block: got 'x', expected a layer number, 0..1023"),
            ({"post_block": {"1": {"scale": 2}}}, "steering.post_block.1.vector: missing"),
            ({"post_block": {"1": {"vector": [1], "gain": 2}}}, "steering.post_block.1.gain: unknown"),
            (
                {"post_block": {"1": {"vector": [1], "scale": "2"}}},
                "steering.post_block.1.scale: got '2', expected a number",
            ),
            ({"post_block": {"1": {"vector": [1], "scale": True}}}, "steering.post_block.1.scale: got True"),
        ],
    )
    def test_refuses_the_rest_by_its_field(self, value, message):
        with pytest.raises(UsageError) as error:
            parse_steering(value)
        assert str(error.value).startswith(message)


class TestRelative:
    def test_is_the_vector_at_length_1_by_the_scale(self):
        for long in (1e-200, 1.0, 1e37):
            data = (long * np.array([3.0, -4.0])).tobytes()
            vector = SteeringVector(2, "post_block", data, "float64", 0.5, relative=True)
            vector.check([SITE], 2)
            assert vector.array(np.float64) == pytest.approx([0.3, -0.4], rel=1e-12)

    def test_is_read_from_plain_values_and_from_packed_ones(self):
        plain = {"post_block": {2: {"vector": [3.0, 4.0], "scale": 2.0, "relative": True}}}
        data = np.array([[3.0, 4.0]], np.float32).tobytes()
        packed = {
            "dtype": "float32",
            "shape": [1, 2],
            "layer_indices": [2],
            "data": data,
            "scales": [2.0],
            "relative": True,
        }
        assert parse_steering(plain) == parse_steering({"post_block": packed})
        assert parse_steering(plain)[0].relative
        assert not parse_steering({"post_block": {2: [3.0, 4.0]}})[0].relative

    @pytest.mark.parametrize("value", [1, "yes", None])
    def test_is_true_or_false(self, value):
        entry = {"vector": [3.0, 4.0], "relative": value}
        with pytest.raises(UsageError, match=r"^steering.post_block.2.relative: got .*, expected true or false$"):
            parse_steering({"post_block": {2: entry}})

    def test_has_a_direction(self):
        zero = SteeringVector.make(SITE, [0.0, 0.0], relative=True)
        with pytest.raises(UsageError, match=r"^steering.post_block.2: got a zero vector, expected a direction"):
            zero.check([SITE], 2)
