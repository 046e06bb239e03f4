"""Plain values of steering: numbers, layers and vectors in the forms of JSON, dicts and arrays.

Each function takes a value and the field that holds it. It returns the parsed value, or raises UsageError with the
field first. A bool is not a number. Every number must be in float32's range, because steering is computed in float32.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.dtypes import VECTOR_DTYPES
from capflow.capture.site import Site, by_own_name
from capflow.errors import UsageError, explain

NUMBER_MAX = float(np.finfo(np.float32).max)
"""The largest float32 number."""

_BITS: dict[np.dtype[Any], tuple[npt.DTypeLike, int, int]] = {
    VECTOR_DTYPES["bfloat16"]: (np.uint16, 0x7FFF, 0x7F80),
    VECTOR_DTYPES["float16"]: (np.uint16, 0x7FFF, 0x7C00),
    VECTOR_DTYPES["float32"]: (np.uint32, 0x7FFFFFFF, 0x7F800000),
}
"""For each dtype: the unsigned dtype of its bits, the mask of all bits except the sign, and the bits of infinity.

The bits of NaN are above those of infinity.
"""

_FINITE = "finite numbers of float32's range"


def finite(values: npt.NDArray[Any]) -> bool:
    """Return whether every number is in float32's range. The array is not empty and has one of `VECTOR_DTYPES`."""
    if values.dtype not in _BITS:
        # False for NaN.
        return bool(np.abs(values).max() <= NUMBER_MAX)
    unsigned, magnitude, infinity = _BITS[values.dtype]
    return bool((values.view(unsigned) & magnitude).max() < infinity)


def check_finite(values: npt.NDArray[Any], field: str) -> None:
    """Raise UsageError with the index of the first number that is NaN or beyond float32's range."""
    if finite(values):
        return
    bad = np.argwhere(~(np.abs(values.astype(np.float64)) <= NUMBER_MAX))[0].tolist()
    index = bad[0] if len(bad) == 1 else bad
    raise UsageError(explain(field, got=f"{values[tuple(bad)]} at index {index}", expected=_FINITE))


def number(value: Any, field: str, at: str = "") -> float:
    """Return the number in a field.

    at: the place inside the field, for the message.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise UsageError(explain(field, got=f"{reprlib.repr(plain)}{at}", expected="a number"))
    if not -NUMBER_MAX <= plain <= NUMBER_MAX:
        expected = "a finite number of float32's range"
        raise UsageError(explain(field, got=f"{reprlib.repr(plain)}{at}", expected=expected))
    return float(plain)


def whole(value: Any, field: str, low: int, high: int, noun: str) -> int:
    """Return the whole number of `low..high` in a field.

    noun: a name for the number, for the message.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    if type(plain) is not int or not low <= plain <= high:
        raise UsageError(explain(field, got=reprlib.repr(plain), expected=f"{noun}, {low}..{high}"))
    return plain


def check_width(width: float, row: int | tuple[int, ...], field: str) -> None:
    """Raise UsageError unless a vector has the width of a row.

    row: the width of the stream, or the shape of a row at the site.
    """
    shape = (row,) if isinstance(row, int) else row
    if width != math.prod(shape):
        own = "the model's width" if len(shape) == 1 else f"{shape[0]} heads of {shape[1]}"
        raise UsageError(explain(field, got=f"{width:g} numbers", expected=f"{math.prod(shape)}, {own}"))


def layer_number(value: Any, field: str) -> int:
    """Return the layer that a whole number, or its digits as text, names."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 4:
        value = int(value)
    return whole(value, field, 0, limits.LAYERS_MAX - 1, "a layer number")


def by_hook(value: Any, where: str, example: str) -> Iterator[tuple[str, Any]]:
    """Yield each hook of a mapping, under its own name, and its value.

    example: a correct value, for the message.
    """
    if not isinstance(value, Mapping) or not value:
        raise UsageError(explain(where, got=reprlib.repr(value), expected=f"a mapping like {example}"))
    yield from by_own_name(value, where).items()


def by_layer(layers: Any, where: str, hook: str, noun: str) -> Iterator[tuple[Site, str, Any]]:
    """Yield the site of each layer of a mapping, its field and its value.

    noun: a name for a layer's value, for the message.
    """
    if not isinstance(layers, Mapping) or not layers:
        expected = f"a mapping of layer to {noun}, or packed"
        raise UsageError(explain(where, got=reprlib.repr(layers), expected=expected))
    seen = set()
    for key, entry in layers.items():
        layer = layer_number(key, where)
        if layer in seen:
            raise UsageError(explain(f"{where}.{layer}", got="the layer twice", expected="each layer once"))
        seen.add(layer)
        yield Site(layer, hook), f"{where}.{layer}", entry


def one_or_several(entry: Any, field: str, noun: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield each mapping of a list, or a single mapping, with its field.

    noun: a name for each, for the message.
    """
    several = isinstance(entry, list | tuple)
    if several and not entry:
        raise UsageError(explain(field, got="[]", expected=f"{noun}, or a list of them"))
    for index, one in enumerate(entry if several else (entry,)):
        at = f"{field}.{index}" if several else field
        if not isinstance(one, Mapping):
            raise UsageError(explain(at, got=reprlib.repr(one), expected=f"{noun}, a mapping"))
        yield at, one


def check_keys(value: Mapping[Any, Any], where: str, allowed: Sequence[str], required: Sequence[str] = ()) -> None:
    """Raise UsageError for an unknown key and for a missing one."""
    for key in value:
        if key not in allowed:
            raise UsageError(explain(f"{where}.{key}: unknown", expected=f"one of {', '.join(allowed)}"))
    for key in required:
        if key not in value:
            raise UsageError(explain(f"{where}.{key}: missing", expected=f"all of {', '.join(required)}"))


def gate_name(value: Mapping[Any, Any], where: str) -> str:
    """Return the name in the field `gate` of a mapping; empty without one.

    where: the field that holds the mapping.
    """
    name = value.get("gate")
    if name is None:
        return ""
    if not isinstance(name, str) or not 0 < len(name) <= limits.GATE_NAME_LENGTH_MAX:
        expected = f"the name of a gate, 1..{limits.GATE_NAME_LENGTH_MAX} characters"
        raise UsageError(explain(f"{where}.gate", got=reprlib.repr(name), expected=expected))
    return name


def vector(value: Any, field: str) -> npt.NDArray[np.float64]:
    """Return the numbers of an array, a tensor or a list, `[hidden_size]` float64.

    Raises UsageError unless they are one-dimensional, 1 to `limits.HIDDEN_SIZE_MAX`, and finite.
    """
    # The shape is checked before the numbers are copied: a view of a single number may have any shape.
    if hasattr(value, "shape"):
        _check_shape(value.shape, field)
    values = _listed(value, field) if isinstance(value, list | tuple) else array(value, field)
    _check_shape(values.shape, field)
    check_finite(values, field)
    return values


def _check_shape(shape: Sequence[int], field: str) -> None:
    if len(shape) != 1 or not 0 < shape[0] <= limits.HIDDEN_SIZE_MAX:
        raise UsageError(explain(field, got=f"shape {list(shape)}", expected="[hidden_size]"))


def _listed(value: Sequence[Any], field: str) -> npt.NDArray[np.float64]:
    if len(value) > limits.HIDDEN_SIZE_MAX:
        raise UsageError(explain(field, got=f"shape [{len(value)}]", expected="[hidden_size]"))
    try:
        # msgspec refuses bools, which numpy would accept as numbers.
        numbers = msgspec.convert(value, list[float])
    except msgspec.ValidationError:
        numbers = [number(each, field, f" at index {index}") for index, each in enumerate(value)]
    return np.frombuffer(struct.pack(f"{len(numbers)}d", *numbers), np.float64)


def array(value: Any, field: str) -> npt.NDArray[np.float64]:
    """Return an array or a tensor of any shape as float64; raise UsageError unless it holds numbers."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            # torch cannot make a numpy array of bfloat16.
            value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
        values = np.asarray(value)
    except (TypeError, ValueError) as e:
        raise UsageError(explain(field, got=str(e), expected="a list of numbers")) from e
    if values.dtype.kind not in "fiu" and values.dtype != VECTOR_DTYPES["bfloat16"]:
        got = f"an array of {values.dtype}" if isinstance(value, np.ndarray) else reprlib.repr(value)
        raise UsageError(explain(field, got=got, expected="a list of numbers"))
    return values.astype(np.float64)


# --- entries of a row: heads where a row has heads, else single numbers such as neurons or experts ---


def read_index(value: Any, field: str) -> tuple[int, ...]:
    """Return the entries that a whole number, or a list of different ones, names; raise UsageError."""
    given = value.tolist() if isinstance(value, np.ndarray) else value
    given = [given] if isinstance(given, int) else given
    most = limits.ENTRIES_MAX
    if not isinstance(given, list | tuple) or not 0 < len(given) <= most:
        got = f"{len(given)} numbers" if isinstance(given, list | tuple) else repr(given)
        raise UsageError(explain(field, got=got, expected=f"a whole number, or a list of 1..{most}"))
    index = tuple(whole(each, field, 0, limits.HIDDEN_SIZE_MAX - 1, "an index") for each in given)
    if len(set(index)) != len(index):
        twice = next(each for each in index if index.count(each) > 1)
        raise UsageError(explain(field, got=f"{twice} twice", expected="each index once"))
    return index


def unit_of(shape: tuple[int, ...]) -> int:
    """Return how many numbers an entry of a row has: `head_dim`, or 1."""
    return shape[1] if len(shape) == 2 else 1


def check_index(index: tuple[int, ...], values: float, shape: tuple[int, ...], field: str) -> None:
    """Raise UsageError unless a row of this shape has the entries, and the values are as many as they need.

    index: of an action, it was not read by `read_index`.
    values: how many there are; not a whole number if the bytes do not fit.
    """
    read_index(index, f"{field}.index")
    noun = "head" if len(shape) == 2 else "number"
    if (largest := max(index)) >= shape[0]:
        raise UsageError(explain(f"{field}.index", got=largest, expected=f"a {noun} of 0..{shape[0] - 1}"))
    unit = unit_of(shape)
    if values not in (1, unit, unit * len(index)):
        expected = " or ".join(map(str, sorted({1, unit, unit * len(index)})))
        raise UsageError(explain(f"{field}.value", got=f"{values:g} numbers", expected=expected))


def crosses(row: npt.NDArray[np.float32], part: int) -> bool:
    """Return whether the numbers of a row that are not 0 lie in several of its parts, of `part` numbers each."""
    places = np.flatnonzero(row) // part
    return bool(places.size) and bool(places[0] != places[-1])


def entries_row(
    index: tuple[int, ...], values: npt.NDArray[np.float32], shape: tuple[int, ...], width: int
) -> npt.NDArray[np.float32]:
    """Return a row that sets entries and leaves the others, `[width]`.

    values: one number for all, one entry for all, or all entries, one after another.
    shape: that of the site's rows; further numbers of the row are left.
    """
    unit = unit_of(shape)
    row = np.full(width, np.nan, np.float32)
    entries = row[: math.prod(shape)].reshape(shape[0], unit)
    entries[list(index)] = values if values.size in (1, unit) else values.reshape(len(index), unit)
    return row
