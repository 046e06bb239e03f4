"""The port of gRPC.

The API servers of one engine listen on the same port and share its connections (SO_REUSEPORT). The process that starts
them holds the port, without listening, while they run, so that no other server joins them.
"""

from __future__ import annotations

import socket

from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow.serve_options import GRPC_PORT as FLAG


def address(host: str, port: int) -> str:
    """Return the address of gRPC, `HOST:PORT`. Raises UsageError if gRPC is not installed."""
    require("grpc", FLAG)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hold(address: str) -> socket.socket:
    """Return a socket that holds the port until it is closed. Raises UsageError if another process has the port."""
    host, _, port = address.rpartition(":")
    try:
        (family, kind, _, _, place), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as alone:
            # Earlier connections may still be closing.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(place)
        held = socket.socket(family, kind)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(place)
    except OSError as e:
        raise UsageError(explain(FLAG, got=f"{address}: {e.strerror}", expected="an address that is free")) from e
    return held
