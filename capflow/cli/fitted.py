"""Tables and lines that fit a terminal of any width.

Invariant: no cell is wrapped, and only the first column of a table is shortened. A table that is too wide leaves out
whole columns, the least important first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
# Longer names are shortened rather than a column with a rank below `_SPARE_RANK` left out.
_NAME_LENGTH = 18
_SPARE_RANK = 7
# Between the parts of a line.
_SEPARATOR = "   "


class Column(NamedTuple):
    """A column of a table.

    rank: 0 for a column that is never left out. Of the others, that with the highest rank is left out first. From 7 on,
        a column is left out also if names would be shortened otherwise.
    sort: the name by which rows can be sorted by this column; empty if they cannot.
    left: whether it is aligned to the left.
    """

    title: str
    rank: int
    sort: str = ""
    left: bool = False


class SortOrder(NamedTuple):
    """The order of rows: by which column, and whether in reverse. Numbers begin with the largest, names with A."""

    by: str
    reverse: bool = False


class TableRow(NamedTuple):
    """A row of a table: its name, its cells in the order of the other columns, and its values by which rows are sorted.

    style: the style of the whole row.
    """

    name: str
    cells: Sequence[Text | str]
    values: Mapping[str, Any]
    style: str = ""


class FittedTable:
    """A table whose first column is names.

    columns: that of the names first.
    order: by which column the rows are sorted, if the table has it; None leaves them as they are.
    rows_max: the largest number of rows that are shown.
    shorten: returns a name in at most so many cells.
    unlisted: how many rows there are beside `rows`, and words that say which.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[TableRow],
        *,
        order: SortOrder | None,
        shorten: Callable[[str, int], str],
        rows_max: int | None = None,
        unlisted: tuple[int, str] = (0, ""),
    ) -> None:
        self._columns = columns
        self._mark = "" if order is None else " ▴" if order.reverse else " ▾"
        self._sort = "" if order is None else order.by
        has_column = self._sort in {column.sort for column in columns if column.sort}
        self._rows = _sorted(rows, order) if order is not None and has_column else list(rows)
        self._shorten = shorten
        self._left_out = 0 if rows_max is None else max(0, len(rows) - rows_max)
        self._rows = self._rows[: len(rows) - self._left_out]
        self._unlisted = unlisted

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        titles = [self._title(column) for column in self._columns]
        cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row.cells] for row in self._rows]
        widths = [
            max([cell_len(title), *(row[number - 1].cell_len for row in cells)]) for number, title in enumerate(titles)
        ]
        name_length = max(map(cell_len, [titles[0], *(row.name for row in self._rows)]))
        shown = list(range(len(titles)))
        # Columns of little importance give way to whole names, and the others to names that can be told apart.
        for length, rank in ((name_length, _SPARE_RANK), (max(_NAME_LENGTH, cell_len(titles[0])), 1)):
            widths[0] = min(name_length, length)
            spare = sorted((n for n in shown if self._columns[n].rank >= rank), key=lambda n: self._columns[n].rank)
            while spare and _total(shown, widths) > options.max_width:
                shown.remove(spare.pop())
        widths[0] = max(1, min(name_length, widths[0] + options.max_width - _total(shown, widths)))
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold cyan", expand=False)
        for number in shown:
            is_left = self._columns[number].left or not number
            table.add_column(titles[number], justify="left" if is_left else "right", no_wrap=True)
        for row, row_cells in zip(self._rows, cells, strict=True):
            name = self._shorten(row.name, widths[0])
            if cell_len(name) > widths[0]:  # characters that are two cells wide
                name = set_cell_size(name, widths[0] - 1) + "…"
            table.add_row(name, *(row_cells[number - 1] for number in shown[1:]), style=row.style)
        unlisted, which = self._unlisted
        more = [f"and {self._left_out} more"] if self._left_out else []
        more += [f"{unlisted} {which}"] if unlisted else []
        if more:
            table.caption, table.caption_justify = ", ".join(more), "left"
        yield table

    def _title(self, column: Column) -> str:
        return column.title + self._mark if column.sort and column.sort == self._sort else column.title


class LineOfParts:
    """Parts in one line. Where they do not fit, it is broken between two of them; a part that is too long is folded."""

    def __init__(self, *parts: Text | str) -> None:
        self._parts = [Text(part) if isinstance(part, str) else part for part in parts if part]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [Text(overflow="fold")]
        for part in self._parts:
            if lines[-1] and lines[-1].cell_len + len(_SEPARATOR) + part.cell_len > options.max_width:
                lines.append(Text(overflow="fold"))
            lines[-1].append(_SEPARATOR if lines[-1] else "").append_text(part)
        yield from lines


def _sorted(rows: Sequence[TableRow], order: SortOrder) -> list[TableRow]:
    """Return the rows that have a value by it, and then the others."""
    having = [row for row in rows if row.values.get(order.by) is not None]
    is_name = bool(having) and isinstance(having[0].values[order.by], str)
    having.sort(key=lambda row: row.values[order.by], reverse=is_name == order.reverse)
    return having + [row for row in rows if row.values.get(order.by) is None]


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[number] for number in shown) + _GAP * (len(shown) - 1)
