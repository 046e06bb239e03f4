"""vLLM-Hook: its worker that keeps hidden states of all tokens, and its analyzer that reads them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from child import Job, answers, engine_arguments, prompts, sampling, serve


class Hook:
    """A `HookLLM`."""

    def __init__(self, job: Job) -> None:
        import vllm_hook_plugins

        self.job = job
        config = Path(job["disk"]) / "config.json"
        # Its layers are counted from 1.
        layers = list(range(1, job["layers"] + 1))
        config.write_text(json.dumps({"hidden_states": {"layers": layers, "mode": "all_tokens"}}))
        vllm_hook_plugins.register_plugins()
        self.llm = vllm_hook_plugins.HookLLM(
            worker_name="probe_hidden_states",
            analyzer_name="hidden_states",
            config_file=str(config),
            hook_dir=job["disk"],
            # It asks for the tokenizer.
            **engine_arguments(job) | {"skip_tokenizer_init": False},
        )
        self.made: Any = None

    def turn(self, _: int) -> list[list[int]]:
        """Generate, and read the hidden states."""
        from vllm import SamplingParams

        outputs = self.llm.generate(prompts(self.job), SamplingParams(**sampling(self.job)))
        self.made = self.llm.analyze(analyzer_spec={"reduce": "none"})["hidden_states"]
        return answers(outputs)

    def rows(self) -> Any:
        """Return the rows of the last turn."""
        import torch

        layers = [torch.stack(self.made[name]) for name in sorted(self.made, key=lambda name: int(name.split(".")[-1]))]
        return torch.stack(layers, 1).numpy()


if __name__ == "__main__":
    serve(Hook)
