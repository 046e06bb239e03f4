"""Rows by consumer through real vLLM: chunked, preempted, cached and batched, each consumer has its wanted rows."""

import pytest

import capflow
from capflow.capture.site import Site
from capflow.errors import UsageError
from tests.kit.engines import GREEDY, answers, engine, prompts, relative_error
from tests.kit.rows import ALL, FLOAT32_BOUND

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CROWDED = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192, "enable_prefix_caching": True}
"""Room for about four requests of 160 tokens, so that six which grow to that preempt each other."""

LENGTHS = (60, 97, 62, 33, 58, 59)
LAST = {"hooks": {"post_block": [3]}, "positions": "last_prompt", "tag": "the last"}
ANSWER = {"hooks": {"post_block": [1, 2]}, "positions": "all_generated", "max_rows": 20}
PLAIN, COLD = "filesystem", "filesystem@cold"
ASKED = [
    {PLAIN: LAST},
    {PLAIN: ANSWER, COLD: LAST},
    {COLD: {**ALL, "tag": "everything"}},
    LAST,
    {PLAIN: ALL, COLD: ALL},
    None,
]
"""What each of six requests asks for; the single form is both consumers'."""


@pytest.fixture(scope="module")
def crowd(tiny, tmp_path_factory):
    """The outputs of six requests that preempt each other, of the same with cached prompts, and the rows' path."""
    root = tmp_path_factory.mktemp("rows")
    consumers = [f"{name}:root={root / name},capture=requests" for name in (PLAIN, COLD)]
    with engine(tiny, consumers=consumers, **CROWDED) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted = []
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *args, **kwargs: (
            preempted.append(request) or preempt(request, *args, **kwargs)
        )
        rounds = []
        for number in range(2):
            params = [
                capflow.sampling_params(id=f"{number}.{n}", capture=asked, max_tokens=100, **GREEDY)
                for n, asked in enumerate(ASKED)
            ]
            rounds.append(llm.generate(prompts(LENGTHS), params, use_tqdm=False))
        assert preempted
        with pytest.raises(UsageError) as refused:
            llm.generate(prompts((4,)), capflow.sampling_params(capture={"filesystem@clod": LAST}), use_tqdm=False)
    return rounds, root, str(refused.value)


def spec_of(asked, consumer):
    return None if asked is None else asked if "hooks" in asked else asked.get(consumer)


def positions_of(spec, prompt, computed):
    """Return the positions that a spec of these tests means."""
    every = {
        "last_prompt": [prompt - 1],
        "all_generated": list(range(prompt, computed)),
        "all": list(range(computed)),
    }[spec["positions"]]
    return every[: spec.get("max_rows")]


@pytest.mark.parametrize("number", [0, 1], ids=["first", "cached"])
def test_each_consumer_has_exactly_the_rows_that_were_asked_for_it(crowd, reference, number):
    rounds, root, _ = crowd
    data = {name: capflow.open(root / name) for name in (PLAIN, COLD)}
    for n, (output, answer) in enumerate(zip(rounds[number], answers(rounds[number]), strict=True)):
        tokens = [*output.prompt_token_ids, *answer]
        stream = reference.post_block(tokens)
        for consumer in (PLAIN, COLD):
            spec, result = spec_of(ASKED[n], consumer), output.capture_results.get(consumer)
            if spec is None:
                assert result is None or result.status == "not_requested"
                assert f"{number}.{n}" not in data[consumer]
                continue
            assert (result.status, result.tag) == ("ok", spec.get("tag", "")), result
            capture = data[consumer][f"{number}.{n}"]
            capture.verify()
            assert capture.tag == spec.get("tag", "")
            layers = range(4) if spec["hooks"]["post_block"] == "all" else spec["hooks"]["post_block"]
            assert sorted(capture.sites) == [Site(layer, "post_block") for layer in layers]
            expected = positions_of(spec, len(output.prompt_token_ids), len(tokens) - 1)
            for site in capture.sites:
                rows, positions, _ = capture[site]
                assert positions.tolist() == expected
                assert relative_error(rows, stream[site.layer, expected]) < FLOAT32_BOUND


def test_a_consumer_that_the_hub_does_not_have_is_refused_before_anything_runs(crowd):
    assert crowd[2] == "capture: got consumer filesystem@clod, expected one of the hub's: filesystem, filesystem@cold"
