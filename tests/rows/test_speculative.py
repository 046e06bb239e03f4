"""Speculative decoding: rows of accepted drafts once, rows of rejected ones never, steering at drafts' positions too.

The engines with drafts run in a process of their own: once numba is loaded, vLLM starts no further engine beside it.
"""

import dataclasses

import pytest

import capflow
from tests.kit.children import Run, check_answers, requests, run
from tests.kit.engines import save_drafter

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
STEERED = {"r1": {"1": 3}, "r4": {"0": 5, "2": 9}}


def test_rule_3_rejected_drafts_are_never_delivered_and_accepted_ones_once(tiny, reference, tmp_path):
    without = Run(
        tiny, str(tmp_path / "without"), requests((30, 5, 60, 17, 90), (60, 33, 48, 61, 40)), steering=STEERED
    )
    drafting = dataclasses.replace(without, root=str(tmp_path / "drafting"), engine={"speculative_config": NGRAM})
    answers, report = run(drafting)
    assert report["counts"]["accepted"] > 10
    assert report["counts"]["rejected"] > 10
    check_answers(answers, drafting.root, reference, STEERED)
    # What is steered at the drafts' positions decides which are accepted, so the answers are those without drafts.
    assert [a.tokens for a in answers] == [a.tokens for a in run(without)[0]]


@pytest.mark.long
def test_tokens_behind_a_stop_string_in_the_same_step_have_no_rows(tiny_with_words, reference, tmp_path):
    """The answers come to a loop, so that a step gives several tokens: text ends them in the middle of such a step."""
    words = {"skip_tokenizer_init": False, "speculative_config": NGRAM}
    asked = requests((30, 5, 60), (60, 60, 60))
    for request in asked:
        stop = {"stop": [f"{digit} " for digit in range(10)], "include_stop_str_in_output": True}
        request["sampling"] = {**stop, "min_tokens": 40 + len(request["prompt"]) % 7, "detokenize": True}
    stopping = Run(tiny_with_words, str(tmp_path / "rows"), asked, engine=words)
    answers, report = run(stopping)
    assert report["counts"]["accepted"] > 10
    check_answers(answers, stopping.root, reference, {})
    data = capflow.open(stopping.root)
    for answer, request in zip(answers, asked, strict=True):
        assert data[answer.id].sidecar.status == "stop"
        assert request["sampling"]["min_tokens"] < len(answer.tokens) < 60


@pytest.mark.long
def test_drafts_and_preemption_together_neither_lose_nor_repeat_a_row(tiny, reference, tmp_path):
    limits = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192, "enable_prefix_caching": False}
    crowded = Run(
        tiny,
        str(tmp_path / "rows"),
        requests((60, 61, 62, 63, 58, 59), [100] * 6),
        steering=STEERED,
        engine={"speculative_config": NGRAM, **limits},
    )
    answers, report = run(crowded)
    assert report["counts"]["preempted"] > 0
    assert report["counts"]["rejected"] > 10
    check_answers(answers, crowded.root, reference, STEERED)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_rule_3_holds_with_a_model_that_drafts(tiny, reference, tmp_path, v2, ahead):
    model = save_drafter(tiny, tmp_path / "drafter", noise=0.02)
    drafting = Run(
        tiny,
        str(tmp_path / "rows"),
        requests((30, 5), (14, 10)),
        steering=STEERED,
        engine={"speculative_config": model},
        v2=v2,
        ahead=ahead,
    )
    answers, report = run(drafting)
    assert report["runner"] == ("vllm.v1.worker.cpu.model_runner" if v2 else "vllm.v1.worker.cpu_model_runner")
    assert report["counts"]["ahead"] == ahead
    assert report["counts"]["accepted"] > 0
    assert report["counts"]["rejected"] > 0
    check_answers(answers, drafting.root, reference, STEERED)
