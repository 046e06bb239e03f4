"""One live server over gRPC, and the same over HTTP: prompts, streams, steering, captures, refusals, and calls that end early."""

import base64
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("vllm")

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import capflow
from capflow.capture.site import Site
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc.capflow_pb2_grpc import GenerateStub, SteeringStub
from tests.kit.engines import LAYERS, WIDTH, relative_error
from tests.kit.hubs import free_port
from tests.kit.servers import environment, healthy, process, wait_until
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

KEY, STEERING_KEY = "for-the-tests", "to-steer"
AUTHORIZED = (("authorization", f"Bearer {KEY}"),)
MAY_STEER = (*AUTHORIZED, ("x-api-key", STEERING_KEY))
PROMPT = "w5 w77 w123 w9 w250"
TOKENS = [int(word[1:]) for word in PROMPT.split()]
LENGTH_MAX = 4096
BODY_BYTES_MAX = 200_000
CAPTURE = {"hooks": {"post_block": [1, 3]}, "positions": "all"}
VECTOR = [3.0 if n % 2 else -3.0 for n in range(WIDTH)]
OTHER = [-4.0 if n % 3 else 2.0 for n in range(WIDTH)]
PACKED = {"dtype": "float16", "shape": [2, WIDTH], "layer_indices": [1, 2]}
DATA = np.array([VECTOR, OTHER], np.float16).tobytes()
ROW = np.array(OTHER, np.float32).tobytes()


class Served(NamedTuple):
    """A server: a channel to its gRPC, the port of its HTTP, where the rows lie, and the address of its gRPC."""

    channel: grpc.Channel
    port: int
    root: Path
    address: str


@pytest.fixture(scope="module")
def served(tiny_with_words, tmp_path_factory):
    """A server, and a hub that it serves."""
    home = tmp_path_factory.mktemp("home")
    (home / "one.json").write_text(json.dumps({"vectors": {"post_block": {"1": VECTOR}}}))
    port, rpc = free_port(), free_port()
    command = [
        "serve", tiny_with_words, "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--hf-overrides", json.dumps({"max_position_embeddings": LENGTH_MAX}), "--max-model-len", str(LENGTH_MAX),
        "--served-model-name", "tiny", "--api-key", KEY,
        "--steering-api-key", STEERING_KEY, "--steering-modules", f"one={home}/one.json",
        "--steering-body-bytes-max", str(BODY_BYTES_MAX), "--grpc-port", str(rpc),
    ]  # fmt: skip
    variables = environment(home)
    hub = process("run", "--consumer", f"filesystem:root={home}/rows,capture=requests", environment=variables)
    with hub as (_hub, _), process(*command, environment=variables) as (server, said):
        try:
            wait_until(lambda: healthy(port), 400, server)
            address = f"127.0.0.1:{rpc}"
            with grpc.insecure_channel(address) as channel:
                yield Served(channel, port, home / "rows", address)
        finally:
            server.terminate()
            _hub.terminate()
    assert not any("Traceback" in line for line in said)


@pytest.fixture
def generate(served):
    return GenerateStub(served.channel)


def asked(**changes):
    prompt = {} if "prompt_token_ids" in changes else {"prompt": PROMPT}
    return pb.GenerateRequest(**{"max_tokens": 6, "temperature": 0, "ignore_eos": True, **prompt, **changes})


def http(port, **changes):
    """Return the answer over HTTP."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def refusal(call):
    """Return the status of a call that is refused, what it says, and the field that it names."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    wrong = raised.value
    return wrong.code(), wrong.details(), dict(wrong.trailing_metadata()).get("field")


def test_it_says_that_it_serves_and_what(served):
    channel = served.channel
    check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="capflow.v1.Steering"))
    assert check.status == health_pb2.HealthCheckResponse.SERVING
    reflected = ProtoReflectionDescriptorDatabase(channel)
    assert set(reflected.get_services()) == {
        "capflow.v1.Capture", "capflow.v1.Generate", "capflow.v1.Steering", "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip
    service = descriptor_pool.DescriptorPool(reflected).FindServiceByName("capflow.v1.Generate")
    method = service.FindMethodByName("Generate")
    said = message_factory.GetMessageClass(method.input_type)(prompt=PROMPT, max_tokens=2)
    call = channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        type(said).SerializeToString,
        message_factory.GetMessageClass(method.output_type).FromString,
    )
    assert len(call(said, metadata=AUTHORIZED).outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "prompt", [{"prompt": PROMPT}, {"prompt_token_ids": {"token_ids": TOKENS}}], ids=["text", "tokens"]
)
def test_an_answer_is_that_of_http_whole_or_streamed(served, generate, prompt):
    expected = http(served.port)
    choice = expected["choices"][0]
    answer = generate.Generate(asked(**prompt), metadata=AUTHORIZED)
    (output,) = answer.outputs
    assert (output.text, list(output.token_ids)) == (choice["text"], choice["token_ids"])
    assert (output.finish_reason, answer.model, list(answer.prompt_token_ids)) == ("length", "tiny", TOKENS)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)
    *parts, last = generate.GenerateStream(asked(**prompt), metadata=AUTHORIZED)
    assert len(parts) == 6
    assert "".join(part.outputs[0].text for part in parts) == choice["text"]
    assert [token for part in parts for token in part.outputs[0].token_ids] == choice["token_ids"]
    assert [part.outputs[0].finish_reason for part in parts] == [""] * 5 + ["length"]
    assert [list(part.prompt_token_ids) for part in parts] == [TOKENS] + [[]] * 5
    assert (last.usage, list(last.outputs)) == (answer.usage, [])


def test_sampling_is_that_of_http(served, generate):
    sampling = {"temperature": 1.0, "seed": 7, "n": 2, "top_k": 20, "top_p": 0.9, "logprobs": 2, "max_tokens": 8}
    expected = http(served.port, **sampling, return_tokens_as_token_ids=True)["choices"]
    answer = generate.Generate(asked(**sampling), metadata=AUTHORIZED)
    assert [list(output.token_ids) for output in answer.outputs] == [choice["token_ids"] for choice in expected]
    for output, choice in zip(answer.outputs, expected, strict=True):
        assert [each.token_id for each in output.logprobs] == choice["token_ids"]
        assert [each.logprob for each in output.logprobs] == pytest.approx(
            choice["logprobs"]["token_logprobs"], abs=1e-5
        )
        for each, top in zip(output.logprobs, choice["logprobs"]["top_logprobs"], strict=True):
            assert {f"token_id:{token}": pytest.approx(one, abs=1e-5) for token, one in each.top.items()} == top
    greedy = http(served.port)["choices"][0]["token_ids"]
    stopped = generate.Generate(asked(stop_token_ids=[greedy[0]]), metadata=AUTHORIZED).outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", str(greedy[0]), 1)
    pushed = generate.Generate(asked(logit_bias={17: 100}), metadata=AUTHORIZED).outputs[0]
    assert list(pushed.token_ids) == [17] * 6


STEERINGS = {
    "layers": (
        {"steering_vectors": {"post_block": {"layers": {1: {"vector": VECTOR, "scale": 0.5}}}}},
        {"steering_vectors": {"post_block": {"1": {"vector": VECTOR, "scale": 0.5}}}},
    ),
    "packed": (
        {"decode_steering_vectors": {"post_block": {**PACKED, "data": DATA, "scales": [1, 0.5]}}},
        {"decode_steering_vectors": {"post_block": {**PACKED, "data": base64.b64encode(DATA).decode(), "scales": [1, 0.5]}}},
    ),
    "clamps": (
        {"prefill_steering_clamps": {"post_block": {"layers": {1: {"clamps": [{"vector": VECTOR, "value": 9}]}}}}},
        {"prefill_steering_clamps": {"post_block": {"1": {"vector": VECTOR, "value": 9}}}},
    ),
    "patches": (
        {"steering_patches": {"post_block": {"layers": {2: {"patches": [
            {"positions": [-1, 0], "vector": {"dtype": "float32", "shape": [WIDTH], "data": ROW}}]}}}}},
        {"steering_patches": {"post_block": {"2": {"positions": [-1, 0], "vector": OTHER}}}},
    ),
    "module": ({"steering_name": ["one"], "steering_scale": -1}, {"steering_name": "one", "steering_scale": -1}),
    "modules": ({"steering_scales": {"one": 2}}, {"steering_name": {"one": 2}}),
}  # fmt: skip


@pytest.mark.parametrize("form", STEERINGS)
def test_what_steers_is_applied_as_over_http(served, generate, form):
    message, body = STEERINGS[form]
    plain = http(served.port)["choices"][0]["token_ids"]
    expected = http(served.port, **body, steering_report=True)
    said = expected["steering_applied"]
    answer, call = generate.Generate.with_call(asked(**message, steering_report=True), metadata=AUTHORIZED)
    applied = answer.steering_applied
    assert list(answer.outputs[0].token_ids) == expected["choices"][0]["token_ids"] != plain
    assert (applied.key, dict(call.initial_metadata())["x-capflow-steering"]) == (said["key"], said["key"])
    assert (dict(applied.prefill), dict(applied.decode)) == (said["prefill"], said["decode"])
    assert {str(at): dict(counts.sites) for at, counts in applied.patched.items()} == said["patched"]
    assert (dict(applied.modules), applied.global_state) == (said["modules"], said["global"])
    *parts, last = generate.GenerateStream(asked(**message, steering_report=True), metadata=AUTHORIZED)
    assert [token for part in parts for token in part.outputs[0].token_ids] == expected["choices"][0]["token_ids"]
    assert last.steering_applied == applied
    assert not any(part.HasField("steering_applied") for part in parts)


def test_the_global_state_steers_calls_that_ask_for_nothing(served, generate):
    channel, port = served.channel, served.port
    steering = SteeringStub(channel)
    vectors = {"post_block": {"layers": {1: {"vector": VECTOR}}}}
    expected = generate.Generate(asked(steering_vectors=vectors), metadata=AUTHORIZED).outputs[0]
    steering.Set(pb.SetRequest(vectors=vectors), metadata=MAY_STEER)
    try:
        assert generate.Generate(asked(), metadata=AUTHORIZED).outputs[0] == expected
        assert http(port)["choices"][0]["text"] == expected.text
    finally:
        steering.Clear(pb.ClearRequest(), metadata=MAY_STEER)
    assert generate.Generate(asked(), metadata=AUTHORIZED).outputs[0] != expected


def test_a_capture_has_its_rows_when_it_was_waited_for(served, generate, reference):
    root = served.root
    answer = generate.Generate(asked(capture=CAPTURE, capture_wait=True, capture_id="whole"), metadata=AUTHORIZED)
    *parts, last = generate.GenerateStream(
        asked(capture=CAPTURE, capture_wait=True, request_id="streamed"), metadata=AUTHORIZED
    )
    assert not any(part.capture_results for part in parts)
    tokens = [*TOKENS, *answer.outputs[0].token_ids]
    expected = reference.post_block(tokens)
    for message, name in ((answer, "whole"), (last, "cmpl-streamed")):
        result = message.capture_results["filesystem"]
        assert (result.status, result.HasField("error")) == ("ok", False)
        assert str(root) in str(result.payload)
        capture = capflow.open(root)[name]
        assert set(capture.sites) == {Site(1, "post_block"), Site(3, "post_block")}
        for site in capture.sites:
            assert capture[site].token_ids.tolist() == tokens[:-1]
            assert relative_error(capture[site].rows, expected[site.layer][:-1]) < 1e-5


def test_a_spec_by_consumer_has_its_tag(served, generate):
    capture = {"filesystem": {**CAPTURE, "tag": "mine"}}
    answer = generate.Generate(asked(capture=capture, capture_wait=True, capture_id="tagged"), metadata=AUTHORIZED)
    result = answer.capture_results["filesystem"]
    assert (result.status, result.tag, capflow.open(served.root)["tagged"].tag) == ("ok", "mine", "mine")


def test_every_choice_has_its_own_result(served, generate):
    request = asked(capture=CAPTURE, capture_wait=True, capture_id="many", n=2, temperature=1)
    answer = generate.Generate(request, metadata=AUTHORIZED)
    each = [one.results["filesystem"].status for one in answer.capture_results_by_choice]
    assert (each, answer.capture_results["filesystem"].status) == (["ok", "ok"], "ok")
    data = capflow.open(served.root)
    assert all(len(data[f"many#{n}"][Site(3, "post_block")].rows) == 5 + 6 - 1 for n in range(2))


INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
FAR = {"post_block": {"layers": {1: {"patches": [
    {"positions": [10], "vector": {"dtype": "float32", "shape": [WIDTH], "data": ROW}}]}}}}  # fmt: skip
SHORT = {"post_block": {"layers": {1: {"vector": [1.0]}}}}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"capture": {"hooks": {"post_block": [LAYERS]}}}, INVALID, "capture.hooks.post_block"),
        ({"capture": {"hooks": {"post_block": [1.5]}}}, INVALID, "capture.hooks.post_block"),
        ({"capture": {"hooks": {"post_block": "all"}, "position": "all"}}, INVALID, "capture.position"),
        ({"capture": {}}, INVALID, "capture.hooks"),
        ({"capture": {"nobody": CAPTURE}}, INVALID, "capture"),
        ({"capture": CAPTURE, "capture_id": ""}, INVALID, "capture_id"),
        ({"steering_vectors": SHORT}, INVALID, "steering_vectors.post_block.1"),
        ({"decode_steering_vectors": {"mlp_in": SHORT["post_block"]}}, INVALID, "decode_steering_vectors.mlp_in.1"),
        ({"prefill_steering_vectors": {"post_block": {**PACKED, "data": DATA[1:]}}}, INVALID,
         "prefill_steering_vectors.post_block.data"),
        ({"steering_clamps": {"post_block": {"layers": {1: {"clamps": [{"vector": VECTOR}]}}}}}, INVALID,
         "steering_clamps.post_block.1.0"),
        ({"steering_clamps": {"post_block": {"layers": {1: {"clamps": [{"vector": VECTOR, "max": 1.0}] * 65}}}}}, INVALID,
         "steering_clamps.post_block.1"),
        ({"steering_patches": {"post_block": {"layers": {1: {"patches": [{"positions": [0]}]}}}}}, INVALID,
         "steering_patches.post_block.1.0.vector"),
        ({"steering_patches": FAR}, INVALID, "steering_patches.post_block.1.positions"),
        ({"steering_scale": 2.0}, INVALID, "steering_scale"),
        ({"steering_scales": {"one": float("inf")}}, INVALID, "steering_name.one"),
        ({"steering_name": ["gone"]}, MISSING, "steering_name"),
        ({"prompt": ""}, INVALID, "prompt"),
        ({"prompt_token_ids": {"token_ids": [10**6]}}, INVALID, None),
        ({"top_p": 3.0}, INVALID, "top_p"),
        ({"truncate_prompt_tokens": -7}, INVALID, "truncate_prompt_tokens"),
        ({"max_tokens": LENGTH_MAX + 1}, INVALID, "max_tokens"),
        ({"model": "another"}, MISSING, "model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_field(generate, method, changes, code, field):
    def call():
        answer = getattr(generate, method)(asked(**changes), metadata=AUTHORIZED)
        return answer if method == "Generate" else list(answer)

    found = refusal(call)
    assert (found[0], found[2] if field else None) == (code, field), found
    assert "\n" not in found[1]


def test_the_keys_guard_calls(served, generate):
    steering = SteeringStub(served.channel)
    for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", STEERING_KEY),)):
        assert refusal(lambda: generate.Generate(asked(), metadata=metadata))[0] == grpc.StatusCode.UNAUTHENTICATED  # noqa: B023
    assert refusal(lambda: steering.Clear(pb.ClearRequest(), metadata=AUTHORIZED))[0] == grpc.StatusCode.UNAUTHENTICATED
    assert list(steering.ListModules(pb.ListModulesRequest(), metadata=AUTHORIZED).modules) == ["one"]


def test_a_message_that_is_too_large_is_refused(generate):
    large = asked(prompt="w5 " * BODY_BYTES_MAX)
    assert refusal(lambda: generate.Generate(large, metadata=AUTHORIZED))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_id_that_runs_is_refused_to_another_call(generate):
    long = asked(max_tokens=400, capture=CAPTURE, capture_id="one")
    stream = generate.GenerateStream(long, metadata=AUTHORIZED)
    next(stream)
    found = refusal(lambda: generate.Generate(asked(capture=CAPTURE, capture_id="one"), metadata=AUTHORIZED))
    stream.cancel()
    assert (found[0], found[2]) == (INVALID, "capture_id")


@pytest.mark.parametrize("end", ["stream", "call", "deadline"])
def test_a_call_that_ends_early_ends_its_request(served, generate, end):
    port, root = served.port, served.root

    def running():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    long = asked(max_tokens=LENGTH_MAX - 12, capture=CAPTURE, capture_id=f"left-{end}")
    if end == "stream":
        stream = generate.GenerateStream(long, metadata=AUTHORIZED)
        next(stream)
        stream.cancel()
    elif end == "call":
        call = generate.Generate.future(long, metadata=AUTHORIZED)
        eventually(lambda: call.done() or running(), 120)
        assert not call.done(), f"it ended before it was cancelled: {call}"
        call.cancel()
    else:
        call = generate.Generate.future(long, metadata=AUTHORIZED, timeout=1.0)
        assert call.exception(60).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: not running(), 60)
    eventually(lambda: f"left-{end}" in capflow.open(root), 60)
    capture = capflow.open(root)[f"left-{end}"]
    assert capture.sidecar.status == "abort"
    assert capture.computed_length < LENGTH_MAX - 20


def test_the_client_of_the_documentation_works(served, tmp_path):
    page = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
    (client,) = re.findall(r"^```python [^\n]*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    script = tmp_path / "client.py"
    script.write_text(client.replace("127.0.0.1:50051", served.address).replace("my-key", KEY))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True)
    first, captured, *streamed = done.stdout.splitlines()
    assert re.fullmatch(r".+ [0-9a-f]{32}", first)
    assert captured == "filesystem ok"
    assert "".join(streamed) == f"{first.rpartition(' ')[0]}NOT_FOUND steering_name"
