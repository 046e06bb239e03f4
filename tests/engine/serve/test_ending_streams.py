"""Streams over HTTP and gRPC that a gate, the hub's gate or an action ends: where they end, and what they say then."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")

import grpc
import openai
import torch

import capflow
from capflow.capture.site import Site
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import Abort, ActionApplied
from capflow.transport.client import Client
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc.capflow_pb2_grpc import GenerateStub
from tests.kit.doors import PROMPT, TOKENS, words
from tests.kit.engines import relative_error, vector
from tests.kit.hubs import free_port
from tests.kit.rows import FLOAT32_BOUND
from tests.kit.servers import environment, healthy, process, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

LENGTH, LONG = 40, 2500
SITE, WEIGHT = Site(2, "post_block"), vector(11, norm=1.0)
CAPTURE = {"hooks": {"post_block": "all"}, "positions": "all"}
EXTRA = {"ignore_eos": True, "capture": CAPTURE, "capture_wait": True}
TALK = [{"role": "user", "content": PROMPT}]


class Fired(NamedTuple):
    """The answer without gates, and a threshold that one of its rows is the first to reach.

    tokens: of the answer up to the one that the firing row computes. score: of the firing row.
    """

    threshold: float
    tokens: list[int]
    score: float


@pytest.fixture(scope="module")
def fired(reference):
    """A row in the middle of the greedy answer that scores higher than all before it."""
    tokens = list(TOKENS)
    for _ in range(LENGTH):
        with torch.no_grad():
            tokens.append(int(reference.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    scores = reference.post_block(tokens)[SITE.layer] @ WEIGHT
    start = len(TOKENS)
    highest = [p for p in range(start + 3, start + LENGTH - 5) if scores[p] > scores[start:p].max() + 1e-3]
    first = highest[len(highest) // 2]
    threshold = float((scores[first] + scores[start:first].max()) / 2)
    return Fired(threshold, tokens[start : first + 2], float(scores[first]))


class Server(NamedTuple):
    """A server with a hub whose gate ends requests of the names `guarded-*`."""

    client: openai.OpenAI
    stub: GenerateStub
    home: os.PathLike


@pytest.fixture(scope="module")
def server(tiny_with_words, tmp_path_factory, fired):
    home = tmp_path_factory.mktemp("home")
    (home / "chat.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    Probe.make(SITE, WEIGHT, names=("p",), threshold=fired.threshold).save(home / "p.safetensors")
    save_vector(home / "v.safetensors", SITE, vector(12))
    gate = f"gate@guard:probe={home}/p.safetensors,vector={home}/v.safetensors,positions=all_generated"
    port, rpc = free_port(), free_port()
    hub = ("run", "--consumer", f"filesystem:root={home}/rows,capture=requests", "--consumer",
           f"{gate},mode=ordered,action=stop,requests=guarded-*")  # fmt: skip
    command = (
        "serve", tiny_with_words, "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len",
        "4096", "--hf-overrides", json.dumps({"max_position_embeddings": 4096}), "--served-model-name", "tiny",
        "--chat-template", str(home / "chat.jinja"), "--grpc-port", str(rpc),
    )  # fmt: skip
    variables = environment(home)
    with process(*hub, environment=variables) as (running, _), process(*command, environment=variables) as (served, _):
        try:
            wait_until(lambda: healthy(port), 400, served)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            with grpc.insecure_channel(f"127.0.0.1:{rpc}") as channel, client:
                yield Server(client, GenerateStub(channel), home)
        finally:
            served.terminate()
            running.terminate()


class Ended(NamedTuple):
    """What a stream gave in the order of its parts. results: of the capture, in its last message."""

    text: str
    tokens: list[int] | None
    finishes: list[str | None]
    stop_reason: str | None
    results: dict


def completion(server, name, *, on_part=lambda parts: None, length=LENGTH, **extra):
    chunks = []
    for chunk in server.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=length, temperature=0, stream=True,
        extra_body={**EXTRA, "return_token_ids": True, "capture_id": name, **extra},
    ):  # fmt: skip
        chunks.append(chunk)
        on_part(len(chunks))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    tokens = [token for choice in choices for token in choice.token_ids or ()]
    return _ended("".join(choice.text for choice in choices), tokens, choices, chunks)


def chat(server, name, **extra):
    chunks = list(
        server.client.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=LENGTH, temperature=0, stream=True,
            extra_body={**EXTRA, "capture_id": name, **extra},
        )
    )  # fmt: skip
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return _ended("".join(choice.delta.content or "" for choice in choices), None, choices, chunks)


def _ended(text, tokens, choices, chunks):
    results = chunks[-1].model_extra["capture_results"]["filesystem"]
    assert not any("capture_results" in chunk.model_extra for chunk in chunks[:-1])
    return Ended(text, tokens, [each.finish_reason for each in choices], choices[-1].stop_reason, results)


def rpc(server, name, **extra):
    gates = {key: {**gate, "layer": int(gate["layer"])} for key, gate in extra.pop("steering_gates", {}).items()}
    request = pb.GenerateRequest(
        prompt=PROMPT, max_tokens=LENGTH, temperature=0, ignore_eos=True, capture=CAPTURE, capture_id=name,
        capture_wait=True, steering_gates=gates,
    )  # fmt: skip
    parts = list(server.stub.GenerateStream(request))
    outputs = [output for part in parts for output in part.outputs]
    result = parts[-1].capture_results["filesystem"]
    return Ended(
        "".join(output.text for output in outputs),
        [token for output in outputs for token in output.token_ids],
        [output.finish_reason or None for output in outputs],
        outputs[-1].stop_reason,
        {"status": result.status},
    )


def rows_hold(server, reference, name, tokens, status, more=0):
    """Hold the stored rows against the reference: of all tokens but the last, and of at most so many more."""
    capture = capflow.open(server.home / "rows")[name]
    capture.verify()
    assert capture.sidecar.status == status
    expected = reference.post_block([*TOKENS, *tokens])
    count = len(TOKENS) + len(tokens) - 1
    for site in capture.sites:
        positions = capture[site].positions.tolist()
        assert positions == list(range(len(positions)))
        assert count <= len(positions) <= count + more
        assert relative_error(capture[site].rows, expected[site.layer, : len(positions)]) < FLOAT32_BOUND


@pytest.mark.parametrize("door", [completion, chat, rpc])
@pytest.mark.parametrize("by", ["stop", "abort", "hub"])
def test_a_stream_ends_with_the_token_of_the_row_that_fired(server, reference, fired, door, by):
    gate = {"layer": SITE.layer, "vector": WEIGHT.tolist(), "threshold": fired.threshold, "positions": "generated"}
    own = {} if by == "hub" else {"steering_gates": {"rude": {**gate, "abort": by}}}
    name, status = f"{'guarded' if by == 'hub' else by}-{door.__name__}", "abort" if by == "abort" else "stop"
    ended = door(server, name, **own)
    assert words(ended.text) == fired.tokens
    assert ended.tokens in (None, fired.tokens)
    assert ended.finishes == [None] * (len(ended.finishes) - 1) + [status]
    prefix, _, score = ended.stop_reason.rpartition(":")
    assert prefix == ("capflow:gate@guard" if by == "hub" else "capflow:rude")
    assert float(score) == pytest.approx(fired.score, rel=1e-4)
    assert ended.results["status"] == "ok"
    rows_hold(server, reference, name, fired.tokens, status)


@pytest.mark.parametrize(("status", "reason"), [("stop", "capflow:someone"), ("abort", "")])
def test_an_action_ends_a_stream_and_its_rows_come(server, reference, status, reason):
    name, outcomes = f"acted-{status}", []

    def act(parts):
        if parts == 5:
            with Client(f"ipc://{server.home}/capflow/hub.sock") as client:
                outcomes.append(client.act(Abort(name, as_=status, reason=reason), 60))

    ended = completion(server, name, on_part=act, length=LONG)
    assert [type(outcome) for outcome in outcomes] == [ActionApplied], outcomes
    assert 5 <= len(ended.tokens) < LONG
    assert words(ended.text) == ended.tokens
    assert ended.finishes == [None] * (len(ended.finishes) - 1) + [status]
    assert (ended.stop_reason or "") == reason
    assert ended.results["status"] == "ok"
    rows_hold(server, reference, name, ended.tokens, status, more=1)
