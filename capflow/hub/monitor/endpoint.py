"""The endpoint: `/metrics`, `/healthz` and `/readyz` of a hub over HTTP.

Everything is read at the time of the request, on a thread of that request. The threads of the hub and of the consumers
never wait for it. A client that sends nothing, or nonsense, costs one thread for at most `limits.HTTP_HEAD_S_MAX`.
There are at most `limits.HTTP_CLIENTS_MAX` clients; the one that has waited longest with its request makes room for the
next. The answers hold nothing that was captured, and no request changes anything.

Why this is not `prometheus_client.make_wsgi_app` on `wsgiref`: the bounds on clients are most of this file, and stay.
Tried, that is 237 lines in the place of 232; wsgiref also sends a body with the answer to HEAD, and prints tracebacks.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import ipaddress
import json
import logging
import re
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require
from capflow.hub.health import problems
from capflow.hub.hub import Hub

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

logger = logging.getLogger("capflow.hub.endpoint")

_LISTEN = re.compile(r"(?:(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):)?(?P<port>[0-9]{1,5})")
_PORT_MAX = 65_535
_INDEX = b"/metrics  for Prometheus\n/healthz  whether the hub lives\n/readyz   whether it is ready\n"


def parse_listen(address: str | None, where: str) -> tuple[str, int] | None:
    """Return host and port of `PORT`, which is on loopback, `HOST:PORT` or `[HOST]:PORT`; the host is an IP address.

    None if no address is given. Raises UsageError for anything else, and where the packages of the extra `metrics` are
    missing.
    """
    if address is None:
        return None
    require("metrics", where)
    match = _LISTEN.fullmatch(address)
    if match is not None and int(match["port"]) <= _PORT_MAX:
        host = match["six"] or match["host"] or "127.0.0.1"
        host = "127.0.0.1" if host == "localhost" else host
        with contextlib.suppress(ValueError):
            if (ipaddress.ip_address(host).version == 6) == bool(match["six"]):
                return host, int(match["port"])
    expected = f"PORT, HOST:PORT or [HOST]:PORT, a port of 0..{_PORT_MAX} and an IP address"
    raise UsageError(explain(where, got=address, expected=expected))


class Endpoint:
    """Serves the state of a hub, from `start` to `stop`. After `start`, `url` is the address without a path."""

    def __init__(self, hub: Hub, host: str, port: int) -> None:
        from capflow.hub.monitor.metrics import registry_of

        self.host, self.port = host, port
        self.url = ""
        self._hub = hub
        self._registry = registry_of(hub)
        # Set from `start` to `stop`.
        self._server: _Server | None = None
        # Set from `start` to `stop`, too.
        self._thread: threading.Thread | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    def start(self) -> None:
        """Listen; raises CapflowError when the port cannot be had."""
        try:
            self._server = _Server(self.host, self.port, self._hub, self._registry)
        except OSError as e:
            in_use = e.errno == errno.EADDRINUSE
            got = f"{self.host}:{self.port}, " + ("in use" if in_use else e.strerror or str(e))
            do = "stop what listens there, or use port 0 for any free one" if in_use else ""
            raise CapflowError(explain("--metrics-address", got=got, expected="a free port", do=do)) from e
        self.port = self._server.server_address[1]
        self.url = f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(limits.IDLE_S,), name="capflow-endpoint", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(limits.LINGER_S)
            self._server = self._thread = None


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One thread for each request, and not too many."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, hub: Hub, registry: CollectorRegistry) -> None:
        self.hub = hub
        self.registry = registry
        # Taken while a request is read or served.
        self._places = threading.BoundedSemaphore(limits.HTTP_CLIENTS_MAX)
        # Whose request is not read yet, oldest first.
        self._asking: dict[socket.socket, None] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Return the next connection; wait a little when there is no descriptor for it, which leaves it where it is."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(limits.IDLE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self._cut_oldest()
            if not self._places.acquire(timeout=limits.IDLE_S):
                self.shutdown_request(request)
                return
        self._asking[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self.asked(request)
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.asked(request)
            self._places.release()

    def asked(self, request: socket.socket) -> None:
        """Note that a request is read: it is served to its end."""
        self._asking.pop(request, None)

    def _cut_oldest(self) -> None:
        """End the connection that has waited longest with its request."""
        for request in list(self._asking)[:1]:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  socketserver's signature
        """Log nothing about a client that went away, or sent nothing in time."""
        logger.debug("a request failed", exc_info=True)  # noqa: LOG014  called in one


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request, and then the connection is closed."""

    server: _Server
    # The longest time for each read.
    timeout = limits.HTTP_HEAD_S_MAX
    server_version = "capflow"
    sys_version = ""

    def setup(self) -> None:
        self._limit(limits.HTTP_HEAD_S_MAX)
        super().setup()

    def finish(self) -> None:
        self._timer.cancel()
        super().finish()

    def do_GET(self) -> None:
        """Answer."""
        self.server.asked(self.connection)
        self._timer.cancel()
        self._limit(limits.HTTP_S_MAX)
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path in ("/healthz", "/livez"):
            self._health("alive", ["the hub's thread stands still"] if self._hub.stuck(time.monotonic()) else [])
        elif path == "/readyz":
            self._health("ready", problems(self._hub, time.monotonic()))
        elif path == "/":
            self._say(HTTPStatus.OK, "text/plain; charset=utf-8", _INDEX)
        else:
            self._say(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"not found; there is:\n" + _INDEX)

    do_HEAD = do_GET  # noqa: N815  http.server's name

    @property
    def _hub(self) -> Hub:
        return self.server.hub

    def _metrics(self) -> None:
        try:
            from prometheus_client.exposition import choose_encoder

            encode, content_type = choose_encoder(self.headers.get("Accept") or "")
            body = encode(self.server.registry)
        except Exception:
            logger.exception("the metrics cannot be read")
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", b"see the hub's log\n")
            return
        self._say(HTTPStatus.OK, content_type, body)

    def _health(self, word: str, reasons: list[str]) -> None:
        body = json.dumps({word: not reasons, "state": self._hub.state.value, "problems": reasons}).encode() + b"\n"
        self._say(HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK, "application/json", body)

    def _say(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _limit(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _cut(self) -> None:
        """End a connection that takes too long, whatever it is at."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is over

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: what clients get wrong is theirs."""
