"""What one pipeline stage passes on to the next, in the order of the calls of both model runners."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.sequence import IntermediateTensors

from capflow_engine.compat.step import take_margins
from capflow_engine.worker.runner import tap_runner

ONE = np.array([1])


class Gated:
    """A worker's part with a gate: its margins are there when the forward pass is over."""

    marks, rests, gates = None, False, True
    margins = None

    def prepare(self, batch):
        self.margins = None

    @contextlib.contextmanager
    def forward(self, tokens):
        yield
        self.margins = torch.full((1, tokens), 0.5)


class RunnerV1:
    """The calls of vLLM's V1 runner in a step."""

    input_batch = SimpleNamespace(num_reqs=1, num_computed_tokens_cpu=ONE, req_ids=["r"])

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self._prepare_inputs(scheduler_output, ONE)
        return self._model_forward(torch.zeros(4, dtype=torch.int32))

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        return None

    def _model_forward(self, input_ids):
        return IntermediateTensors({"hidden_states": torch.zeros(4, 8)})


class RunnerV2:
    """The calls of vLLM's V2 runner in a step."""

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self.prepare_inputs(scheduler_output)
        return IntermediateTensors({"hidden_states": torch.zeros(4, 8)})

    def prepare_inputs(self, scheduler_output):
        parts = {"num_computed_tokens_np": ONE, "num_scheduled_tokens": ONE, "num_reqs": 1, "req_ids": ["r"]}
        return SimpleNamespace(**parts, num_tokens_after_padding=4)


@pytest.mark.parametrize("base", [RunnerV1, RunnerV2])
def test_a_stage_passes_on_the_margins_of_the_step_that_it_ran(base):
    runner = base()
    tap_runner(runner, Gated(), v2=base is RunnerV2)
    for _ in range(2):
        assert take_margins(runner.execute_model(None)).tolist() == [[0.5] * 4]
