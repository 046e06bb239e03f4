"""The connections of a hub's socket: which of them have a session, and which are closed.

They belong to the thread that polls the socket, and are identified by the descriptors that the library's monitor
reports. A connection without a session is closed after `limits.HANDSHAKE_S_MAX`. If there are too many, the oldest of
these are closed at once, so that descriptors are left for files and consumers.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from capflow import limits


@dataclass
class _Connection:
    """A connection.

    since: when it was accepted or lost its session; None while it has a session.
    """

    since: float | None
    # The routing ids of its messages, each with its key.
    peers: dict[bytes, str] = field(default_factory=dict)


class Connections:
    """All connections, by descriptor.

    connections_max: how many connections there may be.
    """

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        # How many connections were closed here.
        self.closed = 0
        # Oldest first.
        self._connections: dict[int, _Connection] = {}
        # The descriptor of each connected routing id.
        self._speakers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def accepted(self, descriptor: int, now: float) -> None:
        """Add a new connection."""
        self.gone(descriptor)
        self._connections[descriptor] = _Connection(now)

    def gone(self, descriptor: int) -> None:
        """Remove a closed connection."""
        connection = self._connections.pop(descriptor, None)
        for peer in connection.peers if connection is not None else ():
            if self._speakers.get(peer) == descriptor:
                del self._speakers[peer]

    def knows(self, peer: bytes) -> bool:
        """Return whether the connection of a routing id is known."""
        return peer in self._speakers

    def speaks(self, peer: bytes, descriptor: int, user: str) -> None:
        """Record the routing id and the key of a connection."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.since = None  # until the next sweep checks it
            connection.peers[peer] = user
            self._speakers[peer] = descriptor

    def cut(self, peer: bytes) -> None:
        """Close the connection of a routing id."""
        descriptor = self._speakers.get(peer)
        if descriptor is not None:
            self._close(descriptor)

    def close_most(self) -> None:
        """Close the oldest connections without a session if there are too many."""
        without = [descriptor for descriptor, each in self._connections.items() if each.since is not None]
        too_many = max(len(without) - limits.CONNECTIONS_IDLE_MAX, len(self._connections) - self.connections_max)
        for descriptor in without[: max(0, too_many)]:
            self._close(descriptor)

    def sweep(self, now: float, settled: Callable[[bytes], bool], allows: Callable[[str], bool]) -> None:
        """Close the connections whose key is no longer allowed, and those without a session for too long.

        settled: returns whether a routing id has a session, or may stay without one.
        allows: returns whether a key may be connected; not called without a key.
        """
        for descriptor, connection in list(self._connections.items()):
            if any(user and not allows(user) for user in connection.peers.values()):
                self._close(descriptor)
            elif any(map(settled, connection.peers)):
                connection.since = None
            elif connection.since is None:
                connection.since = now
            elif now - connection.since > limits.HANDSHAKE_S_MAX:
                self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        """Shut a connection down; the library owns the descriptor and closes it."""
        self.gone(descriptor)
        self.closed += 1
        with contextlib.suppress(OSError):  # it is closed already
            connection = socket.socket(fileno=descriptor)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
