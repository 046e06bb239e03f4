"""`capflow.cache`: the rows of prompts as arrays, against Transformers; and what it refuses."""

import duckdb
import numpy as np
import polars as pl
import pytest
import torch

import capflow
from capflow.errors import UsageError
from tests.kit.engines import LAYERS, WIDTH, Reference, engine, prompts, relative_error, save_tiny, vector

pytestmark = pytest.mark.engine

LENGTHS = (9, 5, 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    # The consumer captures on its own, too: none of that is in a cache.
    with engine(model, sites=["post_block:*", "attn_out:*"], consumers=[f"filesystem:root={root}"]) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(model):
    reference = Reference(model)
    return [reference.post_block(prompt["prompt_token_ids"]) for prompt in prompts(LENGTHS, seed=8)]


def tokens():
    return [prompt["prompt_token_ids"] for prompt in prompts(LENGTHS, seed=8)]


def test_a_hook_of_some_prompts_is_one_array(llm, expected):
    cache = capflow.cache(llm, tokens())
    rows = cache.stack("hook_resid_post")
    assert rows.shape == (LAYERS, 3, 70, WIDTH)
    for number, length in enumerate(LENGTHS):
        assert relative_error(rows[:, number, :length], expected[number]) < 1e-5
        assert np.isnan(rows[:, number, length:]).all()
        assert cache.positions("post_block:1")[number].tolist() == [*range(length), *[-1] * (70 - length)]
    assert [len(output.outputs[0].token_ids) for output in cache.outputs] == [1, 1, 1]
    assert (len(cache), "post_block:0" in cache, "attn_out:0" in cache) == (3, True, False)
    # Every prompt is in the prefix cache now.
    assert np.array_equal(capflow.cache(llm, tokens()).stack("post_block"), rows, equal_nan=True)


def test_sites_by_any_name_and_positions_of_a_spec(llm, expected):
    names = ["blocks.2.hook_resid_post", "attn_out:1", "hook_attn_out"]
    cache = capflow.cache(llm, tokens()[0], hooks=names, positions=["last_prompt", {"generated": [0, 2]}], max_tokens=4)
    assert [str(site) for site in cache] == [
        *(f"attn_out:{n}" for n in range(LAYERS)[:3]),
        "post_block:2",
        "attn_out:3",
    ]
    assert cache.positions((2, "post_block")).tolist() == [[8, 9, 10]]
    assert relative_error(cache["model.layers.2.output"][0, :1], expected[0][2, 8:9]) < 1e-5
    assert torch.equal(cache.torch("attn_out:1"), torch.from_numpy(cache[1, "attn_out"]))
    steered = capflow.cache(
        llm, tokens()[0], hooks={"post_block": [2]}, steering_vectors={"post_block": {1: vector(1)}}
    )
    assert np.abs(steered["post_block:2"][0] - expected[0][2]).max() > 0.1


def test_a_prompt_without_rows_is_filled_up(llm, expected):
    cache = capflow.cache(llm, tokens(), hooks=["post_block:1"], positions=[8, 60])
    rows = cache["post_block:1"]
    assert rows.shape == (3, 2, WIDTH)
    assert cache.positions("post_block:1").tolist() == [[8, -1], [-1, -1], [8, 60]]
    assert relative_error(rows[2], expected[2][1, [8, 60]]) < 1e-5
    assert np.isnan(rows[1]).all()
    assert cache.to_arrow().num_rows == 3
    nothing = capflow.cache(llm, tokens(), hooks=["post_block:1"], positions="all_generated")
    assert nothing["post_block:1"].shape == (3, 0, WIDTH)
    assert "3 x 0 x 64" in nothing._repr_html_()
    assert nothing.to_arrow().num_rows == 0


def test_tables_and_notebooks(llm, expected):
    cache = capflow.cache(llm, tokens(), hooks=["post_block:3"])
    table = cache.to_arrow()
    frame = pl.from_arrow(table).filter((pl.col("prompt") == 2) & (pl.col("position") == 69))
    assert relative_error(np.stack(frame["row"].to_numpy()), expected[2][3, 69:]) < 1e-5
    count = duckdb.from_arrow(table).aggregate("prompt, count(*)", "prompt").order("prompt")
    assert count.fetchall() == list(enumerate(LENGTHS))
    assert table.to_pandas()["token_id"].tolist() == [token for prompt in tokens() for token in prompt]
    page = cache._repr_html_()
    assert "<td>post_block</td><td>3</td><td>3 x 70 x 64</td>" in page
    assert repr(cache) == "<cache of 3 prompts: post_block of 1 layers>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hooks": "post_bloc"}, "hooks: got post_bloc, expected HOOK:LAYER"),
        ({"hooks": ["post_block:9"]}, "cache.hooks.post_block: got layer 9, expected 0..3"),
        ({"hooks": "mlp_out"}, "cache.hooks.mlp_out: no tap at mlp_out"),
        ({"positions": "first"}, "cache.positions: got first"),
        ({"prompts": []}, "prompts: got none, expected a text or a list of token ids"),
        ({"prompts": None}, "prompts: got None, expected a text or a list of token ids"),
        ({"prompts": 5}, "prompts: got 5, expected a text or a list of token ids"),
        ({"prompts": [["a"]]}, "prompts: got [['a']], expected a text or a list of token ids"),
        ({"n": 2}, "n: got 2, expected none: a cache has one request for each prompt"),
        ({"engine": {}}, "engine: got arguments for an engine that runs"),
        ({"hooks": []}, "cache.hooks: got {}, expected a mapping"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(llm, arguments, message):
    with pytest.raises(UsageError) as error:
        capflow.cache(llm, **({"prompts": [[7, 8]]} | arguments))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("arguments", [{"positions": "first"}, {"prompts": []}, {"n": 2}, {"steering_vectors": 3}])
def test_what_fits_no_model_is_refused_before_one_is_loaded(arguments, monkeypatch):
    monkeypatch.setattr(capflow, "LLM", None)
    with pytest.raises(UsageError, match=r": got "):
        capflow.cache("nowhere", **({"prompts": [np.array([7, 8])]} | arguments))


def test_a_hook_that_a_model_lacks_is_named_before_an_engine_starts(model):
    with pytest.raises(UsageError, match=r"^cache\.hooks: got router:\*, expected a site of LlamaDecoderLayer"):
        capflow.cache(model, [[7, 8]], hooks=["router"], engine={"skip_tokenizer_init": True})
    with pytest.raises(UsageError, match=r"^--sites: got router:\*, expected a site of LlamaDecoderLayer"):
        capflow.cache(model, [[7, 8]], engine={"skip_tokenizer_init": True, "sites": ["router:*"]})


def test_a_site_that_is_not_in_the_cache(llm):
    cache = capflow.cache(llm, [7, 8, 9], hooks="post_block")
    with pytest.raises(UsageError, match="site: got attn_out:1, expected one of post_block:0"):
        cache["attn_out:1"]
    with pytest.raises(UsageError, match="hook: got mlp_in, expected a hook of the cache: post_block"):
        cache.stack("mlp_in")


def test_a_model_by_name_runs_once_and_an_engine_without_files_says_what_to_start(model, expected):
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.kit.engines import environment

    small = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128}
    with environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind"):
        cache = capflow.cache(
            model, tokens()[:1], hooks=["post_block:1"], engine=small | {"kv_cache_memory_bytes": 1 << 24}
        )
        cleanup_dist_env_and_memory()
    assert relative_error(cache["post_block:1"][0], expected[0][1]) < 1e-5
    root = cache.captures[0].path.parent
    assert root.is_dir()
    del cache
    assert not root.exists()
    with (
        engine(model, consumers=["log"]) as llm,
        pytest.raises(UsageError, match="got consumer filesystem, expected one of the hub's: log"),
    ):
        capflow.cache(llm, [[7, 8]])
