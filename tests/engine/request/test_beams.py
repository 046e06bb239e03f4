"""Beams over HTTP: what travels with each token of a search."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from vllm import SamplingParams

from capflow.capture.site import Site
from capflow.steering.compiler import program_of
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.request.beams import BEAMS, Beams, searching
from capflow_engine.request.options import RequestOptions

VECTOR = SteeringVector.make(Site(1, "post_block"), np.ones(2, np.float32))
PROGRAM = program_of(2, [Steering(base=Tier((VECTOR,)))])


async def search(prompt, *_):
    """Generate three tokens of one beam, as vLLM's search does: yield the options of each."""
    tokens = list(prompt["prompt_token_ids"])
    for _ in range(3):
        params = BEAMS.get().steered({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1))
        yield RequestOptions.unpack(params.extra_args)
        tokens.append(7)


@pytest.mark.parametrize("everywhere", [None, PROGRAM], ids=["nothing", "the global state"])
@pytest.mark.parametrize("own", [None, PROGRAM], ids=["plain", "steered"])
def test_each_token_of_a_beam_says_where_the_answer_begins_also_without_steering(own, everywhere):
    """Then a hub's gate sees the answer of a beam as an answer."""

    async def run():
        BEAMS.set(None if own is None else Beams(own))
        before = BEAMS.get()
        tokens = [options async for options in searching(search, lambda: everywhere)({"prompt_token_ids": [5] * 4})]
        assert BEAMS.get() is before
        return tokens

    tokens = asyncio.run(run())
    assert [options.generated for options in tokens] == [0, 1, 2]
    assert {options.program for options in tokens} == {own or everywhere}


def test_a_prompt_without_tokens_reaches_vllm_which_refuses_it():
    async def refused(prompt):
        raise NotImplementedError(prompt["type"])
        yield

    async def run():
        async for _ in searching(refused, lambda: None)({"type": "embeds"}):
            pass

    with pytest.raises(NotImplementedError, match="embeds"):
        asyncio.run(run())
