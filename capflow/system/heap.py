"""The heap: returns free memory from the C library to the system.

glibc has several arenas of memory, one for each of several threads, and returns only the free end of an arena. Several
threads receive, decode and answer large messages. After a burst each arena keeps about as much memory as the burst
took.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from capflow import limits


@contextlib.contextmanager
def trimmed() -> Iterator[None]:
    """Return free memory to the system every `limits.TRIM_S` on a thread; without glibc do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_run, args=(trim, ended), name="capflow-heap", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _run(trim: Callable[[int], int], ended: threading.Event) -> None:
    while not ended.wait(limits.TRIM_S):
        trim(0)  # without the interpreter's lock
