"""How a program of this package ends: each error one line on stderr, and the command line's exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from capflow.errors import CapflowError, UsageError, explain


def ended(work: Callable[[], None]) -> int:
    """Do the work; return the exit code: 0, 2 for what the user is to mend, 1 for what failed, 130 when interrupted."""
    try:
        work()
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


def _said(message: str, code: int) -> int:
    print(f"capflow: {' '.join(message.split())}", file=sys.stderr)
    return code
