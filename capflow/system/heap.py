"""The heap: keeps freed memory for the next messages, and returns it from the C library to the system now and then.

glibc has several arenas of memory, one for each of several threads. It returns the free end of an arena at once, and
large blocks too: then the system clears the same pages again for the next message, which takes as long as to receive
it. What is free inside an arena it never returns. Several threads receive, decode and answer large messages, and after
a burst each arena keeps about as much memory as the burst took.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from capflow import limits

# Parameters of glibc's `mallopt`, with their numbers in `malloc.h`.
_KEPT = {
    # M_TRIM_THRESHOLD: how much of the end of the main arena stays when it is free.
    -1: 1024 * limits.MIB,
    # M_TOP_PAD: the same for other arenas. The system gives this memory only when it is used.
    -2: 64 * limits.MIB,
    # M_MMAP_THRESHOLD: larger blocks are given back at once. It can be no larger.
    -3: 32 * limits.MIB,
}


@contextlib.contextmanager
def trimmed() -> Iterator[None]:
    """Keep freed memory, and return it to the system every `limits.TRIM_S` on a thread; without glibc do nothing.

    The process goes on keeping freed memory afterwards.
    """
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is None:
        yield
        return
    for parameter, value in _KEPT.items():
        library.mallopt(parameter, value)
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
