"""The endpoint plugin: vLLM's routes with capflow's fields, the route of results later, and the routes of steering.

`capflow serve` names it in `VLLM_PLUGINS`, so that vLLM loads it. Its routes replace vLLM's own. A request without the
fields, while no global state steers, goes to vLLM's own handler unchanged. A request with them is checked here before
anything runs.
Invariant: a capture that fails never fails the answer.
"""

# No postponed annotations: FastAPI reads those of the routes.

import contextlib
import functools
import gc
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.anthropic.api_router import create_messages
from vllm.entrypoints.openai.chat_completion.api_router import create_batch_chat_completion, create_chat_completion
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.utils import random_uuid

from capflow.errors import UsageError, explain
from capflow.text import jsontext
from capflow_engine.compat import engine as compat
from capflow_engine.compat.protocol import ErrorResponse
from capflow_engine.request.beams import searching
from capflow_engine.serve.ask import ParsedRequest
from capflow_engine.serve.ending import Door
from capflow_engine.serve.fields import FIELDS
from capflow_engine.serve.front import Front
from capflow_engine.serve.generate import bringing, steering
from capflow_engine.serve.http import capture_routes, steering_routes
from capflow_engine.serve.http.answers import (
    Members,
    begun,
    completions_stream,
    extended,
    messages_stream,
    responses_stream,
)
from capflow_engine.serve.http.bodies import (
    CapflowBatchChatCompletionRequest,
    CapflowChatCompletionRequest,
    CapflowCompletionRequest,
    CapflowMessagesRequest,
    CapflowResponsesRequest,
)
from capflow_engine.serve.http.middleware import BodyLimit, StrayFields
from capflow_engine.serve.refusals import refused
from capflow_engine.serve.serving import Serving
from capflow_engine.settings import Settings

STEERING_HEADER = "X-Capflow-Steering"
"""The header of each steered answer: the key of its steering."""


class Plugin:
    """What vLLM loads: the routes and their state."""

    name = "capflow"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Replace vLLM's routes, and add those of steering and of results later."""
        answers: dict[int | str, dict[str, Any]] = {
            HTTPStatus.OK.value: {"content": {"text/event-stream": {}}},
            HTTPStatus.BAD_REQUEST.value: {"model": ErrorResponse},
            HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse},
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value: {"model": ErrorResponse},
            HTTPStatus.INTERNAL_SERVER_ERROR.value: {"model": ErrorResponse},
        }
        json_only = [Depends(validate_json_request)]
        for path, route in (
            ("/v1/completions", completions),
            ("/v1/chat/completions", chat_completions),
            ("/v1/chat/completions/batch", batch_chat_completions),
            ("/v1/responses", responses),
            ("/v1/messages", messages),
        ):
            compat.remove_route(app, path)
            app.post(path, dependencies=json_only, responses=answers, response_model=None)(route)
            compat.check_route(app, path, route)
        app.include_router(steering_routes.router)
        app.include_router(capture_routes.router)
        app.include_router(APIRouter(lifespan=_beside))
        app.add_middleware(BodyLimit)
        # Around `BodyLimit`, whose refusals routes raise.
        app.add_middleware(StrayFields)
        # Around both: it counts the requests that are being answered.
        app.add_middleware(Door)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Make the state of the routes; none if the engine is not capflow's."""
        config = engine_client.vllm_config if engine_client is not None else None
        state.capflow = None
        if config is not None and isinstance(config.additional_config, Settings):
            state.capflow = front = Front(config, getattr(args, "capflow", Serving()))
            engine_client.generate = steering(front, engine_client.generate)
            for serving in compat.searchers(state):
                serving.beam_search = searching(serving.beam_search, front.everyone)


@contextlib.asynccontextmanager
async def _beside(app: FastAPI) -> AsyncIterator[None]:
    """Take the signals that end the server, and serve gRPC if asked to, while HTTP is served."""
    front: Front | None = getattr(app.state, "capflow", None)
    if front is None:
        yield
        return
    if (server := getattr(app.state, "server", None)) is not None:
        front.ending.take_signals(server, app.state.engine_client, front.asker)
    try:
        async with contextlib.AsyncExitStack() as stack:
            if front.rpc_address is not None:
                from capflow_engine.serve.rpc.server import served

                await stack.enter_async_context(served(app.state, front, front.rpc_address))
            yield
    finally:
        # vLLM froze its objects. Triton's bindings report objects that are never freed as leaks at the exit.
        gc.unfreeze()


async def completions(request: CapflowCompletionRequest, raw_request: Request) -> Any:
    """Answer a completion request."""
    return await _answer(request, raw_request, create_completion, "cmpl-", _prompts(request))


async def chat_completions(request: CapflowChatCompletionRequest, raw_request: Request) -> Any:
    """Answer a chat completion request."""
    return await _answer(request, raw_request, create_chat_completion, "chatcmpl-", 1)


async def responses(request: CapflowResponsesRequest, raw_request: Request) -> Any:
    """Answer a request of the Responses API."""
    return await _answer(request, raw_request, create_responses, "", 1, stream=responses_stream)


async def batch_chat_completions(request: CapflowBatchChatCompletionRequest, raw_request: Request) -> Any:
    """Answer several conversations, each with one choice."""
    _name(raw_request)
    return await _answer(request, raw_request, create_batch_chat_completion, "chatcmpl-", len(request.messages))


async def messages(request: CapflowMessagesRequest, raw_request: Request) -> Any:
    """Answer a request of the Messages API."""
    _name(raw_request)
    return await _answer(request, raw_request, create_messages, "chatcmpl-", 1, stream=messages_stream)


def _name(raw_request: Request) -> None:
    """Name a request whose body has no name, as a client would: vLLM uses the name in its answer."""
    if "X-Request-Id" not in raw_request.headers:
        raw_request.scope["headers"].append((b"x-request-id", random_uuid().encode()))


async def _answer(
    request: Any,
    raw_request: Request,
    handler: Any,
    kind: str,
    prompts: int,
    *,
    stream: Callable[[Any, Members], AsyncIterator[str]] = completions_stream,
) -> Any:
    """Parse a request, have vLLM's handler answer it, and add capflow's members to the answer.

    kind: the beginning of vLLM's id of the response; empty if the body has that id.
    prompts: how many the request has.
    stream: adds members to a stream.
    """
    front: Front | None = raw_request.app.state.capflow
    given = [name for name in FIELDS if getattr(request, name) is not None]
    if front is None:
        if given:
            do = "start the server with `capflow serve`"
            return refused(UsageError(explain(given[0], expected="nothing", do=do)))
        return await handler(request, raw_request)
    own = raw_request.headers.get("X-Request-Id") if kind else None
    try:
        if given:
            jsontext.check_keys(await raw_request.body(), "body")
        ask = ParsedRequest.of(
            request, front.fit, front.store, id=f"{kind}{own or request.request_id}", prompts=prompts
        )
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(front.running(ask))
            if ask is None:
                return await handler(request, raw_request)
            with bringing(request, ask):
                response = await handler(request, raw_request)
            streams = isinstance(response, StreamingResponse)
            if streams:
                if ask.program is not None and ask.program.patched:
                    # A patch may lie beyond the prompt. That is known, and refused, once the prompt is tokens.
                    response.body_iterator = await begun(response.body_iterator)
                chunks = response.body_iterator
                if ask.reports:
                    chunks = stream(chunks, functools.partial(front.members, ask))
                response.body_iterator = _until_end(chunks, stack.pop_all())
            elif isinstance(response, JSONResponse) and response.status_code == HTTPStatus.OK and ask.reports:
                response = extended(response, await front.members(ask))
            key = front.key(ask, streams=streams)
            if response is not None and key is not None and response.status_code == HTTPStatus.OK:
                response.headers[STEERING_HEADER] = key
            return response
    except UsageError as e:
        return refused(e)


async def _until_end(chunks: Any, running: contextlib.AsyncExitStack) -> AsyncIterator[str]:
    """Yield a stream's chunks; its request runs until the last."""
    async with running, contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield chunk


def _prompts(request: CompletionRequest) -> int:
    """Return how many prompts a completion request has."""
    count = 0
    for given in (request.prompt, request.prompt_embeds):
        if isinstance(given, list):
            count += 1 if given and isinstance(given[0], int) else len(given)
        elif given is not None:
            count += 1
    return max(count, 1)
