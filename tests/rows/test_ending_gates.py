"""Gates of the forward pass that end requests: the last token is the firing row's own."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import capflow
from tests.kit.controlled import LENGTHS, PROBED, WEIGHT, ahead_of_output, first_above, hold, scores
from tests.kit.engines import GREEDY, engine, prompts, save_drafter
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, Keeper
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def drafter(tiny, tmp_path_factory):
    return {"speculative_config": save_drafter(tiny, tmp_path_factory.mktemp("drafter") / "model", noise=0.006)}


@pytest.fixture(scope="module")
def threshold(tiny, reference):
    """A score that about half of the requests reach late."""
    with engine(tiny) as llm:
        outputs = llm.generate(prompts(LENGTHS), capflow.sampling_params(max_tokens=60, **GREEDY), use_tqdm=False)
    highest = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        highest.append((reference.post_block(tokens)[PROBED.layer, len(output.prompt_token_ids) + 5 :] @ WEIGHT).max())
    return float(np.median(highest)) - 1e-3


def ended(tiny, tmp_path_factory, gate, *, lengths=LENGTHS, ahead=0, **arguments):
    """Return the keeper and the outputs of requests that bring a gate which ends them."""
    keeper, address = Keeper(), f"ipc://{tmp_path_factory.mktemp('h')}/h"
    gate = {"layer": PROBED.layer, "vector": WEIGHT} | gate
    with running_hub(address, keeper), ahead_of_output(ahead), engine(tiny, hub=address, **arguments) as llm:
        core = llm.llm_engine.engine_core.engine_core
        if ahead:
            core.batch_queue_size, core.batch_queue = ahead, collections.deque(maxlen=ahead)
            core.step_fn = core.step_with_batch_queue
        params = [
            capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=60, steering_gates={"rude": gate}, **GREEDY)
            for n in range(len(lengths))
        ]
        outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
        eventually(lambda: len(keeper.done) == len(lengths))
    assert not keeper.late
    return keeper, outputs


@pytest.mark.parametrize(
    ("status", "more"),
    [("stop", {}), ("abort", {"ahead": 2}), ("stop", {"ahead": 3}), ("stop", None)],
    ids=["sync", "async abort", "async", "drafts"],
)
def test_the_last_token_is_that_of_the_row_that_fired(
    tiny, reference, tmp_path_factory, threshold, drafter, status, more
):
    gate = {"threshold": threshold, "positions": "generated", "abort": status, "label": "guard"}
    keeper, outputs = ended(tiny, tmp_path_factory, gate, **(drafter if more is None else more))
    fired = 0
    for n, output in enumerate(outputs):
        name, (answer,) = f"r{n}", output.outputs
        first = first_above(keeper, name, threshold, LENGTHS[n])
        hold(keeper, name, output, reference, {})
        if first is None:
            assert (len(answer.token_ids), answer.finish_reason) == (60, "length")
            continue
        fired += 1
        assert len(answer.token_ids) == first + 2 - LENGTHS[n]
        assert answer.finish_reason == keeper.done[name].status == status
        kind, gate_name, score = answer.stop_reason.split(":")
        assert (kind, gate_name) == ("capflow", "rude")
        assert float(score) == pytest.approx(scores(keeper, name)[first], rel=1e-4)
        assert sorted(keeper.rows[name][PROBED]) == list(range(first + 1))
        (event,) = [each for each in keeper.events_of(name) if each.kind == "abort"]
        assert (event.asked_by, event.label) == ("gate rude", "guard")
    assert 0 < fired < len(outputs)


def test_a_prompt_whose_first_token_fires_ends_before_an_answer(tiny, tmp_path_factory):
    """The first prompt is computed in chunks."""
    gate = {"threshold": -1e6, "positions": "prompt", "abort": "stop"}
    _, outputs = ended(tiny, tmp_path_factory, gate, lengths=(200, 30))
    answers = [each.outputs[0] for each in outputs]
    assert [(len(each.token_ids), each.finish_reason) for each in answers] == [(0, "stop")] * 2
