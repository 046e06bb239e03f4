"""Both of vLLM's model runners, and async scheduling: every row against Transformers."""

import pytest

import capflow
from tests.kit.children import Run, check_answers, requests, run
from tests.kit.engines import GREEDY, engine, prompts, vector
from tests.kit.engines import answers as answers_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

LENGTHS = (5, 1, 40, 3, 90, 17)
STEERED = {"r1": {"1": 3}, "r4": {"0": 5, "2": 9}}


@pytest.fixture(scope="module")
def stops(tiny):
    """For requests whose answer allows it a token that it comes to, not at once: nobody knows before when it stops.

    Every other request stops by its text instead, which is found behind the engine.
    """
    with engine(tiny) as llm:
        params = [
            capflow.sampling_params(
                steering_vectors={"post_block": {int(n): vector(seed) for n, seed in STEERED[f"r{request}"].items()}}
                if f"r{request}" in STEERED
                else None,
                max_tokens=9,
                **GREEDY,
            )
            for request in range(len(LENGTHS))
        ]
        answers = answers_of(llm.generate(prompts(LENGTHS), params, use_tqdm=False))
    return [next((t for at, t in enumerate(tokens) if at > 1 and t not in tokens[:at]), None) for tokens in answers]


def stopping(number, stop):
    """Return the sampling parameters with which a request stops at a token, or at its text."""
    if stop is None:
        return {}
    return {"stop_token_ids": [stop]} if number % 2 else {"stop": [f"w{stop}"], "detokenize": True}


LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1, 2], ids=["sync", "async", "deeper"])
def test_the_v2_runner_s_rows_are_those_of_their_requests(tiny_with_words, reference, stops, tmp_path, ahead):
    """Prompts longer than a step's budget, decode beside prefill, requests that end at different steps; steering."""
    asked = requests(LENGTHS, [9] * len(LENGTHS))
    for number, (request, stop) in enumerate(zip(asked, stops, strict=True)):
        request["sampling"] = stopping(number, stop)
    words = {"skip_tokenizer_init": False}
    job = Run(tiny_with_words, str(tmp_path / "rows"), asked, steering=STEERED, engine=words, v2=True, ahead=ahead)
    answers, report = run(job)
    stopped = [answer.tokens[-1] == stop for answer, stop in zip(answers, stops, strict=True) if stop is not None]
    assert len(stopped) > 2
    assert all(stopped)
    assert (report["counts"]["overshot"] > 0) is (ahead > 0)  # rows after the end are computed, and not delivered
    assert report["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert report["scheduler"] == ("CaptureAsyncScheduler" if ahead else "CaptureScheduler")
    assert report["counts"]["ahead"] == ahead
    check_answers(answers, tmp_path / "rows", reference, STEERED)
    data = capflow.open(tmp_path / "rows")
    statuses = [data[answer.id].sidecar.status for answer in answers]
    assert statuses == ["length" if stop is None else "stop" for stop in stops]


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=LONG), True], ids=["sync", "async"])
def test_the_v2_runner_preempts_and_resumes_without_losing_or_repeating_a_row(tiny, reference, tmp_path, ahead):
    limits = {"block_size": 32, "num_gpu_blocks_override": 8, "max_model_len": 128, "enable_prefix_caching": False}
    job = Run(
        tiny,
        str(tmp_path / "rows"),
        requests((60, 58, 61), (12, 11, 13)),
        steering=STEERED,
        engine=limits,
        v2=True,
        ahead=int(ahead),
    )
    answers, report = run(job)
    assert report["counts"]["preempted"] > 0
    check_answers(answers, tmp_path / "rows", reference, STEERED)
