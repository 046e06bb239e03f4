"""What checks need of a model before an engine starts, from its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from capflow.errors import UsageError, explain
from capflow_models.backends import config_of, resolved_model
from capflow_models.sweep.origin import origin_of


class Model(NamedTuple):
    """A model.

    tokenizer: None if the model has none.
    length_max: the most tokens of a request, as far as it is known.
    origin: the identity of its files, and versions.
    """

    layers: int
    vocabulary: int
    tokenizer: Any
    length_max: int | None
    origin: Mapping[str, str]


def inspected(model: str, engine: Mapping[str, Any]) -> Model:
    """Return what a model's files say of it. Raises UsageError for a model without a configuration."""
    import transformers

    name, trusts = resolved_model(model), bool(engine.get("trust_remote_code"))
    try:
        whole = config_of(model, engine)
        config = whole.get_text_config()
        layers, vocabulary = int(config.num_hidden_layers), int(config.vocab_size)
    except (OSError, ValueError, AttributeError) as e:
        expected = "a model that Transformers can describe"
        raise UsageError(explain("model", got=f"{model}: {str(e).splitlines()[0]}", expected=expected)) from e
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            engine.get("tokenizer") or name,
            trust_remote_code=trusts,
            revision=engine.get("tokenizer_revision") or engine.get("revision") or "main",
        )
    except (OSError, ValueError, KeyError, TypeError):
        tokenizer = None
    length_max = engine.get("max_model_len") or getattr(config, "max_position_embeddings", None)
    # vLLM takes -1 and texts for a length that it finds out itself.
    known_max = length_max if isinstance(length_max, int) and length_max > 0 else None
    return Model(layers, vocabulary, tokenizer, known_max, origin_of(model, whole))
