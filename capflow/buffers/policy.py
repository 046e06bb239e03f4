"""The overload policies: what a full queue does with the next frame, and the defaults."""

from __future__ import annotations

from typing import Literal

Fallback = Literal["block", "drop"]
"""What a full queue does. `block`: the sender waits, nothing is lost. `drop`: the newest rows are lost, counted."""


Policy = Literal["block", "drop", "spill"]
"""The same, and `spill`: what has no room goes to disk, and comes from there in order."""


ConsumerPolicy = Literal["block", "drop", "skip", "spill"]
"""The same, and `skip`: the oldest rows make room for the newest, for who shows what happens now. With `spill` everything goes to disk."""


POLICY_DEFAULT: Policy = "block"
"""Of workers: nothing is lost, and nothing is written to a disk that nobody named."""


CONSUMER_POLICY_DEFAULT: ConsumerPolicy = "block"
"""Of consumers that do not say otherwise; those that keep what they are given say `spill`."""


FALLBACK_DEFAULT: Fallback = "block"
"""What holds when a spool is full, of workers and of consumers."""
