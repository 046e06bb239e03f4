"""A proxy before an S3 server that can refuse what is written, as a store without room does."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from typing import Self

_FULL = b"<?xml version='1.0'?><Error><Code>QuotaExceeded</Code><Message>The bucket is full</Message></Error>"
_ANSWER = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
)


class Refusing:
    """A proxy between `with` and its end.

    only: writes to other paths pass.
    full: while it is set, writes get the answer 403 QuotaExceeded.
    full_later: the same, but only for the parts and the end of uploads that are begun.
    refused: set with the first write that is refused.
    """

    def __init__(self, port: int, only: bytes = b"") -> None:
        self.full = threading.Event()
        self.full_later = threading.Event()
        self.refused = threading.Event()
        refusing = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                client: socket.socket = self.request
                head = b""
                while b"\r\n\r\n" not in head:
                    data = client.recv(65536)
                    if not data:
                        return
                    head += data
                method, path, rest = head.split(b" ", 2)
                later = refusing.full_later.is_set() and b"uploadId=" in path
                if method in (b"PUT", b"POST") and only in path and (refusing.full.is_set() or later):
                    refusing.refused.set()
                    client.sendall(_ANSWER % (len(_FULL), _FULL))
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
                    return
                line, _, fields = rest.partition(b"\r\n")
                # The server closes after its answer, so each request comes on a connection of its own.
                head = b"%b %b %b\r\nConnection: close\r\n%b" % (method, path, line, fields)
                head = head.replace(b"Connection: Keep-Alive\r\n", b"")
                with socket.create_connection(("127.0.0.1", port)) as upstream:
                    upstream.sendall(head)
                    threading.Thread(target=_pipe, args=(client, upstream), daemon=True).start()
                    _pipe(upstream, client)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
