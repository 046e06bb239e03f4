"""What every contender is compared with: float32 in Hugging Face Transformers.

    python reference.py MODEL DIRECTORY PROMPTS LENGTH TOKENS

Writes into the directory:

* `job.json`: the prompts, random tokens, and the model's size; `child.Job` says what the fields are.
* `rows.npy` `[prompts, layers, positions, width]`: the residual stream after each layer, of one forward pass over each
  prompt and its answer.
* `weight.npy` `[width]`, `vectors.npy` `[prompts, width]`: a probe and steering vectors for the middle layer. A vector
  is half as long as the median row there, so that answers change.
* `answers.json`: `plain` and `steered`, the greedy answers, and `margin`, by how much the likeliest token led at least.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from with_hooks import Hooked


def main(model: str, directory: Path, count: int, length: int, tokens: int) -> None:
    """Write the files."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    rng = np.random.default_rng(0)
    highest = min(config.vocab_size, 200_000)
    prompts = rng.integers(highest // 20, highest, (count, length)).tolist()
    if (start := config.bos_token_id) is not None:
        prompts = [[start, *prompt[1:]] for prompt in prompts]
    job: dict[str, Any] = {
        "model": model,
        "prompts": prompts,
        "tokens": tokens,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "layer": config.num_hidden_layers // 2,
        "vectors": str(directory / "vectors.npy"),
        "weight": str(directory / "weight.npy"),
    }
    hooked = Hooked(job | {"mode": "rows"})
    answers = {"plain": hooked.turn(0)}
    for parts in hooked.kept:
        parts.clear()
    ids = torch.cat([hooked.prompts, torch.tensor(answers["plain"])[:, :-1]], 1)
    with torch.inference_mode():
        logits = hooked.model(ids, use_cache=False, logits_to_keep=tokens).logits
    rows = torch.stack([parts[0] for parts in hooked.kept], 1).numpy()
    first, second = logits.topk(2, -1).values.unbind(-1)
    np.save(directory / "rows.npy", rows)
    at_layer = rows[:, job["layer"]]
    half = np.median(np.linalg.norm(at_layer, axis=-1)) / 2
    vectors = rng.standard_normal((count, job["width"])).astype(np.float32)
    np.save(job["vectors"], vectors * (half / np.linalg.norm(vectors, axis=-1, keepdims=True)))
    np.save(job["weight"], rng.standard_normal(job["width"]).astype(np.float32))
    del hooked, rows, logits
    answers["steered"] = Hooked(job | {"mode": "steer"}).turn(0)
    (directory / "answers.json").write_text(json.dumps(answers | {"margin": float((first - second).min())}))
    (directory / "job.json").write_text(json.dumps(job))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
