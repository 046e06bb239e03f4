"""The endpoint plugin: `/v1/completions` and `/v1/chat/completions` with capflow's fields, and results in the answer.

vLLM loads it when `VLLM_PLUGINS` names it, which `capflow serve` sees to, and puts its routes in the place of its own. A request without
any of the fields goes to vLLM's own handler and is answered with what that says. One with them is checked here, before
anything runs; a capture that fails never fails the answer.
"""

# No postponed annotations: FastAPI reads those of the routes.

import contextlib
import itertools
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, PrivateAttr
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from capflow.errors import UsageError, explain
from capflow.result import joined
from capflow_engine import compat
from capflow_engine.asker import Asker
from capflow_engine.fields import Asked, path_of
from capflow_engine.options import KEY
from capflow_engine.settings import Settings

_DONE = "data: [DONE]"


class Fields(BaseModel):
    """What a body may have for capflow; the values are checked against the model before anything runs."""

    capture: Any = Field(default=None, description="Which sites and positions to capture.")
    capture_id: Any = Field(default=None, description="What the request is called; by default the response's id.")
    capture_wait: Any = Field(default=None, description="Whether the response waits for the consumers.")
    steering: Any = Field(default=None, description="Vectors to add, by hook and layer.")
    _options: Iterator[dict[str, Any]] | None = PrivateAttr(default=None)  # for each prompt, in order

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's parameters for the next prompt, with what is asked for it."""
        params = super().to_sampling_params(*args, **kwargs)  # type: ignore[misc]
        if self._options is not None:
            params.extra_args = {**(params.extra_args or {}), KEY: next(self._options)}
        return params


class CapflowCompletionRequest(Fields, CompletionRequest):  # type: ignore[misc]
    """The body of `/v1/completions`."""


class CapflowChatCompletionRequest(Fields, ChatCompletionRequest):  # type: ignore[misc]
    """The body of `/v1/chat/completions`."""


class Plugin:
    """What vLLM is given: routes, and what they need of the engine."""

    name = "capflow"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Put the routes in the place of vLLM's."""
        responses: dict[int | str, dict[str, Any]] = {
            HTTPStatus.OK.value: {"content": {"text/event-stream": {}}},
            HTTPStatus.BAD_REQUEST.value: {"model": ErrorResponse},
            HTTPStatus.NOT_FOUND.value: {"model": ErrorResponse},
            HTTPStatus.INTERNAL_SERVER_ERROR.value: {"model": ErrorResponse},
        }
        json_only = [Depends(validate_json_request)]
        for path, route in (("/v1/completions", completions), ("/v1/chat/completions", chat_completions)):
            app.post(path, dependencies=json_only, responses=responses, response_model=None)(route)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002 - vLLM's signature
        """Take what the routes need of the engine; nothing when it is not capflow's."""
        config = engine_client.vllm_config if engine_client is not None else None
        tapped = config is not None and isinstance(config.additional_config, Settings)
        state.capflow = Front(config) if tapped else None


class Front:
    """What the routes of one server share."""

    def __init__(self, vllm_config: Any) -> None:
        self.settings: Settings = vllm_config.additional_config
        self.info = compat.model_info(vllm_config)
        self.asker = Asker(self.settings.hub)
        self.running: WeakValueDictionary[str, Asked] = WeakValueDictionary()  # by what their choices are called

    def take(self, request: Any, raw_request: Request, kind: str, prompts: int) -> Asked:
        """Return what a request asks for, having told it to its parameters.

        Raises UsageError that begins with the path of the field that is wrong.
        """
        said = {name: getattr(request, name) for name in Fields.model_fields}
        own = raw_request.headers.get("X-Request-Id") or request.request_id
        xargs = (request.vllm_xargs or {}).get(KEY)
        asked = Asked.parse(said, xargs, self.info, id=f"{kind}-{own}", prompts=prompts, samples=request.n or 1)
        if request.use_beam_search:
            raise UsageError(explain("use_beam_search", got=True, expected="false, with capture and steering"))
        for name in asked.names:
            if name in self.running:
                raise UsageError(explain("capture_id", got=name, expected="one that no running request has"))
        self.running.update(dict.fromkeys(asked.names, asked))
        request._options = itertools.cycle([options.pack() for options in asked.options])  # noqa: SLF001 - our own field
        return asked

    def leave(self, asked: Asked) -> None:
        """Forget a request that is over."""
        for name in asked.names:
            self.running.pop(name, None)

    async def results(self, asked: Asked) -> bytes:
        """Return what the response says of the capture: members of its JSON object, behind a comma."""
        captures = asked.options[0].capture is not None
        wait_s = self.settings.capture_wait_s if asked.wait else 0.0
        found = await self.asker.ask(asked.names, captures=captures, wait_s=wait_s)
        said: dict[str, Any] = {"capture_results": joined(found)}
        if len(found) > 1:
            said["capture_results_by_choice"] = [found[name] for name in asked.names]
        return b"," + msgspec.json.encode(said)[1:-1]


async def completions(request: CapflowCompletionRequest, raw_request: Request) -> Any:
    """Answer a completion request."""
    return await _answer(request, raw_request, create_completion, "cmpl", _prompts(request))


async def chat_completions(request: CapflowChatCompletionRequest, raw_request: Request) -> Any:
    """Answer a chat completion request."""
    return await _answer(request, raw_request, create_chat_completion, "chatcmpl", 1)


async def _answer(request: Any, raw_request: Request, handler: Any, kind: str, prompts: int) -> Any:
    xargs = request.vllm_xargs
    if request.capture is request.capture_id is request.capture_wait is request.steering is None and not (
        xargs and KEY in xargs
    ):
        return await handler(request, raw_request)
    front: Front | None = raw_request.app.state.capflow
    if front is None:
        return _refused(UsageError(explain("capture", expected="nothing", do="start the server with `capflow serve`")))
    try:
        asked = front.take(request, raw_request, kind, prompts)
    except UsageError as e:
        return _refused(e)
    streams = False
    try:
        response = await handler(request, raw_request)
        if isinstance(response, StreamingResponse):
            streams = True
            response.body_iterator = _streamed(front, asked, response.body_iterator)
        elif isinstance(response, JSONResponse) and response.status_code == HTTPStatus.OK and asked.reports:
            return _extended(response, await front.results(asked))
    finally:
        if not streams:
            front.leave(asked)
    return response


async def _streamed(front: Front, asked: Asked, chunks: Any) -> AsyncIterator[str]:
    """Yield a stream's chunks as they come, the last of them with the results.

    A chunk that may be the last, the one with usage or one that finishes a choice, is held until the next one is there.
    """
    held: str | None = None
    try:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if held is not None and chunk.startswith(_DONE):
                    yield _inserted(held, (await front.results(asked)).decode()) if asked.reports else held
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
    finally:
        front.leave(asked)


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


def _extended(response: JSONResponse, members: bytes) -> Response:
    """Return a response with members put into its JSON object; all else is as it was."""
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    body = bytes(response.body)
    return Response(body[:-1] + members + body[-1:], response.status_code, headers, background=response.background)


def _refused(error: UsageError) -> JSONResponse:
    """Return an error as OpenAI's clients know it."""
    code = HTTPStatus.BAD_REQUEST
    info = ErrorInfo(message=str(error), type="BadRequestError", param=path_of(error), code=code.value)
    return JSONResponse(ErrorResponse(error=info).model_dump(), code.value)


def _prompts(request: CompletionRequest) -> int:
    """Return how many prompts a completion request has."""
    count = 0
    for given in (request.prompt, request.prompt_embeds):
        if isinstance(given, list):
            count += 1 if given and isinstance(given[0], int) else len(given)
        elif given is not None:
            count += 1
    return max(count, 1)
