"""Rounding rows to 8 bits: the bound of every number's error, and which rows are never rounded."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.dtypes import DTYPES
from capflow_consumers.dataset.shards import quantization
from capflow_consumers.dataset.shards.quantization import CODES, dequantised, numbers_of, quantised

BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
ARITHMETIC = 2.0**-22
"""The relative error that float32 itself adds."""


def bound_of(dtype, exact, scales):
    """Return how far each number may be from the exact one, float64."""
    scales = scales.astype(np.float64)[:, None]
    rounding = scales / 2 if dtype == "int8" else np.maximum(np.abs(exact) / 16, scales / 1024)
    return rounding + ARITHMETIC * np.abs(exact)


def assert_within_bounds(rows, dtype):
    codes, scales = quantised(rows, dtype)
    exact = rows.astype(np.float64)
    numbers = dequantised(codes, scales, dtype)
    assert numbers.dtype == np.float32
    assert np.isfinite(numbers).all()
    error = np.abs(numbers.astype(np.float64) - exact)
    assert (error <= bound_of(dtype, exact, scales)).all(), (error / bound_of(dtype, exact, scales)).max()
    # A scale is no larger than it must be, so the bounds are those of the largest number.
    top = 127 if dtype == "int8" else 448
    largest = np.abs(exact).max(axis=1)
    assert (scales <= np.maximum(largest / top * (1 + ARITHMETIC), 2.0**-126)).all()


@st.composite
def finite_rows(draw):
    """Rows of any dtype and width: numbers of any size, or of any bits."""
    name = draw(st.sampled_from(sorted(BITS)))
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    chance = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    if draw(st.booleans()):
        bits = chance.integers(0, 1 << np.dtype(BITS[name]).itemsize * 8, shape, np.uint64).astype(BITS[name])
        rows = bits.view(DTYPES[name])
    else:
        spread = draw(st.sampled_from([0.0, 1.0, 4.0]))  # of the exponents within a row
        size = draw(st.floats(-44, 37)) if name != "float16" else draw(st.floats(-8, 4))
        factors = 10.0 ** (size - spread * chance.random(shape))
        with np.errstate(over="ignore"):
            rows = (chance.standard_normal(shape) * factors).astype(np.float32).astype(DTYPES[name])
    with np.errstate(invalid="ignore"):
        usable = np.abs(rows.astype(np.float64)) < 2.0**127
    return np.where(usable, rows, DTYPES[name].type(1))


@pytest.mark.parametrize("dtype", CODES)
@settings(max_examples=300, deadline=None)
@given(rows=finite_rows())
def test_no_number_is_further_off_than_its_bound(dtype, rows):
    assert_within_bounds(rows, dtype)


@pytest.mark.parametrize("source", BITS)
@pytest.mark.parametrize("dtype", CODES)
def test_numbers_of_every_size_are_within_their_bounds(dtype, source):
    limits = np.finfo(np.float16) if source == "float16" else np.finfo(np.float32)
    high = 15 if source == "float16" else 126
    sizes = 2.0 ** np.arange(high, int(np.log2(float(limits.smallest_subnormal))) - 1, -1)
    rows = (sizes[:, None] * np.linspace(-1, 1, 33)).astype(np.float32).astype(DTYPES[source])
    assert_within_bounds(rows, dtype)


def test_codes_of_float8_are_the_nearest_with_ties_to_even():
    numbers = numbers_of("float8_e4m3")
    finite = np.unique(numbers[np.isfinite(numbers)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(sign * np.inf)) for sign in (-1, 1)]
    chance = np.random.default_rng(0)
    some = [
        (chance.standard_normal(1 << 16) * size).clip(-448, 448).astype(np.float32) for size in (1e-3, 0.1, 10, 300)
    ]
    every = np.concatenate([finite, middles, *around, *some, np.array([-0.0, 448.00003, -448.00003], np.float32)])
    codes = quantization._nearest_e4m3(every)
    assert np.array_equal(codes, every.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    # Beside the library: no other code is nearer.
    distance = np.abs(every.astype(np.float64)[:, None] - finite).min(axis=1)
    assert np.array_equal(np.abs(every.astype(np.float64) - numbers[codes]), distance)


@pytest.mark.parametrize("source", BITS)
@pytest.mark.parametrize("dtype", CODES)
def test_rows_of_zeros_stay_zeros(dtype, source):
    rows = np.zeros((3, 7), DTYPES[source])
    rows[1] = -0.0
    codes, scales = quantised(rows, dtype)
    assert not dequantised(codes, scales, dtype).any()
    assert (scales > 0).all()


NEVER = {
    "bfloat16": [np.nan, -np.nan, np.inf, -np.inf, 2.0**127, -3.3e38],
    "float16": [np.nan, -np.nan, np.inf, -np.inf],
    "float32": [np.nan, -np.nan, np.inf, -np.inf, 2.0**127, -3.4e38],
}


@pytest.mark.parametrize(("source", "number"), [(source, number) for source in NEVER for number in NEVER[source]])
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("place", [(0, 0), (1, 3), (2, 6)])
def test_a_row_that_cannot_be_rounded_is_not(dtype, source, number, place):
    rows = np.ones((3, 7), DTYPES[source])
    assert quantised(rows, dtype) is not None
    rows[place] = number
    assert quantised(rows, dtype) is None


@pytest.mark.parametrize("dtype", CODES)
def test_numbers_just_below_the_bound_stay_finite(dtype):
    largest = np.nextafter(np.float32(2.0**127), np.float32(0))
    steps = np.arange(1 << 12, dtype=np.uint32)
    rows = (largest.view(np.uint32) - steps).view(np.float32)[:, None] * np.array([1, -0.5], np.float32)
    assert_within_bounds(rows, dtype)


@pytest.mark.parametrize("dtype", CODES)
def test_rows_are_rounded_each_by_itself(dtype, monkeypatch):
    rows = np.random.default_rng(1).standard_normal((100, 9)).astype(DTYPES["bfloat16"])
    monkeypatch.setattr(quantization, "_NUMBERS_AT_ONCE", 30)
    codes, scales = quantised(rows, dtype)
    for number, row in enumerate(rows):
        one = quantised(row[None], dtype)
        assert np.array_equal(one.codes[0], codes[number])
        assert one.scales[0] == scales[number]


@pytest.mark.parametrize("dtype", CODES)
def test_no_rows_are_no_rows(dtype):
    codes, scales = quantised(np.zeros((0, 5), np.float32), dtype)
    assert codes.shape == (0, 5)
    assert dequantised(codes, scales, dtype).shape == (0, 5)
