"""The ways into a server and into `capflow.LLM`, and one table of what all of them promise.

Fields are written as in a body of HTTP. A `Door` brings them the way that its clients do.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import openai

import capflow
from capflow_engine.serve.refusals import path_of
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc.capflow_pb2_grpc import GenerateStub
from tests.kit.engines import LAYERS, WIDTH

KEY, STEERING_KEY = "for-the-tests", "to-steer"
AUTHORIZED = (("authorization", f"Bearer {KEY}"),)
PROMPT = "w5 w77 w123 w9 w250"
TOKENS = [int(word[1:]) for word in PROMPT.split()]
LENGTH_MAX = 4096
BODY_BYTES_MAX = 200_000
ANSWER = 6
"""How many tokens an answer has."""

VECTOR = [3.0 if n % 2 else -3.0 for n in range(WIDTH)]
OTHER = [-4.0 if n % 3 else 2.0 for n in range(WIDTH)]
ONE = {"post_block": {"1": VECTOR}}
MODULE = {"vectors": ONE}
"""What the module `one` holds."""


class Served(NamedTuple):
    """A server with its hub.

    client: of its HTTP. channel: to its gRPC. port: of its HTTP. root: the directory of the rows. address: of its gRPC.
    """

    client: openai.OpenAI
    channel: grpc.Channel
    port: int
    root: Path
    address: str


class Answer(NamedTuple):
    """What a request returned.

    tokens: of its answer. key: of the steering, beside the answer. result: of its capture, as (status, tag).
    steering: the answer's report of it.
    """

    tokens: list[int]
    key: str | None
    result: tuple[str, str] | None
    steering: dict[str, Any] | None


class RefusedError(Exception):
    """A door refused a request. field: the path of the field. unknown: whether something that it names is missing."""

    def __init__(self, field: str | None, message: str, *, unknown: bool) -> None:
        super().__init__(message)
        self.field, self.message, self.unknown = field, message, unknown


Door = Callable[[Mapping[str, Any]], Answer]

# --- HTTP ---

TALK = [{"role": "user", "content": PROMPT}]
PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": PROMPT, "max_tokens": ANSWER},
    "chat/completions": {"messages": TALK, "max_tokens": ANSWER},
    "responses": {"input": PROMPT, "max_output_tokens": ANSWER},
    "messages": {"messages": TALK, "max_tokens": ANSWER},
    "chat/completions/batch": {"messages": [TALK], "max_tokens": ANSWER},
}
"""A body of each route, without capflow's fields."""

_TEXTS: dict[str, Callable[[Any], str]] = {
    "completions": lambda answer: answer["choices"][0]["text"],
    "responses": lambda answer: answer["output"][-1]["content"][0]["text"],
    "messages": lambda answer: answer["content"][0]["text"],
}


def post(port: int, path: str, body: Any, key: str = KEY) -> tuple[int, Any]:
    """Return the status and the JSON of an answer of HTTP."""
    return _post(port, path, body, key)[:2]


def _post(port: int, path: str, body: Any, key: str) -> tuple[int, Any, Mapping[str, str]]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer), answer.headers
    except urllib.error.HTTPError as e:
        return e.code, json.load(e), e.headers


def http(served: Served, route: str) -> Door:
    """Return a route of HTTP."""

    def ask(fields: Mapping[str, Any]) -> Answer:
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, **PROMPTS[route], **fields}
        status, answer, headers = _post(served.port, route, body, KEY)
        if status != 200:
            message = answer["error"]["message"]
            # vLLM's form of an error of `messages` has no path.
            field = answer["error"].get("param") or path_of(message)
            raise RefusedError(field, message, unknown=status == 404)
        text = _TEXTS.get(route, lambda answer: answer["choices"][0]["message"]["content"])(answer)
        result = answer.get("capture_results", {}).get("filesystem")
        steering = answer.get("steering_applied")
        return Answer(
            words(text), headers.get("x-capflow-steering"), result and (result["status"], result["tag"]), steering
        )

    return ask


def words(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [int(word[1:]) for word in text.split()]


# --- gRPC ---


def message(fields: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return gRPC's form of a request."""
    typed = {name: _typed(name, value) for name, value in fields.items()}
    if isinstance(typed.get("steering_name"), Mapping):
        typed["steering_scales"] = typed.pop("steering_name")
    elif "steering_name" in typed:
        typed["steering_name"] = [typed["steering_name"]]
    return pb.GenerateRequest(**{"prompt": PROMPT, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True} | typed)


def _typed(name: str, value: Any) -> Any:
    kind = name.rpartition("_")[2]
    if kind == "gates":
        return {name: {**gate, "layer": int(gate["layer"])} for name, gate in value.items()}
    if kind not in ("vectors", "clamps", "patches"):
        return value
    return {hook: _layers(kind, layers) for hook, layers in value.items()}


def _layers(kind: str, layers: Mapping[str, Any]) -> Any:
    if "data" in layers:
        return {**layers, "data": base64.b64decode(layers["data"])}
    return {"layers": {int(layer): _layer(kind, value) for layer, value in layers.items()}}


def _layer(kind: str, value: Any) -> Any:
    if kind == "vectors" and not isinstance(value, Mapping) and not isinstance(value[0], Mapping):
        value = {"vector": value}
    each = [value] if isinstance(value, Mapping) else value
    return {kind: [_patch(patch) for patch in each] if kind == "patches" else each}


def _patch(patch: Mapping[str, Any]) -> Any:
    if "vector" not in patch:
        return patch
    row = np.array(patch["vector"], np.float32)
    return {**patch, "vector": {"dtype": "float32", "shape": row.shape, "data": row.tobytes()}}


def rpc(served: Served, *, stream: bool) -> Door:
    """Return the method of gRPC."""
    stub = GenerateStub(served.channel)

    def ask(fields: Mapping[str, Any]) -> Answer:
        request = message(fields)
        try:
            if stream:
                call = stub.GenerateStream(request, metadata=AUTHORIZED)
                parts = list(call)
            else:
                answer, call = stub.Generate.with_call(request, metadata=AUTHORIZED)
                parts = [answer]
        except grpc.RpcError as e:
            field = dict(e.trailing_metadata()).get("field")
            raise RefusedError(field, e.details(), unknown=e.code() == grpc.StatusCode.NOT_FOUND) from e
        assert not any(part.capture_results or part.HasField("steering_applied") for part in parts[:-1])
        tokens = [token for part in parts for output in part.outputs for token in output.token_ids]
        result, applied = parts[-1].capture_results.get("filesystem"), parts[-1].steering_applied
        steering = {
            "key": applied.key,
            "prefill": dict(applied.prefill),
            "decode": dict(applied.decode),
            "patched": {str(at): dict(counts.sites) for at, counts in applied.patched.items()},
            "modules": dict(applied.modules),
            "global": applied.global_state,
        }
        if applied.gates:
            fields = {field.name for field in pb.AppliedGate.DESCRIPTOR.fields}
            steering["gates"] = [
                {name: getattr(gate, name) if name != "sharpness" or gate.HasField(name) else None for name in fields}
                for gate in applied.gates
            ]
        key = dict(call.initial_metadata()).get("x-capflow-steering")
        reports = parts[-1].HasField("steering_applied")
        return Answer(tokens, key, result and (result.status, result.tag), steering if reports else None)

    return ask


# --- Python ---


def python(llm: capflow.LLM) -> Door:
    """Return the engine of this process. Its outputs always have what HTTP has to be asked for."""
    import msgspec

    from capflow_engine.steering.store import UnknownModuleError

    def ask(fields: Mapping[str, Any]) -> Answer:
        options = {name: value for name, value in fields.items() if name not in ("capture_wait", "steering_report")}
        options |= {"id": options.pop("capture_id")} if "capture_id" in options else {}
        try:
            params = capflow.sampling_params(max_tokens=ANSWER, temperature=0, ignore_eos=True, **options)
            (output,) = llm.generate({"prompt_token_ids": TOKENS}, params, use_tqdm=False)
        except capflow.UsageError as e:
            raise RefusedError(path_of(e), str(e), unknown=isinstance(e, UnknownModuleError)) from e
        result = output.capture_results.get("filesystem")
        steering = output.steering_applied and json.loads(msgspec.json.encode(output.steering_applied))
        key = steering and steering["key"]
        return Answer(list(output.outputs[0].token_ids), key, result and (result.status, result.tag), steering)

    return ask


HTTP = frozenset(PROMPTS)
RPC = frozenset({"Generate", "GenerateStream"})
LLM = frozenset({"LLM"})
PARSED = frozenset({"parsed"})
"""The fields alone, without an engine behind them."""
DOORS = HTTP | RPC | LLM

# --- the table ---

CAPTURE = {"hooks": {"post_block": [1, 3]}, "positions": "all"}


class Refused(NamedTuple):
    """Fields that are refused before anything runs.

    field: the path of what is wrong. words: some of the message. doors: those that take such fields. unknown: whether
    the refusal says that something is missing, not that something is wrong.
    """

    fields: dict[str, Any]
    field: str
    words: str
    doors: frozenset[str] = DOORS | PARSED
    unknown: bool = False


def _vectors(layer: int, vector: list[float], hook: str = "post_block") -> dict[str, Any]:
    return {hook: {str(layer): vector}}


def _clamps(*clamps: dict[str, Any]) -> dict[str, Any]:
    return {"post_block": {"1": list(clamps)}}


def _hooks(**hooks: Any) -> dict[str, Any]:
    return {"capture": {"hooks": hooks}}


def _patches(**patch: Any) -> dict[str, Any]:
    return {"steering_patches": {"post_block": {"1": [patch]}}}


_UNTYPED = HTTP | LLM | PARSED
"""A message of gRPC has no room for a value of another type."""
_ASKS = DOORS - LLM | PARSED
"""A request in Python calls the field otherwise, or does not need it."""

GATE = {"layer": 0, "vector": OTHER, "threshold": 0.5, "sharpness": 2.0, "positions": "prompt", "label": "mine"}


def _gated(field: str = "steering_vectors", layer: int = 1, **changed: Any) -> dict[str, Any]:
    part = {"post_block": {str(layer): {"vector": VECTOR, "gate": "rude"}}}
    return {"steering_gates": {"rude": {**GATE, **changed}}, field: part}


_PACKED = {
    "dtype": "float16",
    "shape": [2, WIDTH],
    "layer_indices": [1, 2],
    "data": base64.b64encode(np.array([VECTOR, OTHER], np.float16).tobytes()).decode(),
    "scales": [-0.5, 0.5],
}

REFUSED = {
    "layer": Refused(_hooks(post_block=[LAYERS]), "capture.hooks.post_block", f"layer {LAYERS}"),
    "half a layer": Refused(_hooks(post_block=[1.5]), "capture.hooks.post_block", "1.5"),
    "no tap": Refused(_hooks(mlp_in=[0]), "capture.hooks.mlp_in", "--sites mlp_in:0"),
    "hook": Refused(_hooks(nowhere=[0]), "capture.hooks", "nowhere"),
    "no hooks": Refused({"capture": {}}, "capture.hooks", "hooks"),
    "key": Refused({"capture": {**CAPTURE, "position": "all"}}, "capture.position", "one of"),
    "positions": Refused({"capture": {**CAPTURE, "positions": "some"}}, "capture.positions", "some"),
    "window": Refused({"capture": {**CAPTURE, "positions": {"last": -1}}}, "capture.positions.last", "-1"),
    "rows": Refused({"capture": {**CAPTURE, "max_rows": 0}}, "capture.max_rows", "0"),
    "tag": Refused({"capture": {**CAPTURE, "tag": "a\nb"}}, "capture.tag", "printable"),
    "consumer's hook": Refused(
        {"capture": {"filesystem": _hooks(nowhere=[0])["capture"]}}, "capture.filesystem.hooks", "nowhere"
    ),
    "consumer": Refused(
        {"capture": {"nobody": CAPTURE}}, "capture", "consumer nobody, expected one of the hub's: filesystem", DOORS
    ),
    "no spec": Refused({"capture": "everything"}, "capture", "everything", _UNTYPED),
    "wait": Refused({"capture": CAPTURE, "capture_wait": "yes"}, "capture_wait", "true or false", HTTP | PARSED),
    "id": Refused({"capture": CAPTURE, "capture_id": 7}, "capture_id", "characters", HTTP | PARSED),
    "empty id": Refused({"capture": CAPTURE, "capture_id": ""}, "capture_id", "characters", _ASKS),
    "width": Refused(
        {"steering_vectors": _vectors(1, [1.0, 2.0])}, "steering_vectors.post_block.1", "the model's width"
    ),
    "nan": Refused(
        {"steering_vectors": _vectors(1, [float("nan")] * WIDTH)}, "steering_vectors.post_block.1", "nan at index 0"
    ),
    "no numbers": Refused(
        {"steering_vectors": {"post_block": {"0": "abc"}}}, "steering_vectors.post_block.0", "numbers", _UNTYPED
    ),
    "steered layer": Refused({"steering_vectors": _vectors(99, VECTOR)}, "steering_vectors.post_block.99", "layer 99"),
    "steered site": Refused(
        {"decode_steering_vectors": _vectors(1, VECTOR, "mlp_in")}, "decode_steering_vectors.mlp_in.1", "no tap"
    ),
    "clamp": Refused({"steering_clamps": _clamps({"vector": VECTOR})}, "steering_clamps.post_block.1.0", "min"),
    "clamps": Refused(
        {"decode_steering_clamps": _clamps(*[{"vector": VECTOR, "value": 0.0}] * 65)},
        "decode_steering_clamps.post_block.1", "65",
    ),
    "patch": Refused(_patches(positions=[0]), "steering_patches.post_block.1.0.vector", "vector"),
    "reach": Refused(
        _patches(positions=[-30], vector=OTHER), "steering_patches.post_block.1.positions",
        f"-30, expected -{len(TOKENS)} or later", DOORS,
    ),
    "packed": Refused(
        {"prefill_steering_vectors": {"post_block": {**_PACKED, "data": _PACKED["data"][:-4]}}},
        "prefill_steering_vectors.post_block.data", "bytes",
    ),
    "scale": Refused({"steering_scale": 2.0}, "steering_scale", "steering_name"),
    "module": Refused({"steering_name": "gone"}, "steering_name", "gone", unknown=True),
    "module's scale": Refused({"steering_name": {"one": float("inf")}}, "steering_name.one", "inf"),
    "module's words": Refused({"steering_name": {"one": "much"}}, "steering_name.one", "much", _UNTYPED),
    "gate's width": Refused(_gated(vector=[1.0]), "steering_gates.rude.vector", "1 numbers"),
    "gate's vector": Refused(_gated(vector=[float("nan")] * WIDTH), "steering_gates.rude.vector", "nan at index 0"),
    "gate's threshold": Refused(_gated(threshold=float("inf")), "steering_gates.rude.threshold", "finite"),
    "gate's sharpness": Refused(_gated(sharpness=-1.0), "steering_gates.rude.sharpness", "above 0"),
    "gate's score": Refused(_gated(score="near"), "steering_gates.rude.score", "one of dot, cosine, cast"),
    "gate's positions": Refused(_gated(positions="some"), "steering_gates.rude.positions", "last_prompt"),
    "gate's abort": Refused(_gated(abort="kill"), "steering_gates.rude.abort", "one of stop, abort"),
    "one gate twice": Refused(
        {"steering_gates": {"rude": GATE},
         "steering_vectors": {"post_block": {"1": [{"vector": VECTOR, "gate": "rude"}] * 2}}},
        "steering_vectors.post_block.1", "gate rude twice",
    ),
    "gate's latch": Refused(_gated(latch="yes"), "steering_gates.rude.latch", "true or false", _UNTYPED),
    "gate's tap": Refused(_gated(hook="mlp_in"), "steering_gates.rude", "--sites mlp_in:0"),
    "gate's place": Refused(_gated(layer=0, latch=True), "steering_vectors.post_block.0.gate", "probe before"),
    "gate that is too late": Refused(
        {**_gated(layer=0), "steering_gates": {"rude": {**GATE, "layer": 2}}},
        "steering_vectors.post_block.0.gate", "at or before",
    ),
    "gate that never acts": Refused(_gated("decode_steering_vectors"), "decode_steering_vectors.post_block.1.gate",
                                    "latch"),
    "unknown gate": Refused({"steering_vectors": _gated()["steering_vectors"]}, "steering_vectors.post_block.1.gate",
                            "steering_gates"),
    "gates": Refused({"steering_gates": {f"g{n}": GATE for n in range(9)}}, "steering_gates", "9 gates"),
    "report": Refused({"steering_report": 1}, "steering_report", "true or false", HTTP | PARSED),
    "steering": Refused({"steering": ONE}, "steering", "steering_vectors", HTTP),
    "spelling": Refused({"steering_strength": 2.0}, "steering_strength", "steering", HTTP),
    "xargs": Refused({"vllm_xargs": {"capflow": "{"}}, "vllm_xargs.capflow", "JSON", HTTP),
}  # fmt: skip

CAPTURED: dict[str, tuple[dict[str, Any], str, slice]] = {
    "for every consumer": (CAPTURE, "", slice(None)),
    "for one by name": ({"filesystem": {**CAPTURE, "positions": "last_prompt", "tag": "mine"}}, "mine", slice(4, 5)),
}
"""A capture spec, its tag, and which of the computed positions it means."""

_HERE = {"post_block:1": 1}
_APPLIED = {
    "name": "rude",
    "site": "post_block:0",
    "score": "dot",
    "threshold": 0.5,
    "sharpness": 2.0,
    "latch": False,
    "positions": "prompt",
    "label": "mine",
    "abort": "",
}
STEERED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layers": (
        {"steering_vectors": {"post_block": {"1": {"vector": VECTOR, "scale": -0.5}}}},
        {"prefill": _HERE, "decode": _HERE},
    ),
    "packed": ({"decode_steering_vectors": {"post_block": _PACKED}}, {"decode": {**_HERE, "post_block:2": 1}}),
    "clamps": ({"prefill_steering_clamps": _clamps({"vector": VECTOR, "value": -9.0})}, {"prefill": _HERE}),
    "patches": (
        {"steering_patches": {"post_block": {"2": {"positions": [-1, 0], "vector": OTHER}}}},
        {"patched": {"-1": {"post_block:2": 1}, "0": {"post_block:2": 1}}},
    ),
    "gates": (
        _gated(),
        {"prefill": _HERE, "decode": _HERE, "gates": [_APPLIED]},
    ),
    "two gates at one site": (
        {
            "steering_gates": {"rude": GATE, "sad": {"layer": 1, "vector": VECTOR, "sharpness": 0.5}},
            "steering_vectors": {
                "post_block": {
                    "1": [
                        {"vector": VECTOR},
                        {"vector": OTHER, "gate": "rude", "scale": -0.5},
                        {"vector": OTHER, "gate": "sad", "scale": 2.0},
                    ]
                }
            },
        },
        {
            "prefill": {"post_block:1": 3},
            "decode": {"post_block:1": 3},
            "gates": [
                _APPLIED,
                {**_APPLIED, "name": "sad", "site": "post_block:1", "threshold": 0.0, "sharpness": 0.5,
                 "positions": "all", "label": ""},
            ],
        },
    ),
    "a gate that ends the answer": (
        {"steering_gates": {"rude": {**GATE, "positions": "generated", "threshold": -1e9, "abort": "stop"}}},
        {"gates": [{**_APPLIED, "positions": "generated", "threshold": -1e9, "abort": "stop"}]},
    ),
    "latched gates": (
        _gated("decode_steering_vectors", latch=True, positions="last_prompt", score="cosine", threshold=-1.0),
        {"decode": _HERE, "gates": [
            {**_APPLIED, "latch": True, "positions": "last_prompt", "score": "cosine", "threshold": -1.0}]},
    ),
    "module": (
        {"steering_name": "one", "steering_scale": -1.0},
        {"prefill": _HERE, "decode": _HERE, "modules": {"one": -1.0}},
    ),
    "modules": ({"steering_name": {"one": 2.0}}, {"prefill": _HERE, "decode": _HERE, "modules": {"one": 2.0}}),
}  # fmt: skip
"""What steers a request, and what its answer says of that beside the key."""
