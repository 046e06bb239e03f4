"""The overload policies: what happens when a queue is full, who may choose which, and the default."""

from __future__ import annotations

import enum


class WhenFull(enum.StrEnum):
    """What happens when a queue is full."""

    BLOCK = "block"
    """The sender waits. Nothing is lost, memory is bounded, and the sender becomes as slow as the receiver."""

    DROP = "drop"
    """The sender never waits. The newest rows are lost, counted, and named in the request's result."""

    SKIP = "skip"
    """The sender never waits. The oldest rows are discarded to admit the newest, and so are rows that waited for more
    than a second: lost, counted, named in the request's result. For live views."""

    SPILL = "spill"
    """Rows go to a spool on disk and are read from it in order: a worker's rows when memory is full, a consumer's
    always. A full spool blocks or drops."""


POLICIES_OF_WORKERS = (WhenFull.BLOCK, WhenFull.DROP, WhenFull.SPILL)
"""The policies that a worker may have. A consumer may have any."""

FALLBACKS = (WhenFull.BLOCK, WhenFull.DROP)
"""The policies of a full spool."""

POLICY_DEFAULT = WhenFull.BLOCK
"""The default of workers, consumers and full spools: nothing is lost, and nothing is written to a disk that nobody
named."""
