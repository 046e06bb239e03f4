"""vllm-lens: rows with the outputs, a steering vector for each request, or a hook that scores one layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from child import Job, answers, engine_arguments, nothing, prompts, sampling, serve


class Lens:
    """vLLM with the plugin of vllm-lens, which turns compilation off."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM, SamplingParams

        self.job, self.mode = job, job["mode"]
        self.llm = LLM(**engine_arguments(job))
        asked = self._asked()
        self.params = [SamplingParams(**sampling(job), extra_args=extra) for extra in asked]
        self.outputs: Any = None

    def _asked(self) -> list[dict[str, Any]]:
        import torch
        from vllm_lens import Hook, SteeringVector

        job, count = self.job, len(self.job["prompts"])
        if self.mode == "rows":
            return [{"output_residual_stream": list(range(job["layers"]))}] * count
        if self.mode == "steer":
            vectors = torch.from_numpy(np.load(job["vectors"]))
            layers = [job["layer"]]
            return [
                {"apply_steering_vectors": [SteeringVector(activations=vector[None], layer_indices=layers)]}
                for vector in vectors
            ]
        weight = torch.from_numpy(np.load(job["weight"]))

        def score(ctx: Any, rows: Any) -> None:
            ctx.saved.setdefault("scores", []).append(rows @ weight)

        return [{"apply_hooks": [Hook(fn=score, layer_indices=[job["layer"]])]} for _ in range(count)]

    def turn(self, _: int) -> list[list[int]]:
        """Generate; the rows come with the outputs."""
        self.outputs = None
        # vllm-lens takes what it was asked out of the parameters.
        params = [each.clone() for each in self.params]
        self.outputs = self.llm.generate(prompts(self.job), params, use_tqdm=False)
        return answers(self.outputs)

    def rows(self) -> Any:
        """Return the rows or scores of the last turn."""
        if self.mode == "rows":
            return np.stack([output.activations["residual_stream"].numpy() for output in self.outputs])
        if self.mode == "steer":
            return nothing()
        import torch

        return np.stack([torch.cat(output.hook_results["0"]["scores"]).numpy() for output in self.outputs])


if __name__ == "__main__":
    serve(Lens)
