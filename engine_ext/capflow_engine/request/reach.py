"""How far a request reaches: the positions that it computes at most. Patches beyond them are refused.

Invariant: a front end refuses by this rule before a request runs; the scheduler applies the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

from capflow.errors import UsageError, explain
from capflow.steering.program import SCORES, SiteOps, SteeringProgram
from capflow_engine.compat import engine as compat
from capflow_engine.request.options import KEY, PackedOptions


class OutOfReachError(UsageError, VLLMValidationError):  # type: ignore[misc]
    """A patch lies out of the reach of its request. It is one of vLLM's own errors, which vLLM hands on unchanged."""

    def __init__(self, field: str, position: int, expected: str) -> None:
        super().__init__(explain(field, got=position, expected=expected))
        self.parameter = field

    def __str__(self) -> str:
        return str(self.args[0])


def length_max(prompt_length: int, max_tokens: int | None, model_length_max: int) -> int:
    """Return how many positions of a request are computed at most; its last token never is.

    max_tokens: None for no limit.
    """
    length = model_length_max if max_tokens is None else min(prompt_length + max_tokens, model_length_max)
    return max(prompt_length, length - 1)


def check_patches(program: SteeringProgram | None, prompt_length: int, length: int | None) -> None:
    """Raise OutOfReachError for a patch before the prompt, or after the last computed position.

    length: None where that is not known.
    """
    for position, sites in program.patched if program is not None else ():
        expected = None
        if position < -prompt_length:
            expected = f"-{prompt_length} or later: the prompt has {prompt_length} tokens"
        elif length is not None and position >= length:
            expected = f"below {length}, which is all that is computed with this prompt and max_tokens"
        if expected is not None:
            raise OutOfReachError(f"steering_patches.{sites[0].hook}.{sites[0].layer}.positions", position, expected)


def check_params(params: Any, prompt_length: int, model_length_max: int, *, resumable: bool = False) -> None:
    """Raise OutOfReachError for patches out of the reach of a request with these sampling parameters.

    resumable: whether more input may come, so that the end is unknown.
    """
    packed = (params.extra_args or {}).get(KEY)
    if not isinstance(packed, PackedOptions):  # the scheduler compiles and checks these
        return
    options = packed.options
    if options.program is None or not options.program.patched:
        return
    # Each token of a beam is a request of its own.
    beam = options.generated is not None
    prompt = prompt_length - (options.generated or 0)
    ends = not resumable and not beam
    check_patches(options.program, prompt, length_max(prompt, params.max_tokens, model_length_max) if ends else None)


def check_added(engine: Any, model_length_max: int) -> None:
    """Have an engine in this process check each new request once its prompt is tokens, before it is added."""

    def check(request: Any) -> None:
        if request.sampling_params is not None:
            length = compat.prompt_length(request)
            check_params(request.sampling_params, length, model_length_max, resumable=request.resumable)

    compat.before_adding(engine, check)


def first_latching(program: SteeringProgram, steered_from: int) -> int | None:
    """Return the first position that a latched gate scores, or one that may end the request; None if there is none.

    steered_from: the first position that is steered like a generated one.
    """
    wanted = {number for number, gate in enumerate(program.gates) if gate.latched or gate.abort}

    def latches(sites: Sequence[SiteOps]) -> bool:
        return any(op.kind in SCORES and op.gate in wanted for site in sites for op in site.ops)

    if not wanted:
        return None
    first = [position for position, sites in program.patches(steered_from).items() if latches(sites)]
    if latches(program.prefill) and steered_from > 0:
        first.append(0)
    if latches(program.decode):
        first.append(steered_from)
    return min(first, default=None)
