"""The waiters: clients that asked what became of requests that are not over."""

from __future__ import annotations

from capflow import limits
from capflow.errors import RemoteProtocolError, explain

Asked = tuple[str, str]
"""An engine as a client named it, empty for any, and the id of a request."""


class Waiters:
    """Clients by the request they wait for; a client leaves when it is answered or gone."""

    def __init__(self) -> None:
        self._clients: dict[Asked, bytes | tuple[bytes, ...]] = {}  # by request: one client, or several
        self._count = 0  # of all pairs

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
            self._clients[request] = (*waiting, client) if waiting else client

    def waits(self, request: Asked) -> bool:
        """Return whether someone waits for the request."""
        return request in self._clients

    def pop(self, request: Asked) -> tuple[bytes, ...]:
        """Remove and return those who wait for the request."""
        clients = self._of(request)
        self._clients.pop(request, None)
        self._count -= len(clients)
        return clients

    def gone(self, client: bytes) -> None:
        """Forget a client."""
        for request in [request for request in self._clients if client in self._of(request)]:
            left = tuple(other for other in self.pop(request) if other != client)
            if left:
                self._clients[request] = left
                self._count += len(left)

    def _of(self, request: Asked) -> tuple[bytes, ...]:
        clients = self._clients.get(request, ())
        return (clients,) if isinstance(clients, bytes) else clients
