"""hotwire-vllm: a steering vector for each request, of a file that is there when the engine starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from child import Job, answers, engine_arguments, nothing, prompts, sampling, serve


class Hotwire:
    """vLLM with the plugin of hotwire."""

    def __init__(self, job: Job) -> None:
        import torch
        from vllm import LLM, SamplingParams

        self.job = job
        for number, vector in enumerate(np.load(job["vectors"])):
            table = torch.zeros(job["layers"], job["width"])
            table[job["layer"]] = torch.from_numpy(vector)
            torch.save(table, Path(job["disk"]) / f"v{number}.pt")
        os.environ["HOTWIRE_VECTORS"] = job["disk"]
        self.llm = LLM(**engine_arguments(job))
        specs = [{"id": f"v{n}", "layer": job["layer"], "scale": 1.0} for n in range(len(job["prompts"]))]
        self.params = [SamplingParams(**sampling(job), extra_args={"hotwire": json.dumps(spec)}) for spec in specs]

    def turn(self, _: int) -> list[list[int]]:
        """Generate."""
        return answers(self.llm.generate(prompts(self.job), self.params, use_tqdm=False))

    def rows(self) -> Any:
        """Return none."""
        return nothing()


if __name__ == "__main__":
    serve(Hotwire)
