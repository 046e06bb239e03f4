"""Health: whether a hub lives, and whether it does what it is there for.

The reasons name consumers and states, never captured data: anyone may read them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class HubState(enum.Enum):
    """Where a hub stands, between its making and its end."""

    STARTING = "starting"
    """Its consumers are being opened; nothing is taken yet."""
    RUNNING = "running"
    HANDING_OVER = "handing over"
    """It takes what comes; engines send new requests to their other hubs."""
    DRAINING = "draining"
    """Nothing is taken any more; the consumers handle what they have."""
    STOPPED = "stopped"


class _Consumer(Protocol):
    @property
    def name(self) -> str: ...

    def trouble(self, now: float) -> str | None: ...


class _Hub(Protocol):
    @property
    def state(self) -> HubState: ...

    @property
    def lanes(self) -> Sequence[_Consumer]: ...

    def stuck(self, now: float) -> bool: ...

    def engine_troubles(self) -> Sequence[str]: ...


def problems(hub: _Hub, now: float) -> list[str]:
    """Return why the hub is not ready; empty when it listens and every consumer and controller gets on."""
    reasons = ["the hub's thread stands still"] if hub.stuck(now) else []
    if hub.state is not HubState.RUNNING:
        return [*reasons, f"the hub is {hub.state.value}"]
    troubles = ((lane.name, lane.trouble(now)) for lane in hub.lanes)
    reasons += [f"consumer {name}: {trouble}" for name, trouble in troubles if trouble is not None]
    return reasons + list(hub.engine_troubles())
