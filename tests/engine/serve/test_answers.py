"""Streams of answers: what is wrong with a request before its answer begins is raised before there is a stream."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from capflow.errors import UsageError
from capflow_engine.serve.http.answers import begun, responses_stream

CREATED, RUNNING = "event: response.created\ndata: {}\n\n", "event: response.in_progress\ndata: {}\n\n"
WORDS = ["event: response.output_text.delta\ndata: {}\n\n", "event: response.completed\ndata: {}\n\n"]


async def stream(chunks, wrong=None, taken=None):
    for chunk in chunks:
        if taken is not None:
            taken.append(chunk)
        yield chunk
    if wrong is not None:
        raise wrong


async def all_of(chunks):
    return [chunk async for chunk in await begun(chunks)]


@pytest.mark.parametrize("chunks", [[], [CREATED], [CREATED, RUNNING, *WORDS], ["data: {}\n\n", "data: [DONE]\n\n"]])
def test_a_stream_that_has_begun_is_what_it_was(chunks):
    assert asyncio.run(all_of(stream(chunks))) == chunks


def test_what_refuses_a_request_behind_the_first_events_is_raised_before_any_of_them():
    async def ask():
        await begun(stream([CREATED, RUNNING], UsageError("steering_patches: got 9")))

    with pytest.raises(UsageError, match=r"^steering_patches: got 9"):
        asyncio.run(ask())


def test_no_more_is_waited_for_than_the_first_words():
    async def ask():
        taken = []
        await begun(stream([CREATED, *WORDS], taken=taken))
        return taken

    assert asyncio.run(ask()) == [CREATED, WORDS[0]]


@pytest.mark.parametrize("kind", ["completed", "incomplete"])
def test_the_event_of_a_whole_response_has_the_members(kind):
    """vLLM sends `response.incomplete` instead of `response.completed` from 0.33 on, at the limit of tokens."""

    async def members():
        return b',"capture_results":{"log":{"status":"ok"}}'

    async def ask():
        last = f'event: response.{kind}\ndata: {{"response":{{"id":"r1"}}}}\n\n'
        return [chunk async for chunk in responses_stream(stream([CREATED, last]), members)]

    first, last = asyncio.run(ask())
    event, _, data = last.partition("\n")
    assert (first, event) == (CREATED, f"event: response.{kind}")
    assert json.loads(data.removeprefix("data:")) == {
        "response": {"id": "r1", "capture_results": {"log": {"status": "ok"}}}
    }
