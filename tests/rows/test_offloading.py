"""KV connectors: what vLLM's offloading connector brings to which request, and the connectors that are refused.

A connector belongs to a process, so its engine runs alone.
"""

import numpy as np
import pytest

import capflow
from capflow.errors import UsageError
from capflow_engine.compat import connectors
from capflow_engine.compat import engine as compat
from capflow_engine.hubs import hubs_at
from capflow_engine.settings import Settings
from tests.kit.engines import GREEDY, VOCABULARY, engine, prompts, relative_error
from tests.kit.poisonings import POISONINGS, PROMPT
from tests.kit.rows import FLOAT32_BOUND
from tests.kit.steered import LOGITS_MAX, RAW, SteeredReference, logits, vector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CAPTURED = {"hooks": {"post_block": "all", "mlp_out": "all"}, "positions": [{"last": 20}, "all_generated"]}


@pytest.fixture(scope="module")
def steered(tiny):
    return SteeredReference(tiny)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "rows"


@pytest.fixture(scope="module")
def offloading_engine(tiny, root):
    from tests.kit.offloading import offloading

    arguments = {"sites": ["*:*"], "block_size": 32, "num_gpu_blocks_override": 100, **RAW, **offloading()}
    with engine(tiny, consumers=[f"filesystem:root={root},capture=requests"], **arguments) as llm:
        yield llm


@pytest.fixture
def offloaded(offloading_engine):
    """The engine, with no block anywhere."""
    assert offloading_engine.reset_prefix_cache(reset_connector=True)
    return offloading_engine


def ask(llm, fields, prompt=PROMPT):
    """Return a request's output; all blocks that it finds are the connector's."""
    assert llm.reset_prefix_cache()
    params = capflow.sampling_params(max_tokens=5, logprobs=VOCABULARY, **GREEDY, **fields)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


@pytest.mark.parametrize("name", POISONINGS)
def test_a_block_is_brought_only_to_what_is_steered_alike_and_never_where_a_row_is_wanted(
    offloaded, steered, root, name
):
    first, second, tokens = POISONINGS[name]
    ask(offloaded, first)
    captured = {**second, "id": name, "capture": CAPTURED}  # it finds the blocks of the second, before position 80
    for fields, cached in ((second, tokens), (captured, 64)):
        output = ask(offloaded, fields)
        assert output.num_cached_tokens == cached
        inputs = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        expected, seen = steered.run(inputs, len(output.prompt_token_ids), second)
        error = np.abs(logits(output) - expected[len(output.prompt_token_ids) - 1 :]).max()
        assert error < LOGITS_MAX, f"logits are off by {error:.1e}"
    capture = capflow.open(root)[name]
    assert len(capture.sites) == 8
    for site in capture.sites:
        assert capture[site].positions.tolist() == list(range(80, 104))
        assert relative_error(capture[site].rows, np.asarray(seen[site])[80:104]) < FLOAT32_BOUND, site


def _following_nothing(monkeypatch):
    monkeypatch.setattr(connectors, "follow_forks", lambda *_: None)


@pytest.mark.parametrize("wrong", [None, _following_nothing], ids=["right", "keys that stay"])
def test_a_connector_forgets_its_keys_of_blocks_that_an_action_steers(offloaded, monkeypatch, wrong):
    """It takes the keys of a whole prompt before the first step; an action forks them before the second."""
    if wrong is not None:
        wrong(monkeypatch)
    prompt = prompts((200,), seed=6)[0]  # in steps of 64 tokens
    offloaded.enqueue(prompt, capflow.sampling_params(max_tokens=5, **GREEDY), use_tqdm=False)
    offloaded.llm_engine.step()
    scheduler = offloaded.llm_engine.engine_core.engine_core.scheduler
    (request,) = scheduler.requests.values()
    scheduler.capflow._fork_for_itself(request, 64)
    offloaded.wait_for_completion(use_tqdm=False)
    assert ask(offloaded, {}, prompt).num_cached_tokens == (64 if wrong is None else 192)


def test_what_a_latched_gate_scores_is_not_brought(offloaded):
    gate = {"rude": {"layer": 0, "vector": vector(5), "latch": True}}
    fields = {"steering_gates": gate, "steering_vectors": {"post_block": {1: {"vector": vector(1), "gate": "rude"}}}}
    assert [ask(offloaded, fields).num_cached_tokens for _ in range(2)] == [0, 0]


def connected(name, **extra):
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (connected("ExampleConnector"), "--kv-transfer-config is not supported with ExampleConnector: it finds blocks"),
        (connected("LMCacheConnectorV1"), "with LMCacheConnectorV1: it finds blocks by their tokens"),
        (connected("NixlConnector"), "with NixlConnector: it takes the blocks of a request from another engine"),
        (connected("SimpleCPUOffloadConnector"), "with SimpleCPUOffloadConnector: it was not tested"),
        (connected("OffloadingConnector", spec_name="TieringOffloadingSpec"), "and TieringOffloadingSpec: it was not"),
        (connected("OffloadingConnector", spec_name="Mine", spec_module_path="mine"), "and Mine: it was not tested"),
        (connected("OffloadingConnector"), "with OffloadingConnector on a CPU: vLLM offloads from GPUs only"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size is not supported with OffloadingConnector on a CPU"),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            "--kv-offloading-size is not supported with LMCacheMPConnector: it finds blocks by their tokens",
        ),
    ],
)
def test_a_connector_that_may_bring_wrong_blocks_is_refused_by_name_before_anything_runs(tiny, arguments, error):
    with pytest.raises(UsageError, match=error), engine(tiny, **arguments):
        pass


def test_a_connector_is_refused_by_the_engine_too_however_it_came():
    from vllm.config import KVTransferConfig, VllmConfig

    settings = Settings(engine="e", hubs=hubs_at([], None, insecure=False), sites=(), user={})
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(UsageError, match="not supported with ExampleConnector"):
        compat.check_config(VllmConfig(additional_config=settings, kv_transfer_config=connector))
