"""The watchers: clients that get a copy of each frame that the hub takes, as long as they keep up.

Invariant: a watcher holds no worker's credit and no consumer's frame. At most `limits.TAP_BYTES_MAX`, or one larger
frame, are on the way to a watcher that has not granted more credit. It skips the frames that arrive meanwhile, which
are counted, and goes on with the newest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.hub.effects import Effects, Log, Send
from capflow.hub.requests.request import KnownEngine
from capflow.protocol.message import Watched, WatchedEvent, WatchRequest, encode
from capflow.protocol.session import Parts
from capflow.steering.action import Answered


@dataclass
class _Watcher:
    """One client that watches.

    owner: the owner of its place.
    credit_bytes: how many bytes may still be sent.
    behind: whether it skipped the last frame.
    events: whether it gets the answers to actions.
    """

    name: str
    owner: str
    credit_bytes: int = 0
    frames: int = 0
    bytes: int = 0
    skipped_frames: int = 0
    skipped_bytes: int = 0
    behind: bool = False
    events: bool = False


class Watchers:
    """Every watcher of a hub, by connection. The counters include watchers that left."""

    def __init__(self, effects: Effects) -> None:
        # The frames and bytes that were sent to watchers.
        self.frames = 0
        self.bytes = 0
        self.skipped_frames = 0
        self._effects = effects
        self._watchers: dict[bytes, _Watcher] = {}
        self._count = Shares("taps", limits.TAPS_MAX, owners_max=max(1, limits.TAPS_MAX // 4), unit="taps")

    def __len__(self) -> int:
        return len(self._watchers)

    def __contains__(self, peer: bytes) -> bool:
        """Return whether a client watches."""
        return peer in self._watchers

    def take(self, peer: bytes, name: str, owner: str, request: WatchRequest, engines: Iterable[KnownEngine]) -> None:
        """Add credit of a watcher. A new watcher also gets the engines.

        Raises RoomError if there are too many watchers.
        """
        watcher = self._watchers.get(peer)
        if watcher is None:
            self._count.take(owner, 1)
            watcher = self._watchers[peer] = _Watcher(name, owner)
            self._log(logging.INFO, peer, {"event": "tap_opened", "tap": name}, "%s watches this hub", name)
            for engine in engines:
                self._effects.say(peer, Watched(engine.name, engine.model))
        watcher.credit_bytes = min(watcher.credit_bytes + request.credit_bytes, limits.TAP_BYTES_MAX)
        watcher.events = request.events

    def gone(self, peer: bytes) -> None:
        """Forget a client."""
        watcher = self._watchers.pop(peer, None)
        if watcher is not None:
            self._count.give(watcher.owner, 1)
            event = {"event": "tap_closed", "tap": watcher.name, "skipped_frames": watcher.skipped_frames}
            args = (watcher.name, watcher.skipped_frames)
            self._log(logging.INFO, peer, event, "%s left; it skipped %d frames", *args)

    def frame(self, parts: Parts, nbytes: int) -> None:
        """Send a frame, unchanged, to each watcher with enough credit."""
        for peer, watcher in self._watchers.items():
            if nbytes > watcher.credit_bytes and watcher.credit_bytes < limits.TAP_BYTES_MAX:
                self._skip(peer, watcher, nbytes)
                continue
            watcher.behind = False
            watcher.credit_bytes -= nbytes
            watcher.frames += 1
            watcher.bytes += nbytes
            self.frames += 1
            self.bytes += nbytes
            self._effects.add(Send(peer, parts))

    def tell(self, answered: Answered) -> None:
        """Send the answer to an action to each watcher that wants it and has credit for it."""
        message = WatchedEvent(answered)
        nbytes = len(encode(message))
        for peer, watcher in self._watchers.items():
            if watcher.events and nbytes <= watcher.credit_bytes:
                watcher.credit_bytes -= nbytes
                self._effects.say(peer, message)

    @property
    def minds_actions(self) -> bool:
        """Whether a watcher gets the answers to actions."""
        return any(watcher.events for watcher in self._watchers.values())

    def _skip(self, peer: bytes, watcher: _Watcher, nbytes: int) -> None:
        watcher.skipped_frames += 1
        watcher.skipped_bytes += nbytes
        self.skipped_frames += 1
        if not watcher.behind:
            watcher.behind = True
            event = {"event": "tap_behind", "tap": watcher.name, "skipped_frames": watcher.skipped_frames}
            self._log(logging.WARNING, peer, event, "%s does not keep up; it skips frames", watcher.name)

    def greet(self, engine: KnownEngine) -> None:
        """Tell each watcher that an engine connected."""
        for peer in self._watchers:
            self._effects.say(peer, Watched(engine.name, engine.model))

    def lose(self, engine: KnownEngine, replica: int | None, stage: int | None) -> None:
        """Tell each watcher that an engine is gone, or one replica of it, or one pipeline stage of that."""
        for peer in self._watchers:
            self._effects.say(peer, Watched(engine.name, replica=replica, stage=stage))

    def _log(self, level: int, peer: bytes, event: dict[str, Any], text: str, *args: object) -> None:
        self._effects.add(Log(level, text, args, event, peer))

    def status(self) -> list[dict[str, Any]]:
        """Return each watcher's counters."""
        return [
            {
                "tap": watcher.name,
                "frames": watcher.frames,
                "bytes": watcher.bytes,
                "skipped_frames": watcher.skipped_frames,
                "skipped_bytes": watcher.skipped_bytes,
            }
            for watcher in list(self._watchers.values())
        ]
