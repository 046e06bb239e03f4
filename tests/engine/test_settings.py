"""An engine's settings as what vLLM takes them for: the `additional_config` of its user."""

import json
import pickle

import pytest
from vllm.config import VllmConfig

from capflow.capture.site import Site
from capflow_engine.hubs import hubs_at
from capflow_engine.settings import GRAPH_KEY, Settings


def settings(sites=1, engine="e", **user):
    named = tuple(Site(layer, "post_block") for layer in range(sites))
    return Settings(engine=engine, hubs=hubs_at([], None, insecure=False), sites=named, user=user)


def sent(config):
    """Return a configuration as another process of the engine gets it."""
    return pickle.loads(pickle.dumps(config))  # noqa: S301 - written here


def test_vllm_sees_the_user_s_own_configuration_and_capflow_its_settings():
    config = VllmConfig(additional_config=settings(kda_prefill_backend="triton"))
    for seen in (config, sent(config)):
        assert isinstance(seen.additional_config, dict)
        assert seen.additional_config.get("kda_prefill_backend") == "triton"
        assert seen.additional_config.sites == (Site(0, "post_block"),)


def test_vllm_adds_to_the_configuration():
    """As it does for an option such as `--gdn-prefill-backend`."""
    config = VllmConfig(additional_config=settings())
    config.additional_config["gdn_prefill_backend"] = "triton"
    assert sent(config).additional_config["gdn_prefill_backend"] == "triton"
    assert config.compute_hash() != VllmConfig(additional_config=settings()).compute_hash()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (settings(), settings(engine="another"), True),
        (settings(sites=1), settings(sites=2), False),
        (settings(), settings(x=1), False),
        (settings(x=1), settings(x=2), False),
    ],
    ids=["another name", "another tap", "a user's entry", "a user's value"],
)
def test_the_key_of_compiled_graphs_follows_what_is_compiled(one, other, same):
    hashes = {VllmConfig(additional_config=each).compute_hash() for each in (one, other)}
    assert (len(hashes) == 1) is same


def test_the_entry_of_capflow_is_one_that_vllm_can_hash():
    assert set(json.loads(json.dumps(settings(x=1)))) == {"x", GRAPH_KEY}
