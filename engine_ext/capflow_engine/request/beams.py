"""Beam search, steered: each of a beam's tokens is a request of its own to vLLM, whose prompt ends with the answer so far.

What always holds: the prompt's positions of a beam are steered as a prompt's, those of its answer as generated ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams

from capflow.steering.program import SteeringProgram
from capflow_engine.compat import engine as compat
from capflow_engine.request.options import KEY, RequestOptions


@dataclass
class Beams:
    """What steers the beams of a request over HTTP, and the length of the prompt they are searched for, once known."""

    program: SteeringProgram
    prompt: int | None = None

    def steered(self, prompt: Any, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the next token of one beam."""
        assert self.prompt is not None, "vLLM searches beams in a way that is not known here"
        return with_program(params, self.program, compat.beam_length(prompt) - self.prompt)


BEAMS: ContextVar[Beams | None] = ContextVar("capflow_beams", default=None)
"""Of the request that is being answered, or the search that is under way; None where none steers beams."""


def searching(
    beam_search: Callable[..., AsyncIterator[Any]], everyone: Callable[[], SteeringProgram | None]
) -> Callable[..., AsyncIterator[Any]]:
    """Return vLLM's search for the beams of one prompt, which then knows where their answers begin.

    everyone: says what steers a request of a route that knows no fields.
    """

    @functools.wraps(beam_search)
    async def searched(prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        beams = BEAMS.get()
        program = everyone() if beams is None else beams.program
        if program is not None:  # the searches for several prompts run in contexts of their own, or one after another
            BEAMS.set(Beams(program, compat.beam_length(prompt)))
        try:
            async with contextlib.aclosing(beam_search(prompt, *args, **kwargs)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    yield output
        finally:
            BEAMS.set(beams)

    return searched


def with_program(params: SamplingParams, program: SteeringProgram, generated: int) -> SamplingParams:
    """Return the parameters of a beam of whose prompt the last `generated` tokens are its answer so far."""
    params = params.clone()
    options = RequestOptions(program=program, generated=generated)
    params.extra_args = {**(params.extra_args or {}), KEY: options.pack()}
    return params
