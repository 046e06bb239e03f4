"""The waiters: clients that asked what became of requests that are not over."""

from __future__ import annotations

from collections import Counter

from capflow import limits
from capflow.errors import RemoteProtocolError, explain

Asked = tuple[str, str]
"""An engine as a client named it, empty for any, and the id of a request."""


class Waiters:
    """Clients by the request they wait for; a client leaves when it is answered or gone."""

    def __init__(self) -> None:
        self._clients: dict[Asked, bytes | tuple[bytes, ...]] = {}  # by request: one client, or several
        self._count = 0  # of all pairs
        self._waits: Counter[bytes] = Counter()  # for how many each client waits; none is 0

    def __contains__(self, client: bytes) -> bool:
        """Return whether a client waits for any request."""
        return client in self._waits

    def add(self, request: Asked, client: bytes) -> None:
        """Have a client wait.

        Raises RemoteProtocolError when too much is waited for.
        """
        if self._count >= limits.AWAITED_MAX:
            expected = f"at most {limits.AWAITED_MAX}"
            raise RemoteProtocolError(explain("requests waited for", got=self._count + 1, expected=expected))
        waiting = self._of(request)
        if client not in waiting:
            self._count += 1
            self._waits[client] += 1
            self._clients[request] = (*waiting, client) if waiting else client

    def waits(self, request: Asked) -> bool:
        """Return whether someone waits for the request."""
        return request in self._clients

    def pop(self, request: Asked) -> tuple[bytes, ...]:
        """Remove and return those who wait for the request."""
        clients = self._of(request)
        self._clients.pop(request, None)
        self._count -= len(clients)
        for client in clients:
            self._waits[client] -= 1
            if not self._waits[client]:
                del self._waits[client]
        return clients

    def gone(self, client: bytes) -> None:
        """Forget a client."""
        if client not in self._waits:
            return
        for request in [request for request in self._clients if client in self._of(request)]:
            for other in self.pop(request):
                if other != client:
                    self.add(request, other)

    def _of(self, request: Asked) -> tuple[bytes, ...]:
        clients = self._clients.get(request, ())
        return (clients,) if isinstance(clients, bytes) else clients
