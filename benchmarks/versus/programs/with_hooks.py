"""Hugging Face Transformers with forward hooks, all prompts in one batch, with its cache of keys and values.

`reference` also makes what the driver compares everyone with: see `reference.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from child import Job, nothing, serve


class Hooked:
    """A model of Transformers whose layers have forward hooks.

    job["mode"]: `rows` keeps every layer's rows, `probe` scores one layer's, `steer` adds a vector there.
    """

    def __init__(self, job: Job) -> None:
        import torch
        import transformers

        self.torch, self.job = torch, job
        self.model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
        # Fixed lengths: nothing ends an answer.
        self.model.generation_config.eos_token_id = None
        self.prompts = torch.tensor(job["prompts"])
        self.layers = self.model.model.layers
        self.kept: list[list[Any]] = [[] for _ in self.layers]
        self.made: Any = None
        mode, layer = job["mode"], self.layers[job["layer"]]
        if mode == "rows":
            for number, each in enumerate(self.layers):
                each.register_forward_hook(functools.partial(self._keep, number))
        elif mode == "probe":
            self.weight = torch.from_numpy(np.load(job["weight"]))
            layer.register_forward_hook(self._score)
        elif mode == "steer":
            self.vectors = torch.from_numpy(np.load(job["vectors"]))
            layer.register_forward_hook(self._steer)

    def _keep(self, number: int, _layer: Any, _args: Any, output: Any) -> None:
        self.kept[number].append(stream(output).clone())

    def _score(self, _layer: Any, _args: Any, output: Any) -> None:
        self.kept[0].append(stream(output) @ self.weight)

    def _steer(self, _layer: Any, _args: Any, output: Any) -> Any:
        steered = stream(output) + self.vectors[:, None]
        return steered if output is stream(output) else (steered, *output[1:])

    def turn(self, _: int) -> list[list[int]]:
        """Generate."""
        torch, tokens = self.torch, self.job["tokens"]
        for parts in self.kept:
            parts.clear()
        self.made = None
        with torch.inference_mode():
            ids = self.model.generate(
                self.prompts,
                attention_mask=torch.ones_like(self.prompts),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
            if self.job["mode"] == "rows":
                self.made = torch.stack([torch.cat(parts, 1) for parts in self.kept], 1)
            elif self.job["mode"] == "probe":
                self.made = torch.cat(self.kept[0], 1)
        return ids[:, self.prompts.shape[1] :].tolist()

    def rows(self) -> Any:
        """Return the rows or scores of the last turn."""
        return nothing() if self.made is None else self.made.numpy()


def stream(output: Any) -> Any:
    """Return the residual stream `[prompts, positions, width]` that a layer returns, alone or in a tuple."""
    return output[0] if isinstance(output, tuple) else output


if __name__ == "__main__":
    serve(Hooked)
