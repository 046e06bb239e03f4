"""Rows of prompts as arrays: `capflow.cache` against Transformers with forward hooks, and against TransformerLens.

    python benchmarks/cache.py [--model demo] [--prompts 128] [--tokens 32] [--hook heads] [--rounds 3]
        [--transformer-lens DIRECTORY]

Every contender returns the same rows, in float32: the stream that leaves each layer (`post_block`), or with `--hook
heads` each head's result, at each position of random prompts. All are loaded at the same time, in this process. Turns
are interleaved; loading is not timed. Rows must agree. Medians are of the CPU time of the process and of its hub's, as
in `sweep.py`, which also says how to install TransformerLens.

* `loop`: one forward pass for each prompt, of the last token's logits only; rows stay in memory.
* `batched`: the same, with `--batch` prompts of equal length in one forward pass.
* `TransformerLens`: `run_with_cache` for each prompt, as its tutorials do; it computes the logits of every token.
* `capflow`: `cache.stack` of a `capflow.cache`. The rows went through the hub to files, with checksums, and back.

Predicted: capflow computes as `batched` does. Its way through files costs 1 to 2 ms for each MB, a fifth of the step: 2
times the loop, 3 times TransformerLens, 0.8 times `batched`.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from overhead import run_round
from sweep import attached

from capflow.capture.site import Site
from capflow_models.backends import resolved_model

Rows = npt.NDArray[np.float32]
"""`[layers, prompts, tokens, width]`."""

AGREE = 1e-3
"""The largest difference of rows, as a share of the largest number of the layer."""


class Loop:
    """Transformers with forward hooks, `batch` prompts in one forward pass."""

    def __init__(self, model: Any, hook: str, batch: int) -> None:
        self.model, self.hook, self.batch = model, hook, batch

    def turn(self, prompts: Sequence[Sequence[int]]) -> Rows:
        """Return the rows."""
        parts = []
        for start in range(0, len(prompts), self.batch):
            rows: dict[int, torch.Tensor] = {}
            handles = [
                attached(layer, self.hook, functools.partial(_keep, rows, number))
                for number, layer in enumerate(self.model.model.layers)
            ]
            with torch.inference_mode():
                self.model(torch.tensor(prompts[start : start + self.batch]), use_cache=False, logits_to_keep=1)
            for handle in handles:
                handle.remove()
            parts.append(torch.stack([rows[number] for number in range(len(rows))]))
        return torch.cat(parts, dim=1).numpy()


def _keep(rows: dict[int, torch.Tensor], layer: int, values: torch.Tensor) -> None:
    rows[layer] = values.clone()


class Lens:
    """TransformerLens."""

    def __init__(self, directory: str, name: str, hook: str) -> None:
        sys.path.append(directory)
        from transformer_lens.model_bridge import TransformerBridge

        self.model = TransformerBridge.boot_transformers(name, dtype=torch.float32)
        layers = range(self.model.cfg.n_layers)
        self.names = [Site(layer, hook).transformer_lens_name for layer in layers]

    def turn(self, prompts: Sequence[Sequence[int]]) -> Rows:
        """Return the rows."""
        parts = []
        with torch.inference_mode():
            for prompt in prompts:
                _, cache = self.model.run_with_cache(torch.tensor([prompt]), names_filter=self.names)
                parts.append(torch.stack([cache[name][0].flatten(1) for name in self.names]))
        return torch.stack(parts, dim=1).numpy()


class Capflow:
    """`capflow.cache`."""

    def __init__(self, name: str, hook: str) -> None:
        import capflow

        self.hook = hook
        self.directory = tempfile.TemporaryDirectory(prefix="capflow-bench-")
        self.llm = capflow.LLM(
            name,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            sites=[f"{hook}:*"],
            consumers=[f"filesystem:root={self.directory.name},capture=requests"],
        )

    def turn(self, prompts: Sequence[Sequence[int]]) -> Rows:
        """Return the rows."""
        import capflow

        rows = capflow.cache(self.llm, prompts, hooks=self.hook, detokenize=False).stack(self.hook)
        return rows.reshape(*rows.shape[:3], -1)

    def close(self) -> None:
        """End the engine."""
        self.llm.close()
        self.directory.cleanup()


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hook", default="post_block", choices=["post_block", "heads"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--transformer-lens", default="")
    args = parser.parse_args()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    name = resolved_model(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    turns: dict[str, Callable[[Sequence[Sequence[int]]], Rows]] = {
        "loop": Loop(model, args.hook, 1).turn,
        "batched": Loop(model, args.hook, args.batch).turn,
    }
    if args.transformer_lens:
        turns["TransformerLens"] = Lens(args.transformer_lens, name, args.hook).turn
    ours = Capflow(name, args.hook)
    turns["capflow"] = ours.turn
    rng = np.random.default_rng(0)
    vocabulary = min(model.config.vocab_size, 200_000)
    seconds: dict[str, list[float]] = {kind: [] for kind in turns}
    for number in range(args.rounds + 1):
        prompts = rng.integers(vocabulary // 20, vocabulary, (args.prompts, args.tokens)).tolist()
        rows = run_round(turns, prompts, number, seconds)
        for kind, theirs in rows.items():
            assert theirs.shape == rows["capflow"].shape, kind
            scale = np.abs(theirs).max(axis=(1, 2, 3), keepdims=True)
            apart = (np.abs(theirs - rows["capflow"]) / scale).max()
            assert apart < AGREE, f"{kind}: rows differ by {apart:.1e}"
    ours.close()
    size, threads = rows["capflow"].nbytes / 1e6, torch.get_num_threads()
    print(
        f"\n{args.hook} of {args.prompts} prompts of {args.tokens} tokens, {size:.0f} MB, "
        f"{args.rounds} turns each, interleaved, {threads} threads"
    )
    print("| contender | CPU s | MB per CPU s | capflow is faster by |")
    print("|---|---|---|---|")
    for kind, each in seconds.items():
        median = statistics.median(each)
        factor = statistics.median(other / own for other, own in zip(each, seconds["capflow"], strict=True))
        print(f"| {kind} | {median:.1f} | {size / median:.0f} | {factor:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
