"""The taps of a hub: clients that are sent a copy of every frame that it takes, as far as they keep up.

It belongs to the hub's thread and does no I/O of its own. What always holds: a tap holds no worker's credit and no consumer's frame;
at most `limits.TAP_BYTES_MAX` (and one frame, if it is larger) are on the way to a tap that has not said that it took them. What
comes meanwhile it skips, counted, and goes on with the newest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.hub.peers.log import PeerLog
from capflow.hub.requests.request import KnownEngine
from capflow.protocol.message import Watched
from capflow.protocol.session import Parts


@dataclass
class _Tap:
    """One client that taps. credit_bytes: what may still be sent; all else counts since it joined."""

    name: str
    owner: str
    credit_bytes: int = 0
    frames: int = 0
    bytes: int = 0
    skipped_frames: int = 0
    skipped_bytes: int = 0
    behind: bool = False  # whether the last frame was skipped


class Taps:
    """Every tap of a hub, by connection. send: takes what is to go out; say: a message. log: where it stands who taps."""

    def __init__(
        self, send: Callable[[bytes, Parts], None], say: Callable[[bytes, Watched], None], log: PeerLog
    ) -> None:
        self._send = send
        self._say = say
        self._log = log
        self._taps: dict[bytes, _Tap] = {}  # until they leave
        self._count = Shares("taps", limits.TAPS_MAX, owners_max=max(1, limits.TAPS_MAX // 4), unit="taps")
        # Counters over all taps, those that left too.
        self.frames = 0  # copies sent
        self.bytes = 0
        self.skipped_frames = 0

    def __len__(self) -> int:
        return len(self._taps)

    def __contains__(self, peer: bytes) -> bool:
        """Return whether a client taps."""
        return peer in self._taps

    def take(self, peer: bytes, name: str, owner: str, credit_bytes: int, engines: Iterable[KnownEngine]) -> None:
        """Take what a tap says: it may be sent more. The first time it is told of the engines that there are.

        Raises RoomError when there are too many.
        """
        tap = self._taps.get(peer)
        if tap is None:
            self._count.take(owner, 1)
            tap = self._taps[peer] = _Tap(name, owner)
            event = {"event": "tap_opened", "tap": name}
            self._log.say(logging.INFO, peer, time.monotonic(), "%s taps this hub", name, event=event)
            for engine in engines:
                self._say(peer, Watched(engine.name, engine.model))
        tap.credit_bytes = min(tap.credit_bytes + credit_bytes, limits.TAP_BYTES_MAX)

    def gone(self, peer: bytes) -> None:
        """Forget a client."""
        tap = self._taps.pop(peer, None)
        if tap is not None:
            self._count.give(tap.owner, 1)
            event = {"event": "tap_closed", "tap": tap.name, "skipped_frames": tap.skipped_frames}
            text = "%s left; it skipped %d frames"
            self._log.say(logging.INFO, peer, time.monotonic(), text, tap.name, tap.skipped_frames, event=event)

    def frame(self, parts: Parts, nbytes: int) -> None:
        """Send a frame, as it came, to every tap that has room for it."""
        for peer, tap in self._taps.items():
            if nbytes > tap.credit_bytes and tap.credit_bytes < limits.TAP_BYTES_MAX:
                tap.skipped_frames += 1
                tap.skipped_bytes += nbytes
                self.skipped_frames += 1
                if not tap.behind:
                    tap.behind = True
                    event = {"event": "tap_behind", "tap": tap.name, "skipped_frames": tap.skipped_frames}
                    text = "%s does not keep up; it skips frames"
                    self._log.say(logging.WARNING, peer, time.monotonic(), text, tap.name, event=event)
                continue
            tap.behind = False
            tap.credit_bytes -= nbytes
            tap.frames += 1
            tap.bytes += nbytes
            self.frames += 1
            self.bytes += nbytes
            self._send(peer, parts)

    def greet(self, engine: KnownEngine) -> None:
        """Tell of an engine that connected."""
        for peer in self._taps:
            self._say(peer, Watched(engine.name, engine.model))

    def lose(self, engine: KnownEngine, replica: int | None, stage: int | None) -> None:
        """Tell that an engine is gone, or one replica of it, or one pipeline stage of that."""
        for peer in self._taps:
            self._say(peer, Watched(engine.name, replica=replica, stage=stage))

    def status(self) -> list[dict[str, Any]]:
        """Return each tap's counters."""
        return [
            {
                "tap": tap.name,
                "frames": tap.frames,
                "bytes": tap.bytes,
                "skipped_frames": tap.skipped_frames,
                "skipped_bytes": tap.skipped_bytes,
            }
            for tap in list(self._taps.values())
        ]
