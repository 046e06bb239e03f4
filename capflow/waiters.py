"""The waiters: clients that asked what became of requests that are not over."""

from __future__ import annotations

from capflow import limits
from capflow.errors import RemoteProtocolError, explain

Asked = tuple[str, str]
"""An engine as a client named it, empty for any, and the id of a request."""


class Waiters:
    """Clients by the request they wait for; a client leaves when it is answered or gone."""

    def __init__(self) -> None:
        self._clients: dict[Asked, set[bytes]] = {}  # by request
        self._count = 0  # of all pairs

    def add(self, request: Asked, client: bytes) -> None:
        """Have a client wait.

        Raises RemoteProtocolError when too much is waited for.
        """
        if self._count >= limits.AWAITED_MAX:
            expected = f"at most {limits.AWAITED_MAX}"
            raise RemoteProtocolError(explain("requests waited for", got=self._count + 1, expected=expected))
        clients = self._clients.setdefault(request, set())
        self._count += client not in clients
        clients.add(client)

    def waits(self, request: Asked) -> bool:
        """Return whether someone waits for the request."""
        return request in self._clients

    def pop(self, request: Asked) -> set[bytes]:
        """Remove and return those who wait for the request."""
        clients = self._clients.pop(request, set())
        self._count -= len(clients)
        return clients

    def gone(self, client: bytes) -> None:
        """Forget a client."""
        for request, clients in list(self._clients.items()):
            if client in clients:
                self._count -= 1
                clients.discard(client)
                if not clients:
                    del self._clients[request]
