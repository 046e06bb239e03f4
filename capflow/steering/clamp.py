"""Clamps: a bound on the component of the residual stream along a direction, at one site.

With `p = x · d` for the unit vector `d`, a clamp does `x ← x + strength · (min(max(p, low), high) - p) · d`. Equal
bounds set the projection to a value; 0 removes the direction (directional ablation, Arditi et al. 2024,
arXiv:2406.11717).

A clamp may name entries of the row instead of a direction: heads, neurons or experts. It bounds each number of these
entries, or sets them to values: zero and mean ablation of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import widened
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.packed import PackedBlock, is_packed
from capflow.steering.vector import AtSite

_BOUNDS = ("min", "max", "value", "strength")
_KEYS = ("vector", *_BOUNDS, "gate", "index")
_EXAMPLE = '{"post_block": {12: {"vector": [0.1, …], "min": -1.0, "max": 1.0}}}'
# A smaller squared length may have lost significant terms to underflow.
_SQUARE_MIN = 1e-200
# How many numbers are brought to unit length at once: their float64 fit in a processor's cache.
_NUMBERS_AT_ONCE = 32768
# The largest accepted difference between a unit vector's length and 1.
_LENGTH_ERROR_MAX = 1e-3


class Clamp(AtSite, frozen=True, forbid_unknown_fields=True):
    """A bound along one direction at one site, or of some entries of its rows.

    data: the unit vector, `[hidden_size]` float32 little-endian. With an index, the values of the entries, `[n]`, as
        `entries_row` takes them; empty if `low` and `high` bound them.
    low, high: the bounds of the projection, or of each number of the entries, in the units of the row.
    strength: 1 moves the projection all the way into its bounds, 0 not at all.
    gate: the name of the gate that multiplies the strength; empty without one.
    index: the entries: heads where the rows have heads, else single numbers; empty with a direction.
    """

    layer: int
    hook: str
    data: bytes
    low: float = -math.inf
    high: float = math.inf
    strength: float = 1.0
    gate: str = ""
    index: tuple[int, ...] = ()

    @property
    def values(self) -> npt.NDArray[np.float32] | None:
        """What the entries are set to, `[n]` float32; None for a direction, and for a range of values."""
        if not self.index or (not self.data and self.low != self.high):
            return None
        return np.frombuffer(self.data, np.float32) if self.data else np.array([self.low], np.float32)

    def needs_row(self, part: int) -> str:
        """Return what it is, if its direction has numbers of several ranks, as `AtSite.needs_row` does."""
        crosses = not self.index and plain.crosses(np.frombuffer(self.data, np.float32), part)
        return "a clamp along a direction" if crosses else ""

    @classmethod
    def make(
        cls, site: Site, direction: npt.NDArray[Any], bounds: Mapping[str, Any], *, where: str, gate: str = ""
    ) -> Clamp:
        """Return the clamp along a direction, `[hidden_size]`, of any length except 0.

        bounds: `value`, or one or both of `min` and `max`; and `strength`, 1 by default.
        where: the field that holds the bounds, and the direction as `vector`.

        Raises UsageError with the field first.
        """
        given = {name: plain.number(value, f"{where}.{name}") for name, value in bounds.items()}
        low, high, strength = _bounds(given, where)
        (data,) = _units(direction[np.newaxis], lambda _row: (f"{where}.vector", ""))
        return cls(site.layer, site.hook, data, low, high, strength, gate)

    @classmethod
    def of_entries(
        cls, site: Site, index: tuple[int, ...], given: Mapping[str, Any], *, where: str, gate: str
    ) -> Clamp:
        """Return the clamp of entries; raise UsageError with the field first.

        given: `value`, a number or a list of numbers; or one or both of `min` and `max`; and `strength`.
        where: the field that holds these.
        """
        value = given.get("value")
        if value is None or isinstance(value, int | float | np.generic):
            bounds = {name: plain.number(each, f"{where}.{name}") for name, each in given.items()}
            data = b""
        else:
            bounds = {name: plain.number(each, f"{where}.{name}") for name, each in given.items() if name != "value"}
            bounds["value"] = 0.0
            data = plain.vector(value, f"{where}.value").astype(np.float32).tobytes()
        low, high, strength = _bounds(bounds, where)
        return cls(site.layer, site.hook, data, low, high, strength, gate, index)

    def check(self, sites: Collection[Site], row: int | tuple[int, ...], *, where: str = "steering_clamps") -> None:
        """Raise UsageError unless the clamp fits a model with these tapped sites and rows of this width or shape.

        where: the field that holds the clamps.
        """
        field = f"{where}.{self.hook}.{self.layer}"
        self.site.check_tapped(sites, field)
        if not self.low <= self.high or not math.isfinite(self.strength):
            got = f"bounds {self.low}..{self.high}, strength {self.strength}"
            raise UsageError(explain(field, got=got, expected="bounds in order and a finite strength"))
        if self.index:
            shape = (row,) if isinstance(row, int) else row
            plain.check_index(self.index, self.width if self.data else 1, shape, field)
            values = self.values
            if values is None and plain.unit_of(shape) > 1:
                raise UsageError(explain(field, got="min or max of heads", expected="value, for an index of heads"))
            if values is not None:
                plain.check_finite(values, field)
            return
        plain.check_width(self.width, row, field)
        direction = np.frombuffer(self.data, np.float32)
        length = float(np.sqrt(np.square(direction, dtype=np.float64).sum()))
        if not abs(length - 1.0) <= _LENGTH_ERROR_MAX:
            raise UsageError(explain(field, got=f"a direction of length {length:g}", expected="a unit vector"))


def parse_clamps(value: Any, *, where: str = "steering_clamps") -> tuple[Clamp, ...]:
    """Return the clamps that a plain value describes: `{hook: layers}`.

    The layers of a hook are `{layer: clamp or [clamps]}` or packed. A clamp is `{"vector": [hidden_size], "min": x,
    "max": y, "strength": s, "gate": name}` with at least one bound, or with `value` in the place of both. With `index`,
    a number or a list, in the place of `vector` it acts on entries of the row: heads where the rows have heads, else
    single numbers. Then `value` may also be a list: an entry for all of them, or one after another. In the packed
    form (see `capflow.steering.packed`) each of `min`, `max`, `value` and `strength` is a number, or a list with one
    for each row; `gate` is one name; and a layer may have several rows.

    Raises UsageError with the field first. Parsed clamps are returned unchanged.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(each, Clamp) for each in value):
        return tuple(value)
    clamps: list[Clamp] = []
    for hook, layers in plain.by_hook(value, where, _EXAMPLE):
        at = f"{where}.{hook}"
        if is_packed(layers):
            clamps += _unpacked(layers, hook, at)
            continue
        for site, field, entry in plain.by_layer(layers, at, hook, "clamp"):
            for one, clamp in plain.one_or_several(entry, field, "a clamp"):
                plain.check_keys(clamp, one, _KEYS, () if "index" in clamp else ("vector",))
                bounds = {name: number for name, number in clamp.items() if name in _BOUNDS}
                gate = plain.gate_name(clamp, one)
                if "index" in clamp:
                    if "vector" in clamp:
                        raise UsageError(explain(f"{one}.index: given beside vector", expected="one of both"))
                    index = plain.read_index(clamp["index"], f"{one}.index")
                    clamps.append(Clamp.of_entries(site, index, bounds, where=one, gate=gate))
                    continue
                direction = plain.vector(clamp["vector"], f"{one}.vector")
                clamps.append(Clamp.make(site, direction, bounds, where=one, gate=gate))
    return tuple(clamps)


def _bounds(given: Mapping[str, float], where: str, at: str = "") -> tuple[float, float, float]:
    """Return the lower and the upper bound, and the strength; raise UsageError.

    at: the place inside the field, for the message.
    """
    check_bounds(given, where)
    low = given.get("value", given.get("min", -math.inf))
    high = given.get("value", given.get("max", math.inf))
    if low > high:
        raise UsageError(explain(f"{where}.min", got=f"{low}{at}", expected=f"at most max, {high}"))
    return low, high, given.get("strength", 1.0)


def check_bounds(given: Mapping[str, Any], where: str) -> None:
    """Raise UsageError unless there is either a value or at least one bound."""
    if "value" in given and ("min" in given or "max" in given):
        raise UsageError(explain(f"{where}.value: given beside a bound", expected="value, or min and max"))
    if not {"value", "min", "max"} & set(given):
        raise UsageError(explain(f"{where}: no bound", expected="min, max or both, or value"))


def _unpacked(layers: Mapping[str, Any], hook: str, where: str) -> list[Clamp]:
    block = PackedBlock.read(layers, where, (*_BOUNDS, "gate"))
    gate = plain.gate_name(layers, where)
    given = {name: block.numbers(layers[name], f"{where}.{name}") for name in _BOUNDS if name in layers}
    check_bounds(given, where)
    clamps = []
    units = _units(block.packed.array(), lambda row: (f"{where}.data", f" in row {row}"))
    for row, layer in enumerate(block.layers):
        low, high, strength = _bounds({name: numbers[row] for name, numbers in given.items()}, where, f" in row {row}")
        clamps.append(Clamp(layer, hook, next(units), low, high, strength, gate))
    return clamps


def _units(directions: npt.NDArray[Any], place: Callable[[int], tuple[str, str]]) -> Iterator[bytes]:
    """Yield each direction of `[n, hidden_size]` at length 1, computed in float64 and rounded to float32 once.

    place: returns the field of a row, and the place inside it, for the message.
    """
    count, width = directions.shape
    step = max(1, _NUMBERS_AT_ONCE // width)
    for begin in range(0, count, step):
        values = widened(directions[begin : begin + step]).astype(np.float64)
        squares = np.square(values).sum(axis=1)
        for row in np.flatnonzero(squares < _SQUARE_MIN):
            largest = np.abs(values[row]).max()
            if largest == 0.0:
                field, at = place(begin + row)
                raise UsageError(explain(field, got=f"a zero vector{at}", expected="a direction"))
            values[row] /= largest
            squares[row] = np.square(values[row]).sum()
        values /= np.sqrt(squares)[:, np.newaxis]
        # Adding 0 turns negative zeros into positive ones.
        units = values.astype(np.float32) + np.float32(0)
        yield from (unit.tobytes() for unit in units)
