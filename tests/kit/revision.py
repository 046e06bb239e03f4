"""The commit of this checkout: a long run reports it, so that each of its numbers can be traced and made again."""

from __future__ import annotations

import subprocess

from tests.kit.sources import ROOT


def revision() -> str:
    """Return the commit, marked where files differ from it; `unknown` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()
