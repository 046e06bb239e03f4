"""`post_mlp` is taken for `post_block` wherever a user names a hook point, and is stored as `post_block`."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from capflow.capture.site import HOOKS, Site, by_own_name, hook_named
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError
from capflow.steering.request import Steering
from capflow_engine.settings import tapped_sites
from capflow_engine.steering.files import load_sites
from capflow_engine.steering.module import load_module
from capflow_engine.structure import Structure
from capflow_models.spec import site_of

SITE = Site(3, "post_block")
CLAMP = {"vector": [1.0, 0.0], "value": 0}
PATCH = {"positions": [0], "vector": [1.0, 2.0]}


def test_every_hook_has_its_own_name_and_one_has_another():
    assert {name: hook_named(name) for name in (*HOOKS, "post_mlp")} == {h: h for h in HOOKS} | {
        "post_mlp": "post_block"
    }
    for name in ("post", "post_mlp ", "", None, 3, ("post_mlp",)):
        assert hook_named(name) is None


def test_a_site_is_read_by_either_name():
    assert Site.parse("post_mlp:3") == Site.parse("post_block:3") == SITE
    assert str(Site.parse("post_mlp:3")) == "post_block:3"
    assert site_of(3, "post_mlp") == SITE


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
