"""Where spools lie."""

from __future__ import annotations

import os
from pathlib import Path

from capflow.errors import UsageError, explain


def default_root() -> Path:
    """Return what spools lie below when the user names no place: `$XDG_STATE_HOME/capflow/spool`, `~/.local/state/…` by default."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "capflow" / "spool"


def check_root(root: Path, where: str = "--spool-dir") -> None:
    """Raise UsageError when nothing can be spilled below a directory."""
    existing = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(explain(where, got=str(existing), expected="a directory that can be written"))
