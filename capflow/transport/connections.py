"""The connections of a hub's socket: which have a session, and which are closed.

It belongs to the thread that polls the socket. Connections are known by their descriptors, as the library's monitor tells of them. One
without a session is closed after `limits.HANDSHAKE_S_MAX`; when there are too many, the oldest of these are closed at once, so that
descriptors are left for files and consumers.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from capflow import limits


@dataclass
class _Connection:
    """since: when it was accepted, or lost its session; None while it has one."""

    since: float | None
    # The names that it speaks under, and the key of each.
    peers: dict[bytes, str] = field(default_factory=dict)


class Connections:
    """All connections, by descriptor.

    connections_max: how many there may be.
    """

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        # By `shut`.
        self.closed = 0
        # Oldest first.
        self._connections: dict[int, _Connection] = {}
        # Descriptor by name, while it is connected.
        self._speakers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def accepted(self, descriptor: int, now: float) -> None:
        """Note a new connection; close the oldest without a session when there are too many."""
        self.gone(descriptor)
        self._connections[descriptor] = _Connection(now)

    def gone(self, descriptor: int) -> None:
        """Note that a connection is closed."""
        connection = self._connections.pop(descriptor, None)
        for peer in connection.peers if connection is not None else ():
            if self._speakers.get(peer) == descriptor:
                del self._speakers[peer]

    def knows(self, peer: bytes) -> bool:
        """Return whether it is known which connection a name belongs to."""
        return peer in self._speakers

    def speaks(self, peer: bytes, descriptor: int, user: str) -> None:
        """Note under which name, and with which key, a connection speaks."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.since = None  # until the next sweep knows better
            connection.peers[peer] = user
            self._speakers[peer] = descriptor

    def cut(self, peer: bytes) -> None:
        """Close the connection that speaks under a name."""
        descriptor = self._speakers.get(peer)
        if descriptor is not None:
            self._close(descriptor)

    def close_most(self) -> None:
        """Close the oldest connections without a session, as far as there are too many."""
        without = [descriptor for descriptor, each in self._connections.items() if each.since is not None]
        too_many = max(len(without) - limits.CONNECTIONS_IDLE_MAX, len(self._connections) - self.connections_max)
        for descriptor in without[: max(0, too_many)]:
            self._close(descriptor)

    def sweep(self, now: float, settled: Callable[[bytes], bool], allows: Callable[[str], bool]) -> None:
        """Close the connections whose key is not allowed any more, and those that are without a session for too long.

        settled: whether a name has a session, or may stay without one.
        allows: whether a key may be connected; not asked about "".
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
        """Close a connection; the library, which owns the descriptor, notices and gives it back."""
        self.gone(descriptor)
        self.closed += 1
        with contextlib.suppress(OSError):  # it is closed already
            connection = socket.socket(fileno=descriptor)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
