"""The bar of a job that counts answers or runs: of Rich in a terminal, of tqdm in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def counting_bar(console: Console) -> Progress:
    """Return a bar with a count and both times; it shows nothing where the console is no terminal."""
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


@contextmanager
def notebook_bar(noun: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of tqdm while a block runs in a notebook; yield what takes the counts, of what is done and of all.

    It yields None anywhere else.
    """
    if not in_notebook():
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(desc=noun) as bar:

        def progress(count: int, total: int) -> None:
            bar.total = total
            bar.update(count - bar.n)

        yield progress
