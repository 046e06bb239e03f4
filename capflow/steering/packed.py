"""The packed form: numbers as the bytes of an array, with its dtype and shape.

    {"dtype": "float16", "shape": [2, 4096], "layer_indices": [3, 12], "data": "<base64>"}

`data` holds the elements of the array in row-major order, little-endian: as base64 text (RFC 4648, padded, without line
breaks), or as raw bytes in formats that can carry bytes, such as msgpack. `dtype` is float16, bfloat16, float32 or
float64. Row `i` belongs to layer `layer_indices[i]`. A field that belongs to the rows, such as `scales`, is one number
for all rows, or a list with a number for each row.

The bytes are never converted here. Their number is checked. NaN and infinity are refused.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.dtypes import VECTOR_DTYPES
from capflow.errors import UsageError, explain
from capflow.steering.plain import check_finite, check_keys, layer_number, number, whole
from capflow.text.brief import brief

try:
    # vLLM brings it. It decodes ten times as fast as msgspec, and accepts the same texts.
    from pybase64 import b64decode
except ModuleNotFoundError:
    b64decode = None  # type: ignore[assignment]

FIELDS = ("dtype", "shape", "data")
BLOCK_FIELDS = ("dtype", "shape", "layer_indices", "data")


class Packed(NamedTuple):
    """An array, in the form in which it arrived.

    dtype: a key of `VECTOR_DTYPES`.
    shape: `[n, hidden_size]` or `[hidden_size]`.
    data: the elements, row-major, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        return brief(self)

    @classmethod
    def read(cls, value: Mapping[str, Any], where: str, dimensions: Sequence[int] = (2,)) -> Packed:
        """Return the array that the fields `dtype`, `shape` and `data` of a mapping describe.

        dimensions: the allowed numbers of dimensions; the last one is `hidden_size`.

        Raises UsageError that begins with the name of the wrong field.
        """
        dtype, shape = value["dtype"], _items(value["shape"])
        if not isinstance(dtype, str) or dtype not in VECTOR_DTYPES:
            expected = f"one of {', '.join(VECTOR_DTYPES)}"
            raise UsageError(explain(f"{where}.dtype", got=reprlib.repr(dtype), expected=expected))
        if shape is None or len(shape) not in dimensions:
            expected = " or ".join("[hidden_size]" if count == 1 else "[n, hidden_size]" for count in dimensions)
            raise UsageError(explain(f"{where}.shape", got=reprlib.repr(value["shape"]), expected=expected))
        for size in shape[:-1]:
            whole(size, f"{where}.shape", 1, limits.POSITION_MAX, "a number of rows")
        whole(shape[-1], f"{where}.shape", 1, limits.HIDDEN_SIZE_MAX, "a width")
        data = _bytes(value["data"], f"{where}.data")
        size = math.prod(shape) * VECTOR_DTYPES[dtype].itemsize
        if len(data) != size:
            expected = f"{size}, {dtype} of shape {list(shape)}"
            raise UsageError(explain(f"{where}.data", got=f"{len(data)} bytes", expected=expected))
        packed = cls(dtype, tuple(shape), data)
        check_finite(packed.array(), f"{where}.data")
        return packed

    def array(self) -> npt.NDArray[Any]:
        """Return the array: a read-only view of the bytes."""
        return np.frombuffer(self.data, VECTOR_DTYPES[self.dtype]).reshape(self.shape)

    def rows(self) -> list[bytes]:
        """Return the bytes of each row, `[hidden_size]` of `dtype`."""
        size = self.shape[-1] * VECTOR_DTYPES[self.dtype].itemsize
        return [self.data[start : start + size] for start in range(0, len(self.data), size)]


class PackedBlock(NamedTuple):
    """Rows of one hook, `[n, hidden_size]`, and the layer of each row."""

    layers: tuple[int, ...]
    packed: Packed

    def __repr__(self) -> str:
        return brief(self)

    @classmethod
    def read(cls, value: Mapping[str, Any], where: str, more: Sequence[str] = ()) -> PackedBlock:
        """Return the rows that a mapping describes.

        more: further allowed keys.

        Raises UsageError that begins with the name of the wrong field.
        """
        check_keys(value, where, (*BLOCK_FIELDS, *more), BLOCK_FIELDS)
        packed = Packed.read(value, where)
        field = f"{where}.layer_indices"
        given = _items(value["layer_indices"])
        if given is None or len(given) != packed.shape[0]:
            expected = f"a list of {packed.shape[0]} layers, one for each row"
            raise UsageError(explain(field, got=reprlib.repr(value["layer_indices"]), expected=expected))
        return cls(tuple(layer_number(layer, field) for layer in given), packed)

    def numbers(self, value: Any, field: str) -> list[float]:
        """Return a number for each row.

        value: one number for all rows, or a list of them.
        """
        count = len(self.layers)
        given = _items(value)
        if given is None:
            return [number(value, field)] * count
        if len(given) != count:
            raise UsageError(explain(field, got=f"{len(given)} numbers", expected=f"one number, or {count}"))
        return [number(each, field, f" at index {index}") for index, each in enumerate(given)]


def is_packed(value: Any) -> bool:
    """Return whether a value is meant to be packed: it is a mapping with any key of the packed form."""
    return isinstance(value, Mapping) and any(field in value for field in BLOCK_FIELDS)


def _items(value: Any) -> list[Any] | None:
    """Return the items of a list, a tuple or a one-dimensional array; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value.tolist())
    return list(value) if isinstance(value, list | tuple) else None


def _bytes(value: Any, field: str) -> bytes:
    if isinstance(value, str):
        try:
            return msgspec.convert(value, bytes) if b64decode is None else b64decode(value, validate=True)
        except (msgspec.ValidationError, ValueError):
            pass
    elif isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise UsageError(explain(field, got=reprlib.repr(value), expected="base64 text, padded, or raw bytes"))
