"""vLLM's answers with capflow's members in their JSON objects, whole or streamed. All else stays unchanged.

The last chunk of a stream has the members. In a stream of completions it finishes every choice, or has the usage; in
one of the Responses API it is the event `response.completed`, or `response.incomplete` at a limit of tokens; in one of
messages it is the event `message_stop`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import JSONResponse

Members = Callable[[], Awaitable[bytes]]
"""Returns the members as JSON, with a comma before them."""

_DONE = "data: [DONE]"
_WHOLE = ("event: response.completed\n", "event: response.incomplete\n")
_STOPPED = "event: message_stop\n"
_BEGINS = ("event: message_start\n", "event: response.created\n", "event: response.in_progress\n")


def extended(response: JSONResponse, members: bytes) -> Response:
    """Return a response with members put into its JSON object."""
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    body = bytes(response.body)
    return Response(body[:-1] + members + body[-1:], response.status_code, headers, background=response.background)


async def completions_stream(chunks: Any, members: Members) -> AsyncIterator[str]:
    """Yield a stream's chunks as they come, the last of them with members.

    A chunk that may be the last, with usage or a finished choice, is held until the next chunk comes.
    """
    held: str | None = None
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if held is not None and chunk.startswith(_DONE):
                yield _inserted(held, (await members()).decode())
                held = None
            elif held is not None and not chunk.startswith(":"):  # not a comment, which keeps the connection alive
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
            if chunk.startswith(_WHOLE):
                kind, _, data = chunk.partition("\n")
                event = msgspec.json.decode(data.removeprefix("data:"))
                more = msgspec.json.decode(b"{" + (await members())[1:] + b"}")
                event["response"] = {**event["response"], **more}
                yield f"{kind}\ndata: {msgspec.json.encode(event).decode()}\n\n"
            else:
                yield chunk


async def messages_stream(chunks: Any, members: Members) -> AsyncIterator[str]:
    """Yield a stream's events as they come, the one that ends it with members."""
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield _inserted(chunk, (await members()).decode()) if chunk.startswith(_STOPPED) else chunk


async def begun(chunks: Any) -> AsyncIterator[str]:
    """Return a stream's chunks once the answer begins, so that a refusal of the request is raised before that."""
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
    """Return whether a chunk may be the last with text."""
    if '"choices":[]' not in chunk and '"finish_reason":"' not in chunk:
        return False
    try:
        event = msgspec.json.decode(chunk.removeprefix("data:"))
    except msgspec.DecodeError:
        return False
    choices = event.get("choices") if isinstance(event, dict) else None
    return choices is not None and all(choice.get("finish_reason") is not None for choice in choices)


def _inserted(chunk: str, members: str) -> str:
    end = chunk.rindex("}")
    return chunk[:end] + members + chunk[end:]
