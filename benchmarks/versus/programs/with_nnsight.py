"""nnsight's back end of vLLM: a trace with an invoke for each prompt."""

from __future__ import annotations

from typing import Any

from child import Job, engine_arguments, sampling, serve


class Traced:
    """nnsight's `VLLM`."""

    def __init__(self, job: Job) -> None:
        from nnsight.modeling.vllm import VLLM

        arguments = engine_arguments(job)
        self.job = job
        self.model = VLLM(arguments.pop("model"), dispatch=True, **arguments)
        self.made: Any = None

    def turn(self, _: int) -> list[list[int]]:
        """Generate."""
        import torch

        layers, tokens, rows, samples = range(self.job["layers"]), self.job["tokens"], [], []
        with self.model.trace(**sampling(self.job)) as tracer:
            for prompt in self.job["prompts"]:
                with tracer.invoke(prompt):
                    kept: Any = [[] for _ in layers]
                    tokens_of: Any = []
                    for _ in tracer.iter[:tokens]:
                        for number in layers:
                            kept[number].append(sum(self.model.model.layers[number].output))
                        tokens_of.append(self.model.samples.output)
                    rows.append(kept.save())
                    samples.append(tokens_of.save())
        self.made = torch.stack([torch.stack([torch.cat(parts) for parts in each]) for each in rows])
        return [[int(token) for token in each] for each in samples]

    def rows(self) -> Any:
        """Return the rows of the last turn."""
        return self.made.numpy()


if __name__ == "__main__":
    serve(Traced)
