"""A child process that does engine work for a command. Its log is kept if it failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capflow.errors import CapflowError, UsageError, explain

_LOOK_S = 1.0
# CPU time below this part of a processor is no progress.
_BUSY_PART_MIN = 0.01


def last_event(
    module: str, arguments: Sequence[str], kind: str, work: str, *, still_s: float | None = None
) -> dict[str, Any]:
    """Run `python -m module` to its end and return its last event, which must be of `kind`.

    work: the name of the work in errors.
    still_s: the child is killed after so many seconds in which it uses no CPU; None waits for it.

    Raises UsageError or CapflowError with the child's message, and CapflowError if the child ends without an event or
    is killed.
    """
    with tempfile.NamedTemporaryFile(prefix="capflow-", suffix=".log", delete=False) as log:
        command = [sys.executable, "-m", module, *arguments]
        do = f"see {log.name}"
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process:
            try:
                output = _output(process, still_s)
            except BaseException:
                process.kill()
                raise
        if output is None:
            raise CapflowError(explain(work, got=f"no progress for {still_s:g} s", do=do))
    event = next((read for line in reversed(output.splitlines()) if (read := _event(line)) is not None), None)
    if event is None or event["event"] not in (kind, "error"):
        code = process.returncode
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise CapflowError(explain(work, got=f"the process ended with {ended}", do=do))
    if event["event"] != "error":
        Path(log.name).unlink()
        return event
    if event["usage"]:
        Path(log.name).unlink()
        raise UsageError(event["message"])
    raise CapflowError(explain(event["message"], do=do))


def _output(process: subprocess.Popen[bytes], still_s: float | None) -> bytes | None:
    """Return what a process wrote until its end; None if it was killed."""
    used_s, moved = 0.0, time.monotonic()
    while True:
        try:
            return process.communicate(timeout=None if still_s is None else min(_LOOK_S, still_s))[0]
        except subprocess.TimeoutExpired:
            assert still_s is not None
            if (now_s := _cpu_s(process.pid)) > used_s + _BUSY_PART_MIN * still_s:
                used_s, moved = now_s, time.monotonic()
            elif time.monotonic() - moved > still_s:
                # A process that it started may hold its output open, so that is not read to its end.
                process.kill()
                process.wait()
                return None


def _cpu_s(pid: int) -> float:
    """Return the CPU time, in seconds, of a child and of its own children that have ended."""
    times = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(line)
    except ValueError:
        return None
    return read if isinstance(read, dict) and "event" in read else None
