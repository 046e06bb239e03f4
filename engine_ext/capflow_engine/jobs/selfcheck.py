"""A small capture from end to end, for `capflow doctor`: a tiny random model in vLLM, compared with Transformers."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from capflow.errors import CapflowError, explain
from capflow_engine.jobs.child import Tell, work_for_parent

_PROMPTS = ([3, 14, 15, 92, 65], [35, 89, 79], [32, 38, 46, 26, 43, 38, 32])
_TOKENS = 4
_BOUND = 1e-4


def main() -> int:
    """Capture and compare; report the number of `rows`, their `error` and what is `off`.

    The report has the form of `capflow_engine.jobs.child`.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

    def work(tell: Tell) -> None:
        with tempfile.TemporaryDirectory(prefix="capflow-doctor-") as name:
            rows, worst = _capture(Path(name))
        if worst >= _BOUND:
            got = f"a largest relative error against Transformers of {worst:.1e} in {rows} rows"
            raise CapflowError(explain("captured rows", got=got, expected=f"less than {_BOUND:g}"))
        from capflow_engine.compat.engine import features_off

        tell("checked", rows=rows, error=worst, off=features_off())

    return work_for_parent(work)


def _capture(directory: Path) -> tuple[int, float]:
    """Return how many rows were captured and the largest relative error among them."""
    import torch
    import transformers

    import capflow

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(directory / "model")
    with capflow.LLM(
        str(directory / "model"),
        consumers=[f"filesystem:root={directory / 'rows'},capture=requests"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
    ) as llm:
        params = [
            capflow.sampling_params(
                id=f"r{n}",
                capture={"hooks": {"post_block": "all"}},
                max_tokens=_TOKENS,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
            )
            for n in range(len(_PROMPTS))
        ]
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in _PROMPTS], params, use_tqdm=False)
    rows, worst = 0, 0.0
    data = capflow.open(directory / "rows")
    for n, output in enumerate(outputs):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.no_grad():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        # The last state is taken after the final norm, so the stream of the last layer is not among them.
        caught = [state[0] for state in states[1:-1]]
        for layer, expected in enumerate(caught):
            got = np.asarray(data[f"r{n}"][capflow.Site(layer, "post_block")].rows)
            reference = expected[: len(tokens) - 1].numpy()
            if got.shape != reference.shape:
                return rows, float("inf")
            rows += len(got)
            error = np.linalg.norm(got - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
            worst = max(worst, float(error.max()))
    return rows, worst


if __name__ == "__main__":
    sys.exit(main())
