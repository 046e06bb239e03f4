"""Speculative decoding: rows of accepted drafts once, rows of rejected ones never, steering at drafts' positions too.

The engines with drafts run in a process of their own: once numba is loaded, vLLM starts no further engine beside it.
"""

import dataclasses

import pytest
from children import Run, run
from engines import Reference, prompts, save_tiny
from rows import ALL, check_rows

import capflow

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
STEERED = {"r1": {"1": 3}, "r4": {"0": 5, "2": 9}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(tiny):
    return Reference(tiny)


def requests(lengths, max_tokens):
    return [
        {"id": f"r{n}", "prompt": p["prompt_token_ids"], "capture": ALL, "max_tokens": tokens}
        for n, (p, tokens) in enumerate(zip(prompts(lengths), max_tokens, strict=True))
    ]


def hold(answers, root, reference):
    data = capflow.open(root)
    for answer in answers:
        assert answer.status == "ok"
        check_rows(data[answer.id], [*answer.prompt, *answer.tokens], reference, STEERED.get(answer.id))


def test_rows_of_accepted_drafts_are_delivered_once_and_of_rejected_ones_never(tiny, reference, tmp_path):
    without = Run(
        tiny, str(tmp_path / "without"), requests((30, 5, 60, 17, 90), (60, 33, 48, 61, 40)), steering=STEERED
    )
    drafting = dataclasses.replace(without, root=str(tmp_path / "drafting"), engine={"speculative_config": NGRAM})
    answers, said = run(drafting)
    assert said["counts"]["accepted"] > 10
    assert said["counts"]["rejected"] > 10
    hold(answers, drafting.root, reference)
    # What is steered at the drafts' positions decides which are accepted, so the answers are those without drafts.
    assert [a.tokens for a in answers] == [a.tokens for a in run(without)[0]]


def test_drafts_and_preemption_together_neither_lose_nor_repeat_a_row(tiny, reference, tmp_path):
    limits = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192, "enable_prefix_caching": False}
    crowded = Run(
        tiny,
        str(tmp_path / "rows"),
        requests((60, 61, 62, 63, 58, 59), [100] * 6),
        steering=STEERED,
        engine={"speculative_config": NGRAM, **limits},
    )
    answers, said = run(crowded)
    assert said["counts"]["preempted"] > 0
    assert said["counts"]["rejected"] > 10
    hold(answers, crowded.root, reference)
