"""The dtype that rows are stored in, where a spec asks for another one than the model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import DTYPES

FLOAT16_MAX = float(np.finfo(np.float16).max)


def name_of(asked: str, model: str) -> str:
    """Return the name of the dtype that rows are stored in.

    asked: the spec's `dtype`; "model" for that of the model.
    model: the model's dtype.
    """
    return model if asked == "model" else asked


def converted(rows: npt.NDArray[Any], dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Convert rows `[sites, n, width]` to a dtype; return them, and how many rows of each site overflowed, int64.

    A row overflows when a finite number becomes infinite; it is stored as infinite.
    """
    with np.errstate(over="ignore"):
        stored = rows.astype(DTYPES[dtype])
    if dtype != "float16":
        return stored, np.zeros(len(rows), np.int64)
    overflowed = np.isinf(stored) & np.isfinite(rows.astype(np.float32))
    return stored, overflowed.any(axis=2).sum(axis=1)
