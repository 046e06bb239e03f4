"""Gates of the forward pass that end requests: the last token is the firing row's own."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from tests.kit.children import Run, check_answers, requests
from tests.kit.children import run as run_child
from tests.kit.controlled import CROWDED, LENGTHS, PROBED, WEIGHT, hold, hold_ends, mostly_long, run
from tests.kit.engines import GREEDY, engine, prompts, save_drafter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FIRST = Site(1, "post_block")
"""A site of the first of two pipeline stages."""
FULL = CROWDED | {"num_gpu_blocks_override": 13}
LENGTH = 60


@pytest.fixture(scope="module")
def unsteered(tiny):
    with engine(tiny) as llm:
        params = capflow.sampling_params(max_tokens=LENGTH, **GREEDY)
        return llm.generate(prompts(LENGTHS), params, use_tqdm=False)


@pytest.fixture(scope="module")
def threshold_at(unsteered, reference):
    """Return a function that returns a score which about half of the requests reach late at a site."""

    @functools.cache
    def threshold(site, late=5):
        highest = []
        for output in unsteered:
            start, tokens = len(output.prompt_token_ids), [*output.prompt_token_ids, *output.outputs[0].token_ids]
            highest.append((reference.post_block(tokens)[site.layer, start + late : -1] @ WEIGHT).max())
        return float(np.median(highest)) - 1e-3

    return threshold


@pytest.fixture(scope="module")
def drafter(tiny, tmp_path_factory):
    """A drafter most of whose drafts are accepted, so that rows fire in front of accepted ones."""
    drafting = save_drafter(tiny, tmp_path_factory.mktemp("drafter") / "model", noise=0.002)
    return {"speculative_config": drafting | {"num_speculative_tokens": 4}}


def gate(threshold, status="stop", *, site=PROBED, positions="generated", **more):
    """Return the fields of a request with a gate that ends it."""
    probe = {"hook": site.hook, "layer": site.layer, "vector": WEIGHT, "threshold": threshold}
    return {"steering_gates": {"rude": {**probe, "positions": positions, "abort": status, "label": "guard", **more}}}


CASES = {
    "sync": ("stop", {}),
    "async abort": ("abort", {"ahead": 2}),
    "async": ("stop", {"ahead": 3}),
    "drafts": ("stop", {"drafts": True}),
    "preempted": ("stop", FULL),
    "async preempted": ("stop", FULL | {"ahead": 2}),
    "async dropped": ("stop", {"ahead": 2, "resets": 7}),
    "async deeper dropped": ("abort", {"ahead": 3, "resets": 8}),
    "compiled": ("stop", {"enforce_eager": False, "ahead": 2}),
}


@pytest.mark.parametrize(
    ("status", "more"),
    mostly_long(CASES, "async abort", "drafts", "async preempted", "async deeper dropped"),
)
def test_the_last_token_is_that_of_the_row_that_fired(
    tiny, reference, tmp_path_factory, threshold_at, drafter, status, more
):
    drafts = more.get("drafts", False)
    arguments = {name: value for name, value in more.items() if name != "drafts"} | (drafter if drafts else {})
    threshold = threshold_at(PROBED)
    keeper, outputs = run(
        tiny, tmp_path_factory, [], max_tokens=LENGTH, asked=lambda n: gate(threshold, status), **arguments
    )
    fired = hold_ends(keeper, outputs, reference, threshold, status, "rude", length=LENGTH)
    assert 0 < fired < len(outputs)
    assert bool(keeper.preempted) == ("block_size" in more or "resets" in more)
    assert bool(keeper.counts["rejected"]) == bool(keeper.counts["accepted"]) == drafts
    for event in (event for event in keeper.events if event.kind == "abort"):
        assert (event.asked_by, event.label) == ("gate rude", "guard")


def test_requests_that_may_end_have_no_drafts_under_async_scheduling_and_their_mates_do(
    tiny, reference, tmp_path_factory, threshold_at, drafter
):
    threshold = threshold_at(PROBED)
    guarded = [gate(threshold) if n < 3 else {} for n in range(len(LENGTHS))]
    keeper, outputs = run(tiny, tmp_path_factory, [], max_tokens=LENGTH, asked=lambda n: guarded[n], ahead=2, **drafter)
    assert hold_ends(keeper, outputs[:3], reference, threshold, "stop", "rude", length=LENGTH) > 0
    assert not any(event.kind == "abort" for event in keeper.events if event.request in ("r3", "r4", "r5"))
    for n in (3, 4, 5):
        hold(keeper, f"r{n}", outputs[n], reference, {})
        assert len(outputs[n].outputs[0].token_ids) == LENGTH
    assert min(keeper.counts["accepted"], keeper.counts["rejected"]) > 0


@pytest.mark.parametrize(
    "more",
    [{}, {"ahead": 2}, {"ahead": 2, "max_num_batched_tokens": 1024}],
    ids=["in chunks", "in chunks, async", "whole, async"],
)
def test_a_row_of_a_prompt_ends_its_request_before_any_token_behind_it(tiny, reference, tmp_path_factory, more):
    """In the first chunk, at the prompt's last row, in a later chunk, never, and by a gate that scores answers too."""
    lengths, ends = (200, 200, 150, 90, 70), (10, 199, 114, None, 25)
    thresholds = []
    for prompt, end in zip(prompts(lengths), ends, strict=True):
        each = reference.post_block(prompt["prompt_token_ids"])[PROBED.layer] @ WEIGHT
        highest = each.max() + 1.0 if end is None else each[:end].max()
        thresholds.append(float(highest) + 1e-3 if end != 199 else -1e9)
        assert end in (None, 199) or each[end] > thresholds[-1]
    asked = [
        gate(thresholds[0], positions="prompt"),
        gate(thresholds[1], positions="last_prompt"),
        gate(thresholds[2], "abort", positions="prompt"),
        gate(thresholds[3], positions="prompt"),
        gate(thresholds[4], positions="all"),
    ]
    keeper, outputs = run(tiny, tmp_path_factory, [], lengths=lengths, max_tokens=9, asked=lambda n: asked[n], **more)
    assert (keeper.counts["chunks"] > 2) == ("max_num_batched_tokens" not in more)
    for n, (output, end) in enumerate(zip(outputs, ends, strict=True)):
        (answer,) = output.outputs
        hold(keeper, f"r{n}", output, reference, {})
        assert len(answer.token_ids) == (9 if end is None else max(end + 2 - lengths[n], 0))
        assert (answer.stop_reason or "").startswith("capflow:rude:") == (end is not None)
        assert sorted(keeper.rows[f"r{n}"][PROBED]) == list(range(lengths[n] + 8 if end is None else end + 1))
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["stop", "stop", "abort", "length", "stop"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [0, 1, 0, 9, 0]


def test_each_sample_ends_by_itself(tiny, reference, tmp_path_factory, threshold_at):
    """Samples of one request have different answers."""
    fields = gate(threshold_at(PROBED)) | {"n": 3, "temperature": 0.7}
    keeper, outputs = run(tiny, tmp_path_factory, [], lengths=LENGTHS[:4], max_tokens=LENGTH, asked=lambda n: fields)
    fired = hold_ends(keeper, outputs, reference, threshold_at(PROBED), "stop", "rude", length=LENGTH)
    assert 0 < fired < 12
    reasons = [{answer.finish_reason for answer in output.outputs} for output in outputs]
    assert {"stop", "length"} in reasons


PARALLEL = {
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, compiled": {"tensor_parallel_size": 2, "enforce_eager": False},
    "two stages": {"pipeline_parallel_size": 2, "enforce_eager": False},
}


@pytest.mark.long
@pytest.mark.parametrize("case", PARALLEL)
@pytest.mark.parametrize("site", [FIRST, PROBED], ids=["first stage", "last stage"])
def test_ranks_and_stages_end_a_request_at_the_same_row(tiny, reference, tmp_path_factory, threshold_at, case, site):
    threshold = threshold_at(site)
    keeper, outputs = run(
        tiny,
        tmp_path_factory,
        [],
        max_tokens=LENGTH,
        asked=lambda n: gate(threshold, site=site),
        in_process=False,
        **PARALLEL[case],
    )
    fired = hold_ends(keeper, outputs, reference, threshold, "stop", "rude", site=site, length=LENGTH)
    assert 0 < fired < len(outputs)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1], ids=["sync", "async"])
def test_the_v2_runner_ends_a_request_at_the_same_row(tiny, reference, tmp_path, unsteered, ahead):
    """The first of two requests ends, at the row that scores highest among the first ten of its answer."""
    start, tokens = LENGTHS[0], [*unsteered[0].prompt_token_ids, *unsteered[0].outputs[0].token_ids]
    scores = reference.post_block(tokens)[PROBED.layer, start : start + 10] @ WEIGHT
    asked = requests(LENGTHS[:2], (20, 20))
    for request, threshold in zip(asked, (float(scores.max()) - 1e-3, 1e9), strict=True):
        fields = gate(threshold)
        fields["steering_gates"]["rude"]["vector"] = WEIGHT.tolist()
        request["sampling"] = fields
    answers, report = run_child(Run(tiny, str(tmp_path / "rows"), asked, v2=True, ahead=ahead))
    assert report["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert report["counts"]["ahead"] == ahead
    assert [len(answer.tokens) for answer in answers] == [int(scores.argmax()) + 2, 20]
    check_answers(answers, str(tmp_path / "rows"), reference, {})
    statuses = [capflow.open(tmp_path / "rows")[answer.id].sidecar.status for answer in answers]
    assert statuses == ["stop", "length"]


def test_what_a_gate_scores_is_computed_though_nothing_captures_it_and_blocks_are_cached(tiny, unsteered, reference):
    """The same prompt again, whose blocks are cached, and a preempted request, whose answer's blocks are."""
    prompt, plain = prompts((100,), seed=5), capflow.sampling_params(max_tokens=9, **GREEDY)
    scores = reference.post_block(prompt[0]["prompt_token_ids"])[PROBED.layer] @ WEIGHT
    guard = gate(float(scores[:64].max()) - 1e-3, positions="prompt")
    firsts = []
    with engine(tiny, block_size=32) as llm:
        for params in (plain, plain, capflow.sampling_params(max_tokens=9, **GREEDY, **guard)):
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            firsts.append((output.num_cached_tokens, len(output.outputs[0].token_ids)))
    assert firsts == [(0, 9), (96, 9), (0, 0)]
