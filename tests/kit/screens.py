"""What a terminal shows."""

from __future__ import annotations

import io

from rich.console import Console


def shown(renderable, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(renderable)
    return console.file.getvalue()
