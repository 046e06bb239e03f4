"""The gRPC server of one API server: its services, its credentials, and who may call them.

Invariants: it serves while HTTP is served. A client without vLLM's `--api-key` is refused before any of its call is
read. A message is no larger than a body over HTTP may be. Connections and calls are bounded.

Health and reflection need no key, as `/health` and `/openapi.json`.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from vllm import envs

from capflow import limits
from capflow.errors import explain
from capflow.system.descriptors import connections_max
from capflow_engine.serve.api_keys import Keys
from capflow_engine.serve.ending import Ending
from capflow_engine.serve.front import Front
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc import capflow_pb2_grpc
from capflow_engine.serve.rpc.calls import Calls
from capflow_engine.serve.rpc.capture import CaptureService
from capflow_engine.serve.rpc.generation import GenerationService
from capflow_engine.serve.rpc.steering import SteeringService, headers_of

logger = logging.getLogger("vllm.capflow")

GRACE_S = 2.0
"""How long calls may take to end when the server stops."""

_OURS = f"/{pb.DESCRIPTOR.package}."
_SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
_KEEPALIVE_MS_MIN = 10_000
_UNAUTHENTICATED = explain("key", got="none that fits", expected="vLLM's --api-key as `authorization: Bearer KEY`")


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """The engine's health, until the server ends.

    engine: vLLM's client of the engine.
    """

    def __init__(self, engine: Any, ending: Ending) -> None:
        super().__init__()
        self._engine = engine
        self._ending = ending

    async def look(self) -> None:
        """Set the status from the engine's health."""
        status = health_pb2.HealthCheckResponse.SERVING
        try:
            await self._engine.check_health()
        except Exception:  # noqa: BLE001 - any error means that the engine is not well
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        if self._ending.begun:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *_SERVICES):
            await self.set(service, status)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's
        """Return whether a service serves."""
        await self.look()
        return await super().Check(request, context)


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Admits calls of capflow's services that bring one of vLLM's keys."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        # A handler of streams reads nothing before it asks for it.
        self._refusal = grpc.stream_unary_rpc_method_handler(self._refuse)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        headers = headers_of(handler_call_details.invocation_metadata)
        bearer = {"Authorization": headers.get("authorization", "")}
        if handler_call_details.method.startswith(_OURS) and not self._keys.admit(bearer):
            return self._refusal
        return await continuation(handler_call_details)

    @staticmethod
    async def _refuse(_requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _UNAUTHENTICATED)


class _Reader(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses bytes that are no message of capflow's services with `INVALID_ARGUMENT`; gRPC itself uses `INTERNAL`."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        name = handler_call_details.method.rpartition("/")[2]

        def read(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError as e:
                return e

        async def checked(request: Any, context: Any) -> None:
            if isinstance(request, DecodeError):
                expected = f"the message of {name} in this server's capflow.proto"
                wrong = explain("request", got="bytes that are none", expected=expected)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)

        async def answer(request: Any, context: Any) -> Any:
            await checked(request, context)
            return await handler.unary_unary(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await checked(request, context)
            async for response in handler.unary_stream(request, context):
                yield response

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(stream if handler.response_streaming else answer, read, handler.response_serializer)


@contextlib.asynccontextmanager
async def served(state: Any, front: Front, address: str) -> AsyncIterator[None]:
    """Serve while the block runs.

    state: of vLLM's app.
    address: `HOST:PORT`.
    """
    guards: list[grpc.aio.ServerInterceptor] = []
    if tokens := tuple(key for key in (state.args.api_key or [envs.VLLM_API_KEY]) if key):
        guards.append(_Guard(Keys(tokens)))
    calls = Calls(keyed=_OURS if guards else "")
    server = grpc.aio.server(
        interceptors=[*guards, calls, _Reader()],
        options=(
            ("grpc.max_receive_message_length", front.body_bytes_max),
            ("grpc.max_send_message_length", -1),
            # Several API servers share the port.
            ("grpc.so_reuseport", 1),
            ("grpc.max_allowed_incoming_connections", min(limits.RPC_CONNECTIONS_MAX, connections_max())),
            ("grpc.server_handshake_timeout_ms", round(limits.HANDSHAKE_S_MAX * 1000)),
            # The client of a closed connection connects again at its next call.
            ("grpc.max_connection_idle_ms", round(limits.RPC_IDLE_S * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            # An answer may take longer than that.
            ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS_MIN),
        ),
    )
    watch = Health(state.engine_client, front.ending)
    await watch.look()
    generation = GenerationService(front, getattr(state, "openai_serving_completion", None))
    capflow_pb2_grpc.add_GenerateServicer_to_server(generation, server)
    capflow_pb2_grpc.add_CaptureServicer_to_server(CaptureService(front), server)
    capflow_pb2_grpc.add_SteeringServicer_to_server(SteeringService(front), server)
    health_pb2_grpc.add_HealthServicer_to_server(watch, server)
    reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    credentials = _credentials(state.args)
    if credentials is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, credentials)
    await server.start()
    logger.info("gRPC is served on %s", address)
    try:
        yield
    finally:
        await watch.enter_graceful_shutdown()
        await server.stop(GRACE_S)


def _credentials(args: Namespace) -> Any:
    """Return the credentials of vLLM's --ssl-* flags; None without them."""
    if not args.ssl_certfile:
        return None
    certificate = Path(args.ssl_certfile).read_bytes()
    key = Path(args.ssl_keyfile or args.ssl_certfile).read_bytes()
    roots = Path(args.ssl_ca_certs).read_bytes() if args.ssl_ca_certs else None
    asks = args.ssl_cert_reqs == ssl.CERT_REQUIRED
    return grpc.ssl_server_credentials([(key, certificate)], roots, require_client_auth=asks)
