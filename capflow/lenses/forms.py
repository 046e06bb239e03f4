"""Forms: how each architecture turns the stream after its last block into logits.

An architecture is in this table only if a test compares its lens with Transformers, at every layer. Any other one is
refused. Defaults are those of Transformers' configurations, which published `config.json` files may leave out.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

NormKind = Literal["rms", "rms_plus_one", "layer"]
"""The final norm.

`rms`: x / rms(x) · w (Zhang and Sennrich 2019, arXiv:1910.07467).
`rms_plus_one`: x / rms(x) · (1 + w), as Gemma has it.
`layer`: (x - mean) / deviation · w + b, with or without b (Ba et al. 2016, arXiv:1607.06450).
"""


class Form(NamedTuple):
    """The final norm and the unembedding of an architecture.

    eps, eps_default: the configuration's field of the norm's ε, and its default.
    tied: the default of `tie_word_embeddings`, without which the head is a matrix of its own.
    norm, embedding, head: the names of the modules; the names of the first two follow the checkpoint's prefix.
    multiplied: the field of a factor of the logits, and its default.
    divided: the field of a divisor of the logits, and its default.
    capped: the field of c in c · tanh(logit / c), and its default; None for no cap.
    layers: the field of the number of layers.
    """

    kind: NormKind = "rms"
    eps: str = "rms_norm_eps"
    eps_default: float = 1e-6
    tied: bool = False
    norm: str = "norm"
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    multiplied: tuple[str, float] | None = None
    divided: tuple[str, float] | None = None
    capped: tuple[str, float | None] | None = None
    layers: str = "num_hidden_layers"


_RMS5 = Form(eps_default=1e-5)
_GLM = Form(eps_default=1.5625e-7)
_LAYER = Form(kind="layer", eps="layer_norm_eps", eps_default=1e-5)
_GEMMA = Form(kind="rms_plus_one", tied=True)
_COHERE = _LAYER._replace(tied=True, multiplied=("logit_scale", 0.0625))
_GPT2 = Form(
    kind="layer",
    eps="layer_norm_epsilon",
    eps_default=1e-5,
    tied=True,
    norm="ln_f",
    embedding="wte",
    layers="n_layer",
)

FORMS: dict[str, Form] = {
    "apertus": _RMS5,
    "arcee": _RMS5,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "cwm": _RMS5,
    "deepseek_v2": Form(),
    "deepseek_v3": Form(),
    "dots1": Form(),
    "ernie4_5": _RMS5._replace(tied=True),
    "exaone4": _RMS5,
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(capped=("final_logit_softcapping", 30.0)),
    "gemma3": _GEMMA._replace(capped=("final_logit_softcapping", None)),
    "gemma3_text": _GEMMA._replace(capped=("final_logit_softcapping", None)),
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": _RMS5,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _LAYER._replace(norm="final_layer_norm", embedding="embed_in", head="embed_out"),
    "gpt_oss": _RMS5,
    "granite": Form(divided=("logits_scaling", 1.0)),
    "granitemoe": Form(divided=("logits_scaling", 1.0)),
    "hunyuan_v1_dense": _RMS5,
    "llama": Form(),
    "llama4": _RMS5,
    "llama4_text": _RMS5,
    "ministral": Form(),
    "ministral3": _RMS5,
    "mistral": Form(),
    "mistral3": Form(),
    "mixtral": _RMS5,
    "olmo2": _RMS5,
    "olmo3": _RMS5,
    "olmoe": _RMS5,
    "phi": _LAYER._replace(norm="final_layernorm"),
    "phi3": _RMS5,
    "qwen2": Form(),
    "qwen2_moe": Form(),
    "qwen3": Form(),
    "qwen3_moe": Form(),
    "seed_oss": Form(),
    "smollm3": Form(tied=True),
    "stablelm": _LAYER,
    "starcoder2": _LAYER._replace(eps="norm_epsilon", tied=True),
}
"""The form of each architecture, by the `model_type` of its configuration."""

NESTED = ("gemma3", "llama4", "mistral3")
"""Architectures whose fields are in `text_config`."""

PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "transformer.", "gpt_neox.")
"""What stands in a checkpoint before the names of the norm and the embedding."""

HEAD_PREFIXES = ("", "language_model.")
"""What stands in a checkpoint before the name of the head."""
