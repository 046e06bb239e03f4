"""The screen of `capflow top`: the tables of a hub's status in the room of a terminal, and the keys."""

from __future__ import annotations

import functools

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.segment import Segment, Segments
from rich.text import Text

from capflow.cli.fitted import SortOrder
from capflow.cli.hub.rates import History
from capflow.cli.hub.view import SORTS, clean, sections, stacked
from capflow.cli.units import human_seconds

# Rows of workers that are shown on a screen of any height.
_ROWS_MIN = 3
# Requests that are shown at the cost of what is in `_OPTIONAL`.
_REQUESTS_MIN = 5
# Left out if there is no room.
_OPTIONAL = ("spools", "taps", "notices")
# Lines of a screen besides the rows of workers and consumers, with a few requests.
_LINES_ELSE = 18


def ordered(order: SortOrder, key: str) -> SortOrder:
    """Return the order of the rows after a key."""
    if key in "sS":
        return order._replace(by=SORTS[(SORTS.index(order.by) + 1) % len(SORTS)])
    return order._replace(reverse=not order.reverse) if key in "rR" else order


class Screen:
    """The content of the screen: the tables, and the keys in its last line.

    The requests have the room that the other tables leave.

    gone: for how many seconds the hub has not answered, and why; None if it answers.
    """

    def __init__(self, address: str, history: History, gone: tuple[float, str] | None, order: SortOrder) -> None:
        self._address = address
        self._history = history
        self._gone = gone
        self._order = order

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        keys = self._keys()
        lines = self._lines(console, options.update(height=None), height - 2)[: max(1, height - 2)]
        for line in lines:
            yield Segments([*line, Segment.line()])
        yield from [Segments([Segment.line()])] * (height - 1 - len(lines))
        yield keys

    def _keys(self) -> Text:
        mark = "▴" if self._order.reverse else "▾"
        keys = f"q leaves   s sorts: {self._order.by} {mark}   r reverses"
        return Text(keys, "dim", no_wrap=True, overflow="ellipsis", end="")

    def _lines(self, console: Console, options: ConsoleOptions, height: int) -> list[list[Segment]]:
        status, gone = self._history.now, self._gone
        if status is None:
            waiting = f"no answer for {human_seconds(gone[0])}; waiting\n{clean(gone[1])}" if gone else "connecting"
            style = "red" if gone else "dim"
            head = Text(f"capflow  {clean(self._address)}", "bold")
            return console.render_lines(Group(head, Text(waiting, style)), options, pad=False)
        note = None if gone is None else Text(f"no answer for {human_seconds(gone[0])}; waiting", "bold red")
        rows_max = max(_ROWS_MIN, height - _LINES_ELSE - len(status["consumers"]))
        drawn = functools.partial(
            sections, status, self._history.rates, rows_max=rows_max, order=self._order, note=note
        )
        parts = drawn(requests_max=_REQUESTS_MIN)
        room = height
        for name, part in list(parts.items()):
            # An empty line stands between two parts.
            lines = len(console.render_lines(part, options)) + (name != "hub")
            if name in _OPTIONAL and lines > room:
                del parts[name]
            else:
                room -= lines
        if "requests" in parts:
            parts["requests"] = drawn(requests_max=max(1, _REQUESTS_MIN + room))["requests"]
        return console.render_lines(stacked(parts.values()), options, pad=False)
