"""A child of the command line that does an engine's work: run to its end, its last event read, its log kept when it failed."""

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
    module: str, arguments: Sequence[str], kind: str, what: str, *, limit_s: float | None = None
) -> dict[str, Any]:
    """Run `python -m module`, which tells its parent of its work, and return the last event, which is to be of a kind.

    what: the work, for errors. Raises UsageError and CapflowError with the message of the child's, and CapflowError
        when it ends without one or takes longer than `limit_s`.
    """
    with tempfile.NamedTemporaryFile(prefix="capflow-", suffix=".log", delete=False) as log:
        command = [sys.executable, "-m", module, *arguments]
        do = f"see {log.name}"
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            raise CapflowError(explain(what, got=f"no end in {limit_s:g} s", do=do)) from None
    event = next((read for line in reversed(done.stdout.splitlines()) if (read := _event(line)) is not None), None)
    if event is None or event["event"] not in (kind, "error"):
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise CapflowError(explain(what, got=f"the process ended with {ended}", do=do))
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
