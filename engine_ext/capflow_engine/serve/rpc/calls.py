"""Bounds the calls of a gRPC server that run at once, shared between keys, or without keys between connections.

Invariant: a call of any service counts from before its message is read until it has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.errors import RoomError
from capflow_engine.serve.rpc.steering import headers_of


class Calls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses a call with `RESOURCE_EXHAUSTED` if its owner has no room.

    keyed: the path of the methods that come with a key, as `authorization`. Calls of other methods belong to their
        connection. Empty for none.
    """

    def __init__(self, keyed: str) -> None:
        self._keyed = keyed
        self._shares = Shares("calls", limits.RPC_CALLS_MAX, unit="calls", do="end some, or try again later")

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return a method's handler that takes a place before it reads."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        key = ""
        if self._keyed and handler_call_details.method.startswith(self._keyed):
            key = headers_of(handler_call_details.invocation_metadata).get("authorization", "")
        handle = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def answer(requests: Any, context: Any) -> Any:
            async with self._place(key, context):
                return await handle(requests if handler.request_streaming else await _first(requests, context), context)

        async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            async with self._place(key, context):
                responses = handle(requests if handler.request_streaming else await _first(requests, context), context)
                if not hasattr(responses, "__aiter__"):  # it writes to the context
                    await responses
                    return
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        yield response

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        behaviour = stream if handler.response_streaming else answer
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _place(self, key: str, context: Any) -> AsyncIterator[None]:
        """Hold a place for a call. Ends the call if there is none."""
        owner = f"key {hash(key):x}" if key else f"connection {context.peer()}"
        try:
            self._shares.take(owner, 1)
        except RoomError as e:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(e))
        try:
            yield
        finally:
            self._shares.give(owner, 1)


async def _first(requests: Any, context: Any) -> Any:
    """Return the one message of a call. Ends the call if there is none."""
    async for request in requests:
        return request
    return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request: got no message, expected one")
