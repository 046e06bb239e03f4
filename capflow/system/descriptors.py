"""The limit of file descriptors of this process, and how many of them connections may use."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from capflow import limits


def raise_limit() -> None:
    """Raise the soft limit to `limits.DESCRIPTORS_WANTED` or the hard limit, whichever is lower. Never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, limits.DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system with a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_max() -> int:
    """Return how many connections a hub that starts now may take. The rest is for its files and consumers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    have = limits.DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else min(soft, limits.DESCRIPTORS_WANTED)
    kept = max(limits.DESCRIPTORS_KEPT_MIN, int(have * limits.DESCRIPTORS_KEPT_SHARE))
    return max(1, have - _open_now() - kept)


def _open_now() -> int:
    """Return how many descriptors are open in this process; 0 without `/proc`."""
    with contextlib.suppress(OSError):
        return len(list(Path("/proc/self/fd").iterdir()))
    return 0
