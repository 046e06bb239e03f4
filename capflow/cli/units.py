"""Numbers formatted for people."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_count(count: float) -> str:
    """Return a number in at most five characters, `12.3k`."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.0f}" if not unit or count >= 99.95 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def human_seconds(seconds: float) -> str:
    """Return a time in its two largest units, `2 h 5 m`, or in tenths of a second."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} m" if hours < 24 else f"{hours // 24} d {hours % 24} h"
