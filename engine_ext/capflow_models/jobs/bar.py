"""The bar of a job that counts answers or runs: of Rich in a terminal, of tqdm in a notebook."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def counting_bar(console: Console) -> Progress | NotebookBar:
    """Return a bar with a count and both times; it shows nothing where there is neither terminal nor notebook."""
    if in_notebook():
        return NotebookBar()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBar:
    """Bars of tqdm, with the part of Rich's interface that jobs use."""

    disable = False

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._bars: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def add_task(self, description: str, *, total: int, completed: int = 0) -> int:
        """Show a bar; return its number."""
        from tqdm.auto import tqdm

        bar = self._stack.enter_context(tqdm(desc=description, total=total, initial=completed))
        self._bars.append(bar)
        return len(self._bars) - 1

    def update(self, task: Any, *, completed: int) -> None:
        """Set how much is done."""
        bar = self._bars[task]
        bar.update(completed - bar.n)
