"""Answers of vLLM's, extended: members put into a JSON object, whole or streamed. All else is as it was.

A stream of completions ends with a chunk that finishes every choice, or the one with usage; one of the Responses API with
the event `response.completed`, one of messages with the event `message_stop`. That chunk has the members.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import JSONResponse

Members = Callable[[], Awaitable[bytes]]
"""Asks for the members: JSON, behind a comma."""

_DONE = "data: [DONE]"
_COMPLETED = "event: response.completed\n"
_STOPPED = "event: message_stop\n"
_BEGINS = ("event: message_start\n", "event: response.created\n", "event: response.in_progress\n")


def extended(response: JSONResponse, members: bytes) -> Response:
    """Return a response with members put into its JSON object."""
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    body = bytes(response.body)
    return Response(body[:-1] + members + body[-1:], response.status_code, headers, background=response.background)


async def completions_stream(chunks: Any, members: Members) -> AsyncIterator[str]:
    """Yield a stream's chunks as they come, the last of them with members.

    A chunk that may be the last, the one with usage or one that finishes a choice, is held until the next one is there.
    """
    held: str | None = None
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if held is not None and chunk.startswith(_DONE):
                yield _inserted(held, (await members()).decode())
                held = None
            elif held is not None and not chunk.startswith(":"):  # comments keep the connection alive
                yield held
                held = None
            if _may_be_last(chunk):
                held = chunk
            else:
                yield chunk
        if held is not None:
            yield held


async def responses_stream(chunks: Any, members: Members) -> AsyncIterator[str]:
    """Yield a stream's events as they come, that of the whole response with members in it."""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if chunk.startswith(_COMPLETED):
                event = msgspec.json.decode(chunk.removeprefix(_COMPLETED).removeprefix("data:"))
                more = msgspec.json.decode(b"{" + (await members())[1:] + b"}")
                event["response"] = {**event["response"], **more}
                yield f"{_COMPLETED}data: {msgspec.json.encode(event).decode()}\n\n"
            else:
                yield chunk


async def messages_stream(chunks: Any, members: Members) -> AsyncIterator[str]:
    """Yield a stream's events as they come, the one that ends it with members."""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield _inserted(chunk, (await members()).decode()) if chunk.startswith(_STOPPED) else chunk


async def begun(chunks: Any) -> AsyncIterator[str]:
    """Return a stream's chunks once one says anything of the answer: what refuses the request is raised here, before there is one."""
    held = []
    async for chunk in chunks:
        held.append(chunk)
        if not chunk.startswith(_BEGINS):
            break

    async def rest() -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):
            for chunk in held:
                yield chunk
            async for chunk in chunks:
                yield chunk

    return rest()


def _may_be_last(chunk: str) -> bool:
    """Return whether no more text need follow a chunk."""
    if '"choices":[]' not in chunk and '"finish_reason":"' not in chunk:
        return False
    try:
        said = msgspec.json.decode(chunk.removeprefix("data:"))
    except msgspec.DecodeError:
        return False
    choices = said.get("choices") if isinstance(said, dict) else None
    return choices is not None and all(choice.get("finish_reason") is not None for choice in choices)


def _inserted(chunk: str, members: str) -> str:
    end = chunk.rindex("}")
    return chunk[:end] + members + chunk[end:]
