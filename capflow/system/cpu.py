"""The processor time of this process's threads."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

_PREFIX = "capflow-"


def thread_times_ns() -> dict[str, int]:
    """Return the processor time of each running thread of capflow, in nanoseconds, by name without `capflow-`.

    Threads of one name count as one. It is empty on systems without `/proc/self/task/*/schedstat` (Linux' proc(5)).
    The clock of a thread (`pthread_getcpuclockid`) is not asked: that is undefined for a thread that just ended.
    """
    times: Counter[str] = Counter()
    for thread in threading.enumerate():
        if thread.name.startswith(_PREFIX) and thread.native_id is not None:
            try:
                line = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text("ascii")
            except OSError:
                continue
            times[thread.name.removeprefix(_PREFIX)] += int(line.split()[0])
    return dict(times)
