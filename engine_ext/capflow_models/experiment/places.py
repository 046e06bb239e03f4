"""The lines of a TOML file at which its keys are, for errors. `tomllib` does not keep them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]#]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_LONG_STRING = re.compile(r'"""|\'\'\'')

Key = tuple[str | int, ...]
"""The place of a value: keys, and numbers of elements of arrays of tables."""


def lines_of(text: str) -> dict[Key, int]:
    """Return the line of each key and each table of a TOML file, from 1. Lines within long strings are skipped."""
    lines: dict[Key, int] = {(): 1}
    table: Key = ()
    counts: Counter[Key] = Counter()
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        quotes = len(_LONG_STRING.findall(line))
        if inside:
            inside = quotes % 2 == 0
            continue
        if header := _HEADER.match(line):
            table = _parts(header[2])
            if header[1] == "[[":
                counts[table] += 1
                table = (*table, counts[table] - 1)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[1]))
            for end in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:end], number)
        inside = quotes % 2 == 1
    return lines


def line_of(lines: dict[Key, int], path: Sequence[str | int]) -> int:
    """Return the line of a value, or of the innermost table around it that has a line."""
    for end in range(len(path), -1, -1):
        if (line := lines.get(tuple(path[:end]))) is not None:
            return line
    return 1


def _parts(text: str) -> Key:
    return tuple(part.strip("\"'") for part in _PART.findall(text))
