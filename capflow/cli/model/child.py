"""A child process that does engine work for a command. Its log is kept if it failed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capflow.errors import CapflowError, UsageError, explain


def last_event(
    module: str, arguments: Sequence[str], kind: str, work: str, *, limit_s: float | None = None
) -> dict[str, Any]:
    """Run `python -m module` to its end and return its last event, which must be of `kind`.

    work: the name of the work in errors.
    limit_s: after this time the child is killed.

    Raises UsageError or CapflowError with the child's message, and CapflowError if the child ends without an event or
    takes longer than `limit_s`.
    """
    with tempfile.NamedTemporaryFile(prefix="capflow-", suffix=".log", delete=False) as log:
        command = [sys.executable, "-m", module, *arguments]
        do = f"see {log.name}"
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            raise CapflowError(explain(work, got=f"no end in {limit_s:g} s", do=do)) from None
    event = next((read for line in reversed(done.stdout.splitlines()) if (read := _event(line)) is not None), None)
    if event is None or event["event"] not in (kind, "error"):
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise CapflowError(explain(work, got=f"the process ended with {ended}", do=do))
    if event["event"] != "error":
        Path(log.name).unlink()
        return event
    if event["usage"]:
        Path(log.name).unlink()
        raise UsageError(event["message"])
    raise CapflowError(explain(event["message"], do=do))


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(line)
    except ValueError:
        return None
    return read if isinstance(read, dict) and "event" in read else None
