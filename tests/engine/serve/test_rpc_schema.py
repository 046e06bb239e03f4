"""The schema of gRPC: its generated code, and that it says what bodies over HTTP say."""

import importlib.metadata
import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import msgspec
import numpy as np
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from capflow.capture.frame import Dropped, Gap
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError
from capflow.steering.request import STEERING_FIELDS, Steering
from capflow_engine.serve.fields import FIELDS
from capflow_engine.serve.http.steering_bodies import ModuleBody, SetBody
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc import capflow_pb2_grpc
from capflow_engine.serve.rpc.generation import body_of
from capflow_engine.serve.rpc.values import fields_of, parsed
from tests.kit.sources import PACKAGES, ROOT

RPC = PACKAGES["capflow_engine"] / "serve" / "rpc"
PROTO = "capflow_engine/serve/rpc/capflow.proto"
WIDTH = 4
ROWS = np.arange(2 * WIDTH, dtype=np.float16).reshape(2, WIDTH) + 1


def names(message):
    return {field.name for field in message.DESCRIPTOR.fields}


_VERSION = re.compile(r"\d+\.\d+\.\d+|^    \d+,$", re.MULTILINE)


def test_the_generated_code_is_that_of_the_schema(tmp_path):
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, PROTO]
    subprocess.run(command, check=True, cwd=RPC.parents[2])
    made = sorted((tmp_path / PROTO).parent.iterdir())
    assert [path.name for path in made] == ["capflow_pb2.py", "capflow_pb2.pyi", "capflow_pb2_grpc.py"]
    for path in made:
        texts = {_VERSION.sub("", each.read_text(encoding="utf-8")) for each in (path, RPC / path.name)}
        assert len(texts) == 1, f"{path.name}: run `make proto`"


def test_what_is_installed_is_no_older_than_the_generated_code():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["grpc"]
    floors = dict(line.split(">=") for line in extra)
    assert floors["grpcio"] == capflow_pb2_grpc.GRPC_GENERATED_VERSION
    assert f"# Protobuf Python Version: {floors['protobuf']}\n" in (RPC / "capflow_pb2.py").read_text()
    for name in ("grpcio-health-checking", "grpcio-reflection"):
        assert importlib.metadata.version(name)


def test_a_request_has_every_field_of_a_body_and_none_that_vllm_would_not_know():
    ours = {*FIELDS, "steering_scales"} - {"steering_module_ref"}  # a pair of text and number is no field of a message
    assert ours <= names(pb.GenerateRequest)
    assert names(pb.GenerateRequest) - ours - {"prompt_token_ids"} <= set(CompletionRequest.model_fields)


def test_what_steers_everyone_has_the_fields_of_its_bodies():
    assert names(pb.SetRequest) == set(SetBody.model_fields)
    assert names(pb.RegisterModuleRequest) == set(ModuleBody.model_fields)


PACKED = {"dtype": "float16", "shape": [2, WIDTH], "layer_indices": [0, 2], "data": ROWS.tobytes()}
LISTS = ROWS.astype(float).tolist()


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"steering_vectors": {"post_block": {"layers": {1: {"vectors": [{"vector": LISTS[0]}]}}}}},
         {"steering_vectors": {"post_block": {"1": LISTS[0]}}}),
        ({"decode_steering_vectors": {"post_block": {"layers": {1: {"vectors": [
            {"vector": LISTS[0], "scale": 0.0}]}}}}},
         {"decode_steering_vectors": {"post_block": {"1": {"vector": LISTS[0], "scale": 0.0}}}}),
        ({"prefill_steering_vectors": {"post_block": {**PACKED, "scales": [1.0, 0.5]}}},
         {"prefill_steering_vectors": {"post_block": {**PACKED, "scales": [1.0, 0.5]}}}),
        ({"steering_clamps": {"mlp_in": {"layers": {2: {"clamps": [
            {"vector": LISTS[1], "min": 0.0}, {"vector": LISTS[0], "value": 0, "strength": 0.5},
        ]}}}}},
         {"steering_clamps": {"mlp_in": {"2": [{"vector": LISTS[1], "min": 0.0},
                                               {"vector": LISTS[0], "value": 0, "strength": 0.5}]}}}),
        ({"decode_steering_clamps": {"post_block": {**PACKED, "max": [1.0, 2.0]}}},
         {"decode_steering_clamps": {"post_block": {**PACKED, "max": [1.0, 2.0]}}}),
        ({"steering_patches": {"post_block": {"layers": {0: {"patches": [
            {"positions": [0, -1], "vector": {"dtype": "float16", "shape": [2, WIDTH], "data": ROWS.tobytes()}},
            {"positions": [3], "amount": 0.5,
             "vector": {"dtype": "float16", "shape": [WIDTH], "data": ROWS[0].tobytes()}},
        ]}}}}},
         {"steering_patches": {"post_block": {"0": [{"positions": [0, -1], "vector": LISTS},
                                                    {"positions": [3], "amount": 0.5, "vector": LISTS[0]}]}}}),
        ({"steering_gates": {"rude": {"layer": 1, "vector": LISTS[0], "threshold": 0.5, "sharpness": 4.0, "latch": True,
                                      "positions": "prompt", "label": "x", "hook": "pre_attn", "bias": -1.0,
                                      "abort": "stop"}},
          "decode_steering_vectors": {"post_block": {**PACKED, "layer_indices": [1, 2], "gate": "rude"}},
          "steering_vectors": {"post_block": {"layers": {1: {"vectors": [{"vector": LISTS[0], "gate": "rude"}]}}}},
          "steering_clamps": {"mlp_in": {"layers": {2: {"clamps": [{"vector": LISTS[1], "max": 0, "gate": "rude"}]}}}},
          "steering_patches": {"post_block": {"layers": {1: {"patches": [
              {"positions": [-1], "gate": "rude",
               "vector": {"dtype": "float16", "shape": [WIDTH], "data": ROWS[0].tobytes()}}]}}}}},
         {"steering_gates": {"rude": {"layer": 1, "vector": LISTS[0], "threshold": 0.5, "sharpness": 4, "latch": True,
                                      "positions": "prompt", "label": "x", "hook": "pre_attn", "bias": -1,
                                      "abort": "stop"}},
          "decode_steering_vectors": {"post_block": {**PACKED, "layer_indices": [1, 2], "gate": "rude"}},
          "steering_vectors": {"post_block": {"1": {"vector": LISTS[0], "gate": "rude"}}},
          "steering_clamps": {"mlp_in": {"2": {"vector": LISTS[1], "max": 0, "gate": "rude"}}},
          "steering_patches": {"post_block": {"1": {"positions": [-1], "vector": LISTS[0], "gate": "rude"}}}}),
        ({"steering_features": [{"sae": "mood", "features": {7: {"add": 2.0}, 9: {"set": 0.0, "strength": 0.5}}}],
          "decode_steering_features": [{"sae": "mood", "features": {8: {"set": 1.0, "gate": "g"}}},
                                       {"sae": "calm", "features": {8: {"add": 0.0}}, "gate": "g"}],
          "steering_gates": {"g": {"layer": 1, "vector": LISTS[0]}}},
         {"steering_features": [{"sae": "mood", "features": {"7": 2, "9": {"set": 0, "strength": 0.5}}}],
          "decode_steering_features": [{"sae": "mood", "features": {"8": {"set": 1, "gate": "g"}}},
                                       {"sae": "calm", "features": {"8": 0.0}, "gate": "g"}],
          "steering_gates": {"g": {"layer": 1, "vector": LISTS[0]}}}),
        ({"steering_name": ["a", "b"], "steering_scale": 2.0}, {"steering_name": ["a", "b"], "steering_scale": 2.0}),
        ({"steering_scales": {"a": 0.0, "b": -1.5}}, {"steering_name": {"a": 0.0, "b": -1.5}}),
    ],
)  # fmt: skip
def test_a_message_steers_as_the_same_in_json(message, plain):
    body = body_of(pb.GenerateRequest(prompt="x", **message), stream=False)
    text = {name: value for name in STEERING_FIELDS if (value := getattr(body, name)) is not None}
    assert Steering.parse(text) == Steering.parse(plain)


def test_a_capture_has_whole_numbers_where_json_has():
    spec = {
        "hooks": {"post_block": [0, 2], "mlp_in": "all"},
        "positions": [{"generated": [1000, 2000]}, -1],
        "max_rows": 4,
        "dtype": "float16",
    }
    message = fields_of(pb.GenerateRequest(capture=spec))["capture"]
    assert message == spec
    assert CaptureSpec.parse(message) == CaptureSpec.parse(spec)
    odd = {"a": 1.5, "b": float("inf"), "c": None, "d": [True, {}, "x"]}
    assert fields_of(pb.GenerateRequest(capture=odd))["capture"] == odd


def test_what_is_not_said_is_left_out_and_what_is_said_to_be_nothing_is_not():
    assert fields_of(pb.GenerateRequest()) == {}
    assert fields_of(pb.GenerateRequest(temperature=0, capture_wait=False)) == {"temperature": 0, "capture_wait": False}


UNKNOWN = b"\xca\x3e\x01x"  # field 1001, one byte


def test_a_result_says_over_grpc_what_it_says_over_http():
    """Also where the rows are that did not come, and no more fields in the one than in the other."""
    gaps = (Gap(("post_block:2", "mlp_out:0"), 3, 7), Gap(("post_block:2",), 9, 10))
    lost = (Dropped(9, "queue_full", gaps), Dropped(1 << 40, "engine_lost"))
    result = CaptureResult("partial_error", "9 rows lost", {"path": "/rows", "files": [1, {"a": None}]}, True, lost)
    over_http = msgspec.to_builtins(result)
    message = parsed({"capture_results": {"filesystem": over_http}}, pb.GenerateResponse())
    text = message.capture_results["filesystem"]
    assert names(text) == set(CaptureResult.__struct_fields__)
    assert names(pb.Dropped()) == set(Dropped.__struct_fields__)
    assert names(pb.Gap()) == set(Gap.__struct_fields__)
    assert (text.status, text.error, text.budget_reached) == ("partial_error", "9 rows lost", True)
    assert text.payload == {"path": "/rows", "files": [1, {"a": None}]}
    assert [(d.rows, d.reason) for d in text.dropped] == [(9, "queue_full"), (1 << 40, "engine_lost")]
    assert [(tuple(g.sites), g.start, g.stop) for g in text.dropped[0].gaps] == [
        msgspec.structs.astuple(g) for g in gaps
    ]


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (lambda r: r, "request"),
        (lambda r: r.prompt_token_ids, "prompt_token_ids"),
        (lambda r: r.steering_vectors["post_block"], "steering_vectors.post_block"),
        (lambda r: r.steering_vectors["post_block"].layers[3], "steering_vectors.post_block.layers.3"),
        (lambda r: r.steering_vectors["mlp_in"].layers[3].vectors.add(),
         "steering_vectors.mlp_in.layers.3.vectors.0"),
        (lambda r: r.steering_clamps["mlp_in"].layers[3].clamps.add(), "steering_clamps.mlp_in.layers.3.clamps.0"),
        (lambda r: r.steering_patches["mlp_in"].layers[0].patches.add().vector,
         "steering_patches.mlp_in.layers.0.patches.0.vector"),
    ],
)  # fmt: skip
def test_a_field_that_the_schema_does_not_know_is_refused_wherever_it_is(place, path):
    request = pb.GenerateRequest()
    place(request).MergeFromString(UNKNOWN)
    with pytest.raises(UsageError, match=f"^{re.escape(path)}: got an unknown field, number 1001"):
        fields_of(pb.GenerateRequest.FromString(request.SerializeToString()))


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": {}}, "prompt"),
        ({"prompt": "x", "steering_scales": {"a": 1.0}, "steering_name": ["a"]}, "steering_scales"),
    ],
)
def test_what_makes_no_body_is_refused(request_, path):
    with pytest.raises(UsageError, match=f"^{path}:"):
        body_of(pb.GenerateRequest(**request_), stream=False)


def test_the_schema_is_beside_its_code():
    assert Path(pb.__file__).with_name("capflow.proto").is_file()


def test_a_client_needs_neither_torch_nor_vllm():
    source = "import sys; import capflow_engine.serve.rpc.capflow_pb2_grpc; print({'torch', 'vllm'} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_a_relative_vector_is_that_of_a_body_plain_or_packed():
    row = [3.0, 4.0]
    plain = {"layers": {2: {"vectors": [{"vector": row, "scale": 0.5, "relative": True}]}}}
    data = struct.pack("<2f", *row)
    packed = {
        "dtype": "float32",
        "shape": [1, 2],
        "layer_indices": [2],
        "data": data,
        "scales": [0.5],
        "relative": True,
    }
    result = []
    for vectors in (plain, packed):
        message = pb.GenerateRequest(steering_vectors={"post_block": vectors})
        sent = pb.GenerateRequest.FromString(message.SerializeToString())
        result.append(Steering.parse({"steering_vectors": fields_of(sent)["steering_vectors"]}).base.vectors)
    assert result[0] == result[1]
    assert result[0][0].relative


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (pb.Clamp(index=[3, 5], value=0.5), {"index": [3, 5], "value": 0.5}),
        (pb.Clamp(index=[1], values=[1.0, 2.0], strength=0.5), {"index": [1], "value": [1.0, 2.0], "strength": 0.5}),
        (pb.Clamp(index=[8, 9], min=-1), {"index": [8, 9], "min": -1.0}),
    ],
)
def test_a_clamp_of_entries_is_that_of_a_body(message, plain):
    request = pb.GenerateRequest()
    request.steering_clamps["heads"].layers[2].clamps.append(message)
    sent = fields_of(pb.GenerateRequest.FromString(request.SerializeToString()))["steering_clamps"]
    clamps = Steering.parse({"steering_clamps": sent}).base.clamps
    assert clamps == Steering.parse({"steering_clamps": {"heads": {2: plain}}}).base.clamps
    request.steering_clamps["heads"].layers[2].clamps[0].MergeFrom(pb.Clamp(value=1, values=[1.0]))
    with pytest.raises(UsageError, match=r"^steering_clamps\.heads\.layers\.2\.clamps\.0\.values: given beside value"):
        fields_of(request)


def test_a_patch_of_entries_is_that_of_a_body():
    rows = pb.Rows(dtype="float32", shape=[2], data=struct.pack("<2f", 1, 2))
    request = pb.GenerateRequest()
    request.steering_patches["heads"].layers[2].patches.append(pb.Patch(positions=[0, -1], index=[3], vector=rows))
    sent = fields_of(pb.GenerateRequest.FromString(request.SerializeToString()))["steering_patches"]
    plain = {"heads": {2: {"positions": [0, -1], "index": 3, "vector": [1.0, 2.0]}}}
    assert Steering.parse({"steering_patches": sent}).patches == Steering.parse({"steering_patches": plain}).patches
