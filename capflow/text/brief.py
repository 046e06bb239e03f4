"""Short reprs on one line: bytes and arrays by their size, long lists, tuples and mappings by their first items.

A class uses it with `__repr__ = brief` in its body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_ITEMS_MAX = 3
_TEXT_MAX = 240  # long enough for an error message
_LENGTH_MAX = 1_000


def brief(value: Any) -> str:
    """Return `Class(field=…, …)` of a struct, dataclass or named tuple, without None, False and empty fields.

    Fields of a dataclass with `repr=False` are left out, too.
    """
    fields = ", ".join(f"{name}={shown}" for name, shown in named_fields(value))
    if len(fields) > _LENGTH_MAX:
        fields = f"{fields[:_LENGTH_MAX]}…"
    return f"{type(value).__name__}({fields})"


def named_fields(value: Any) -> list[tuple[str, str]]:
    """Return the fields that `brief` shows, each with the short repr of its value."""
    held = ((name, getattr(value, name)) for name in _fields(value))
    return [(name, _shown(each)) for name, each in held if not _empty(each)]


def _fields(value: Any) -> Iterable[str]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.repr]
    names: tuple[str, ...] = value._fields
    return names


def _empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | bytes | tuple | list | Mapping) and not value)


def _shown(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return f"<{len(value):,} bytes>"
    if isinstance(value, memoryview):
        return f"<{value.nbytes:,} bytes>"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{value.dtype} {list(value.shape)}>"
    if isinstance(value, str):
        return repr(value) if len(value) <= _TEXT_MAX else f"{value[:_TEXT_MAX]!r}…"
    if isinstance(value, Mapping):
        return _items([f"{key!r}: {_shown(held)}" for key, held in _first(value.items())], len(value), "{}")
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return _items([_shown(held) for held in _first(value)], len(value), "()" if isinstance(value, tuple) else "[]")
    return repr(value)


def _first(items: Any) -> list[Any]:
    return [item for item, _ in zip(items, range(_ITEMS_MAX), strict=False)]


def _items(shown: list[str], count: int, around: str) -> str:
    more = [f"… {count:,} in all"] if count > len(shown) else []
    comma = "," if around == "()" and count == 1 else ""
    return f"{around[0]}{', '.join([*shown, *more])}{comma}{around[1]}"
