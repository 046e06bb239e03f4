"""The dtypes of rows and of vectors, by their names in torch. Numbers are little-endian."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

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
