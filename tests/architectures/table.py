"""Tiny random models of every text decoder that Transformers and vLLM both implement, and the expected rows of sites.

Here, sites are found by the names of Transformers' modules, in a table by architecture; the engine finds them from
sums, without names. The proof is that both agree up to rounding.
"""

import contextlib
import functools
import inspect
import json
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.architectures import inside

VOCABULARY = 320
HIDDEN = 64

MULTIMODAL = (
    "aria", "blip-2", "cohere2_vision", "cohere_compass", "cosmos3_edge", "ernie4_5_vl_moe", "exaone4_5", "gemma3",
    "gemma3n", "gemma4", "gemma4_unified", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "granite4_vision",
    "idefics3", "internvl", "lfm2_vl", "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision",
    "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mistral3", "muse_glimmer", "nemotron_h_omni", "paddleocr_vl",
    "paligemma", "qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
    "qwen4_exp", "smolvlm", "step3p7",
)  # fmt: skip
"""Models of images and text that vLLM implements; they get text only."""

SHAPE = {
    "hidden_size": HIDDEN, "n_embd": HIDDEN, "d_model": HIDDEN, "word_embed_proj_dim": HIDDEN,
    "intermediate_size": 96, "ffn_hidden_size": 96, "ffn_dim": 96, "n_inner": 96, "shared_intermediate_size": 48,
    "moe_intermediate_size": 48, "expert_ffn_hidden_size": 48, "shared_expert_intermediate_size": 48,
    "block_ff_dim": 96,
    "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3,
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2,
    "num_key_value_heads": 1, "num_kv_heads": 1, "head_dim": 32, "attention_head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "seq_length": 512,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "top_k_experts": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "sliding_window": 64, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
"""The values of a configuration's fields, for the fields that it has."""

_SCALED = {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 2.0}

_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 64}
_SECTIONED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_TIED = {"tie_word_embeddings": True}
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]

SPECIAL = {
    "axk1": _MLA | {"num_key_value_heads": 2, "first_k_dense_replace": 0}, "axk2": _MLA | {"num_key_value_heads": 2},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v2": _MLA | {"num_key_value_heads": 2, "routed_scaling_factor": 4.0},
    "deepseek_v3": _MLA | {"num_key_value_heads": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": _MLA | {"num_key_value_heads": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6},
    "longcat_flash": _MLA | {"zero_expert_num": 2, "num_layers": 3, "mla_scale_q_lora": True, "mla_scale_kv_lora":
        True},
    "kimi_linear": _MLA, "youtu": _MLA | {"num_key_value_heads": 2}, "biogpt": _TIED, "bloom": _TIED,
    "gpt_bigcode": _TIED, "opt": _TIED, "falcon": _TIED | {"ffn_hidden_size": 256}, "gemma2": _TIED,
    "glm4_moe": {"head_dim": 32, "routed_scaling_factor": 2.5},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 48, "route_norm": True, "qk_norm": True},
    "inkling_text": {"padded_vocab_size": VOCABULARY},
    "lfm2": {"block_dim": HIDDEN, "conv_dim": HIDDEN, "layer_types": ["conv", "full_attention", "conv"]} | _TIED,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1} | _TIED,
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "llama4_text": {"num_experts_per_tok": 1},
    "dbrx": {"d_model": HIDDEN, "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "cohere_compass_text": {"rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4, "mrope_section":
        [6, 6, 4]} for name in ("sliding_attention", "full_attention")}, "layer_types": ["sliding_attention",
        "full_attention", "sliding_attention"]},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_kv_shared_layers": 0},
    "cosmos3_edge_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5,
        5]}},
    "qwen3_vl_moe_text": {"norm_topk_prob": True}, "cohere2_vision": _TIED,
    "glm4v_text": {"attention_bias": True, "rope_parameters": _SECTIONED | {"partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3]}},
    "glm4v_moe_text": {"head_dim": 32, "use_qk_norm": False, "rope_parameters": _SECTIONED |
        {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}},
    "glm_ocr_text": {"rope_parameters": _SECTIONED | {"partial_rotary_factor": 1.0}},
    "paddleocr_vl_text": {"rope_parameters": _SECTIONED},
    "paligemma": {"text_config": {"use_bidirectional_attention": False}},
    "ernie4_5_vl_moe": {"vision_config": {"embed_dim": 64, "mlp_ratio": 1.5}},
    "cohere_compass": _TIED | {"text_config": _TIED},
    "granite4_vision": {"text_config": {"model_type": "granite"} | _SCALED, "spatial_target_layers": [0, 1],
        "deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "gemma4": {"vision_config": {"hidden_size": 64}},
    "gemma4_unified": {"vision_config": {"hidden_size": 64}},
    "muse_glimmer": {"projector_hidden_size": 64, "out_hidden_size": 256, "vision_config": {"output_dim": 256}},
    "emu3": {"vq_config": {"base_channels": 32}},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qianfan_ocr": {"vision_config": {"image_size": 28, "patch_size": 14}},
    "step3p7": {"vision_config": {"output_dim": 64}},
    "glm5_next_text": {"num_key_value_heads": 2, "qk_rope_head_dim": 0},
    "qwen3_next": {"layer_types": _LINEAR}, "qwen3_5_text": {"layer_types": _LINEAR},
    "qwen3_5_moe_text": {"layer_types": _LINEAR}, "doge": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"output_gate_type": "sigmoid"}, "aria_text": {"num_experts_per_tok": 2},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "layernorm_epsilon": 1e-5,
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 32, "swa_v_head_dim": 32,
        "sliding_window_size": 64, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "attention_head_dim": 64,
        "num_key_value_heads": 2, "attention_hidden_size": 128, "n_mamba_heads": 4} | _TIED,
    "modernbert-decoder": {"decoder_bias": False} | _TIED,
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * 3} | _TIED,
    "qwen2_vl_text": {"rope_parameters": _SECTIONED}, "qwen2_5_vl_text": {"rope_parameters": _SECTIONED},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 48], "rope_parameters": {"rope_type": "default",
        "rope_theta": 1e4, "mrope_section": [6, 6, 4]}},
    "granite": _SCALED, "granite_swa": _SCALED, "granitemoe": _SCALED, "granitemoeshared": _SCALED,
    "granitemoe_swa": _SCALED, "hyperclovax": _SCALED,
    "granitemoehybrid": _SCALED | {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"},
    "minicpm3": {"num_key_value_heads": 2, "scale_depth": 1.4, "head_dim": None}, "gptj": {"rotary_dim": 16},
    "diffllama": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local"], 1], [["global"], 1]], "num_heads": 2},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_text": _TIED | {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
        "num_hidden_layers": 6, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16,
        "global_head_dim": 32},
    "gemma4_unified_text": _TIED | {"global_head_dim": 32, "num_hidden_layers": 6},
    "mpt": {"d_model": 64, "n_heads": 2, "n_layers": 3}, "olmo": {"clip_qkv": None},
}  # fmt: skip
"""Additional fields of a configuration, by model type."""

NAMED = {"phimoe": "PhiMoEForCausalLM"}
"""The name of an architecture in published checkpoints, if Transformers' own name selects another class of vLLM."""

TRANSPOSED = ("qwen3_vl_moe",)
"""Published checkpoints hold the experts transposed: Transformers transposes them on load, but not back on save."""

CAPPED = ("gemma2", "vaultgemma")
"""Transformers caps attention logits only in its eager attention."""

UNBIASED = ("ernie4_5_moe",)
"""vLLM's router on a CPU ignores the biases for the choice of experts; they are zero here."""

HEADED = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "lfm2", "lfm2_moe", "lfm2_vl", "longcat_flash",
    "youtu",
)  # fmt: skip
"""Queries have a dimension of heads, for which vLLM's rotary kernel for CPUs is wrong; here vLLM uses PyTorch's."""

COARSE = {"minicpm3": 2e-5}
"""The largest error that is allowed in float32, by model type, where vLLM's attention on a CPU has fewer digits."""

_SHARP = (
    "with query norms a tenth as large: this attention is not scaled and would magnify the rounding of random weights"
)
NOTES = (
    {
        "apertus": "vLLM computes the two parameters of its activation in bfloat16 for any dtype; "
        "the reference does the same",
        "bloom": "vLLM computes GELU exactly, Transformers uses the tanh approximation; the reference here is exact",
        **dict.fromkeys(
            inside.EVENS_FIRST, "vLLM has the even dimensions of queries and keys first; the reference does the same"
        ),
        **dict.fromkeys(inside.SCALED, "Transformers scales queries before attention, vLLM in it: compared unscaled"),
        "ernie4_5_moe": "vLLM's router on a CPU leaves out the biases for the choice of experts; they are zero here",
    }
    | dict.fromkeys(
        HEADED,
        "with vLLM's option `custom_ops=-rotary_embedding`: "
        "its rotary kernel for CPUs is wrong when heads are a dimension of the query",
    )
    | dict.fromkeys(MULTIMODAL, "text only")
    | {
        "glm4_moe_lite": "with vLLM's option `custom_ops=-rotary_embedding`, as for others; "
        "and with `rms_norm_eps` 1e-06, which Transformers uses for the norms of its latents in any case",
        "minicpm3": "within 2e-5: vLLM's attention of it on a CPU has fewer digits",
        "gemma4": f"text only, and {_SHARP}",
        "gemma4_text": _SHARP,
        "gemma4_unified_text": _SHARP,
        "paligemma": "text only, and with causal attention, as in vLLM; "
        "Transformers attends to a prompt in both directions",
    }
)
"""The notes of the matrix's rows, by model type."""

_PARAMETERS_MAX = 20_000_000

_ENCODER_DECODER = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "prophetnet", "trocr", "whisper",
)  # fmt: skip
_ENCODER = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
_COMPANION = ("gemma4_assistant", "gemma4_unified_assistant")
_SOUND = ("moshi", "musicgen", "musicgen_melody")

_GPU = ("glm5_next", "inkling_text", "kimi_linear", "minimax_m3_vl", "nemotron_h_omni")
_OTHER_FIELDS = ("deepseek_v4", "ernie4_5_vl_moe", "longcat_flash", "qianfan_ocr", "step3p7")
_OTHER_ANSWERS = ("cohere_compass", "doge", "mimo_v2_flash", "phimoe", "zaya")

LEFT_OUT = (
    dict.fromkeys(_ENCODER_DECODER, "the decoder of an encoder-decoder")
    | dict.fromkeys(_ENCODER, "an encoder")
    | dict.fromkeys(_COMPANION, "it drafts for another model and reads that model's cache")
    | dict.fromkeys(_SOUND, "it generates sound")
    | dict.fromkeys(_GPU, "vLLM needs a GPU for it")
    | dict.fromkeys(_OTHER_FIELDS, "vLLM reads other fields of its configuration than Transformers writes")
    | dict.fromkeys(_OTHER_ANSWERS, "vLLM's answers without capflow differ from Transformers")
)
"""The architectures that are not tried, with the reason."""

_VISION = {
    "hidden_size": 64, "embed_dim": 64, "intermediate_size": 64, "num_hidden_layers": 2, "depth": 2,
    "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "image_size": 28, "patch_size": 14,
    "out_hidden_size": HIDDEN, "vision_output_dim": HIDDEN, "projection_dim": 64, "projector_input_dim": 64,
    "projector_output_dim": 64, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16, "vision_use_head": False, "encoder_hidden_size": 64,
}  # fmt: skip


def model_types():
    """Return the model types that Transformers implements as causal language models or models of images and text."""
    return [name for name in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL}) if name not in LEFT_OUT]


WRONG_COARSE = {"ctrl": "vLLM without capflow gives other answers if it is compiled than if it is not"}
"""Why an architecture is not compared in another dtype than float32, by model type."""


def config_of(model_type):
    """Return the configuration of a tiny model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blank = transformers.AutoConfig.for_model(model_type)
        multimodal = model_type in MULTIMODAL
        fields = {} if multimodal else _fields(blank)
        special = {name: value for name, value in SPECIAL.get(model_type, {}).items() if value is not None}
        for name in blank.sub_configs:
            extra = special.pop(name, {})
            part = _part(blank, name, extra)
            if part is not None:
                tiny = _fields(part) if name == "text_config" else _tiny(part, _VISION)
                fields[name] = type(part)(**(tiny | extra)).to_dict()
        fields |= special
        for name in ("tie_word_embeddings", "vocab_size", "hidden_size"):
            if multimodal and name not in fields and _has(blank, name):
                fields[name] = fields["text_config"].get(name, SHAPE[name])
        for name in blank.to_dict():
            if name.endswith(("image_token_id", "image_token_index", "video_token_id", "audio_token_id")):
                fields.setdefault(name, 3)
        config = transformers.AutoConfig.for_model(model_type, **fields)
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if multimodal else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [names[model_type]]
    return config


def _part(blank, name, extra):
    """Return the configuration of a part of a model; None if the model has no such part."""
    if "model_type" in extra:
        return transformers.AutoConfig.for_model(extra["model_type"])
    part = getattr(blank, name, None)
    return blank.sub_configs[name]() if part is None and extra else part


def _fields(blank):
    special = SPECIAL.get(blank.model_type, {})
    fields = {name: value for name, value in _tiny(blank, SHAPE).items() if name not in special}
    return fields | {name: value for name, value in special.items() if value is not None}


def _tiny(blank, shape):
    return {name: value for name, value in shape.items() if _has(blank, name)}


def _has(config, name):
    try:
        return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
    except Exception:  # noqa: BLE001 - a field that differs by layer
        return False


def make(model_type, directory, dtype="float32"):
    """Save a tiny random model whose answers depend on every layer; return it in float32, with weights of `dtype`."""
    torch.manual_seed(7)
    config = config_of(model_type)
    auto = transformers.AutoModelForImageTextToText if model_type in MULTIMODAL else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > _PARAMETERS_MAX:
        raise ValueError(f"its configuration makes {size / 1e6:.0f} million parameters, which is not tiny")
    eager = {"attn_implementation": "eager"} if model_type in CAPPED else {}
    model = auto.from_config(config, dtype=torch.float32, **eager)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15 if "emb" in name or "wte" in name else 0.09)
            elif "bias" in name:
                weight.normal_(0, 0.05)
            elif weight.numel() > 1:
                sharp = name.endswith("q_norm.weight") and model_type.startswith("gemma4")
                # This attention has no scale, and sharp attention magnifies rounding.
                weight.add_(torch.randn_like(weight) * 0.1).mul_(0.1 if sharp else 1.0)
        for module in model.modules():
            if type(module).__name__ == "XIELUActivation":
                module.bfloat16()  # as vLLM does for every dtype
            if type(module).__name__ == "BloomMLP":
                module.gelu_impl = nn.GELU()  # as vLLM does; Transformers uses the tanh approximation
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.05)
        for name, weight in model.named_parameters():
            if "e_score_correction_bias" in name and model_type in UNBIASED:
                weight.zero_()
    _round(model, getattr(torch, dtype))
    model.save_pretrained(directory)
    _as_published(model_type, Path(directory))
    return model.eval()


@torch.no_grad()
def _round(model, dtype):
    for weight in model.state_dict().values():
        if weight.is_floating_point():
            weight.copy_(weight.to(dtype))


def _as_published(model_type, directory):
    """Change a saved model to the form of published checkpoints, if it differs from what Transformers saves."""
    if model_type in NAMED:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [NAMED[model_type]]}))
    if model_type in TRANSPOSED:
        file = str(directory / "model.safetensors")
        weights = {
            name: weight.mT.contiguous() if ".mlp.experts." in name else weight
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, {"format": "pt"})


# --- what Transformers computes ---

_LAYERS = ("layers", "h", "blocks")
_MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe")
_BEFORE = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm", "ln_2", "ln_mlp", "norm_2",
           "feedforward_layernorm", "post_attention_layernorm")  # fmt: skip
_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm")

NAMES = {
    "bloom": ("mlp", "post_attention_layernorm", "mlp.dense_4h_to_h"),
    "gemma4": ((), "pre_feedforward_layernorm", None), "gemma4_text": ((), "pre_feedforward_layernorm", None),
    "opt": ("fc2", "final_layer_norm", None), "blip-2": ("fc2", "final_layer_norm", None),
    "biogpt": ("fc2", "final_layer_norm", None),
    "ctrl": ("ffn", "layernorm2", None),
    "doge": (None, None, None), "zamba2": (None, None, None),
    "hyperclovax": ("mlp", "post_attention_layernorm", "post_norm2"),
    "granitemoe_swa": (("block_sparse_moe", "shared_mlp"), "post_attention_layernorm", None),
    "granitemoehybrid": (("block_sparse_moe", "shared_mlp"), "post_attention_layernorm", None),
    "granitemoeshared": (("block_sparse_moe", "shared_mlp"), "post_attention_layernorm", None),
}  # fmt: skip
"""The names of (MLP, norm before it, norm after it), by model type, where the usual names are wrong; None: no module.

Several names of an MLP are modules whose outputs are added up; no name: more is added after the MLP. None for the MLP:
the layer returns something else than the sum of its modules.
"""

PARALLEL = {
    "cohere_compass",
    "gpt_neox",
    "gptj",
    "phi",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere2_vision",
    "falcon",
    "codegen",
}
"""Attention and MLP are parallel: there is no stream between them."""


def layers_of(model, config):
    """Return the decoder layers of a Transformers model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for root in (decoder, model):
        for name, module in root.named_modules():
            numbers = len(module) if isinstance(module, nn.ModuleList) else 0
            if name.split(".")[-1] in _LAYERS and numbers == config.get_text_config().num_hidden_layers:
                return module
    raise LookupError("no list of layers")


def expected(model_type, model, prompts):
    """Return the expected rows of each prompt at each site, `{(layer, hook): [tokens, hidden]}`."""
    return [_expected(model_type, model, prompt) for prompt in prompts]


def _expected(model_type, model, tokens):
    # What attention and norms return, by layer and name.
    seen, parts = {}, {}
    with contextlib.ExitStack() as stack:
        layers = layers_of(model, model.config)
        for number, layer in enumerate(layers):
            watch = functools.partial(_watch, stack, seen, number)
            watch(layer, "pre_attn", before=True)
            watch(layer, "post_block")
            inside.watch(stack, seen, number, layer, mixers_of(layer), model_type)
            for mixer in mixers_of(layer)[:1]:
                watch(mixer, "attn_in", before=True)
                _watch(stack, parts, number, mixer, "mixer", scale=scale_of(model.config.get_text_config()))
            for name, child in layer.named_children():
                if "norm" in name:
                    _watch(stack, parts, number, child, name)
            mlp, before, after = names_of(model_type, layer)
            if mlp is None:
                continue
            if model_type not in PARALLEL:
                watch(getattr(layer, before or mlp), "post_attn", before=True)
            if before is not None:
                watch(getattr(layer, before), "mlp_in")
            else:
                watch(getattr(layer, mlp), "mlp_in", before=True)
            for name in [mlp] if isinstance(mlp, str) and after is None else [after] if after else mlp:
                watch(layer.get_submodule(name), "mlp_out", scale=scale_of(model.config.get_text_config()))
        run = model.language_model if model_type == "blip-2" else model  # blip-2 itself needs an image
        _watch(stack, seen, len(layers) - 1, run.get_output_embeddings(), "final", before=True)
        # Transformers counts PaliGemma's positions from 1, which turns `q` and `k` further, and attention not at all.
        more = {"position_ids": torch.arange(len(tokens))[None]} if model_type == "paligemma" else {}
        with torch.no_grad():
            run(torch.tensor([tokens]), use_cache=False, **more)
    for number in range(len(layers)):
        candidates = [rows for (layer, _), rows in parts.items() if layer == number]
        seen |= added_by_attention(seen, number, candidates)
    return seen


_CACHES = {"past_key_values", "past_key_value", "layer_past", "cache_params"}


def mixers_of(layer):
    """Return the modules of a layer that mix tokens: those that take a cache and lie in no other one."""
    mixers = []
    for name, module in layer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in mixers)
        if name and not inside and _CACHES & set(inspect.signature(module.forward).parameters):
            mixers.append((name, module))
    return [module for _, module in mixers]


def added_by_attention(rows, number, candidates):
    """Return what attention adds to the stream, `{(layer, "attn_out"): rows}`.

    It is the candidate that is the difference of the streams after and before, which itself has lost digits.
    """
    entering, middle, added, leaving = (
        rows.get((number, hook)) for hook in ("pre_attn", "post_attn", "mlp_out", "post_block")
    )
    difference = leaving - (0 if added is None else added) - entering if middle is None else middle - entering
    nearest = min(candidates, key=lambda each: distance(each, difference), default=difference)
    return {(number, "attn_out"): nearest if distance(nearest, difference) < 1e-3 else difference}


def names_of(model_type, layer):
    """Return the names of a layer's MLP, of the norm before it and of the norm after it."""
    if model_type in NAMES:
        return NAMES[model_type]
    children = dict(layer.named_children())
    first = lambda names: next((name for name in names if name in children), None)  # noqa: E731
    after = first(_AFTER)
    before = first(_BEFORE)
    if after is not None and before == "post_attention_layernorm" and "input_layernorm" not in children:
        before = None  # both norms follow their block
    return first(_MLP), before, after


def scale_of(config):
    """Return the factor of a module's output before it is added to the stream."""
    if (depth := getattr(config, "scale_depth", None)) is not None:
        return depth / config.num_hidden_layers**0.5
    return getattr(config, "residual_multiplier", 1.0)


def _watch(stack, seen, number, module, hook, *, before=False, scale=1.0):
    def take(value):
        value = value[0] if isinstance(value, tuple) else value
        rows = (value.detach() * scale).reshape(-1, value.shape[-1]).numpy().copy()
        seen[number, hook] = seen[number, hook] + rows if (number, hook) in seen else rows

    def given(module, args, kwargs):
        take(args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor)))

    handle = (
        module.register_forward_pre_hook(given, with_kwargs=True)
        if before
        else module.register_forward_hook(lambda module, args, output: take(output))
    )
    stack.callback(handle.remove)


def adds_up(rows, layers):
    """Return the largest relative error of `post_attn + mlp_out = post_block`, a check of the names above."""
    worst = 0.0
    for number in range(layers):
        if (number, "post_attn") in rows and (number, "mlp_out") in rows:
            total = rows[number, "post_attn"] + rows[number, "mlp_out"]
            worst = max(worst, distance(total, rows[number, "post_block"]))
    return worst


def distance(rows, reference):
    """Return the largest error, relative to the largest value of the reference."""
    if rows.shape != reference.shape:
        return float("inf")
    return float(np.abs(rows.astype(np.float64) - reference).max() / np.abs(reference).max())


def usual_distance(rows, reference):
    """Return the median error of a row, relative to the reference's, in the 2-norm."""
    if rows.shape != reference.shape:
        return float("inf")
    errors = np.linalg.norm(rows.astype(np.float64) - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
    return float(np.median(errors))
