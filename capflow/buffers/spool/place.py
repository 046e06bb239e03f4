"""The default directory of spools."""

from __future__ import annotations

import os
from pathlib import Path

from capflow.errors import UsageError, explain


def default_root() -> Path:
    """Return the default directory of spools: `$XDG_STATE_HOME/capflow/spool`, or `~/.local/state/capflow/spool`."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "capflow" / "spool"


def check_root(root: Path, where: str = "--spool-dir") -> None:
    """Raise UsageError if no spool can be made below a directory."""
    existing = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(explain(where, got=str(existing), expected="a directory that can be written"))
