"""The log of what peers do. The number of lines of each kind and of each peer is limited; the rest are counted.

Only the hub's thread uses it. Each kind and each peer may have a burst of lines at once, and after that a fixed number
in a second. `flush` logs in one line how many were left out.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from capflow import limits
from capflow.buffers.newest import keep_newest


class _Bucket:
    """How many lines may be said now, and when that was."""

    __slots__ = ("at", "lines")

    def __init__(self, lines: float, at: float) -> None:
        self.lines, self.at = lines, at

    def fill(self, burst: int, per_s: float, now: float) -> bool:
        """Add what time brought; return whether a line may be said."""
        self.lines = min(float(burst), self.lines + (now - self.at) * per_s)
        self.at = now
        return self.lines >= 1


class PeerLog:
    """Says what peers do, within bounds, by a logger."""

    def __init__(self, logger: logging.Logger) -> None:
        # Lines, since the beginning.
        self.left_out = 0
        self._logger = logger
        # By event: as many as the hub has.
        self._kinds: dict[str, _Bucket] = {}
        # By key or connection; the oldest goes first.
        self._peers: dict[bytes | str, _Bucket] = {}
        # Lines left out by event; emptied by `flush`.
        self._unsaid: Counter[str] = Counter()
        self._flushed_at = 0.0

    def say(
        self, level: int, peer: bytes | str, now: float, text: str, *args: object, event: dict[str, Any], **more: Any
    ) -> None:
        """Log a line about a peer, known by its key or connection, if there is room.

        event: its fields, the event's name under `event`.
        """
        kind = event["event"]
        of_kind = self._kinds.setdefault(kind, _Bucket(limits.LOG_KIND_LINES_MAX, now))
        of_peer = self._peers.pop(peer, None) or _Bucket(limits.LOG_PEER_LINES_MAX, now)
        self._peers[peer] = of_peer
        keep_newest(self._peers, limits.SESSIONS_MAX)
        fits = of_kind.fill(limits.LOG_KIND_LINES_MAX, limits.LOG_KIND_LINES_PER_S, now)
        if not (of_peer.fill(limits.LOG_PEER_LINES_MAX, limits.LOG_PEER_LINES_PER_S, now) and fits):
            self.left_out += 1
            self._unsaid[kind] += 1
            return
        of_kind.lines -= 1
        of_peer.lines -= 1
        self._logger.log(level, text, *args, extra=event, **more)

    def flush(self, now: float) -> None:
        """Say how many lines were left out, if any, and not too often."""
        if not self._unsaid or now - self._flushed_at < limits.LOG_LEFT_OUT_S:
            return
        self._flushed_at = now
        lines = self._unsaid.total()
        text = ", ".join(f"{count} {kind}" for kind, count in sorted(self._unsaid.items()))
        event = {"event": "log_left_out", "lines": lines}
        self._logger.warning("%d lines about peers are left out: %s", lines, text, extra=event)
        self._unsaid.clear()
