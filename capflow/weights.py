"""Weights of a model that are not in its captured rows, and that the caller gives, such as a router's bias."""

from __future__ import annotations

import reprlib
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
    if not needed:
        raise UsageError(explain(name, got=reprlib.repr(numbers), expected="none for this layer"))
    try:
        array = _array(numbers)
    except (TypeError, ValueError, RuntimeError) as e:  # such as lists of lists, and tensors without values
        raise UsageError(explain(name, got=reprlib.repr(numbers), expected=expected)) from e
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise UsageError(explain(name, got=f"{array.dtype} {list(array.shape)}", expected=expected))
    with np.errstate(over="ignore"):
        if not np.isfinite(array.astype(np.float32)).all():
            raise UsageError(explain(name, got="numbers that are not finite in float32", expected=expected))
    return array


def _array(numbers: Any) -> npt.NDArray[Any]:
    """Return an array, a tensor or a list as an array in a dtype of NumPy's own."""
    if hasattr(numbers, "detach"):
        numbers = numbers.detach().cpu()
        numbers = numbers.double() if numbers.is_floating_point() else numbers  # NumPy takes no tensor in bfloat16
    array = np.asarray(numbers)
    return as_float32(array) if array.dtype.name == "bfloat16" else array
