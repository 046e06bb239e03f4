"""A child process that works for the command line, and tells its parent of it: one JSON object a line on standard output.

Each has its kind as `event`. The last is `error`, with `usage` and `message`, when the work failed; `usage` says that what was asked
for is wrong. The exit code is 0, 1 when something failed, 2 when what was asked for is wrong, 130 when a signal ended it.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from typing import IO, Any

from capflow.errors import CapflowError, UsageError, explain

_INTERRUPTED = 130

Tell = Callable[..., None]
"""Tells of an event, named by the first argument, with fields."""


def own_output() -> IO[str]:
    """Return standard output, by lines; what vLLM prints from here on goes to standard error, and does not mix with it."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def work_for_parent(work: Callable[[Tell], None]) -> int:
    """Do the work; return the exit code."""
    out = own_output()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def tell(event: str, **fields: Any) -> None:
        out.write(json.dumps({"event": event, **fields}) + "\n")

    try:
        work(tell)
    except CapflowError as e:
        usage = isinstance(e, UsageError)
        tell("error", usage=usage, message=str(e))
        return 2 if usage else 1
    except KeyboardInterrupt:  # the parent asked for the end, and knows
        return _INTERRUPTED
    except Exception as e:  # noqa: BLE001 - the parent is told, and standard error has the traceback
        traceback.print_exc()
        tell("error", usage=False, message=explain("the engine failed", got=f"{type(e).__name__}: {e}"))
        return 1
    return 0
