"""Patches: rows of the residual stream replaced by given rows, or moved towards them (activation patching)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.packed import FIELDS, Packed
from capflow.steering.vector import AtSite

_KEYS = ("positions", "vector", "amount", "gate", "index")
_EXAMPLE = '{"post_block": {12: {"positions": [3, -1], "vector": [0.1, …]}}}'


class Patch(AtSite, frozen=True, forbid_unknown_fields=True):
    """Rows for positions of one site: `x ← x + amount · (row - x)`; an amount of 1 replaces `x`.

    positions: counted from the start of the prompt, or from its end if negative (-1 is its last token).
    data: `[positions, hidden_size]` float32 little-endian, a row for each position. With an index, the values of the
        entries in the place of a row, as `entries_row` takes them.
    amount: how far `x` moves towards the row.
    gate: the name of the gate that multiplies the amount; empty without one.
    index: the entries of the row that are replaced: heads where the rows have heads, else single numbers; empty for
        all.
    """

    layer: int
    hook: str
    positions: tuple[int, ...]
    data: bytes
    amount: float = 1.0
    gate: str = ""
    index: tuple[int, ...] = ()

    @property
    def _element_bytes(self) -> int:
        return 4 * len(self.positions) or 1

    def rows(self, shape: tuple[int, ...], width: int) -> npt.NDArray[np.float32]:
        """Return a row for each position, `[positions, width]`; NaN where it leaves the model's number.

        shape: that of the site's rows.
        """
        given = np.frombuffer(self.data, np.float32).reshape(len(self.positions), -1)
        if self.index:
            return np.stack([plain.entries_row(self.index, values, shape, width) for values in given])
        return np.pad(given, ((0, 0), (0, width - given.shape[1])))

    def check(self, sites: Collection[Site], row: int | tuple[int, ...], *, where: str = "steering_patches") -> None:
        """Raise UsageError unless the patch fits a model with these tapped sites and rows of this width or shape.

        where: the field that holds the patches.
        """
        field = f"{where}.{self.hook}.{self.layer}"
        self.site.check_tapped(sites, field)
        read_positions(list(self.positions), f"{field}.positions")
        if self.index:
            shape = (row,) if isinstance(row, int) else row
            plain.check_index(self.index, self.width, shape, field)
        else:
            plain.check_width(self.width, row, field)
        plain.check_finite(np.frombuffer(self.data, np.float32), field)
        plain.number(self.amount, f"{field}.amount")


def parse_patches(value: Any, *, where: str = "steering_patches") -> tuple[Patch, ...]:
    """Return the patches that a plain value describes: `{hook: {layer: patch or [patches]}}`.

    A patch is `{"positions": [whole numbers], "vector": rows, "amount": 1.0, "gate": name}`. Rows are `[hidden_size]`,
    one row for all positions, or `[positions, hidden_size]`: lists, an array, a tensor, or packed as `{"dtype",
    "shape", "data"}` (see `capflow.steering.packed`). A position occurs at most once at a site. With `index`, a number
    or a list, a row has the values of these entries alone: heads where the site's rows have heads, else single numbers.

    Raises UsageError with the field first. Parsed patches are returned unchanged.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(each, Patch) for each in value):
        return tuple(value)
    patches: list[Patch] = []
    for hook, layers in plain.by_hook(value, where, _EXAMPLE):
        for site, field, entry in plain.by_layer(layers, f"{where}.{hook}", hook, "patch"):
            seen: set[int] = set()
            for one, patch in plain.one_or_several(entry, field, "a patch"):
                plain.check_keys(patch, one, _KEYS, ("positions", "vector"))
                positions = read_positions(patch["positions"], f"{one}.positions", seen)
                rows = _rows(patch["vector"], f"{one}.vector", len(positions))
                amount = plain.number(patch.get("amount", 1.0), f"{one}.amount")
                index = plain.read_index(patch["index"], f"{one}.index") if "index" in patch else ()
                patches.append(Patch(*site, positions, rows.tobytes(), amount, plain.gate_name(patch, one), index))
    return tuple(patches)


def read_positions(value: Any, field: str, seen: set[int] | None = None) -> tuple[int, ...]:
    """Return the positions of a list, each of which may occur once.

    seen: the positions of earlier patches of the same site; these positions are added to it.

    Raises UsageError with the field first.
    """
    given = value.tolist() if isinstance(value, np.ndarray) else value
    most = limits.POSITIONS_LISTED_MAX
    if not isinstance(given, list | tuple) or not 0 < len(given) <= most:
        got = f"{len(given)} positions" if isinstance(given, list | tuple) else repr(given)
        raise UsageError(explain(field, got=got, expected=f"a list of 1..{most} positions"))
    seen = set() if seen is None else seen
    for each in given:
        position = plain.whole(each, field, -limits.POSITION_MAX, limits.POSITION_MAX, "a position")
        if position in seen:
            raise UsageError(explain(field, got=f"{position} twice", expected="each position of a site once"))
        seen.add(position)
    if len(seen) > most:
        raise UsageError(explain(field, got=f"{len(seen)} positions", expected=f"at most {most} at a site"))
    return tuple(int(each) for each in given)


def _rows(value: Any, field: str, count: int) -> npt.NDArray[np.float32]:
    """Return a patch's `vector` as rows, `[count, hidden_size]` float32."""
    rows = _given(value, field)
    if rows.ndim == 1:
        rows = np.broadcast_to(rows, (count, rows.size))
    if rows.ndim != 2 or len(rows) != count or not 0 < rows.shape[1] <= limits.HIDDEN_SIZE_MAX:
        expected = f"[hidden_size] or [{count}, hidden_size], a row for each position"
        raise UsageError(explain(field, got=f"shape {list(rows.shape)}", expected=expected))
    return rows.astype(np.float32)


def _given(value: Any, field: str) -> npt.NDArray[Any]:
    if isinstance(value, Mapping):
        plain.check_keys(value, field, FIELDS, FIELDS)
        return Packed.read(value, field, (1, 2)).array()
    if not isinstance(value, list | tuple):
        rows = plain.array(value, field)
        if rows.size:
            plain.check_finite(rows, field)
        return rows
    if not value or not (isinstance(value[0], list | tuple) or bool(getattr(value[0], "shape", None))):
        return plain.vector(value, field)
    several = [plain.vector(row, f"{field}.{index}") for index, row in enumerate(value)]
    for index, row in enumerate(several):
        if row.size != several[0].size:
            expected = f"{several[0].size}, as in the first row"
            raise UsageError(explain(f"{field}.{index}", got=f"{row.size} numbers", expected=expected))
    return np.stack(several)
