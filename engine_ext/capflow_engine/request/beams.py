"""Steered beam search. Each token of a beam is a request of its own to vLLM; its prompt ends with the answer so far.

Invariant: the prompt's positions of a beam are steered as a prompt's, those of its answer as generated ones. That also
holds for what a hub brings to a beam without steering of its own.
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
    """The program of the beams of a request over HTTP.

    program: None if neither the request nor the global state steers.
    prompt: the length of the prompt that is searched for; None until the search begins.
    """

    program: SteeringProgram | None
    prompt: int | None = None

    def steered(self, prompt: Any, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the next token of one beam."""
        assert self.prompt is not None, "vLLM generates a beam's token outside of a search"
        return with_program(params, self.program, compat.beam_length(prompt) - self.prompt)


BEAMS: ContextVar[Beams | None] = ContextVar("capflow_beams", default=None)
"""Of the running search, or of the request that is being answered if its fields steer beams; None otherwise."""


def searching(
    beam_search: Callable[..., AsyncIterator[Any]], everyone: Callable[[], SteeringProgram | None]
) -> Callable[..., AsyncIterator[Any]]:
    """Return vLLM's search for the beams of one prompt, wrapped so that it notes where their answers begin.

    everyone: returns the program for a request of a route that takes no fields of capflow.
    """

    @functools.wraps(beam_search)
    async def searched(prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        beams = BEAMS.get()
        program = everyone() if beams is None else beams.program
        # Searches for several prompts run in contexts of their own, or one after another.
        # vLLM itself refuses a prompt that is not tokens.
        if program is not None or "prompt_token_ids" in prompt:
            BEAMS.set(Beams(program, compat.beam_length(prompt)))
        try:
            async with contextlib.aclosing(beam_search(prompt, *args, **kwargs)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    yield output
        finally:
            BEAMS.set(beams)

    return searched


def with_program(params: SamplingParams, program: SteeringProgram | None, generated: int) -> SamplingParams:
    """Return the parameters of a beam's next token.

    program: None if nothing steers the beam, except perhaps a hub.
    generated: how many of its prompt's last tokens are its answer so far.
    """
    params = params.clone()
    options = RequestOptions(program=program, generated=generated)
    params.extra_args = {**(params.extra_args or {}), KEY: options.pack()}
    return params
