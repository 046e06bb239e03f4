"""`capflow spool` in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def capflow_spool(*arguments, **options):
    command = [sys.executable, "-m", "capflow", "spool", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **options)
