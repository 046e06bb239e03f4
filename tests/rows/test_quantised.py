"""Quantised weights: rows and steering are those of vLLM without capflow, with hooks on the same model's layers."""

import numpy as np
import pytest
import torch

import capflow
from tests.kit.engines import GREEDY, LAYERS, answers, engine, prompts, relative_error, vector
from tests.kit.quantised import save_int8
from tests.kit.rows import ALL, FLOAT32_BOUND, SITES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

STEERED = {"plain": None, "steered": 7}
PROMPTS = prompts((30, 41))


def _hooked(llm, seed):
    """Have every layer add its output's rows to a list; the second layer then adds a vector to its output."""
    caught = [[] for _ in range(LAYERS)]

    def hook_of(number):
        def hook(module, inputs, output):
            hidden, residual = output
            caught[number].append((hidden + residual).clone())
            if seed and number == 1:
                hidden += torch.as_tensor(vector(seed))

        return hook

    core = llm.llm_engine.engine_core.engine_core
    layers = core.model_executor.driver_worker.worker.model_runner.model.model.layers
    return caught, [layer.register_forward_hook(hook_of(number)) for number, layer in enumerate(layers)]


def test_rows_of_int8_weights_are_those_of_hooks_in_vllm_without_capflow(tiny, reference, tmp_path):
    model = save_int8(tiny, tmp_path / "int8")
    expected = {}
    with engine(model, capflow_on=False, enable_prefix_caching=False) as llm:
        from vllm import SamplingParams

        for number, prompt in enumerate(PROMPTS):
            for name, seed in STEERED.items():
                caught, hooks = _hooked(llm, seed)
                outputs = llm.generate([prompt], SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False)
                for hook in hooks:
                    hook.remove()
                expected[f"{name} {number}"] = answers(outputs)[0], [torch.cat(rows).numpy() for rows in caught]
    fields = {
        name: {"steering_vectors": {"post_block": {1: vector(seed)}}} if seed else {} for name, seed in STEERED.items()
    }
    asked = [(f"{name} {number}", prompt, fields[name]) for number, prompt in enumerate(PROMPTS) for name in STEERED]
    with engine(model, consumers=[f"filesystem:root={tmp_path / 'rows'},capture=requests"]) as llm:
        params = [
            capflow.sampling_params(id=key, capture=ALL, max_tokens=8, **GREEDY, **more) for key, _, more in asked
        ]
        outputs = llm.generate([prompt for _, prompt, _ in asked], params, use_tqdm=False)
    data = capflow.open(tmp_path / "rows")
    for (key, _, _), tokens in zip(asked, answers(outputs), strict=True):
        assert tokens == expected[key][0]
        for site in SITES:
            rows, positions, _ = data[key][site]
            assert positions.tolist() == list(range(len(rows)))
            assert relative_error(rows, expected[key][1][site.layer]) < FLOAT32_BOUND, (key, site)
    # The weights are quantised indeed.
    whole = reference.post_block(PROMPTS[0]["prompt_token_ids"])
    assert relative_error(np.asarray(data["plain 0"][SITES[-1]].rows)[:30], whole[-1]) > 100 * FLOAT32_BOUND
