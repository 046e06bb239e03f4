"""Rows of sites that are not steered: tapped where a norm returns the stream, they are the rows of any other tap."""

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.errors import UsageError
from tests.kit.engines import GREEDY, LAYERS, engine, prompts, vector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

HOOKS = ("pre_attn", "post_attn", "post_block")
SITES = [f"{hook}:*" for hook in HOOKS]
SPEC = {"hooks": dict.fromkeys(HOOKS, "all"), "positions": "all"}
STEERED = Site(2, "pre_attn")
LENGTHS = (5, 1, 40, 3, 90, 17)


def taps(llm):
    """Return by site the name of the module that carries its tap."""
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    index = dict(enumerate(sorted(llm.capflow_settings.sites)))
    return {
        index[int(module.site)]: name.rpartition(".")[0].removeprefix("model.")
        for name, module in model.named_modules()
        if type(module).__name__ == "Tap"
    }


def rows_of(tiny, keeper, name, **arguments):
    """Return the rows of requests, some steered at `STEERED`, by request and site, and the places of the taps."""
    with engine(tiny, hub=keeper.address, sites=SITES, **arguments) as llm:
        params = [
            capflow.sampling_params(
                id=f"{name}{n}",
                capture=SPEC,
                steering_vectors={"pre_attn": {STEERED.layer: vector(1)}} if n % 2 else None,
                max_tokens=5,
                **GREEDY,
            )
            for n in range(len(LENGTHS))
        ]
        llm.generate(prompts(LENGTHS), params, use_tqdm=False)
        refused = capflow.sampling_params(steering_vectors={"post_block": {3: vector(1)}})
        if llm.capflow_model.fixed:
            with pytest.raises(
                UsageError, match=r"post_block:3, which can only be captured; steer .* --steer-sites post_block:3"
            ):
                llm.generate(prompts((4,)), refused, use_tqdm=False)
        places = taps(llm)
    assert not keeper.twice
    rows = {
        site: [(p, *keeper.rows[f"{name}{n}"][site][p]) for n in range(len(LENGTHS)) for p in range(LENGTHS[n] + 4)]
        for site in llm.capflow_settings.sites
    }
    return rows, places


@pytest.mark.parametrize(
    ("dtype", "eager"), [("bfloat16", True), pytest.param("float32", False, marks=pytest.mark.long)]
)
def test_the_rows_of_a_norm_are_those_of_a_tap_before_it(tiny, keeper, dtype, eager):
    options = {"dtype": dtype, "enforce_eager": eager}
    expected, before = rows_of(tiny, keeper, "a", **options)
    assert before[Site(1, "post_block")] == "layers.1"
    rows, places = rows_of(tiny, keeper, "b", steer_sites=[str(STEERED)], **options)
    assert places == {
        **{Site(n, "post_attn"): f"layers.{n}.post_attention_layernorm" for n in range(LAYERS)},
        Site(0, "pre_attn"): "layers.0",  # is given a stream that is whole
        Site(0, "post_block"): "layers.1.input_layernorm",
        Site(1, "pre_attn"): "layers.1.input_layernorm",
        Site(1, "post_block"): "layers.1",  # before the stream is steered
        STEERED: "layers.2",
        Site(2, "post_block"): "layers.3.input_layernorm",
        Site(3, "pre_attn"): "layers.3.input_layernorm",
        Site(3, "post_block"): "norm",
    }
    for site, theirs in expected.items():
        for (position, token, row), (at, own_token, own) in zip(theirs, rows[site], strict=True):
            assert (at, own_token) == (position, token)
            if eager:
                assert np.array_equal(own, row), (site, position)
            else:  # the compiler picks the order of a sum anew for each graph
                assert np.abs(own - row).max() <= 1e-5 * np.abs(row).max(), (site, position)
