"""Reprs fit in a notebook: a line, whatever a value holds; and a package lists its public names."""

import numpy as np
import pytest

import capflow
import capflow_models
from capflow.capture.site import Site
from capflow.steering.action import Steer
from capflow.steering.compiler import program_of
from capflow.steering.request import Steering
from capflow.steering.vector import SteeringVector
from capflow.testing.frames import make_frame
from capflow_engine.request.options import RequestOptions
from capflow_models import AblationSpec, Completion, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec

WIDTH = 4096
ROW = np.arange(1.0, WIDTH + 1)
FIELDS = {
    "steering_vectors": {"post_block": dict.fromkeys(range(32), ROW)},
    "decode_steering_clamps": {"post_block": {1: [{"vector": ROW, "value": 0}] * 60}},
    "steering_patches": {"post_block": {3: {"positions": list(range(1000)), "vector": ROW}}},
}
STEERING = Steering.parse(FIELDS)
VECTOR = SteeringVector.make(Site(12, "post_block"), ROW, 2.0)
LAYER = LayerSteeringSpec(ROW, 2.0, ProjectionCapSpec(ROW, cap_above=1.0), AblationSpec(ROW))
VALUES = {
    "vector": VECTOR,
    "clamp": STEERING.decode.clamps[0],
    "patch": STEERING.patches[0],
    "tier": STEERING.base,
    "steering": STEERING,
    "options": RequestOptions(id="one", steering=STEERING),
    "program": program_of(WIDTH, [STEERING]),
    "site of a program": program_of(WIDTH, [STEERING]).decode[1],
    "action": Steer("one", STEERING.base.vectors),
    "spec": capflow.CaptureSpec.parse({"hooks": {"post_block": list(range(32))}, "positions": list(range(1000))}),
    "layer": LAYER,
    "specification": SteeringSpec(dict.fromkeys(range(32), LAYER)),
    "completion": Completion("so " * 1000, tuple(range(1000)), tuple(range(1000))),
    "result": capflow.CaptureResult("ok", payload={"files": [f"file-{n}" for n in range(1000)], "text": "x" * 10_000}),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_repr_is_one_short_line(kind):
    text = repr(VALUES[kind])
    assert text.startswith(f"{type(VALUES[kind]).__name__}(")
    assert len(text) < 1200
    assert "\n" not in text
    assert "\\x" not in text


def test_a_repr_tells_what_there_is():
    text = "SteeringVector(layer=12, hook='post_block', data=<16,384 bytes>, dtype='float32', scale=2.0)"
    assert repr(VECTOR) == text
    assert repr(LAYER).startswith(
        "LayerSteeringSpec(vector=<float32 [4096]>, scale=2.0, projection_cap=ProjectionCapSpec("
    )
    assert "… 32 in all" in repr(STEERING.base)


def test_a_frame_says_what_it_is_of():
    frame = make_frame([("one", 900, 0, 1000), ("two", 4, 0, 4)], hidden=64, seq=7, step=9)
    assert repr(frame) == "<frame 7 of 'engine-1', step 9: 2 requests, 1 sites, 257,024 bytes of float32>"
    assert len(repr(frame.header)) < 1200
    assert len(repr(list(frame.chunks()))) < 2000


@pytest.mark.parametrize("package", [capflow, capflow_models])
def test_a_package_lists_its_public_names_and_nothing_else(package):
    assert dir(package) == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in dir(package) if name not in {"LLM", "AsyncLLM"})
