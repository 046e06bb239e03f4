"""Requests that come and go, and whose input goes on, when a test wants them to."""

import copy

import pytest
from vllm.sampling_params import RequestOutputKind

import capflow
from capflow_engine.compat import engine as compat
from tests.kit.engines import GREEDY
from tests.kit.rows import ALL


class Driver:
    """Drives an engine step by step, so that requests come and go when a test wants them to."""

    def __init__(self, llm):
        self.llm, self.engine = llm, llm.llm_engine
        # The tokens of each request, as vLLM answers.
        self.tokens = {}

    def add(self, name, prompt, max_tokens, **more):
        params = capflow.sampling_params(id=name, capture=ALL, **(GREEDY | {"max_tokens": max_tokens} | more))
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def say(self, name, prompt, params, *, more=True):
        """Add a part of a request's input, or with `more=False` the word that there is none."""
        params = params.clone()
        params.output_kind = RequestOutputKind.DELTA
        tasks = self.engine.get_supported_tasks()
        request = self.engine.input_processor.process_inputs(
            name, {"prompt_token_ids": list(prompt)}, params, supported_tasks=tasks, resumable=more
        )
        request.external_req_id = name
        self.engine.output_processor.add_request(copy.deepcopy(request), None, None, 0)
        self.engine.engine_core.add_request(request)  # as from a socket, another: both make its prompt longer

    def talk(self, name, prompt, params):
        """Add a part of a request's input; return what is generated before it waits for the next one."""
        self.say(name, prompt, params)
        talking = self.engine.engine_core.engine_core.scheduler.requests[name]
        for _ in range(100):
            self.engine.step()
            if talking.status.name == "WAITING_FOR_STREAMING_REQ":
                return list(talking.output_token_ids)
        return pytest.fail("the part was not answered")

    def steps(self, count):
        for _ in range(count):
            self._take(self.engine.step())

    def run(self):
        for _ in range(1000):
            if not self.engine.has_unfinished_requests():
                break
            self._take(self.engine.step())
        else:
            pytest.fail("requests do not end")
        compat.flush(self.engine)

    def _take(self, outputs):
        for output in outputs:
            self.tokens[output.request_id] = [*output.prompt_token_ids, *output.outputs[0].token_ids]

    def results(self, *names):
        """Return what the hub says of requests, once it is final."""
        with self.llm.capflow_settings.hubs[0].client() as client:
            results = client.results(names, wait=True)
            return {name: by_consumer["keeper"].status for name, by_consumer in results.items()}
