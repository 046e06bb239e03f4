"""TransformerLens: its bridge over Transformers, `generate` under forward hooks, all prompts in one batch."""

from __future__ import annotations

import functools
from typing import Any

from child import Job, serve


class Lens:
    """A `TransformerBridge`."""

    def __init__(self, job: Job) -> None:
        import torch
        from transformer_lens.model_bridge import TransformerBridge

        self.torch, self.job = torch, job
        self.model = TransformerBridge.boot_transformers(job["model"], dtype=torch.float32)
        self.prompts = torch.tensor(job["prompts"])
        self.kept: list[list[Any]] = [[] for _ in range(job["layers"])]
        self.hooks = [(f"blocks.{n}.hook_out", functools.partial(self._keep, n)) for n in range(job["layers"])]
        self.made: Any = None

    def _keep(self, number: int, values: Any, hook: Any) -> None:  # noqa: ARG002, TransformerLens names it
        self.kept[number].append(values.clone())

    def turn(self, _: int) -> list[list[int]]:
        """Generate."""
        for parts in self.kept:
            parts.clear()
        self.made = None
        with self.torch.inference_mode(), self.model.hooks(fwd_hooks=self.hooks):
            ids = self.model.generate(
                self.prompts,
                max_new_tokens=self.job["tokens"],
                do_sample=False,
                stop_at_eos=False,
                use_past_kv_cache=True,
                return_type="tokens",
                verbose=False,
            )
        self.made = self.torch.stack([self.torch.cat(parts, 1) for parts in self.kept], 1)
        return ids[:, self.prompts.shape[1] :].tolist()

    def rows(self) -> Any:
        """Return the rows of the last turn."""
        return self.made.numpy()


if __name__ == "__main__":
    serve(Lens)
