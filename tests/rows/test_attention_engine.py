"""Attention weights of captured queries and keys against those that Transformers returns."""

import numpy as np
import pytest
import torch
import transformers

import capflow
from capflow.errors import UsageError
from capflow_engine.compat.model import check_model
from tests.architectures.table import config_of
from tests.kit.engines import GREEDY, SHAPE, Reference, answers, engine, environment, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

GROUPED = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3}
WINDOW = 16
SLIDING, FULL = "sliding_attention", "full_attention"
SCALED = {"query_pre_attn_scalar": 48, "sliding_window": WINDOW}
TIED = {"tie_word_embeddings": True}
MODELS = {
    "llama": transformers.LlamaConfig(**GROUPED),
    "gemma2": transformers.Gemma2Config(**GROUPED | TIED, **SCALED, attn_logit_softcapping=2.0),
    "gemma3": transformers.Gemma3TextConfig(**GROUPED, **SCALED, layer_types=[SLIDING, FULL, SLIDING]),
    "qwen3": transformers.Qwen3Config(**GROUPED),
    "olmo2": transformers.Olmo2Config(**GROUPED),  # on vLLM's Transformers backend
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gpt_oss": transformers.GptOssConfig(
        **GROUPED, sliding_window=WINDOW, layer_types=[SLIDING, FULL, SLIDING], num_local_experts=4
    ),
}
WINDOWS = {
    "gemma2": [WINDOW, None, WINDOW],
    "gemma3": [WINDOW, None, WINDOW],
    "gpt_oss": [WINDOW, None, WINDOW],
    "mistral": [WINDOW] * 3,
}
LENGTHS = (9, 70, 150)  # the last two take several steps of 64 tokens
ANSWER = 6


def save(directory, config):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15 if "embed" in name else 0.05 if "experts" in name else 0.11)
            elif name.endswith("sinks"):
                weight.normal_(1, 2)
    model.float().save_pretrained(directory)
    return str(directory)


def weights_of(model, tokens):
    """Return what Transformers computes, `[layers, heads, tokens, tokens]`."""
    with torch.no_grad():
        layers = model(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    return np.stack([layer[0].double().numpy() for layer in layers])


def sinks_of(model):
    """Return each layer's sinks; None for a layer without."""
    return [getattr(layer.self_attn, "sinks", None) for layer in model.model.layers]


def hold(path, root, **arguments):
    """Assert that each prompt's weights are those of Transformers, in each layer; return these, caches and sinks."""
    reference = Reference(path).model
    sinks = sinks_of(reference)
    given = [prompt["prompt_token_ids"] for prompt in prompts(LENGTHS, seed=2)]
    consumers = [f"filesystem:root={root},capture=requests"]
    more = GREEDY | {"max_tokens": ANSWER}
    with engine(path, sites=["q:*", "k:*"], consumers=consumers, **arguments) as llm:
        cache = capflow.cache(llm, given, hooks=["q", "k"], positions="all", **more)
        late = capflow.cache(llm, given[-1], hooks=["q", "k"], positions={"last": 8}, **more)
    expected = [
        weights_of(reference, [*prompt, *answer[:-1]])
        for prompt, answer in zip(given, answers(cache.outputs), strict=True)
    ]
    for number, layers in enumerate(expected):
        for layer, theirs in enumerate(layers):
            ours = cache.attention(layer, number, sinks=sinks[layer])
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs).max() < 1e-6, f"layer {layer} of prompt {number}"
            assert (theirs > 0.01).sum() > theirs.shape[0] * theirs.shape[1], "weights that are nearly one-hot"
    return cache, late, expected, sinks


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("gemma2", "mistral") else pytest.mark.long) for name in MODELS]
)
def test_weights_are_those_of_transformers(name, tmp_path):
    path = save(tmp_path / "model", MODELS[name])
    cache, late, expected, sinks = hold(path, tmp_path / "rows")
    forms = [cache.model.attention_of(layer) for layer in range(3)]
    assert [form.window for form in forms] == WINDOWS.get(name, [None] * 3)
    # The queries behind a cached prefix, with the keys of an earlier request.
    assert late.outputs[0].num_cached_tokens == 128
    with pytest.raises(UsageError, match=r"attention of layer 1: got no rows at k of the positions 0\.\.141, "):
        late.attention(1)
    q, k = late.captures[0][1, "q"], cache.captures[2][1, "k"]
    start = LENGTHS[2] - 8
    weights = capflow.attention_weights(q.shaped[:8], k.shaped[: LENGTHS[2]], forms[1], start=start, sinks=sinks[1])
    assert np.abs(weights - expected[2][1][:, start : LENGTHS[2], : LENGTHS[2]]).max() < 1e-6
    # The rows say it in the data set, too.
    spans = {"subject": (3, 7)}
    capture = capflow.open(tmp_path / "rows")[cache.captures[2].id]
    sums = capture.attention(2, positions=-1, spans=spans, sinks=sinks[2])
    assert np.abs(sums[:, 0, 0] - expected[2][2][:, LENGTHS[2] - 1, 3:7].sum(-1)).max() < 1e-6


# It changes classes of Transformers in its process.
BACKEND = {"model_impl": "transformers"}
TWO_RANKS = {"tensor_parallel_size": 2, "in_process": False}


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [TWO_RANKS, BACKEND | {"in_process": False}, BACKEND | TWO_RANKS | {"enforce_eager": False}],
    ids=["two ranks", "backend", "backend, two ranks, compiled"],
)
def test_weights_of_other_engines(tmp_path, arguments):
    path = save(tmp_path / "model", MODELS["gemma2"])
    hold(path, tmp_path / "rows", **arguments)


@pytest.mark.parametrize(
    ("model_type", "lacks"),
    [
        ("bloom", "a bias of each distance (ALiBi)"),
        pytest.param("llama4_text", "the mask of ChunkedLocalAttention", marks=pytest.mark.long),
    ],
)
def test_attention_that_is_more_than_a_softmax_says_why(model_type, lacks, tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    config_of(model_type).save_pretrained(tmp_path)
    with environment(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"):
        arguments = EngineArgs(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=256)
        forms = check_model(arguments, ["q:*", "k:*"]).attention
        assert lacks in {form.lacks for form, _ in forms}
        # Without `k` there is nothing to say.
        assert check_model(arguments, ["post_block:*", "q:*"]).attention == ()
