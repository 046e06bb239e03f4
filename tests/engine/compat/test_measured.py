"""The logits processor of sweeps follows batches of vLLM's own updates; what it measures is compared with NumPy."""

import json

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from capflow_engine.compat import measured

VOCABULARY = 7


def params(request, reference, group):
    asked = {"request": request, "reference": reference, "group": group, "tokens": [1, 2]}
    return SamplingParams(extra_args={measured.MEASURED_KEY: asked})


@pytest.fixture
def processor(tmp_path, monkeypatch):
    """Return a processor of the first rank, and a function that returns KL by request of the lines so far."""
    out = tmp_path / "measured.jsonl"
    monkeypatch.setenv(measured.MEASURED_OUT, str(out))
    monkeypatch.delenv(measured.MEASURED_FUNCTIONS, raising=False)
    monkeypatch.setattr(measured, "get_tensor_model_parallel_rank", lambda: 0)

    def divergences():
        return {line["request"]: line["kl"] for line in map(json.loads, out.read_text().splitlines())}

    return measured.MeasuredLogits(None, torch.device("cpu"), is_pin_memory=False), divergences


def kl(one, other):
    one, other = (row.double().numpy() for row in (one, other))
    p, q = (np.exp(row) / np.exp(row).sum() for row in (one, other))
    return (p * np.log(p / q)).sum()


def test_a_reference_that_is_preempted_leaves_those_of_its_group(processor):
    measuring, divergences = processor
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    generated = {"a": [], "b": []}
    first = [(n, params(name, name, "g1"), [], output) for n, (name, output) in enumerate(generated.items())]
    measuring.update_state(BatchUpdate(2, [], first, []))
    measuring.apply(logits[:2])
    generated["a"].append(3)
    # Request b is preempted, and comes again in the place that it had.
    measuring.update_state(BatchUpdate(1, [1], [], []))
    again = [(1, params("b", "b", "g1"), [], []), (2, params("c", "a", "g1"), [], [])]
    measuring.update_state(BatchUpdate(3, [], again, []))
    measuring.apply(logits)
    assert divergences()["c"] == pytest.approx(kl(logits[0], logits[2]), rel=1e-4)
    measuring.update_state(BatchUpdate(1, [1, 2], [(0, params("d", "d", "g2"), [], [])], []))
    measuring.apply(logits[:1])
    assert set(measuring._references) == {"d"}, "the next group replaces them"
