"""The lens of a real engine's last layer is what the engine predicted itself, live and from a data set."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

import capflow
from capflow.capture.site import Site
from capflow.lenses.captured import read_capture
from capflow.lenses.file import save_lens
from capflow.lenses.origin import LensOrigin
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.dashboards import Pageless, dashboard
from tests.kit.engines import GREEDY, LAYERS, WIDTH, engine, prompts, save_tiny
from tests.kit.hubs import running_hub

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_last_layer_says_what_the_engine_predicted(architecture, tmp_path):
    model = save_tiny(tmp_path / "model", architecture)
    address = f"ipc://{tmp_path}/h"
    file = tmp_path / "j.safetensors"
    save_identity(file)
    stored = FilesystemConsumer(FilesystemConfig(str(tmp_path / "rows"), hooks=["post_block"], fsync=False))
    options = {} if architecture == "llama" else {"lens": str(file)}
    with dashboard(**options) as consumer, running_hub(address, consumer, stored), engine(model, hub=address) as llm:
        params = capflow.sampling_params(max_tokens=5, **GREEDY | {"logprobs": 8})
        (output,) = llm.generate(prompts([7]), params, use_tqdm=False)
        live = []
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
                live.append(answer["layers"])
    assert_stored_as_live(tmp_path / "rows", file if options else None, live, output.outputs[0])


def save_identity(path):
    """Save a Jacobian lens that doubles a row of layer 0, and leaves the others as they are."""
    matrices = {(Site(n, "post_block"), "weight"): np.eye(WIDTH, dtype=np.float32) * (2 - (n > 0)) for n in range(3)}
    save_lens(path, LensOrigin("jacobian", LAYERS, WIDTH), matrices)


def assert_stored_as_live(root, file, live, completion):
    """Fail unless a lens reads from a data set what the page showed, and the last layer gives the generated tokens."""
    (capture,) = capflow.open(root)
    lens = capflow.open_lens(capture.sidecar.model, file)
    own = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    for site, positions, _, reading in read_capture(lens, capture, 8, token="next"):
        shown = [layers[site.layer]["tokens"] for layers in live]
        assert reading.ids[6:].tolist() == [[token for token, *_ in tokens] for tokens in shown]
        for odds, tokens in zip(reading.probabilities[6:], shown, strict=True):
            np.testing.assert_allclose(odds, [p for *_, p in tokens], rtol=1e-5)
        if site == lens.last:
            assert positions.tolist() == list(range(11))
            assert reading.ids[6:, 0].tolist() == list(completion.token_ids)
            assert (reading.token_ranks[6:10] == 1).all()
            np.testing.assert_allclose(np.log(reading.probabilities[6:, 0]), own, atol=1e-4)
            np.testing.assert_allclose(np.log(reading.token_probabilities[6:10]), own[:4], atol=1e-4)
            assert (reading.divergences == 0).all()
        else:
            assert (reading.divergences > 1e-3).all()
