"""What a step holds, in the words of vLLM's schedulers and model runners; `compat` has everything else of vLLM's insides.

A batch is a list of `(vLLM's request id, first row in the model's tensors, first position, tokens)`. Verified with vLLM
0.32.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

Batch = list[tuple[str, int, int, int]]


# --- the worker ---


def scheduled_batch(runner: Any, num_scheduled_tokens: Any) -> Batch:
    """Return the V1 runner's batch; called after it prepared its inputs, when its batch has this step's order."""
    batch = runner.input_batch
    lengths = num_scheduled_tokens[: batch.num_reqs].tolist()
    starts = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
    rows = itertools.accumulate(lengths, initial=0)
    return list(zip(batch.req_ids, rows, starts, lengths, strict=False))


def prepared_batch(batch: Any) -> Batch:
    """Return the batch that the V2 runner prepared; its order is its own."""
    parts = (batch.query_start_loc_np, batch.num_computed_tokens_np, batch.num_scheduled_tokens)
    return list(zip(batch.req_ids, *(part[: batch.num_reqs].tolist() for part in parts), strict=True))


def step_token_ids(runner: Any, tokens: int) -> Any:
    """Return the input ids of the step that a runner prepared, `[tokens]`, on its device."""
    buffers = getattr(runner, "input_buffers", None)  # of the V2 runner
    ids = runner.input_ids.gpu if buffers is None else buffers.input_ids
    return ids[:tokens]


def forward_tokens(input_ids: Any, kwargs: dict[str, Any]) -> int:
    """Return how many token rows the tensors of a V1 forward pass have, padding included."""
    for tensor in (input_ids, kwargs.get("inputs_embeds")):
        if tensor is not None:
            return int(tensor.shape[0])
    return int(kwargs["positions"].shape[-1])


def new_requests(scheduler_output: Any) -> Iterator[tuple[str, int, dict[str, Any] | None]]:
    """Yield requests that a step gives its workers anew: id, prompt length, `extra_args`.

    These are those that it schedules for the first time, those whose streaming input goes on, and, for the V2
    runner, those that were preempted.
    """
    for new in scheduler_output.scheduled_new_reqs:
        params = new.sampling_params
        yield new.req_id, new.prompt_len, (params.extra_args if params is not None else None)


# --- the scheduler ---


def scheduled_tokens(
    scheduler_output: Any, requests: Mapping[str, Any]
) -> tuple[Mapping[str, int], dict[str, tuple[int, int]]]:
    """Return what a step just scheduled computes, and its draft tokens.

    That is tokens by request, and for each request with drafts the position behind the last and their number.
    """
    drafts = {
        key: (requests[key].num_computed_tokens, len(tokens))
        for key, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        if tokens
    }
    return scheduler_output.num_scheduled_tokens, drafts


def ends_input(request: Any) -> bool:
    """Return whether what was added to a request that runs is no more input, but the word that there is none."""
    return not getattr(request, "resumable", False)


def sample_number(key: str) -> int:
    """Return which of the samples that were asked for a request is, given its id; 0 for one that is none of several."""
    number = key.partition("_")[0]
    return int(number) if number.isdecimal() else 0


def parent_of(key: str) -> str:
    """Return the id of the request that one is a sample of, given its id."""
    return key.partition("_")[2]


def detokenizer(tokenizer: Any, request: Any) -> Any:
    """Return what vLLM's front end searches the answer of a request with for its stop strings."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def stopped_by_token(request: Any) -> bool:
    """Return whether a token ended a request: its text is no part of the answer then."""
    return bool(request.status.name == "FINISHED_STOPPED")


def sampled_tokens(model_runner_output: Any, key: str) -> int:
    """Return how many tokens a step gave a request: those of its drafts that were accepted, and one more."""
    sampled = model_runner_output.sampled_token_ids
    return len(sampled[model_runner_output.req_id_to_index[key]]) if sampled else 0


def drops_steps_under_way(request: Any) -> bool:
    """Return whether the output of steps under way is to be dropped for a request that was just preempted."""
    return bool(getattr(request, "drop_stale_output", False)) and request.num_stale_output_tokens > 0
