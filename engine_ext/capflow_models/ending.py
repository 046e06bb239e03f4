"""How a program of this package ends: each error one line on stderr, and the command line's exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from capflow.errors import CapflowError, UsageError, explain
from capflow.text.printable import printable

_interrupts: list[int] = []  # those that came; Python drops the exception of one that comes in a callback of its own


def ended(work: Callable[[], None]) -> int:
    """Do the work; return the exit code: 0, 2 for what the user is to mend, 1 for what failed, 130 when interrupted."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        work()
        check_interrupted()
    except UsageError as e:
        return _said(str(e), 2)
    except CapflowError as e:
        return _said(str(e), 1)
    except KeyboardInterrupt:
        return _said("interrupted", 130)
    except Exception as e:
        if os.environ.get("CAPFLOW_TRACEBACK"):
            raise
        do = "set CAPFLOW_TRACEBACK=1 to see where"
        return _said(explain("unexpected", got=f"{type(e).__name__}: {e}", do=do), 1)
    return 0


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed and nobody noticed."""
    if _interrupts:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal's handler
    _interrupts.append(number)
    raise KeyboardInterrupt


def _said(message: str, code: int) -> int:
    print(printable(f"capflow: {' '.join(message.split())}"), file=sys.stderr)
    return code
