"""Steering vectors: what is added to the residual stream at a site.

A `SteeringVector` adds `scale · vector` to the stream `x` at one site; a relative one adds `scale · ‖x‖ · vector /
‖vector‖`. It travels as the name of its dtype and its raw little-endian bytes, in the dtype in which it arrived. Lists
of numbers and arrays become float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.dtypes import VECTOR_DTYPES, widened
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.limits import Name
from capflow.steering import plain
from capflow.steering.packed import PackedBlock, is_packed
from capflow.text.brief import brief

_EXAMPLE = '{"post_block": {12: [0.1, …]}}'


_ELEMENT_BYTES = {name: dtype.itemsize for name, dtype in VECTOR_DTYPES.items()}


class _Placed(Protocol):
    """The fields of each subclass of `AtSite`."""

    @property
    def layer(self) -> int: ...

    @property
    def hook(self) -> str: ...

    @property
    def data(self) -> bytes: ...

    @property
    def _element_bytes(self) -> int: ...


class AtSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What acts at one site with rows of the site's width: a vector, a clamp, a patch, a feature or a gate.

    A subclass has the fields `layer`, `hook` and `data`, the bytes of its rows.
    """

    __repr__ = brief

    @property
    def site(self: _Placed) -> Site:
        """The site that it acts at, or that a gate scores."""
        return Site(self.layer, self.hook)

    @property
    def width(self: _Placed) -> float:
        """The number of elements of each row; not a whole number if the bytes do not fit."""
        return len(self.data) / self._element_bytes

    def needs_row(self, part: int) -> str:
        """Return what it is, if it needs numbers of a row that no single rank has; else nothing.

        part: how many numbers of a row a tensor-parallel rank has.
        """
        del part
        return ""

    @property
    def _element_bytes(self) -> int:
        """How many bytes `data` has for each element of a row."""
        return 4


class SteeringVector(AtSite, frozen=True, forbid_unknown_fields=True):
    """One vector for one site.

    data: `[hidden_size]` in `dtype`, little-endian.
    dtype: a key of `VECTOR_DTYPES`.
    scale: multiplies the vector.
    relative: the vector is brought to length 1, and the scale is in units of the stream's norm at each token.
    gate: the name of the gate that multiplies the vector; empty without one.
    """

    layer: int
    hook: Name
    data: Annotated[bytes, msgspec.Meta(max_length=8 * limits.HIDDEN_SIZE_MAX)]
    dtype: Name = "float32"
    scale: float = 1.0
    relative: bool = False
    gate: str = ""

    @property
    def width(self) -> float:
        """The number of elements; not a whole number if the bytes do not fit."""
        return len(self.data) / _ELEMENT_BYTES[self.dtype]

    def needs_row(self, part: int) -> str:
        """Return what it is, if it needs whole rows, as `AtSite.needs_row` does: for their norm."""
        del part
        return "a relative vector" if self.relative else ""

    def _stored(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, VECTOR_DTYPES[self.dtype])

    def array(self, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Return `scale · vector`, `[hidden_size]`; a relative vector is brought to length 1 first.

        It is computed in float64 and rounded once.
        """
        values = widened(self._stored())
        if self.relative:
            return (_unit(values.astype(np.float64)) * self.scale).astype(dtype)
        if self.scale == 1.0:
            return values.astype(dtype, copy=False)
        return (values.astype(np.float64) * self.scale).astype(dtype)

    @classmethod
    def make(
        cls,
        site: Site,
        vector: Any,
        scale: float = 1.0,
        relative: bool = False,
        gate: str = "",
        *,
        where: str = "steering",
    ) -> SteeringVector:
        """Return the vector that an array, a tensor or a list of `hidden_size` numbers holds.

        where: the field that holds it; messages begin with it.

        Raises UsageError if it is not one-dimensional, is empty, or holds NaN or infinity.
        """
        field = f"{where}.{site.hook}.{site.layer}"
        values = plain.vector(vector, field).astype(np.float32)
        times = plain.number(scale, f"{field}.scale")
        return cls(site.layer, site.hook, values.tobytes(), "float32", times, relative, gate)

    def check(
        self, sites: Collection[Site], row: int | tuple[int, ...], *, where: str = "steering", finite: bool = False
    ) -> None:
        """Raise UsageError unless the vector fits a model with these tapped sites and rows of this width or shape.

        finite: whether its numbers are known to be finite.
        """
        field = f"{where}.{self.hook}.{self.layer}"
        if self.dtype not in VECTOR_DTYPES:
            raise UsageError(explain(f"{field}.dtype", got=self.dtype, expected=f"one of {', '.join(VECTOR_DTYPES)}"))
        self.site.check_tapped(sites, field)
        plain.check_width(self.width, row, field)
        if self.relative and not self._stored().any():
            raise UsageError(explain(field, got="a zero vector", expected="a direction, since it is relative"))
        if not self._finite(finite):
            expected = "finite numbers of float32's range"
            raise UsageError(explain(field, got="NaN or infinity", expected=expected))

    def _finite(self, stored: bool) -> bool:
        """Return whether `scale · vector` is finite; the product is computed only if the scale enlarges the vector.

        stored: whether the vector is known to be finite.
        """
        if not stored and not plain.finite(self._stored()):
            return False
        if abs(self.scale) <= 1.0 or (self.relative and abs(self.scale) <= plain.NUMBER_MAX):
            return True
        with np.errstate(over="ignore"):
            # False if the scale is NaN.
            return plain.finite(self.array())


def all_finite(vectors: Iterable[SteeringVector]) -> bool:
    """Return whether the numbers of vectors are finite, all in one pass; their scales are not looked at.

    False also for a dtype that there is not, and for bytes that do not fit.
    """
    data: dict[str, list[bytes]] = {}
    for vector in vectors:
        data.setdefault(vector.dtype, []).append(vector.data)
    for name, rows in data.items():
        joined = b"".join(rows)
        if name not in VECTOR_DTYPES or not joined or len(joined) % _ELEMENT_BYTES[name]:
            return False
        if not plain.finite(np.frombuffer(joined, VECTOR_DTYPES[name])):
            return False
    return True


def parse_steering(value: Any, *, where: str = "steering") -> tuple[SteeringVector, ...]:
    """Return the vectors that a plain value describes: `{hook: layers}`.

    The layers of a hook are `{layer: vector or {"vector": vector, "scale": number, "relative": bool, "gate": name}}` or
    packed (see `capflow.steering.packed`), with `scales`, `relative` and `gate` as further keys. A vector is an array,
    a tensor or a list of `hidden_size` numbers. A layer is a whole number or its digits as text. A layer may have a
    list of such mappings, each with another gate.

    Raises UsageError with the field first. Parsed vectors are returned unchanged.
    """
    if isinstance(value, Sequence) and value and all(isinstance(v, SteeringVector) for v in value):
        _check_each(value, where)
        return tuple(value)
    vectors: list[SteeringVector] = []
    for hook, layers in plain.by_hook(value, where, _EXAMPLE):
        at = f"{where}.{hook}"
        if is_packed(layers):
            vectors += _unpacked(layers, hook, at)
            continue
        for site, field, entry in plain.by_layer(layers, at, hook, "vector"):
            if isinstance(entry, list | tuple) and entry and isinstance(entry[0], Mapping):
                several = [_one(site, one, at, where) for at, one in plain.one_or_several(entry, field, "a vector")]
                _check_each(several, where)
                vectors += several
            else:
                vectors.append(_one(site, entry, field, where))
    return tuple(vectors)


def _one(site: Site, entry: Any, field: str, where: str) -> SteeringVector:
    """Return the vector of one entry of a layer."""
    if not isinstance(entry, Mapping):
        return SteeringVector.make(site, entry, where=where)
    plain.check_keys(entry, field, ("vector", "scale", "relative", "gate"), ("vector",))
    relative = _flag(entry.get("relative", False), f"{field}.relative")
    gate = plain.gate_name(entry, field)
    return SteeringVector.make(site, entry["vector"], entry.get("scale", 1.0), relative, gate, where=where)


def _check_each(vectors: Sequence[SteeringVector], where: str) -> None:
    """Raise UsageError if two vectors of one kind and gate are at one site, or a dtype is unknown."""
    seen = set()
    for vector in vectors:
        field = f"{where}.{vector.hook}.{vector.layer}"
        if vector.dtype not in VECTOR_DTYPES:
            raise UsageError(explain(f"{field}.dtype", got=vector.dtype, expected=f"one of {', '.join(VECTOR_DTYPES)}"))
        if (vector.site, vector.relative, vector.gate) in seen:
            got, expected = ("the site", "each site") if not vector.gate else (f"gate {vector.gate}", "each gate")
            raise UsageError(explain(field, got=f"{got} twice", expected=f"{expected} once"))
        seen.add((vector.site, vector.relative, vector.gate))


def _unpacked(layers: Mapping[str, Any], hook: str, where: str) -> list[SteeringVector]:
    """Return a vector for each row of a packed block, with the row's bytes unchanged."""
    block = PackedBlock.read(layers, where, ("scales", "relative", "gate"))
    for place, layer in enumerate(block.layers):
        if layer in block.layers[:place]:
            raise UsageError(explain(f"{where}.layer_indices", got=f"{layer} twice", expected="each layer once"))
    scales = block.numbers(layers.get("scales", 1.0), f"{where}.scales")
    relative = _flag(layers.get("relative", False), f"{where}.relative")
    gate, dtype = plain.gate_name(layers, where), block.packed.dtype
    return [
        SteeringVector(layer, hook, data, dtype, scale, relative, gate)
        for layer, data, scale in zip(block.layers, block.packed.rows(), scales, strict=True)
    ]


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(explain(field, got=repr(value), expected="true or false"))
    return value


def _unit(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a vector scaled to length 1; zeros unchanged."""
    largest = np.abs(values).max()
    if largest == 0.0:
        return values
    # Without this, squares of very large or small numbers would overflow or underflow.
    values = values / largest
    unit: npt.NDArray[np.float64] = values / np.linalg.norm(values)
    return unit
