"""What the fields of an HTTP body come to, and how wrong ones are refused."""

import json

import msgspec
import pytest

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.request import Steering

pytest.importorskip("vllm")

from capflow_engine.serve.ask import ParsedRequest
from capflow_engine.serve.fields import FIELDS, check_spelling
from capflow_engine.serve.refusals import path_of
from capflow_engine.steering.applied import key_of
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore, UnknownModuleError
from tests.kit.doors import ONE, REFUSED
from tests.kit.engines import LAYERS, WIDTH

INFO = ModelInfo("tiny", 4, 8, "float32", tuple(Site(layer, "post_block") for layer in range(3)))
CAPTURE = {"hooks": {"post_block": [1]}}


SIZE = Size.of(1 << 20, INFO.hidden_size, 4)
VECTORS = {"post_block": {"2": [0.5] * 8}}


def server(**modules):
    store = SteeringStore()
    for name, fields in modules.items():
        store.register(name, Steering.parse(fields))
    return Fit(INFO, SIZE), store


def parse(fields, xargs=None, *, prompts=1, samples=1, at=None):
    return ParsedRequest.parse(fields, xargs, *(at or server()), id="cmpl-1", prompts=prompts, samples=samples)


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
    fields = {"capture": CAPTURE, "steering_vectors": VECTORS}
    assert parse(fields) == parse({}, json.dumps(fields))


@pytest.mark.parametrize(
    ("fields", "reports"), [({"capture": CAPTURE}, True), ({"capture_wait": False}, True), ({"capture_id": "a"}, False)]
)
def test_the_response_reports_when_it_is_asked_to(fields, reports):
    assert parse(fields).reports is reports


@pytest.mark.parametrize("case", [name for name, wrong in REFUSED.items() if "parsed" in wrong.doors])
def test_a_wrong_field_is_named_by_its_path(case):
    wrong = REFUSED[case]
    info = ModelInfo("tiny", LAYERS, WIDTH, "float32", tuple(Site(layer, "post_block") for layer in range(LAYERS)))
    store = SteeringStore()
    store.register("one", Steering.parse({"steering_vectors": ONE}))
    with pytest.raises(UsageError) as caught:
        parse(wrong.fields, at=(Fit(info, Size.of(1 << 20, WIDTH, 4)), store))
    assert (path_of(caught.value), isinstance(caught.value, UnknownModuleError)) == (wrong.field, wrong.unknown)
    assert wrong.words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"capture_id": "x" * 513}, "capture_id"),
        ({"steering_vectors": {"post_block": {"1": [3e38] * 8}}, "steering_name": "large"}, "steering_vectors"),
        (
            {"steering_clamps": {"post_block": {"1": {"vector": [1] * 8, "value": 0}}}, "steering_name": {"large": 2}},
            "steering_name",
        ),
    ],
)
def test_what_is_too_large_is_named_by_its_path(fields, path):
    with pytest.raises(UsageError) as caught:
        parse(fields, at=server(large={"steering_vectors": {"post_block": {"1": [3e38] * 8}}}))
    assert path_of(caught.value).startswith(path)


@pytest.mark.parametrize(
    ("xargs", "path"),
    [
        ("{", "vllm_xargs.capflow"),
        ("[" * 100_000, "vllm_xargs.capflow"),
        ("[1]", "vllm_xargs.capflow"),
        (7, "vllm_xargs.capflow"),
        ('{"samples": 2}', "vllm_xargs.capflow"),
        (json.dumps({"program": None}), "vllm_xargs.capflow"),
        (json.dumps({"steering_name": "unknown"}), "vllm_xargs.capflow.steering_name"),
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


def test_modules_and_the_global_state_are_worked_out_before_anything_runs():
    at = server(half={"steering_vectors": {"post_block": {"2": [0.25] * 8}}})
    named = parse({"steering_name": "half", "steering_scale": 2.0}, at=at)
    assert named.program.id == parse({"steering_vectors": VECTORS}).program.id
    assert parse({"steering_module_ref": ["half", 2.0]}, at=at) == named
    assert parse({}, json.dumps({"steering_module_ref": ["half", 2.0]}), at=at) == named
    at[1].set_global(Steering.parse({"steering_vectors": VECTORS}))
    assert parse({"capture": CAPTURE}, at=at).key == named.key
    at[1].clear_global()
    at[1].unregister("half")
    assert named.program is not None
    assert named.options[0].steering is None


def test_an_unknown_module_is_an_error_of_its_own_on_either_way():
    for fields, xargs in (({"steering_name": "gone"}, None), ({}, '{"steering_name": "gone"}')):
        with pytest.raises(UnknownModuleError, match="none is registered"):
            parse(fields, xargs)


def test_a_report_says_what_is_done_and_where():
    at = server(half={"decode_steering_vectors": {"post_block": {"2": [0.25] * 8}}})
    at[1].set_global(Steering.parse({"steering_vectors": VECTORS}))
    clamps = {"post_block": {"1": [{"vector": [1] * 8, "value": 0}, {"vector": [1, *[0] * 7], "max": 1}]}}
    patches = {"post_block": {"0": {"positions": [-1], "vector": [1.0] * 8}}}
    fields = {"steering_name": {"half": 0.5}, "steering_clamps": clamps, "steering_patches": patches}
    asked = parse({**fields, "steering_report": True}, at=at)
    assert json.loads(msgspec.json.encode(asked.summary)) == {
        "key": key_of(asked.program),
        "prefill": {"post_block:1": 2, "post_block:2": 1},
        "decode": {"post_block:1": 2, "post_block:2": 2},
        "patched": {"-1": {"post_block:0": 1}},
        "modules": {"half": 0.5},
        "global": True,
    }
    assert parse(fields, at=at).summary is None
    assert parse(fields, at=at).key == asked.key


def test_what_comes_to_nothing_says_so_and_what_asks_for_nothing_says_nothing():
    nothing = {"steering_vectors": {"post_block": {"2": {"vector": [0.5] * 8, "scale": 0.0}}}}
    assert parse(nothing).key == "none"
    assert parse({"steering_report": True}).summary.key == "none"
    assert parse({"capture": CAPTURE}).key is None


def test_more_than_the_bank_holds_is_refused():
    small = Fit(INFO, Size.of(2 * 4 * INFO.hidden_size, INFO.hidden_size, 4)), SteeringStore()
    three = {"post_block": {str(n): [float(n + 1)] * 8 for n in range(3)}}
    with pytest.raises(UsageError, match="--steering-bank-bytes"):
        parse({"steering_vectors": three}, at=small)


@pytest.mark.parametrize(
    "name", ["steering", "steering_vector", "prefill_steering_vector", "steering_strength", "captures"]
)
def test_a_field_that_was_meant_for_capflow_and_that_nobody_knows_is_refused(name):
    with pytest.raises(UsageError) as caught:
        check_spelling([name])
    assert path_of(caught.value) == name
    check_spelling(["stream", "guided_json"])
    check_spelling(FIELDS[:0])
