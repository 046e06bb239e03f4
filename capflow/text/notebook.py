"""How objects look in a notebook: a table of HTML with a caption. Every text is escaped.

A class uses it with `_repr_html_ = html_fields` in its body, or builds its own table with `html_table`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from capflow.text.brief import named_fields


def html_table(columns: Sequence[str], lines: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return a table of texts as HTML.

    caption: shown above it; a repr keeps its brackets.
    """
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    head = _line("th", columns)
    return f"<table>{above}{head}{''.join(_line('td', line) for line in lines)}</table>"


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def html_fields(value: Any) -> str:
    """Return a table of the fields of a struct, dataclass or named tuple that its short repr has."""
    return html_table(["field", "value"], named_fields(value), type(value).__name__)
