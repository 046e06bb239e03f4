"""The overload policies: what happens when a queue is full, who may choose which, and the default."""

from __future__ import annotations

import enum


class WhenFull(enum.StrEnum):
    """What happens when a queue is full."""

    BLOCK = "block"
    """The sender waits. Nothing is lost; memory is bounded; what is upstream becomes as slow as what is downstream."""

    DROP = "drop"
    """The sender never waits. The newest rows are lost, counted, and named in the request's result."""

    SKIP = "skip"
    """The sender never waits. The oldest rows are discarded to admit the newest: lost, counted, named in the request's
    result. For live views."""

    SPILL = "spill"
    """Rows go to a spool on disk and come from there in order: a worker's when memory is full, a consumer's always. A
    full spool blocks or drops."""


POLICIES_OF_WORKERS = (WhenFull.BLOCK, WhenFull.DROP, WhenFull.SPILL)
"""Those that a worker may have. A consumer may have any."""

FALLBACKS = (WhenFull.BLOCK, WhenFull.DROP)
"""What may happen when a spool is full."""

POLICY_DEFAULT = WhenFull.BLOCK
"""Of workers, of consumers that name none, and of full spools: nothing is lost, and nothing is written to a disk that
nobody named."""
