"""Commands that record and replay, and the files that they leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from capflow.cli import main
from capflow.plugins.configure import configure, load_plugins

KNOWN = load_plugins()


def record(path, **options):
    return configure("record", {"path": str(path), "fsync": False, **options}, KNOWN)


def tree(root: Path) -> dict[str, bytes]:
    """Return every file below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def run(words):
    """Run the command line in this process; return its exit code."""
    before = sys.argv
    sys.argv = ["capflow", *words]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    return ended.value.code or 0
