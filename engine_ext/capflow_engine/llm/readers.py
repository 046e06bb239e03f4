"""The consumers that requests may name, by hub. A request that names another one is refused before it runs.

Invariants: a hub that does not answer within a second, or is of an earlier version, causes no refusal here; the results
then report each name. A hub that listens and does not answer delays one request in ten seconds, not each.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

from capflow.capture.spec import CaptureByConsumer
from capflow.errors import CapflowError, UsageError, explain
from capflow_engine.hubs import HubAt
from capflow_engine.request.options import RequestOptions
from capflow_engine.settings import Settings

_ANSWER_S = 1.0
# How long an answer, or its absence, holds.
_KNOWN_S = 10.0


class Readers:
    """The consumers that each hub of an engine last reported. Safe for any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hubs = [_Hub(hub) for hub in settings.hubs]

    def check(self, options: Sequence[RequestOptions]) -> None:
        """Raise UsageError if a capture names a consumer that the request's hub does not have. May wait for the hub."""
        for one in options:
            if not isinstance(one.capture, CaptureByConsumer):
                continue
            named = frozenset(one.capture.by_name)
            for number in {self._settings.hub_of(name) for name in one.names}:
                readers = self._hubs[number].readers(named)
                strangers = () if readers is None else sorted(named - readers)
                if strangers and readers is not None:
                    expected = (
                        f"one of the hub's: {', '.join(sorted(readers)) or 'none, for no consumer reads requests'}"
                    )
                    raise UsageError(explain("capture", got=f"consumer {strangers[0]}", expected=expected))

    async def check_async(self, options: Sequence[RequestOptions]) -> None:
        """As `check`, on a thread of its own: an event loop must not wait."""
        if any(isinstance(one.capture, CaptureByConsumer) for one in options):
            await asyncio.to_thread(self.check, options)


class _Hub:
    def __init__(self, at: HubAt) -> None:
        self._at = at
        # Guards what follows.
        self._lock = threading.Lock()
        self._known: frozenset[str] = frozenset()
        # Until when `_known` holds, on the monotonic clock.
        self._until = 0.0
        # Until when a hub that did not answer is not asked, on the same clock.
        self._silent_until = 0.0

    def readers(self, named: frozenset[str]) -> frozenset[str] | None:
        """Return the consumers that requests may name; None if the hub does not say. Asks the hub for unknown names."""
        with self._lock:
            if named <= self._known and time.monotonic() < self._until:
                return self._known
            try:
                if time.monotonic() < self._silent_until or not self._at.is_listening():
                    return None
                with self._at.client(_ANSWER_S) as client:
                    readers = client.readers
            except CapflowError:
                self._silent_until = time.monotonic() + _KNOWN_S
                return None
            if readers is None:
                return None
            self._known, self._until = frozenset(readers), time.monotonic() + _KNOWN_S
            return self._known
