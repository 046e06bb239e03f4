"""Weights of a model that are not in its captured rows, and that the caller gives, such as a router's bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.errors import UsageError, explain
from capflow.probes.probe import as_float32


def numbers_of(
    name: str, numbers: npt.ArrayLike | None, count: int, *, needed: bool, each: str, parameter: str
) -> npt.NDArray[Any] | None:
    """Return one number for each part of a layer, `[count]`; None if the layer needs none.

    name: the argument.
    numbers: an array or a tensor of any dtype that models have, or a list.
    needed: whether the layer has such a weight.
    each: what it has a number for.
    parameter: the weight's name in files of models.

    Raises UsageError for numbers that are missing, not needed or not so many.
    """
    expected = f"{count} numbers, one for each {each}"
    if numbers is None:
        if needed:
            do = f"take them from the model's weights ({parameter})"
            raise UsageError(explain(name, got="none", expected=expected, do=do))
        return None
    # NumPy takes no tensor in bfloat16.
    array = np.asarray(numbers.detach().double().cpu() if hasattr(numbers, "detach") else numbers)
    if not needed:
        raise UsageError(explain(name, got=f"an array {list(array.shape)}", expected="none for this layer"))
    array = as_float32(array) if array.dtype.name == "bfloat16" else array
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise UsageError(explain(name, got=f"{array.dtype} {list(array.shape)}", expected=expected))
    return array
