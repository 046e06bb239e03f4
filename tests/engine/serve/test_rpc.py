"""One live server over gRPC and HTTP: prompts, streams, steering, captures, refusals, and calls that end early."""

import functools
import re
import subprocess
import sys
import urllib.request

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
from tests.kit.doors import (
    AUTHORIZED,
    BODY_BYTES_MAX,
    CAPTURE,
    KEY,
    LENGTH_MAX,
    PROMPT,
    STEERING_KEY,
    TOKENS,
    VECTOR,
    post,
)
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

MAY_STEER = (*AUTHORIZED, ("x-api-key", STEERING_KEY))


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
    status, answer = post(port, "completions", body)
    assert status == 200, answer
    return answer


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
    message = message_factory.GetMessageClass(method.input_type)(prompt=PROMPT, max_tokens=2)
    call = channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        type(message).SerializeToString,
        message_factory.GetMessageClass(method.output_type).FromString,
    )
    assert len(call(message, metadata=AUTHORIZED).outputs[0].token_ids) == 2


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
    # vLLM joins the tokens that a busy reader has not yet taken.
    assert 1 < len(parts) <= 6
    assert "".join(part.outputs[0].text for part in parts) == choice["text"]
    assert [token for part in parts for token in part.outputs[0].token_ids] == choice["token_ids"]
    assert [part.outputs[0].finish_reason for part in parts] == [""] * (len(parts) - 1) + ["length"]
    assert [list(part.prompt_token_ids) for part in parts] == [TOKENS] + [[]] * (len(parts) - 1)
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


def test_the_global_state_steers_calls_that_ask_for_nothing(served, generate):
    channel, port = served.channel, served.port
    steering = SteeringStub(channel)
    vectors = {"post_block": {"layers": {1: {"vectors": [{"vector": VECTOR}]}}}}
    expected = generate.Generate(asked(steering_vectors=vectors), metadata=AUTHORIZED).outputs[0]
    steering.Set(pb.SetRequest(vectors=vectors), metadata=MAY_STEER)
    try:
        assert generate.Generate(asked(), metadata=AUTHORIZED).outputs[0] == expected
        assert http(port)["choices"][0]["text"] == expected.text
    finally:
        steering.Clear(pb.ClearRequest(), metadata=MAY_STEER)
    assert generate.Generate(asked(), metadata=AUTHORIZED).outputs[0] != expected


def test_every_choice_has_its_own_result(served, generate):
    request = asked(capture=CAPTURE, capture_wait=True, capture_id="many", n=2, temperature=1)
    answer = generate.Generate(request, metadata=AUTHORIZED)
    each = [one.results["filesystem"].status for one in answer.capture_results_by_choice]
    assert (each, answer.capture_results["filesystem"].status) == (["ok", "ok"], "ok")
    data = capflow.open(served.root)
    assert all(len(data[f"many#{n}"][Site(3, "post_block")].rows) == 5 + 6 - 1 for n in range(2))


INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"prompt": ""}, INVALID, "prompt"),
        ({"prompt_token_ids": {"token_ids": [10**6]}}, INVALID, None),
        ({"top_p": 3.0}, INVALID, "top_p"),
        ({"truncate_prompt_tokens": -7}, INVALID, "truncate_prompt_tokens"),
        ({"max_tokens": LENGTH_MAX + 1}, INVALID, "max_tokens"),
        ({"model": "another"}, MISSING, "model"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_refused_by_its_field(generate, method, changes, code, field):
    def call():
        answer = getattr(generate, method)(asked(**changes), metadata=AUTHORIZED)
        return answer if method == "Generate" else list(answer)

    result = refusal(call)
    assert (result[0], result[2] if field else None) == (code, field), result
    assert "\n" not in result[1]


def test_the_keys_guard_calls(served, generate):
    steering = SteeringStub(served.channel)
    for metadata in ((), (("authorization", "Bearer wrong"),), (("x-api-key", STEERING_KEY),)):
        call = functools.partial(generate.Generate, asked(), metadata=metadata)
        assert refusal(call)[0] == grpc.StatusCode.UNAUTHENTICATED
    assert refusal(lambda: steering.Clear(pb.ClearRequest(), metadata=AUTHORIZED))[0] == grpc.StatusCode.UNAUTHENTICATED
    assert list(steering.ListModules(pb.ListModulesRequest(), metadata=AUTHORIZED).modules) == ["one"]


def test_a_message_that_is_too_large_is_refused(generate):
    large = asked(prompt="w5 " * BODY_BYTES_MAX)
    assert refusal(lambda: generate.Generate(large, metadata=AUTHORIZED))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_id_that_runs_is_refused_to_another_call(generate):
    long = asked(max_tokens=400, capture=CAPTURE, capture_id="one")
    stream = generate.GenerateStream(long, metadata=AUTHORIZED)
    next(stream)
    result = refusal(lambda: generate.Generate(asked(capture=CAPTURE, capture_id="one"), metadata=AUTHORIZED))
    stream.cancel()
    assert (result[0], result[2]) == (INVALID, "capture_id")


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
