"""Options with several items: a text with commas, a number, or a list of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from capflow.errors import UsageError, explain


def items_of(value: Any, where: str, expected: str) -> list[str]:
    """Return the items of a comma-separated text, of a number or of a list of both, as texts.

    Raises UsageError for another value, and for one without items.
    """
    if isinstance(value, str):
        items = value.split(",")
    elif isinstance(value, Integral):
        items = [str(value)]
    elif isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        items = [str(item) for item in value]
    else:
        raise UsageError(explain(where, got=repr(value), expected=expected))
    if not items:
        raise UsageError(explain(where, got="none", expected=expected))
    return [item.strip() for item in items]
