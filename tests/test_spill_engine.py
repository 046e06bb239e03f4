"""An engine whose hub goes away and comes back: what it computed meanwhile is all there, and its answers are vLLM's."""

from __future__ import annotations

import pytest
from engines import GREEDY, answers, engine, prompts
from hubs import address, running_hub
from rows import ALL, Keeper
from waiting import eventually

import capflow

__all__ = ["address"]

pytestmark = pytest.mark.engine
LENGTHS = [5, 40, 17, 3]


def asked(name):
    return [capflow.sampling_params(id=f"{name}{n}", capture=ALL, max_tokens=12, **GREEDY) for n in range(len(LENGTHS))]


def test_what_is_computed_while_the_hub_is_gone_is_delivered_when_it_is_back(tiny, reference, address, tmp_path):
    first, second = Keeper(), Keeper()
    with running_hub(address, first) as hub, engine(tiny, hub=address, policy="spill", spool_dir=str(tmp_path)) as llm:
        before = llm.generate(prompts(LENGTHS), asked("before"), use_tqdm=False)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        (link,) = worker.capflow.outlets.links
        hub.stop(20)
        eventually(lambda: not link.connected)
        gone = llm.generate(prompts(LENGTHS), asked("gone"), use_tqdm=False)
        assert answers(gone) == answers(before)
        eventually(lambda: link.outbox.waiting > 10)
        with running_hub(address, second):
            eventually(lambda: len(second.done) == len(LENGTHS))
            after = llm.generate(prompts(LENGTHS), asked("after"), use_tqdm=False)
            assert answers(after) == answers(before)
            eventually(lambda: len(second.done) == 2 * len(LENGTHS))
            eventually(lambda: link.outbox.unacknowledged == 0)
    for keeper, name, outputs in ((first, "before", before), (second, "gone", gone), (second, "after", after)):
        for n, output in enumerate(outputs):
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            assert keeper.done[f"{name}{n}"].dropped == ()
            keeper.hold(f"{name}{n}", tokens, reference)
    assert list(tmp_path.iterdir()) == []
