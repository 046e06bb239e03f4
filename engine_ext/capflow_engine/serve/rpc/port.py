"""The port of gRPC: which it is, and that nobody else has it.

The API servers of one engine listen on the same port and share what comes (SO_REUSEPORT). So that no other server gets into
that, the process that starts them holds the port, without listening, for as long as they run.
"""

from __future__ import annotations

import importlib.util
import socket

from capflow.errors import UsageError, explain
from capflow.serve_options import GRPC_PORT as FLAG


def address(host: str, port: int) -> str:
    """Return where gRPC is served, `HOST:PORT`; raise UsageError when what serves it is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("grpc", "grpc_health", "grpc_reflection")):
        raise UsageError(explain(f"{FLAG}: gRPC is not installed", do="pip install 'capflow[grpc]'"))
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hold(address: str) -> socket.socket:
    """Return a socket that holds the port until it is closed; raise UsageError when somebody else has it."""
    host, _, port = address.rpartition(":")
    try:
        (family, kind, _, _, place), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may still be closing
            alone.bind(place)
        held = socket.socket(family, kind)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(place)
    except OSError as e:
        raise UsageError(explain(FLAG, got=f"{address}: {e.strerror}", expected="an address that is free")) from e
    return held
