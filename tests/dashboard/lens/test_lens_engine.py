"""The lens of a real engine's last layer is what the engine predicted itself."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

import capflow
from tests.kit.dashboards import Pageless, dashboard
from tests.kit.engines import GREEDY, LAYERS, engine, prompts, save_tiny
from tests.kit.hubs import running_hub

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_last_layer_says_what_the_engine_predicted(architecture, tmp_path):
    model = save_tiny(tmp_path / "model", architecture)
    address = f"ipc://{tmp_path}/h"
    with dashboard() as consumer, running_hub(address, consumer), engine(model, hub=address) as llm:
        params = capflow.sampling_params(max_tokens=5, **GREEDY | {"logprobs": 8})
        (output,) = llm.generate(prompts([7]), params, use_tqdm=False)
        with Pageless(consumer) as page:
            page.until(lambda p: p.requests.get(1, {}).get("tokens") == 11)
            for step, logprobs in enumerate(output.outputs[0].logprobs):
                answer = page.lens(1, 6 + step)
                assert answer["error"] == ""
                assert [layer["layer"] for layer in answer["layers"]] == list(range(LAYERS))
                tokens = answer["layers"][-1]["tokens"]
                own = {token: np.exp(entry.logprob) for token, entry in logprobs.items()}
                assert tokens[0][0] == output.outputs[0].token_ids[step]
                assert {token for token, *_ in tokens} <= own.keys()
                np.testing.assert_allclose([p for *_, p in tokens], [own[token] for token, *_ in tokens], rtol=1e-4)
