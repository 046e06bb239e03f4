"""The completion server: its address, as the operator gave it, and the connections to it.

Invariant: no connection goes anywhere else. Redirects are not followed and no proxy is used.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import urlsplit

from capflow.errors import UsageError, explain
from capflow_dashboard import limits

EXAMPLE = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class CompletionServer:
    """A server with OpenAI's routes.

    url: its address without a slash at the end and without `/v1`.
    path: the part of it that stands before `/v1`.
    key: what is sent as `Authorization: Bearer`; empty for nothing.
    """

    url: str
    scheme: str
    host: str
    port: int
    path: str
    key: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str, key: str = "", *, where: str) -> CompletionServer:
        """Return the server at an address. Raises UsageError for what is no address of a server."""
        url = re.sub(r"/(v1/?)?$", "", text)
        expected = f"an address such as {EXAMPLE}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as e:
            raise UsageError(explain(where, got=f"{text}: {e}", expected=expected)) from e
        if "@" in parts.netloc:
            # It may hold a password, which the error does not repeat.
            raise UsageError(explain(where, got="a user in the address", expected=expected))
        if not re.fullmatch("[!-~]+", text) or parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(explain(where, got=text, expected=expected))
        if parts.query or parts.fragment or port == 0:
            raise UsageError(explain(where, got=text, expected=expected))
        usual = 443 if parts.scheme == "https" else 80
        return cls(url, parts.scheme, parts.hostname, port or usual, parts.path, key)

    def connection(self) -> HTTPConnection:
        """Return a connection that is not made yet. The certificate of an https server is checked."""
        if self.scheme == "http":
            return HTTPConnection(self.host, self.port, timeout=limits.AGAIN_CONNECT_S_MAX)
        context = ssl.create_default_context()
        return HTTPSConnection(self.host, self.port, timeout=limits.AGAIN_CONNECT_S_MAX, context=context)

    def headers(self) -> dict[str, str]:
        """Return the headers of each request."""
        sent = {"Content-Type": "application/json", "User-Agent": "capflow-dashboard"}
        return sent | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
