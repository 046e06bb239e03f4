"""A child process of a command. It reports to its parent on standard output, one JSON object a line.

The field `event` is the kind of an object. When the work fails, the last one is `error`, with `usage` and `message`;
`usage` is true if the user's input is wrong. The exit code is 0, 1 for a failure, 2 for wrong input, 130 for a signal.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import FrameType
from typing import IO, Any

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain

_INTERRUPTED = 130

Tell = Callable[..., None]
"""Reports an event to the parent: its name, and its fields as keywords."""


def own_output() -> IO[str]:
    """Return standard output, line by line. From here on what vLLM prints goes to standard error instead."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


@contextlib.contextmanager
def interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Delay SIGTERM in a block: the yielded function raises KeyboardInterrupt if the signal came.

    An engine of this process can be shut down in order only between two steps. A step that lasts longer than
    `limits.JOB_STEP_S_MAX` after the signal is interrupted, and its rows are lost.
    """
    came = False

    def hold(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal's handler
        nonlocal came
        came = True
        signal.setitimer(signal.ITIMER_REAL, limits.JOB_STEP_S_MAX)

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    alarm = signal.signal(signal.SIGALRM, signal.default_int_handler)
    term = signal.signal(signal.SIGTERM, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGTERM, term)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)


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
    except KeyboardInterrupt:
        # The parent asked for the end.
        return _INTERRUPTED
    except Exception as e:  # noqa: BLE001 - the parent gets the error, and standard error the traceback
        traceback.print_exc()
        broken = _broken_torchvision()
        message = broken or explain("the engine failed", got=f"{type(e).__name__}: {e}")
        tell("error", usage=False, message=message)
        return 1
    return 0


def _broken_torchvision() -> str | None:
    """Return why torchvision does not import, if it is there; vLLM and Transformers then fail with other errors."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return None
    except RuntimeError as e:
        do = "pip uninstall torchvision torchaudio torchcodec, or install their builds for this torch"
        return explain("torchvision", got=f"{e}", expected=f"a build for torch {version('torch')}", do=do)
    return None
