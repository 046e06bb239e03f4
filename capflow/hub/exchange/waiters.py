"""The waiters: clients that asked what became of requests that are not over."""

from __future__ import annotations

from collections import Counter

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.errors import RoomError, explain

Asked = tuple[str, str]
"""An engine as a client named it, empty for any, and the id of a request."""


# The memory of a name for which a client waits.
_WAIT_BYTES = 256
# A client's answered names are forgotten when its list is longer by this than twice the names that it waits for.
_NAMES_MIN = 64


class Waiters:
    """Clients by the request they wait for; a client leaves when it is answered or gone.

    state: the memory that they share.
    """

    def __init__(self, state: Shares) -> None:
        self._state = state
        # The clients that wait for each request: one, or several.
        self._clients: dict[Asked, bytes | tuple[bytes, ...]] = {}
        # The owner of each client that waits.
        self._owners: dict[bytes, str] = {}
        # For how many requests each client waits; never 0.
        self._waits: Counter[bytes] = Counter()
        # The requests for which each client waits, and some that were answered.
        self._named: dict[bytes, list[Asked]] = {}

    def __contains__(self, client: bytes) -> bool:
        """Return whether a client waits for any request."""
        return client in self._waits

    def add(self, request: Asked, client: bytes, owner: str) -> None:
        """Have a client wait. Raises RoomError when it waits for too much."""
        waiting = self._of(request)
        if client in waiting:
            return
        waits = self._waits[client]
        if waits >= limits.AWAITED_MAX:
            got, expected = f"more than {waits:,}", f"at most {limits.AWAITED_MAX:,} of one connection"
            raise RoomError(explain("requests waited for", got=got, expected=expected))
        self._state.take(owner, _cost(request), label="requests waited for")
        self._owners[client] = owner
        self._waits[client] += 1
        self._clients[request] = (*waiting, client) if waiting else client
        named = self._named.setdefault(client, [])
        named.append(request)
        if len(named) > 2 * waits + _NAMES_MIN:
            self._named[client] = [each for each in dict.fromkeys(named) if client in self._of(each)]

    def waits(self, request: Asked) -> bool:
        """Return whether someone waits for the request."""
        return request in self._clients

    def pop(self, request: Asked) -> tuple[bytes, ...]:
        """Remove and return those who wait for the request."""
        clients = self._of(request)
        self._clients.pop(request, None)
        for client in clients:
            self._answered(client, request)
        return clients

    def gone(self, client: bytes) -> None:
        """Forget a client."""
        for request in self._named.get(client, ()):
            waiting = self._of(request)
            if client not in waiting:
                continue
            left = tuple(other for other in waiting if other != client)
            self._answered(client, request)
            if left:
                self._clients[request] = left
            else:
                del self._clients[request]

    def _answered(self, client: bytes, request: Asked) -> None:
        """Note that a client waits for one request less."""
        self._state.give(self._owners[client], _cost(request))
        self._waits[client] -= 1
        if not self._waits[client]:
            del self._waits[client], self._owners[client], self._named[client]

    def _of(self, request: Asked) -> tuple[bytes, ...]:
        clients = self._clients.get(request, ())
        return (clients,) if isinstance(clients, bytes) else clients


def _cost(request: Asked) -> int:
    return _WAIT_BYTES + 4 * len(request[1])
