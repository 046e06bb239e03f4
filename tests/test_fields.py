"""What the fields of an HTTP body come to, and how wrong ones are refused."""

import json

import pytest

from capflow.errors import UsageError
from capflow.message import ModelInfo
from capflow.site import Site

pytest.importorskip("vllm")

from capflow_engine.fields import Asked, path_of

INFO = ModelInfo("tiny", 4, 8, "float32", tuple(Site(layer, "post_block") for layer in range(3)))
CAPTURE = {"hooks": {"post_block": [1]}}


def parse(fields, xargs=None, *, prompts=1, samples=1):
    return Asked.parse(fields, xargs, INFO, id="cmpl-1", prompts=prompts, samples=samples)


@pytest.mark.parametrize(
    ("prompts", "samples", "names"),
    [
        (1, 1, ("mine",)),
        (2, 1, ("mine#0", "mine#1")),
        (1, 2, ("mine#0", "mine#1")),
        (2, 2, ("mine#0#0", "mine#0#1", "mine#1#0", "mine#1#1")),
    ],
)
def test_each_choice_has_a_name_in_the_order_of_choices(prompts, samples, names):
    assert parse({"capture": CAPTURE, "capture_id": "mine"}, prompts=prompts, samples=samples).names == names


def test_a_request_without_a_name_has_the_response_s():
    assert parse({"capture": CAPTURE}).names == ("cmpl-1",)


def test_the_fields_and_the_text_in_vllm_xargs_come_to_the_same():
    steering = {"post_block": {"2": [0.5] * 8}}
    fields = {"capture": CAPTURE, "steering": steering}
    assert parse(fields) == parse({}, json.dumps(fields))


@pytest.mark.parametrize(
    ("fields", "reports"), [({"capture": CAPTURE}, True), ({"capture_wait": False}, True), ({"capture_id": "a"}, False)]
)
def test_the_response_reports_when_it_is_asked_to(fields, reports):
    assert parse(fields).reports is reports


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"capture": "all"}, "capture"),
        ({"capture": {**CAPTURE, "layers": 1}}, "capture.layers"),
        ({"capture": {"hooks": {"post_block": [4]}}}, "capture.hooks.post_block"),
        ({"capture": {"hooks": {"post_block": [3]}}}, "capture.hooks.post_block"),
        ({"capture": {**CAPTURE, "positions": "some"}}, "capture.positions"),
        ({"capture": {**CAPTURE, "max_rows": 0}}, "capture.max_rows"),
        ({"capture_wait": 1}, "capture_wait"),
        ({"capture_id": ""}, "capture_id"),
        ({"capture_id": 7}, "capture_id"),
        ({"capture_id": "x" * 513}, "capture_id"),
        ({"steering": {"post_block": {"1": [0.5] * 7}}}, "steering.post_block.1"),
        ({"steering": {"post_block": {"1": [float("nan")] * 8}}}, "steering.post_block.1"),
        ({"steering": {"post_block": {str(n): [0.5] * 8 for n in range(4)}}}, "steering"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(fields, path):
    with pytest.raises(UsageError) as caught:
        parse(fields)
    assert path_of(caught.value) == path


@pytest.mark.parametrize(
    ("xargs", "path"),
    [
        ("{", "vllm_xargs.capflow"),
        ("[" * 100_000, "vllm_xargs.capflow"),
        ("[1]", "vllm_xargs.capflow"),
        (7, "vllm_xargs.capflow"),
        ('{"samples": 2}', "vllm_xargs.capflow"),
        (json.dumps({"capture": {"hooks": {"post_block": [4]}}}), "vllm_xargs.capflow.capture.hooks.post_block"),
    ],
)
def test_what_vllm_xargs_carries_is_held_to_the_same(xargs, path):
    with pytest.raises(UsageError) as caught:
        parse({}, xargs)
    assert path_of(caught.value) == path


def test_both_ways_at_once_are_refused():
    with pytest.raises(UsageError, match="vllm_xargs"):
        parse({"capture": CAPTURE}, "{}")
