"""Quantised weights: rows and steering are those of vLLM without capflow and those of Transformers.

The one is the same checkpoint, with hooks on the layers. The other has the weights that the checkpoint stands for.
"""

import numpy as np
import pytest
import torch

import capflow
from tests.kit.engines import GREEDY, LAYERS, answers, engine, prompts, relative_error, vector
from tests.kit.processor import without_amx
from tests.kit.quantised import FORMATS, QuantisedReference, save_quantised
from tests.kit.rows import ALL, FLOAT32_BOUND, SITES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# By dtype, how far a row may be from the reference's.
BOUNDS = {"float32": FLOAT32_BOUND, "float16": 5e-3}
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
                hidden += torch.as_tensor(vector(seed), dtype=hidden.dtype)

        return hook

    core = llm.llm_engine.engine_core.engine_core
    layers = core.model_executor.driver_worker.worker.model_runner.model.model.layers
    return caught, [layer.register_forward_hook(hook_of(number)) for number, layer in enumerate(layers)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=without_amx) if kind == "int8" else kind for kind in FORMATS]
)
def test_rows_are_those_of_hooks_in_vllm_without_capflow_and_in_transformers(tiny, reference, tmp_path, kind):
    model, dtype = save_quantised(tiny, tmp_path / kind, kind), FORMATS[kind].dtype
    bound, expected = BOUNDS[dtype], {}
    with engine(model, capflow_on=False, dtype=dtype, enable_prefix_caching=False) as llm:
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
    asked = [
        (f"{name} {number}", prompt, seed) for number, prompt in enumerate(PROMPTS) for name, seed in STEERED.items()
    ]
    with engine(model, dtype=dtype, consumers=[f"filesystem:root={tmp_path / 'rows'},capture=requests"]) as llm:
        params = [
            capflow.sampling_params(id=key, capture=ALL, max_tokens=8, **GREEDY, **fields[key.split()[0]])
            for key, _, _ in asked
        ]
        outputs = llm.generate([prompt for _, prompt, _ in asked], params, use_tqdm=False)
    data = capflow.open(tmp_path / "rows")
    meant = QuantisedReference(tiny, kind)
    for (key, prompt, seed), tokens in zip(asked, answers(outputs), strict=True):
        assert tokens == expected[key][0]
        whole = [*prompt["prompt_token_ids"], *tokens][:-1]
        stream = meant.post_block(whole, {1: (vector(seed), 0)} if seed else None)
        for site in SITES:
            rows, positions, _ = data[key][site]
            assert positions.tolist() == list(range(len(whole)))
            assert relative_error(rows, expected[key][1][site.layer]) < bound, (key, site)
            errors = [relative_error(*pair) for pair in zip(rows, stream[site.layer], strict=True)]
            # An input between two numbers of 8 bits may be rounded to the other one. The rows after it differ then.
            assert min(errors) < bound, (key, site, errors)
            assert max(errors) < (0.1 if FORMATS[kind].rounded else bound), (key, site, errors)
    # The weights are quantised indeed.
    whole = reference.post_block(PROMPTS[0]["prompt_token_ids"])
    assert relative_error(np.asarray(data["plain 0"][SITES[-1]].rows)[:30], whole[-1]) > 10 * bound
