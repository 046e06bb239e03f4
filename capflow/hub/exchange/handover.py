"""The handover: a hub that ends has its engines send new requests to their other hubs, and waits for its own.

Invariant: `done` is true only when no scheduler that is connected has a request of this hub, every request that the
hub has seen is over, and no connected worker had a frame for it in the last `limits.HANDOVER_QUIET_S`.
"""

from __future__ import annotations

import math

from capflow import limits
from capflow.hub.effects import Effects
from capflow.hub.peers.roster import Peer, Roster
from capflow.hub.requests.index import RequestIndex
from capflow.protocol.message import Beat, WorkerCounts


class Handover:
    """The handover of a hub; nothing happens before `begin`. Any thread may read `done`."""

    def __init__(self, index: RequestIndex, roster: Roster, effects: Effects) -> None:
        self.done = False
        self._begun = False
        self._index = index
        self._roster = roster
        self._effects = effects
        # The schedulers that have no request of this hub any more, by connection.
        self._without: set[bytes] = set()
        # Since when nothing was left to wait for, on the monotonic clock.
        self._quiet_since: float | None = None

    def begin(self) -> None:
        """Ask each scheduler to send new requests to other hubs."""
        self._begun = True
        for peer, _ in list(self._roster.schedulers()):
            self.greet(peer)
        # Without an engine nothing is under way.
        if not self._roster.engines_connected():
            self._quiet_since = -math.inf
        self.tick()

    def greet(self, peer: bytes) -> None:
        """Ask a scheduler that was welcomed, if the handover has begun."""
        self._without.discard(peer)
        if self._begun:
            self._effects.say(peer, Beat(handover=True))

    def note(self, peer: bytes, beat: Beat) -> None:
        """Take what a scheduler says of the requests of this hub."""
        if beat.handover:
            self._without.add(peer)
        else:
            self._without.discard(peer)

    def tick(self) -> None:
        """See whether the handover is done."""
        if not self._begun:
            return
        self._without &= self._roster.peers.keys()
        now = self._effects.now
        if self._index.requests_open or not all(map(self._has_nothing, self._roster.peers.items())):
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        self.done = self._quiet_since is not None and now >= self._quiet_since + limits.HANDOVER_QUIET_S

    def _has_nothing(self, item: tuple[bytes, Peer]) -> bool:
        peer, member = item
        if member.hello.role == "scheduler":
            return peer in self._without
        if member.source is None or member.hello.former is True:
            return True
        counts = member.source.reported or WorkerCounts()
        return not counts.queued_frames and not counts.unacked_frames
