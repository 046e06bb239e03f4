"""LoRA adapters: rows and steering of requests with two adapters and with none, in one batch.

PEFT wrote the adapters, and its model with one of them, unmerged and with hooks, is the reference. vLLM's LoRA kernel
for CPUs computes a request without an adapter with the one in the last slot, if the batch has another adapter. So the
engines here have one slot more than adapters.
"""

import itertools

import pytest

import capflow
from tests.kit.adapters import AdaptedReference, save_adapter
from tests.kit.engines import GREEDY, engine, prompts, relative_error, vector
from tests.kit.rows import ALL, check_rows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def adapters(tiny, reference, tmp_path_factory):
    """By name, an adapter as vLLM takes it, and the reference with it."""
    from vllm.lora.request import LoRARequest

    home = tmp_path_factory.mktemp("adapters")
    made = {"": (None, reference)}
    for number, name in enumerate(NAMES[1:], start=1):
        directory = save_adapter(tiny, home / name, seed=number)
        made[name] = LoRARequest(name, number, directory), AdaptedReference(tiny, directory)
    # No two compute the same rows of the first layer, so a request with another one's rows is seen at each site.
    (tokens,) = (prompt["prompt_token_ids"] for prompt in prompts([20]))
    for (_, one), (_, other) in itertools.combinations(made.values(), 2):
        assert relative_error(one.post_block(tokens)[0], other.post_block(tokens)[0]) > 0.1
    return made


def added(seed):
    return {"steering_vectors": {"post_block": {1: vector(seed)}}}


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_rows_and_steering_are_those_of_each_requests_adapter(tiny, adapters, tmp_path, eager):
    files = f"filesystem:root={tmp_path / 'rows'},capture=requests"
    cases = list(itertools.product(NAMES, (None, 7)))
    with engine(tiny, consumers=[files], enforce_eager=eager, **LORA) as llm:
        params = [
            capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=6, **GREEDY, **(added(seed) if seed else {}))
            for n, (_, seed) in enumerate(cases)
        ]
        outputs = llm.generate(
            prompts([20 + n for n in range(len(cases))]),
            params,
            lora_request=[adapters[name][0] for name, _ in cases],
            use_tqdm=False,
        )
    data = capflow.open(tmp_path / "rows")
    for number, ((name, seed), output) in enumerate(zip(cases, outputs, strict=True)):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        check_rows(data[f"r{number}"], tokens, adapters[name][1], {1: seed} if seed else None)
        assert data[f"r{number}"].adapter == output.capture_results["filesystem"].adapter == name


PROMPT = prompts([104], seed=8)[0]
# The adapter and the vector of a first and of a second request, and how many tokens the second reads from the cache.
SHARED = {
    "the same adapter": (("one", None), ("one", None), 96),
    "the same adapter, steered alike": (("one", 7), ("one", 7), 96),
    "another adapter": (("one", None), ("two", None), 0),
    "another adapter, steered alike": (("one", 7), ("two", 7), 0),
    "no adapter, steered alike": (("one", 7), ("", 7), 0),
    "an adapter, then none": (("one", None), ("", None), 0),
    "none, then an adapter": (("", 7), ("one", 7), 0),
    "the same adapter, steered by another vector": (("one", 7), ("one", 8), 0),
}


def test_adapters_share_no_cached_block_and_keep_the_forks_of_steering(tiny, adapters, tmp_path):
    files = f"filesystem:root={tmp_path / 'rows'},capture=requests"
    capture = {"hooks": {"post_block": "all"}, "positions": "all_generated"}

    def ask(llm, name, seed, **more):
        params = capflow.sampling_params(max_tokens=4, **GREEDY, **more, **(added(seed) if seed else {}))
        (output,) = llm.generate(PROMPT, params, lora_request=adapters[name][0], use_tqdm=False)
        return output

    small = {"block_size": 32, "max_num_seqs": 4, "enable_prefix_caching": True}
    outputs = {}
    with engine(tiny, consumers=[files], **small, **LORA) as llm:
        for case, (first, second, _) in SHARED.items():
            llm.reset_prefix_cache()
            ask(llm, *first)
            outputs[case] = ask(llm, *second, id=case, capture=capture)
    data = capflow.open(tmp_path / "rows")
    for case, (_, (name, seed), cached) in SHARED.items():
        assert outputs[case].num_cached_tokens == cached, case
        tokens = [*outputs[case].prompt_token_ids, *outputs[case].outputs[0].token_ids]
        check_rows(data[case], tokens, adapters[name][1], {1: seed} if seed else None, list(range(104, 107)))
