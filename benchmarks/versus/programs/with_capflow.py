"""capflow: idle, rows to disk, rows to memory, a steering vector for each request, or a probe that scores every token.

* `disk`: the `filesystem` consumer. A turn is over when every file is synced and published.
* `memory`: `capflow.cache` over files of a memory file system. A turn is over when the rows are one array.
* `probe`: the `duckdb` consumer. A turn is over when every score is committed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from child import Job, answers, engine_arguments, nothing, prompts, sampling, serve


class Capflow:
    """An engine with a hub that has one consumer."""

    def __init__(self, job: Job) -> None:
        import capflow

        self.job, self.mode = job, job["mode"]
        arguments = engine_arguments(job) | {"sites": ["post_block:*"]}
        root = job["memory"] if self.mode == "memory" else job["disk"]
        self.root = Path(root) / "rows"
        self.root.mkdir()
        consumer = f"filesystem:root={self.root},capture=requests"
        if self.mode == "probe":
            probe = Path(root) / "probe.safetensors"
            site = capflow.Site(job["layer"], "post_block")
            capflow.Probe.make(site, np.load(job["weight"])).save(probe)
            self.database = Path(root) / "scores.duckdb"
            consumer = f"duckdb:path={self.database},probes={probe}"
        self.llm = capflow.LLM(consumers=[consumer], **arguments)
        if self.mode == "steer":
            self.steered = [self._steered(vector) for vector in np.load(job["vectors"])]
        self.number = 0
        self.cached: Any = None

    def turn(self, number: int) -> list[list[int]]:
        """Generate, and wait for the results."""
        import capflow

        self.number, self.cached = number, None
        job, common = self.job, sampling(self.job)
        if self.mode == "memory":
            common.pop("max_tokens")
            made = capflow.cache(
                self.llm, job["prompts"], hooks="post_block", positions="all", max_tokens=job["tokens"], **common
            )
            self.cached = made.stack("post_block")
            return answers(made.outputs)
        if self.mode == "steer":
            params = self.steered
        elif self.mode == "disk":
            spec = {"hooks": {"post_block": "all"}, "positions": "all"}
            names = self._names()
            params = [capflow.sampling_params(id=name, capture={"filesystem": spec}, **common) for name in names]
        elif self.mode == "probe":
            params = [capflow.sampling_params(id=name, **common) for name in self._names()]
        else:
            params = capflow.sampling_params(**common)
        outputs = self.llm.generate(prompts(job), params, use_tqdm=False)
        results = [result for output in outputs for result in output.capture_results.values()]
        if wrong := [result.error or result.status for result in results if result.status != "ok"]:
            raise RuntimeError(f"{len(wrong)} of {len(results)} results: {wrong[0]}")
        return answers(outputs)

    def rows(self) -> Any:
        """Read the rows or scores of the last turn."""
        if self.mode == "memory":
            return self.cached.swapaxes(0, 1)
        if self.mode == "disk":
            import capflow

            data = capflow.open(self.root)
            sites = [f"post_block:{layer}" for layer in range(self.job["layers"])]
            parts = []
            for name in self._names():
                request = data[name]
                request.verify()
                parts.append(np.stack([request[site].rows for site in sites]))
            return np.stack(parts)
        return self._scores() if self.mode == "probe" else nothing()

    def _scores(self) -> Any:
        """Ask the consumer that runs for the scores of the last turn."""
        sql = "SELECT request_id, position, score FROM scores"
        query = [sys.executable, "-m", "capflow", "query", sql, "--path", str(self.database)]
        answer = subprocess.run([*query, "--format", "jsonl", "--rows", "1000000"], stdout=subprocess.PIPE, check=True)
        names = {name: number for number, name in enumerate(self._names())}
        scores = np.full((len(names), len(self.job["prompts"][0]) + self.job["tokens"] - 1), np.nan, np.float32)
        for line in answer.stdout.splitlines():
            score = json.loads(line)
            if score["request_id"] in names:
                scores[names[score["request_id"]], score["position"]] = score["score"]
        return scores

    def _names(self) -> list[str]:
        return [f"t{self.number}-{n}" for n in range(len(self.job["prompts"]))]

    def _steered(self, vector: Any) -> Any:
        import capflow

        shape = {"dtype": "float32", "shape": [1, len(vector)], "layer_indices": [self.job["layer"]]}
        vectors = {"post_block": shape | {"data": vector.astype(np.float32).tobytes()}}
        return capflow.sampling_params(steering_vectors=vectors, **sampling(self.job))


if __name__ == "__main__":
    serve(Capflow)
