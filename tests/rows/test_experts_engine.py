"""The experts of captured router logits against those that Transformers and vLLM choose."""

import numpy as np
import pytest

import capflow
from capflow.errors import UsageError
from capflow_engine.compat.model import check_model
from tests.architectures import table as architectures
from tests.kit.engines import GREEDY, answers, engine, environment, prompts
from tests.kit.experts import routed, taken

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500), pytest.mark.long]

MANY = dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 16) | {
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
MODELS = {
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "olmoe": ("olmoe", {"num_experts": 8, "norm_topk_prob": False}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 8, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "norm_topk_prob": False}),
    "qwen3_moe, renormalised": ("qwen3_moe", {"num_experts": 8, "norm_topk_prob": True}),
    "deepseek_v2": ("deepseek_v2", MANY | {"topk_method": "group_limited_greedy", "norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", MANY | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "glm4_moe": ("glm4_moe", MANY | {"norm_topk_prob": True}),
    "llama4": ("llama4_text", {"num_local_experts": 8}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8}),
    "granitemoe": ("granitemoe", {"num_local_experts": 8}),
    "cohere2_moe": ("cohere2_moe", {"num_experts": 8, "expert_selection_fn": "sigmoid", "norm_topk_prob": True}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 8}),
    "afmoe": ("afmoe", {"num_experts": 8}),
    "lfm2_moe": ("lfm2_moe", {"num_experts": 8}),
    "flex_olmo, by vLLM's Transformers backend": ("flex_olmo", {"num_experts": 8}),
    "dots1, by vLLM's Transformers backend": ("dots1", {"n_routed_experts": 8}),
}
LENGTHS = (9, 58)  # together they take two steps
ANSWER = 4
MLA = ("deepseek_v2", "deepseek_v3")
"""Where vLLM would take a backend for processors with AMX, which has no float32."""


def bias_of(layer):
    """Return the numbers that a layer of Transformers adds to the scores of its experts."""
    named = [*layer.named_buffers(), *layer.named_parameters()]
    biases = [each for name, each in named if name.endswith(("e_score_correction_bias", "expert_bias"))]
    return biases[0].detach().numpy().ravel()


def given_of(form, layer):
    """Return the arguments of `chosen_experts` for a layer."""
    return {"bias": bias_of(layer)} if form.biased else {}


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_those_of_transformers_and_of_vllm(name, tmp_path, monkeypatch):
    model_type, fields = MODELS[name]
    monkeypatch.setitem(architectures.SPECIAL, model_type, architectures.SPECIAL.get(model_type, {}) | fields)
    model = architectures.make(model_type, tmp_path / "model")
    layers = architectures.layers_of(model, model.config)
    more = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if model_type in architectures.HEADED else {}
    more |= {"attention_backend": "CPU_MLA"} if model_type in MLA else {}
    given = [prompt["prompt_token_ids"] for prompt in prompts(LENGTHS, seed=3)]
    consumers = [f"filesystem:root={tmp_path / 'rows'},capture=requests"]
    with engine(str(tmp_path / "model"), sites=["router:*"], consumers=consumers, **more) as llm, routed(llm) as chosen:
        cache = capflow.cache(llm, given, hooks=["router"], positions="all", max_tokens=ANSWER, **GREEDY)
    forms = {site.layer: cache.model.router_of(site.layer) for site in cache}
    assert set(chosen) == set(forms)
    assert {(form.on_input, form.rounded) for form in forms.values()} == {(name == "llama4", False)}
    for number, calls in chosen.items():
        for logits, ids, weights in calls:
            made = capflow.chosen_experts(logits, forms[number], **given_of(forms[number], layers[number]))
            assert np.array_equal(made.ids, ids)
            scale = forms[number].scale  # which vLLM multiplies the experts' sum by in some models
            assert min(np.abs(made.weights - times * weights).max() for times in (1, scale)) < 1e-5
    for module in model.modules():  # vLLM's Transformers backend changes classes in its process
        module.__dict__.setdefault("do_not_compile", True)
    for number, (prompt, answer) in enumerate(zip(given, answers(cache.outputs), strict=True)):
        with architectures.torch.no_grad(), taken(layers) as expected:
            model(architectures.torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False)
        assert set(expected) == set(forms)
        for layer, ((ids, weights),) in expected.items():
            made = cache.experts(layer, number, **given_of(forms[layer], layers[layer]))
            assert np.array_equal(made.ids, ids), f"layer {layer} of prompt {number}"
            assert np.abs(made.weights - weights).max() < 1e-5, f"layer {layer} of prompt {number}"


@pytest.mark.parametrize(("model_type", "rounded"), [("mixtral", False), ("glm4_moe", True), ("ernie4_5_moe", True)])
def test_in_bfloat16_only_experts_of_equal_logits_may_differ(model_type, rounded, tmp_path):
    model = architectures.make(model_type, tmp_path / "model", "bfloat16")
    layers = architectures.layers_of(model, model.config)
    given = [prompt["prompt_token_ids"] for prompt in prompts((60,) * 4, seed=3)]
    arguments = {"sites": ["router:*"], "consumers": [f"filesystem:root={tmp_path / 'rows'},capture=requests"]}
    with engine(str(tmp_path / "model"), dtype="bfloat16", **arguments) as llm, routed(llm) as chosen:
        cache = capflow.cache(llm, given, hooks=["router"], positions="all", max_tokens=1, **GREEDY)
    assert {cache.model.router_of(site.layer).rounded for site in cache} == {rounded}
    clear_of_all = []
    for number, calls in chosen.items():
        form = cache.model.router_of(number)
        for logits, ids, weights in calls:
            made = capflow.chosen_experts(logits, form, **given_of(form, layers[number]))
            ordered = np.sort(logits, axis=1)[:, -form.top_k - 1 :]
            clear = (np.diff(ordered, axis=1) > 0).all(axis=1)
            assert np.array_equal(np.sort(made.ids[clear]), np.sort(ids[clear]))
            assert np.abs(np.sort(made.weights[clear]) - form.scale * np.sort(weights[clear])).max() < 0.01 * form.scale
            clear_of_all += clear.tolist()
    assert 0.9 < np.mean(clear_of_all) < (1 + rounded) * 0.9999


@pytest.mark.parametrize(
    ("model_type", "fields", "lacks"),
    [
        ("phimoe", {}, "the choice of vllm.model_executor.models.phimoe.phimoe_routing_function"),
        (
            "gemma4_text",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
            "the choice of vllm.model_executor.models.gemma4.Gemma4Router.routing_function",
        ),
        ("longcat_flash", {"zero_expert_type": "identity"}, "the choice of a ZeroExpertRouter"),
    ],
)
def test_routers_with_a_choice_of_their_own_are_named(model_type, fields, lacks, tmp_path, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setitem(architectures.SPECIAL, model_type, architectures.SPECIAL.get(model_type, {}) | fields)
    config = architectures.config_of(model_type)
    config.architectures = [architectures.NAMED.get(model_type, config.architectures[0])]
    config.save_pretrained(tmp_path)
    with environment(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"):
        arguments = EngineArgs(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=256)
        tapped = check_model(arguments, ["router:*"])
        assert {form.lacks for form, _ in tapped.router} == {lacks}
        assert check_model(arguments, ["post_block:*"]).router == ()
    with pytest.raises(UsageError, match=f"^experts: got {lacks}, expected a choice by the router's logits alone$"):
        capflow.chosen_experts(np.zeros((2, 4), np.float32), tapped.router[0][0])
