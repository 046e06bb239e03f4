"""`post_mlp` is taken for `post_block` wherever a user names a hook point, and is stored as `post_block`."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from capflow.capture.site import FORWARD_HOOKS, HOOKS, Site, by_own_name, hook_named, site_named
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError
from capflow.steering.request import Steering
from capflow_engine.layer.structure import Structure
from capflow_engine.settings import tapped_sites
from capflow_engine.steering.files import load_sites
from capflow_engine.steering.module import load_module
from capflow_models.spec import site_of

SITE = Site(3, "post_block")
CLAMP = {"vector": [1.0, 0.0], "value": 0}
PATCH = {"positions": [0], "vector": [1.0, 2.0]}


LENS = {
    "pre_attn": "hook_resid_pre",
    "attn_in": "ln1.hook_normalized",
    "attn_out": "hook_attn_out",
    "post_attn": "hook_resid_mid",
    "mlp_in": "ln2.hook_normalized",
    "mlp_out": "hook_mlp_out",
    "post_block": "hook_resid_post",
    "final": "ln_final.hook_normalized",
    "heads": "attn.hook_z",
    "q": "attn.hook_rot_q",
    "k": "attn.hook_rot_k",
    "v": "attn.hook_v",
    "neurons": "mlp.hook_post",
    "router": "mlp.gate.hook_out",
}


def test_every_hook_has_its_own_name_and_that_of_transformer_lens():
    assert {name: hook_named(name) for name in HOOKS} == {hook: hook for hook in HOOKS}
    assert {hook: hook_named(name) for hook, name in LENS.items()} == {hook: hook for hook in HOOKS}
    assert hook_named("post_mlp") == "post_block"
    for name in ("post", "post_mlp ", "", None, 3, ("post_mlp",)):
        assert hook_named(name) is None


def test_a_site_is_read_by_either_name():
    assert Site.parse("post_mlp:3") == Site.parse("post_block:3") == SITE
    assert str(Site.parse("post_mlp:3")) == "post_block:3"
    assert site_of(3, "post_mlp") == SITE


def test_a_key_of_rows_may_be_the_hook_alone_of_one_site():
    sites = [SITE, Site(1, "heads"), Site(2, "heads"), Site(3, "final")]
    for key in ("final", "ln_final.hook_normalized", "final:3", (3, "final")):
        assert site_named(key, sites) == Site(3, "final")
    assert site_named("post_mlp", sites) == SITE
    for key in ("heads", "q", "loss"):
        with pytest.raises(UsageError, match=f"^site: got {key}, expected HOOK:LAYER with HOOK one of pre_attn, "):
            site_named(key, sites)
    with pytest.raises(UsageError, match=r'^site: got 3, expected \(layer, hook\) or "hook:layer"$'):
        site_named(3, sites)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        *((f"blocks.3.{name}", hook) for hook, name in LENS.items() if hook != "final"),
        *((f"{name}:3", hook) for hook, name in LENS.items()),
        ("model.layers.3.input", "pre_attn"),
        ("model.layers[3].output", "post_block"),
        ("model.model.layers[3].output[0]", "post_block"),
        ("model.layers.3.self_attn.input", "attn_in"),
        ("model.layers.3.mlp.input[0]", "mlp_in"),
    ],
)
def test_a_site_is_read_by_its_name_in_another_library(name, hook):
    assert Site.parse(name) == Site(3, hook)
    assert CaptureSpec.parse({"hooks": [name]}) == CaptureSpec.parse({"hooks": {hook: [3]}})
    layers = [Structure("Layer", dict.fromkeys(HOOKS), {})] * 4
    assert tapped_sites([name], layers) == (Site(3, hook),)
    assert tapped_sites([name.replace("3", "*")], layers) == tuple(Site(n, hook) for n in range(4))


@pytest.mark.parametrize(
    "name",
    ["blocks.3", "blocks.x.hook_resid_pre", "blocks.3.hook_q", "blocks.3.post_mlp", "blocks.3.ln_final.hook_normalized",
     "ln_final.hook_normalized", "model.layers.3.mlp.output", "model.layers[3.output", "layers.3.output"],
)  # fmt: skip
def test_a_name_that_is_no_site_is_refused(name):
    with pytest.raises(UsageError, match=r"^capture\.hooks\[1\]: got .*, expected HOOK:LAYER with HOOK one of"):
        CaptureSpec.parse({"hooks": ["post_block:1", name]})


def test_a_list_of_sites_is_a_spec_of_their_layers():
    spec = CaptureSpec.parse({"hooks": ["post_block:2", "blocks.0.hook_resid_post", "attn_out:1", "post_block:2"]})
    assert spec == CaptureSpec.parse({"hooks": {"post_block": [0, 2], "attn_out": [1]}})


def test_the_order_of_sites_is_that_of_every_model():
    order = [Site(1, hook) for hook in FORWARD_HOOKS]
    assert set(FORWARD_HOOKS) == set(HOOKS)
    for number, site in enumerate(order):
        assert not any(site.precedes(other) for other in order[: number + 1])
        # Attention may stand beside the MLP.
        attention = ("attn_in", "q", "k", "v", "heads", "attn_out")
        beside = {"mlp_in", "router", "neurons", "mlp_out"} if site.hook in attention else set()
        assert {other.hook for other in order[number + 1 :] if not site.precedes(other)} == beside
        assert all(site.precedes(Site(2, other.hook)) and not Site(2, other.hook).precedes(site) for other in order)


def test_a_capture_spec_keeps_the_hooks_own_name():
    other, own = ({"hooks": {hook: [0, "2-3"]}} for hook in ("post_mlp", "post_block"))
    assert CaptureSpec.parse(other) == CaptureSpec.parse(own)


def test_steering_keeps_the_hooks_own_name():
    parsed = [
        Steering.parse(
            {
                "steering_vectors": {hook: {3: [1.0, 2.0]}},
                "decode_steering_clamps": {hook: {3: CLAMP}},
                "steering_patches": {hook: {3: PATCH}},
            }
        )
        for hook in ("post_mlp", "post_block")
    ]
    assert parsed[0] == parsed[1]


def test_patterns_of_sites_name_the_hook_by_either_name():
    layers = [Structure("Layer", {"post_block": None, "post_attn": None}, {})] * 4
    for layer in ("*", "3", "[01]"):
        assert tapped_sites([f"post_mlp:{layer}"], layers) == tapped_sites([f"post_block:{layer}"], layers)


def test_files_of_vectors_name_the_hook_by_either_name(tmp_path):
    row = np.ones(2, np.float32)
    for hook in ("post_mlp", "post_block"):
        save_file({f"{hook}:3": row, f"decode.{hook}:2": row}, tmp_path / f"{hook}.safetensors")
        np.savez(tmp_path / f"{hook}.npz", **{f"{hook}.3": row})
    assert load_module(tmp_path / "post_mlp.safetensors") == load_module(tmp_path / "post_block.safetensors")
    assert list(load_sites(tmp_path / "post_mlp.npz")) == list(load_sites(tmp_path / "post_block.npz")) == [SITE]


def test_a_hook_under_both_names_is_refused(tmp_path):
    both = {"post_mlp": [0], "post_block": [1]}
    with pytest.raises(
        UsageError, match=r"^capture\.hooks: got post_block under two names \(post_mlp and post_block\)"
    ):
        CaptureSpec.parse({"hooks": both})
    with pytest.raises(UsageError, match=r"^steering_clamps: got post_block under two names"):
        Steering.parse({"steering_clamps": {hook: {3: CLAMP} for hook in both}})
    with pytest.raises(UsageError, match=r"^here: got mlp, expected a hook, one of pre_attn"):
        by_own_name({"mlp": 1}, "here")
    save_file({f"{hook}:3": np.ones(2, np.float32) for hook in both}, tmp_path / "both.safetensors")
    with pytest.raises(UsageError, match=r"both\.safetensors: post_mlp:3: got post_block:3 twice"):
        load_module(tmp_path / "both.safetensors")
