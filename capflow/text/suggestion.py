"""Suggests names that are close to a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NAMES_MAX = 3
_PREFIX_LENGTH_MIN = 2


def closest(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three of `names` that are close to `name`, the closest first.

    A name is close if it begins with `name` or is spelled almost like it. Case does not count, nor whether words are
    joined by `-` or `_`.
    """
    by_spelling = {_spelling(each): each for each in names}
    spelling = _spelling(name)
    begins = [each for each in by_spelling if len(spelling) >= _PREFIX_LENGTH_MIN and each.startswith(spelling)]
    similar = difflib.get_close_matches(spelling, by_spelling, _NAMES_MAX)
    return [by_spelling[each] for each in dict.fromkeys([*begins, *similar])][:_NAMES_MAX]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the question `did you mean A or B?`; empty if no name is close."""
    close = closest(name, names)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _spelling(name: str) -> str:
    return name.casefold().replace("_", "-")
