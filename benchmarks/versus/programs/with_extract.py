"""vLLM's own speculator `extract_hidden_states`, with its `ExampleHiddenStatesConnector`: a file for each request.

A turn is over when every file is unlocked. They are not synced. On a CPU the connector is `unpinned.Connector`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from child import Job, answers, engine_arguments, prompts, sampling, serve


class Extract:
    """vLLM with that speculator, which runs no draft model."""

    def __init__(self, job: Job) -> None:
        import torch
        from vllm import LLM, SamplingParams

        self.job = job
        connector = {"kv_connector": "ExampleHiddenStatesConnector"}
        if not torch.accelerator.is_available():
            connector = {"kv_connector": "Connector", "kv_connector_module_path": "unpinned"}
        # Layers are counted from 1: the stream that comes into the next one.
        layers = {"eagle_aux_hidden_state_layer_ids": list(range(1, job["layers"] + 1))}
        self.llm = LLM(
            **engine_arguments(job),
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": layers},
            },
            kv_transfer_config=connector
            | {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": job["disk"]}},
        )
        extra = {"kv_transfer_params": {"include_output_tokens": True}}
        self.params = SamplingParams(**sampling(job), extra_args=extra)
        self.paths: list[str] = []

    def turn(self, _: int) -> list[list[int]]:
        """Generate, and wait for the files."""
        import fcntl
        from pathlib import Path

        outputs = self.llm.generate(prompts(self.job), self.params, use_tqdm=False)
        self.paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
        for path in self.paths:
            with Path(f"{path}.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
        return answers(outputs)

    def rows(self) -> Any:
        """Read the files of the last turn."""
        from safetensors.numpy import load_file

        return np.stack([load_file(path)["hidden_states"].swapaxes(0, 1) for path in self.paths])


if __name__ == "__main__":
    serve(Extract)
