"""vLLM alone."""

from __future__ import annotations

from typing import Any

from child import Job, answers, engine_arguments, nothing, prompts, sampling, serve


class Plain:
    """vLLM, without anything beside it."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM, SamplingParams

        self.job = job
        self.llm = LLM(**engine_arguments(job))
        self.params = SamplingParams(**sampling(job))

    def turn(self, _: int) -> list[list[int]]:
        """Generate."""
        return answers(self.llm.generate(prompts(self.job), self.params, use_tqdm=False))

    def rows(self) -> Any:
        """Return none."""
        return nothing()


if __name__ == "__main__":
    serve(Plain)
