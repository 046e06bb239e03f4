"""Dictionaries that keep their newest entries."""

from __future__ import annotations

from typing import Any


def keep_newest(entries: dict[Any, Any], count_max: int) -> int:
    """Remove the oldest entries until at most `count_max` are left; return how many were removed."""
    excess = max(0, len(entries) - count_max)
    for _ in range(excess):
        del entries[next(iter(entries))]
    return excess
