"""The end of a program of this package: one line on stderr for an error, and the command line's exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from capflow.errors import CapflowError, UsageError, explain
from capflow.text.printable import printable

# The received SIGINTs. Python drops the exception of a signal that arrives in one of its own callbacks.
_interrupts: list[int] = []


def run_program(work: Callable[[], None]) -> int:
    """Do the work; return the exit code: 0, 2 for a usage error, 1 for any other failure, 130 when interrupted."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        work()
        check_interrupted()
    except UsageError as e:
        return _report(str(e), 2)
    except CapflowError as e:
        return _report(str(e), 1)
    except KeyboardInterrupt:
        return _report("interrupted", 130)
    except Exception as e:
        if os.environ.get("CAPFLOW_TRACEBACK"):
            raise
        do = "set CAPFLOW_TRACEBACK=1 to see where"
        return _report(explain("unexpected", got=f"{type(e).__name__}: {e}", do=do), 1)
    return 0


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed and its exception was dropped."""
    if _interrupts:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal's handler
    _interrupts.append(number)
    raise KeyboardInterrupt


def _report(message: str, code: int) -> int:
    print(printable(f"capflow: {' '.join(message.split())}"), file=sys.stderr)
    return code
