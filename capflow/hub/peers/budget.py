"""The budget: how much memory a hub takes for what peers send, and for what.

| part | of the whole | what |
|---|---|---|
| `frames` | half | what workers may send, and frames that consumers have not handled |
| `queues` | an eighth | frames in the queues of consumers that drop or skip |
| `state` | an eighth | engines, workers, open requests, their specs and lost rows, actions, awaited names |
| `inboxes` | an eighth | open requests of consumers that spill |
| `results` | an eighth | requests that are over |

The parts that peers fill are shared between them, as `capflow.buffers.shares` does it.
"""

from __future__ import annotations

import os
from pathlib import Path

from capflow import limits
from capflow.buffers.kept import Kept
from capflow.buffers.shares import Shares

_DO = "end some, or start the hub with more --memory-bytes-max"
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Budget:
    """The memory of one hub.

    inboxes: how many consumers spill.
    """

    def __init__(self, bytes_max: int | None = None, *, inboxes: int = 0) -> None:
        self.bytes_max = memory_default() if bytes_max is None else bytes_max
        part = self.bytes_max // 8
        self.frames = Shares("frames under way", min(4 * part, limits.CREDIT_BYTES_TOTAL), do=_DO)
        self.queues_bytes_max = part
        self.state = Shares("memory of the hub", part, do=_DO)
        self.inboxes = tuple(Shares("memory of a consumer's inbox", part // inboxes, do=_DO) for _ in range(inboxes))
        self.results_bytes_max = part

    def status(self, queued_bytes: int, results: Kept) -> dict[str, dict[str, int]]:
        """Return how much of each part is taken, and what it is at most."""
        inboxes = sum(shares.used for shares in self.inboxes), sum(shares.total for shares in self.inboxes)
        taken = {
            "frames": (self.frames.used, self.frames.total),
            "queues": (queued_bytes, self.queues_bytes_max),
            "state": (self.state.used, self.state.total),
            "inboxes": inboxes,
            "results": (results.nbytes, self.results_bytes_max),
        }
        return {part: {"bytes": used, "bytes_max": bound} for part, (used, bound) in taken.items()}


def memory_default() -> int:
    """Return the budget of a hub that is given none: a part of the memory that this process may have."""
    return max(limits.MEMORY_BYTES_MIN, machine_bytes() // limits.MEMORY_PART)


def machine_bytes() -> int:
    """Return how much memory this process may have: of the machine, or of its control group when that is less."""
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CGROUPS):
        try:
            bounds.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # there is none, or it says `max`
            continue
    return min(bounds)
