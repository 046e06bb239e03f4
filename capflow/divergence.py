"""What an engine may do if its ranks steer differently; it imports nothing, so command lines may read it."""

from __future__ import annotations

ON_DIVERGENCE = ("warn", "freeze", "abort")
"""Report it, freeze the engine, or abort the requests."""

ON_DIVERGENCE_DEFAULT = "warn"
