"""The service of generation: vLLM's completions, made as over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from capflow.errors import UsageError, explain
from capflow_engine.compat.protocol import ErrorResponse
from capflow_engine.serve.ask import ParsedRequest
from capflow_engine.serve.ending import REFUSAL
from capflow_engine.serve.front import Front
from capflow_engine.serve.generate import bringing
from capflow_engine.serve.http.bodies import CapflowCompletionRequest
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc.capflow_pb2_grpc import GenerateServicer
from capflow_engine.serve.rpc.refusals import RefusedError, refusing
from capflow_engine.serve.rpc.values import applied_message, fields_of, parsed

STEERING_METADATA = "x-capflow-steering"
"""In the initial metadata of each answer that was steered: the key of what steered it."""

_DATA, _DONE = "data: ", "[DONE]"
_TOKEN = "token_id:"  # noqa: S105 - how vLLM names tokens by their numbers


class GenerationService(GenerateServicer):
    """The service `Generate`.

    completions: vLLM's handler of completions; None if the model has none.
    """

    def __init__(self, front: Front, completions: Any) -> None:
        self._front = front
        self._completions = completions

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802 - gRPC's
        """Answer once everything is generated."""
        async with refusing(context), self._begun(request, context, stream=False) as (ask, answer):
            response = _response(answer.model_dump(), first=True)
            await self._finish(response, ask)
            return response

    async def GenerateStream(  # noqa: N802 - gRPC's
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answer as it is generated."""
        async with refusing(context), self._begun(request, context, stream=True) as (ask, chunks):
            first = True
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    data = chunk.removeprefix(_DATA)
                    if data.startswith(_DONE):
                        break
                    response = _response(msgspec.json.decode(data), first=first)
                    first = False
                    if not response.outputs:
                        await self._finish(response, ask)
                    yield response

    @contextlib.asynccontextmanager
    async def _begun(
        self, request: pb.GenerateRequest, context: Any, *, stream: bool
    ) -> AsyncIterator[tuple[ParsedRequest | None, Any]]:
        """Yield the parsed request and vLLM's answer: a response, or the chunks of a stream."""
        if self._front.ending.begun:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, REFUSAL)
        if self._completions is None:
            raise RefusedError(HTTPStatus.NOT_IMPLEMENTED, "this model does not generate")
        body = body_of(request, stream=stream)
        with self._front.ending.answering():
            front = self._front
            ask = ParsedRequest.of(body, front.fit, front.store, id=f"cmpl-{body.request_id}", prompts=1)
            async with front.running(ask):
                with contextlib.nullcontext() if ask is None else bringing(body, ask):
                    answer = await self._completed(body)
                key = None if ask is None else front.key(ask, streams=stream)
                if key is not None:
                    await context.send_initial_metadata(((STEERING_METADATA, key),))
                yield ask, answer

    async def _completed(self, body: CapflowCompletionRequest) -> Any:
        """Return vLLM's answer. Raises RefusedError if that is an error."""
        try:
            answer = await self._completions.create_completion(body)
        except Exception as e:  # noqa: BLE001 - as vLLM's own handlers do
            answer = self._completions.create_error_response(e)
        if isinstance(answer, ErrorResponse):
            raise RefusedError(answer.error.code, answer.error.message, answer.error.param)
        return answer

    async def _finish(self, response: pb.GenerateResponse, ask: ParsedRequest | None) -> None:
        """Put capflow's report into a response."""
        if ask is None or not ask.reports:
            return
        report = await self._front.report(ask)
        parsed(results_of(report), response)
        if (summary := report.get("steering_applied")) is not None:
            response.steering_applied.CopyFrom(applied_message(summary))


def results_of(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the capture results among a response's members over HTTP, as messages have them."""
    each = [{"results": one} for one in members.get("capture_results_by_choice", ())]
    return {"capture_results": members.get("capture_results", {}), "capture_results_by_choice": each}


def body_of(request: pb.GenerateRequest, *, stream: bool) -> CapflowCompletionRequest:
    """Return the body of the same request over HTTP.

    Raises UsageError that begins with the path of the wrong field, ValidationError as vLLM's own bodies do.
    """
    fields = fields_of(request)
    if "prompt_token_ids" in fields:
        fields["prompt"] = fields.pop("prompt_token_ids")
    if not fields.get("prompt"):
        raise UsageError(explain("prompt", got="nothing", expected="text, or numbers in prompt_token_ids"))
    if "steering_scales" in fields:
        if "steering_name" in fields:
            raise UsageError(explain("steering_scales: given beside steering_name", expected="one or the other"))
        fields["steering_name"] = dict(sorted(fields.pop("steering_scales").items()))  # a map of a message has no order
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    return CapflowCompletionRequest(
        **fields,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )


def _response(completion: Mapping[str, Any], *, first: bool) -> pb.GenerateResponse:
    """Return the message of a completion, or of a chunk of one. Raises RefusedError for an error."""
    if error := completion.get("error"):
        raise RefusedError(error["code"], error["message"], error.get("param"))
    choices: Sequence[Mapping[str, Any]] = completion["choices"]
    response = pb.GenerateResponse(
        id=completion["id"], model=completion["model"], outputs=[_output(each) for each in choices]
    )
    if first and choices:
        response.prompt_token_ids.extend(choices[0].get("prompt_token_ids") or ())
    if usage := completion.get("usage"):
        response.usage.prompt_tokens = usage["prompt_tokens"]
        response.usage.completion_tokens = usage["completion_tokens"] or 0
    return response


def _output(choice: Mapping[str, Any]) -> pb.Output:
    reason = choice.get("stop_reason")
    return pb.Output(
        index=choice["index"],
        text=choice["text"],
        token_ids=choice.get("token_ids") or (),
        finish_reason=choice.get("finish_reason") or "",
        stop_reason="" if reason is None else str(reason),
        logprobs=_logprobs(choice.get("logprobs")),
    )


def _logprobs(logprobs: Mapping[str, Any] | None) -> list[pb.TokenLogprobs]:
    if logprobs is None:
        return []
    return [
        pb.TokenLogprobs(
            token_id=_token(token),
            logprob=logprob,
            top={_token(other): number for other, number in (top or {}).items()},
        )
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
    ]


def _token(name: str) -> int:
    return int(name.removeprefix(_TOKEN))
