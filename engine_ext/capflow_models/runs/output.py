"""What the output of experiments and of sweeps has in common: values that JSON lacks, and what killed runs leave."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from capflow.errors import UsageError, explain
from capflow.files import make_directory


def make_output(out: Path, option: str) -> None:
    """Make the directory of the output unless it exists. Raises UsageError, with the option first, if that fails."""
    try:
        make_directory(out)
    except OSError as e:
        got = f"{out}, a file" if out.exists() and not out.is_dir() else f"{out}: {e.strerror}"
        raise UsageError(explain(option, got=got, expected="a directory, or a place for one")) from e


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
