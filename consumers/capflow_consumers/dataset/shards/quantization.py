"""Rows rounded to 8 bits a number, with one scale a row: how they are made, and what they stand for.

A row x is stored as codes c and a float32 scale s, and read as c * s in float32. Ties go to the even code.

    int8           s = max|x| / 127; c is the nearest integer. |c * s - x| <= s / 2.
    float8_e4m3    s = max|x| / 448; c is the nearest number of E4M3, which has three bits after the leading one.
                   |c * s - x| <= |x| / 16; below s / 64, where E4M3 is subnormal, <= s / 1024.

The arithmetic in float32 adds at most 2^-22 |x| to these bounds. A scale is at least 2^-126, the smallest normal
float32, so that a row of zeros has one, and rows of subnormal numbers stay within the bounds.

E4M3 is that of the "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0: it has no infinities, and 448 is its
largest number.
https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1

Invariant: a row with a NaN, an infinity or a number from 2^127 on is never rounded; c * s might not be finite.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import DTYPES, widened
from capflow.probes.probe import as_float32
from capflow_consumers.dataset.layout import Quantization

CODES: dict[str, np.dtype[Any]] = {"int8": np.dtype(np.int8), "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
"""The dtypes of codes."""

NUMBERS: dict[str, np.dtype[Any]] = DTYPES | CODES
"""The dtypes of the numbers that shards hold."""

_TOP: dict[str, float] = {"int8": 127.0, "float8_e4m3": 448.0}
_SCALE_MIN = np.float32(2.0**-126)
_BOUND = np.float32(2.0**127)
# What is worked on at a time; with its copies, it fits in the processor's cache.
_NUMBERS_AT_ONCE = 1 << 16


class Quantised(NamedTuple):
    """Rounded rows.

    codes: `[n, width]` uint8, the bits of the codes.
    scales: `[n]` float32.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]


def quantised(rows: npt.NDArray[Any], dtype: Quantization) -> Quantised | None:
    """Round rows `[n, width]` of any captured dtype to codes of a dtype; return None if one of them cannot be rounded.

    A row cannot be rounded that has a NaN, an infinity or a number from 2^127 on.
    """
    count, width = rows.shape
    result = Quantised(np.empty((count, width), np.uint8), np.empty(count, np.float32))
    step = max(1, _NUMBERS_AT_ONCE // width)
    for begin in range(0, count, step):
        block = slice(begin, begin + step)
        numbers = as_float32(widened(rows[block]))
        largest = np.abs(numbers).max(axis=1)
        if not (largest < _BOUND).all():  # also where one is NaN
            return None
        scales = np.maximum(largest / np.float32(_TOP[dtype]), _SCALE_MIN)
        result.scales[block] = scales
        quotients = numbers / scales[:, None]
        if dtype == "int8":
            result.codes.view(np.int8)[block] = np.rint(quotients, out=quotients)
        else:
            result.codes[block] = _nearest_e4m3(quotients)
    return result


def dequantised(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    """Return what codes `[n, width]` of a dtype stand for with the scales `[n]` of their rows, `[n, width]` float32."""
    if dtype == "int8":
        return codes.view(np.int8) * scales[:, None]
    numbers = np.take(numbers_of(dtype), codes)
    numbers *= scales[:, None]
    return numbers


@functools.cache
def numbers_of(dtype: str) -> npt.NDArray[np.float32]:
    """Return the number of each code of a dtype, by its bits, `[256]` float32."""
    return cast("npt.NDArray[np.float32]", np.arange(256, dtype=np.uint8).view(CODES[dtype]).astype(np.float32))


def _nearest_e4m3(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the bits of the nearest E4M3 of each float32 up to 448; ml_dtypes takes five times as long.

    Numbers are cut to the 16 bits of a bfloat16, and looked up. A number that is cut gets an odd last bit. So it stays
    on its side of every tie, and the second rounding gives what one rounding would (rounding to odd: Boldo and
    Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
    """
    bits = numbers.view(np.uint32)
    odd = bits & np.uint32(0xFFFF)
    odd += np.uint32(0xFFFF)
    odd |= bits
    odd >>= np.uint32(16)
    return np.take(_e4m3_of_bfloat16(), odd)


@functools.cache
def _e4m3_of_bfloat16() -> npt.NDArray[np.uint8]:
    """Return the bits of the nearest E4M3 of each bfloat16, by its bits."""
    numbers = as_float32(np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16))
    with np.errstate(invalid="ignore", over="ignore"):
        return numbers.astype(CODES["float8_e4m3"]).view(np.uint8)
