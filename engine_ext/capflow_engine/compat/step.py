"""The content of a step in vLLM's schedulers and model runners.

Verified with vLLM 0.32.0.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from capflow_engine.compat.engine import prompt_length


class RunnerBatch(msgspec.Struct):
    """The requests of a step in the runner's order: their tokens follow one another in the model's tensors.

    keys: vLLM's ids. The list is the runner's own.
    starts: the first position of each request.
    lengths: the number of its tokens.
    """

    keys: Sequence[str]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


# --- the worker ---


def scheduled_batch(runner: Any, num_scheduled_tokens: Any) -> RunnerBatch:
    """Return the V1 runner's batch; valid after it prepared its inputs, when its batch is in the step's order."""
    batch = runner.input_batch
    requests = batch.num_reqs
    lengths = num_scheduled_tokens[:requests].astype(np.int64)
    starts = batch.num_computed_tokens_cpu[:requests].astype(np.int64)
    return RunnerBatch(batch.req_ids, starts, lengths)


def prepared_batch(batch: Any) -> RunnerBatch:
    """Return the batch that the V2 runner prepared, in the runner's order."""
    parts = (batch.num_computed_tokens_np, batch.num_scheduled_tokens)
    return RunnerBatch(batch.req_ids, *(part[: batch.num_reqs].astype(np.int64) for part in parts))


def input_ids(runner: Any) -> Any:
    """Return the buffer of the input ids, int32, on the runner's device; it begins with those of the prepared step."""
    buffers = getattr(runner, "input_buffers", None)  # only the V2 runner has them
    return runner.input_ids.gpu if buffers is None else buffers.input_ids


def forward_tokens(input_ids: Any, kwargs: dict[str, Any]) -> int:
    """Return the number of token rows in the tensors of a V1 forward pass, including padding."""
    for tensor in (input_ids, kwargs.get("inputs_embeds")):
        if tensor is not None:
            return int(tensor.shape[0])
    return int(kwargs["positions"].shape[-1])


_MARGINS = "capflow_margins"


def take_margins(intermediate_tensors: Any) -> Any:
    """Take what `with_margins` added out of the tensors that a pipeline stage received; None if there is nothing."""
    return None if intermediate_tensors is None else intermediate_tensors.tensors.pop(_MARGINS, None)


def with_margins(output: Any, margins: Any) -> Any:
    """Return a runner's output with the margins of gates for the next pipeline stage, unless it is the last stage's.

    vLLM sends each tensor of `IntermediateTensors` by its name. The output may be the runner's own, which it uses again
    in later steps, so the margins are added to a copy.
    """
    from vllm.sequence import IntermediateTensors

    if margins is None or not isinstance(output, IntermediateTensors):
        return output
    return IntermediateTensors({**output.tensors, _MARGINS: margins.contiguous()})


_MARKS = "capflow_marks"


def take_marks(intermediate_tensors: Any) -> bytes:
    """Take what `with_marks` added out of the tensors that a pipeline stage received; empty if there is nothing."""
    marks = None if intermediate_tensors is None else intermediate_tensors.tensors.pop(_MARKS, None)
    return marks if isinstance(marks, bytes) else b"" if marks is None else marks.numpy().tobytes()


def with_marks(output: Any, marks: bytes) -> Any:
    """Return a runner's output with the marks of this pipeline stage for the next one, as `with_margins` does.

    vLLM sends everything but tensors as a part of the tensors' description, over the host; on the CPU it sends tensors
    alone.
    """
    import torch
    from vllm.sequence import IntermediateTensors

    if not marks or not isinstance(output, IntermediateTensors):
        return output
    on_device = any(tensor.device.type != "cpu" for tensor in output.tensors.values())
    added: Any = marks if on_device else torch.frombuffer(bytearray(marks), dtype=torch.uint8)
    return IntermediateTensors({**output.tensors, _MARKS: added})


def new_requests(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """Yield the id and the prompt length of each request that a step sends to its workers as new.

    New are requests that are scheduled for the first time, requests whose streaming input continues, and, for the V2
    runner, requests that were preempted.
    """
    for new in scheduler_output.scheduled_new_reqs:
        length = getattr(new, "prompt_len", None)  # from vLLM 0.29 on
        yield new.req_id, prompt_length(new) if length is None else length


def drafts(scheduler_output: Any) -> dict[str, int]:
    """Return the number of draft tokens of each request that a step verifies."""
    drafted = scheduler_output.scheduled_spec_decode_tokens
    return {key: len(tokens) for key, tokens in drafted.items() if tokens} if drafted else {}


_DECISIONS = "capflow_decisions"


def with_decisions(output: Any, decide: Callable[[Any], bytes]) -> Any:
    """Put decisions on a step's output when it is taken; the scheduler reads them with `decisions_of`.

    output: the model runner's, or an asynchronous one, which is taken in another thread.
    decide: returns the decisions, given the output; empty if there are none.
    """
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    if isinstance(output, AsyncModelRunnerOutput):
        return _deciding()(output, decide)
    return _attached(output, decide) if isinstance(output, ModelRunnerOutput) else output


def _attached(output: Any, decide: Callable[[Any], bytes]) -> Any:
    decisions = decide(output)
    if not decisions:
        return output
    output = copy.copy(output)  # vLLM shares its empty outputs
    setattr(output, _DECISIONS, decisions)
    return output


@functools.cache
def _deciding() -> type[Any]:
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Deciding(AsyncModelRunnerOutput):  # type: ignore[misc]
        """An asynchronous output with the decisions that are made when it is taken."""

        def __init__(self, inner: Any, decide: Callable[[Any], bytes]) -> None:
            self._inner, self._decide = inner, decide

        def get_output(self) -> Any:
            """Return the output when it is there."""
            return _attached(self._inner.get_output(), self._decide)

        def get_kv_connector_output(self) -> Any:
            """Return the part of the KV connector; vLLM asks for it alone where `get_output` fails, from 0.33 on."""
            return self._inner.get_kv_connector_output()

    return Deciding


# --- the scheduler ---


def decisions_of(model_runner_output: Any) -> bytes:
    """Return the decisions on a step's output; empty if there are none."""
    return getattr(model_runner_output, _DECISIONS, b"")


def end_by_decision(request: Any, status: str, reason: str) -> None:
    """Make a request end with the tokens that it has, with status `stop` or `abort`."""
    from vllm.v1.request import RequestStatus

    request.status = RequestStatus.FINISHED_STOPPED if status == "stop" else RequestStatus.FINISHED_ABORTED
    request.stop_reason = reason
    request.resumable = False


def scheduled_tokens(
    scheduler_output: Any, requests: Mapping[str, Any]
) -> tuple[Mapping[str, int], dict[str, tuple[int, int]]]:
    """Return the tokens of a scheduled step: their number by request, and its drafts.

    The drafts of a request are given as the position after the last one and their number.
    """
    drafted = scheduler_output.scheduled_spec_decode_tokens
    if not drafted:
        return scheduler_output.num_scheduled_tokens, {}
    drafts = {key: (requests[key].num_computed_tokens, len(tokens)) for key, tokens in drafted.items() if tokens}
    return scheduler_output.num_scheduled_tokens, drafts


def ends_input(request: Any) -> bool:
    """Return whether an addition to a running request is not more input but the end of its input."""
    return not getattr(request, "resumable", False)


def sample_number(key: str) -> int:
    """Return the index of a sample among its request's samples, given the sample's id; 0 if there is only one."""
    number = key.partition("_")[0]
    return int(number) if number.isdecimal() else 0


def parent_of(key: str) -> str:
    """Return the id of a sample's request, given the sample's id."""
    return key.partition("_")[2]


def detokenizer(tokenizer: Any, request: Any) -> Any:
    """Return the object with which vLLM's front end searches a request's answer for its stop strings."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def stopped_by_token(request: Any) -> bool:
    """Return whether a token ended a request; the token's text is then no part of the answer."""
    return bool(request.status.name == "FINISHED_STOPPED")


def sampled_tokens(model_runner_output: Any, key: str) -> int:
    """Return the number of tokens that a step sampled for a request: its accepted drafts and one more."""
    sampled = model_runner_output.sampled_token_ids
    return len(sampled[model_runner_output.req_id_to_index[key]]) if sampled else 0


def drops_steps_under_way(request: Any) -> bool:
    """Return whether the output of steps in flight must be dropped for a request that was just preempted."""
    return bool(getattr(request, "drop_stale_output", False)) and request.num_stale_output_tokens > 0
