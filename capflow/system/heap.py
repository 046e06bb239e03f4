"""The heap: free memory that the C library keeps, given back to the system.

glibc has an arena of memory for each of several threads, and gives back only what is free at the end of an arena. Large messages are
received, decoded and answered in several threads: after a burst of them each arena keeps about as much memory as the burst took there.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from capflow import limits


@contextlib.contextmanager
def trimmed() -> Iterator[None]:
    """Give back what is free every `limits.TRIM_S`, on a thread; nothing where the C library is not glibc."""
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
