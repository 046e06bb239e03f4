"""The dtype that rows are stored in, where a spec asks for another than the model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import DTYPES

FLOAT16_MAX = float(np.finfo(np.float16).max)


def name_of(asked: str, model: str) -> str:
    """Return the name of the dtype that rows of a model are stored in, given what a spec says."""
    return model if asked == "model" else asked


def converted(rows: npt.NDArray[Any], dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return rows `[sites, n, hidden_size]` as another dtype, and how many rows of each site it cannot hold.

    A row cannot be held when a finite number of it becomes infinite; it is stored as that.
    """
    with np.errstate(over="ignore"):
        stored = rows.astype(DTYPES[dtype])
    if dtype != "float16":
        return stored, np.zeros(len(rows), np.int64)
    lost = np.isinf(stored) & np.isfinite(rows.astype(np.float32))
    return stored, lost.any(axis=2).sum(axis=1)
