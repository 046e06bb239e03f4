"""The dtypes of rows and of vectors, by their names in torch. Numbers are little-endian."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
"""The dtypes of rows."""

VECTOR_DTYPES: dict[str, np.dtype[Any]] = {**DTYPES, "float64": np.dtype(np.float64)}
"""The dtypes of steering vectors."""

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""The names of these dtypes in safetensors."""


def widened(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return float16 numbers as float32, and others as they are.

    numpy converts float16 number by number. To look each up in a table of all of them takes a third of the time.
    """
    return np.take(_float16_numbers(), values.view(np.uint16)) if values.dtype == np.float16 else values


@functools.cache
def _float16_numbers() -> npt.NDArray[np.float32]:
    """Return each float16 number, by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
