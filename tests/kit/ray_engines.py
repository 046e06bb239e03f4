"""An engine in an actor of Ray, as a user's program has it. Processes of Ray import it from here."""

import asyncio

import capflow
from tests.kit.rows import ALL


class Engine:
    """An engine that runs in a process of Ray's, until the process ends."""

    def __init__(self, model, hub, **arguments):
        self._model, self._arguments = model, {"hub": hub, **arguments}
        self._start = asyncio.Lock()
        self._llm = None

    async def generate(self, token_ids, name):
        """Return all tokens of a captured request, and the node where it ran."""
        import ray

        async with self._start:
            if self._llm is None:  # an engine starts where the event loop runs
                sizes = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "skip_tokenizer_init": True}
                self._llm = capflow.AsyncLLM.start(self._model, **sizes, **self._arguments)
        params = capflow.sampling_params(
            id=name, capture=ALL, max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False
        )
        outputs = [output async for output in self._llm.generate({"prompt_token_ids": token_ids}, params)]
        assert [result.status for result in outputs[-1].capture_results.values()] == ["ok"]
        return [*token_ids, *outputs[-1].outputs[0].token_ids], ray.get_runtime_context().get_node_id()

    async def __call__(self, request):
        """Answer a request of Ray Serve."""
        asked = await request.json()
        return await self.generate(asked["token_ids"], asked["name"])

    async def close(self):
        self._llm.shutdown()
