"""What the output of experiments and of sweeps has in common: values that JSON lacks, and what killed runs leave."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any


def as_json(value: Any) -> Any:
    """Return a value of numbers, texts, mappings and lists as JSON has it: NaN and infinities as text."""
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def remove_leftovers(out: Path, prefix: str) -> None:
    """Remove the captured rows of runs that were killed. The caller holds the lock of the output.

    prefix: how the names of their directories begin.
    """
    for rows in out.glob(f"{prefix}*"):
        shutil.rmtree(rows, ignore_errors=True)
