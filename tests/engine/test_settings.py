"""An engine's settings as what vLLM takes them for: the `additional_config` of its user."""

import json
import pickle

import pytest
from vllm.config import VllmConfig

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow_engine.hubs import hubs_at
from capflow_engine.layer.structure import HookPlace, Structure
from capflow_engine.settings import GRAPH_KEY, Settings, Tapped


def settings(sites=1, engine="e", fixed=(), **user):
    named = tuple(Site(layer, "post_block") for layer in range(sites))
    return Settings(engine=engine, hubs=hubs_at([], None, insecure=False), sites=named, fixed=fixed, user=user)


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
        (settings(), settings(fixed=(Site(0, "post_block"),)), False),
        (settings(), settings(x=1), False),
        (settings(x=1), settings(x=2), False),
    ],
    ids=["another name", "another tap", "a tap that does not steer", "a user's entry", "a user's value"],
)
def test_the_key_of_compiled_graphs_follows_what_is_compiled(one, other, same):
    hashes = {VllmConfig(additional_config=each).compute_hash() for each in (one, other)}
    assert (len(hashes) == 1) is same


def test_the_entry_of_capflow_is_one_that_vllm_can_hash():
    assert set(json.loads(json.dumps(settings(x=1)))) == {"x", GRAPH_KEY}


PLACES = dict.fromkeys(("post_block", "mlp_in"), HookPlace(""))
LAYERS = [Structure("Layer", PLACES, {}, {"mlp_in": "attention takes what the MLP takes"}) for _ in range(3)]


@pytest.mark.parametrize(
    ("steered", "fixed"),
    [
        (None, ["mlp_in:0", "mlp_in:1", "mlp_in:2"]),
        (["*:*"], ["mlp_in:0", "mlp_in:1", "mlp_in:2"]),
        (["post_block:1"], ["mlp_in:0", "post_block:0", "mlp_in:1", "mlp_in:2", "post_block:2"]),
        (["post_mlp:0", "post_block:[12]"], ["mlp_in:0", "mlp_in:1", "mlp_in:2"]),
        (["none"], ["mlp_in:0", "post_block:0", "mlp_in:1", "post_block:1", "mlp_in:2", "post_block:2"]),
    ],
    ids=str,
)
def test_the_sites_that_steer_sites_leaves_out_can_only_be_captured(steered, fixed):
    tapped = Tapped.of(["*:*"], LAYERS, steered)
    assert sorted(map(str, tapped.fixed)) == sorted(fixed)
    assert len(tapped.sites) == 6


@pytest.mark.parametrize(
    ("steered", "error"),
    [
        ("post_block:9", r"^--steer-sites: got post_block:9, expected HOOK:LAYER"),
        ("none", r"^--steer-sites: got none, expected HOOK:LAYER"),
        (
            "post_block:2",
            r"^--steer-sites: got post_block:2, expected a tapped site; tap it, too: --sites post_block:2",
        ),
        ("mlp_in:0", r"^--steer-sites: got mlp_in:0, expected a site that can be steered in this model .attention"),
        ("post_attn:0", r"^--steer-sites: got post_attn:0, expected a site of Layer"),
    ],
)
def test_a_pattern_that_no_site_to_steer_has_is_refused(steered, error):
    layers = [Structure("Layer", PLACES, {"post_attn": "no module"}, {"mlp_in": LAYERS[0].fixed["mlp_in"]})] * 3
    with pytest.raises(UsageError, match=error):
        Tapped.of(["post_block:[01]", "mlp_in:*"], layers, ["post_block:0", steered])


def test_settings_have_nothing_that_is_pickled_by_name():
    """Pickle looks for such a name in every module, and a lazy one imports what it finds."""
    import pickletools

    tapped = Tapped.of(["post_block:*"], [Structure("Layer", {"post_block": HookPlace("")})])
    own = Settings("e", (), tapped.sites, fixed=tapped.fixed, shapes=tapped.shapes, attention=tapped.attention)
    names = [arg for op, arg, _ in pickletools.genops(pickle.dumps(own, protocol=4)) if isinstance(arg, str)]
    assert "UNSET" not in names
