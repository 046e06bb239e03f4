"""Requests that a probe or an action ends while they stream: no token behind the end is ever in a stream."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

import capflow
from capflow import Abort, ActionApplied
from capflow.transport.client import Client
from tests.kit.controlled import LENGTHS, PROBED, WEIGHT, gates, hold_ends
from tests.kit.engines import GREEDY, engine, environment, prompts, relative_error, scheduled_ahead
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, FLOAT32_BOUND, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTH = 60
ACTED = 150
"""The most tokens of a request that an action ends."""


class Streamed:
    """What a stream gave: the tokens of each output, and the last output in the form of a whole answer."""

    def __init__(self):
        self.parts, self.last = [], None

    def add(self, output):
        assert self.last is None or not self.last.finished
        (part,) = output.outputs
        self.parts.append(list(part.token_ids))
        assert (part.finish_reason is not None) == output.finished
        self.last = output

    @property
    def output(self):
        """The last output, with all tokens."""
        self.last.outputs[0].token_ids = [token for part in self.parts for token in part]
        return self.last


async def stream(llm, streamed, prompt, **options):
    from vllm.sampling_params import RequestOutputKind

    params = capflow.sampling_params(**{**GREEDY, "capture": ALL, "max_tokens": LENGTH, **options})
    params.output_kind = RequestOutputKind.DELTA
    async for output in llm.generate(prompt, params):
        streamed.add(output)


async def abort(address, streamed, name, status):
    """End a request through the hub, once it streams."""
    await asyncio.to_thread(eventually, lambda: len(streamed.parts) > 3)
    with Client(address) as client:
        action = Abort(name, as_=status, reason="capflow:someone")
        return await asyncio.to_thread(client.act, action)


async def drive(model, address, threshold):
    """Return the streams of requests with gates, of those that the hub's gate sees, and of those that are aborted."""
    llm = capflow.AsyncLLM.start(
        model, hub=address, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256,
        max_num_batched_tokens=64, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    gate = {"hook": PROBED.hook, "layer": PROBED.layer, "vector": WEIGHT, "threshold": threshold}
    fields = {"steering_gates": {"rude": {**gate, "positions": "generated", "abort": "stop"}}}
    async with llm:
        owned, seen, acted = ([Streamed() for _ in range(n)] for n in (len(LENGTHS), len(LENGTHS), 2))
        asked = prompts(LENGTHS)
        both = zip((owned, seen), ("r", "g"), (fields, {}), strict=True)
        calls = [
            stream(llm, each, asked[n], id=f"{name}{n}", **more)
            for group, name, more in both
            for n, each in enumerate(group)
        ]
        for n, status in enumerate(("stop", "abort")):
            calls.append(stream(llm, acted[n], asked[n], id=f"a{n}", max_tokens=ACTED))
            calls.append(abort(address, acted[n], f"a{n}", status))
        results = await asyncio.gather(*calls)
    assert all(isinstance(result, ActionApplied) for result in results[-3::2]), results
    return owned, seen, acted


@pytest.fixture(scope="module")
def threshold(tiny, reference):
    """A score that about half of the requests reach late."""
    with engine(tiny) as llm:
        params = capflow.sampling_params(max_tokens=LENGTH, **GREEDY)
        outputs = llm.generate(prompts(LENGTHS), params, use_tqdm=False)
    highest = []
    for output in outputs:
        start, tokens = len(output.prompt_token_ids), [*output.prompt_token_ids, *output.outputs[0].token_ids]
        highest.append((reference.post_block(tokens)[PROBED.layer, start + 5 : -1] @ WEIGHT).max())
    return float(np.median(highest)) - 1e-3


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1], ids=["sync", "async"])
def test_a_stream_ends_with_the_token_of_the_row_that_fired(
    tiny, reference, tmp_path, tmp_path_factory, threshold, ahead
):
    keeper, address = Keeper(), f"ipc://{tmp_path_factory.mktemp('h')}/h"
    controllers = gates(tmp_path, f"@rude:threshold={threshold},mode=ordered,action=stop,requests=g*")
    scheduling = scheduled_ahead(ahead) if ahead else contextlib.nullcontext()
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    with running_hub(address, keeper, controllers=controllers), scheduling, environment(**variables):
        owned, seen, acted = asyncio.run(drive(tiny, address, threshold))
        eventually(lambda: len(keeper.done) == 2 * len(LENGTHS) + 2)
    assert not keeper.late
    for streams, name, by in ((owned, "r", "rude"), (seen, "g", "gate@rude")):
        outputs = [each.output for each in streams]
        fired = hold_ends(keeper, outputs, reference, threshold, "stop", by, name=name, length=LENGTH)
        assert 0 < fired < len(streams)
    for n, (each, status) in enumerate(zip(acted, ("stop", "abort"), strict=True)):
        (answer,) = each.output.outputs
        assert (answer.finish_reason, answer.stop_reason) == (status, "capflow:someone")
        assert keeper.done[f"a{n}"].status == status
        assert 3 < len(answer.token_ids) < ACTED
        tokens = [*each.output.prompt_token_ids, *answer.token_ids]
        expected = reference.post_block(tokens)
        for site, kept in keeper.rows[f"a{n}"].items():
            # With async scheduling, the last token may have been in a step that was under way.
            assert sorted(kept) == list(range(len(kept)))
            assert len(tokens) - 1 <= len(kept) <= len(tokens) - 1 + ahead
            rows = np.stack([kept[position][1] for position in sorted(kept)])
            assert relative_error(rows, expected[site.layer, : len(kept)]) < FLOAT32_BOUND
        results = each.output.capture_results
        assert {result.status for result in results.values()} == {"ok"}
