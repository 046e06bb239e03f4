"""The turns: in which order the hub's thread handles what its peers sent, so that none waits for another for long.

It belongs to the hub's thread and does no I/O. Each peer has a line of messages, handled in order. The next step is
that of the peer whose messages have taken the least time so far; a step is one message, or a slice of one that takes
longer. Invariant: a peer that sends little waits for at most one step of another peer, however much the others send.

What is read and not handled is bounded: a worker's frames by its credit, all else by a share of
`limits.READ_AHEAD_BYTES_MAX`, and one large message beside: a frame that costs more than all credit is sent unpaid when
nothing else is under way. Who sends more at once is to be cut off: the library has no way to read from some connections
only.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from capflow import limits
from capflow.protocol.session import FRAME_PARTS, Parts, cost

_MESSAGE_BYTES = 1024  # what a message weighs beside its bytes

Handle = Callable[[bytes, Parts, str], Iterator[None]]
"""Handles one message of a connection and a user; yields where another peer may have its turn."""


@dataclass(eq=False)
class _Line:
    """The messages of one peer that the hub has not handled."""

    # The messages that wait, each with its user and its weight in bytes.
    messages: deque[tuple[Parts, str, int]] = field(default_factory=deque)
    # The weight of all messages except `large`.
    weight_bytes: int = 0
    # The one message, if any, that takes more than half of the bytes that may wait; not one of several frames.
    large: Parts | None = None
    # The message that is being handled, when it is in slices.
    step: Iterator[None] | None = None


class Turns:
    """The lines of all peers that wait, and how much of the thread's time each peer has had."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        # The line of each connection; an empty line is removed.
        self._lines: dict[bytes, _Line] = {}
        # A heap of the lines: seconds used, order of arrival, connection.
        self._next: list[tuple[float, int, bytes]] = []
        self._order = itertools.count()
        # Seconds used, by connection. A connection with less counts as much as the one that was served last.
        self._used_s: dict[bytes, float] = {}
        self._served_s = 0.0

    def __contains__(self, peer: object) -> bool:
        """Return whether something of a peer waits to be handled."""
        return peer in self._lines

    @property
    def waiting(self) -> bool:
        """Whether anything waits to be handled."""
        return bool(self._lines)

    def put(self, peer: bytes, parts: Parts, user: str, share_bytes: int, paid_bytes: int) -> bool:
        """Queue a message after the earlier ones of its peer; return False when the peer has sent too much at once.

        share_bytes: how many bytes of each peer may wait; fewer when many peers have messages.
        paid_bytes: how many more bytes may wait, by a worker's credit.
        """
        weight = cost(parts) + _MESSAGE_BYTES
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _Line()
            self._queue(peer)
        bound = paid_bytes + self._share(share_bytes)
        if line.large is None and len(parts) <= FRAME_PARTS and 2 * weight > bound:
            line.large = parts
        elif line.weight_bytes + weight > bound:
            return False
        else:
            line.weight_bytes += weight
        line.messages.append((parts, user, weight))
        return True

    def drop(self, peer: bytes) -> None:
        """Forget the messages of a peer that are not begun."""
        line = self._lines.get(peer)
        if line is not None:
            line.messages.clear()
            line.weight_bytes, line.large = 0, None

    def run(self, seconds: float) -> None:
        """Handle what waits, for that long or until nothing waits; one step at least."""
        now = time.perf_counter()
        until = now + seconds
        while self._next:
            now = self._serve(now, until)
            if now >= until:
                break
        self._forget()

    def _serve(self, now: float, until: float) -> float:
        """Take steps of the next peer until another is due or the time is over; return the time."""
        used, _, peer = heapq.heappop(self._next)
        line = self._lines[peer]
        try:
            while line.messages or line.step is not None:
                self._served_s = used
                try:
                    self._take_step(peer, line)
                finally:
                    then, now = now, time.perf_counter()
                    used += now - then
                if now >= until or (self._next and self._next[0][0] <= used):
                    break
        finally:
            self._used_s[peer] = used
            if line.messages or line.step is not None:
                self._queue(peer)
            else:
                del self._lines[peer]
        return now

    def _forget(self) -> None:
        """Forget how much time peers have had that are owed nothing by it; of too many, all."""
        if not self._lines:
            self._served_s = max(self._used_s.values(), default=self._served_s)
            self._used_s.clear()
        elif len(self._used_s) > limits.SESSIONS_MAX:
            self._used_s = {peer: used for peer, used in self._used_s.items() if used > self._served_s}
            if len(self._used_s) > limits.SESSIONS_MAX:
                self._used_s.clear()

    def _take_step(self, peer: bytes, line: _Line) -> None:
        step, line.step = line.step, None
        if step is None:
            parts, user, weight = line.messages.popleft()
            if parts is line.large:
                line.large = None
            else:
                line.weight_bytes -= weight
            step = self._handle(peer, parts, user)
        for _ in step:
            line.step = step  # it yielded: there is more of it
            break

    def _share(self, share_bytes: int) -> int:
        """Return how much may wait in each line beside what is paid for."""
        even = limits.READ_AHEAD_BYTES_MAX // max(1, len(self._lines))
        return min(max(even, limits.READ_AHEAD_EACH_BYTES_MIN), share_bytes)

    def _queue(self, peer: bytes) -> None:
        used = max(self._used_s.get(peer, 0.0), self._served_s)
        heapq.heappush(self._next, (used, next(self._order), peer))
