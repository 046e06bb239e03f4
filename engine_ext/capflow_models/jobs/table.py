"""A table of plain text on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capflow.text.printable import printable


def print_table(names: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """Print lines under the names of their columns. Numbers are on the right; None is a dash."""
    cells = [[printable(name) for name in names], *([_text(value) for value in line] for line in lines)]
    left = [all(isinstance(line[column], str) for line in lines) for column in range(len(names))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    for row in cells:
        padded = [
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else printable(str(value))
