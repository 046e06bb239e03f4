"""The routes that hold steering: two API servers of one store, without an engine behind them."""

import asyncio
import json

import pytest

pytest.importorskip("vllm")

import fastapi
import httpx
import numpy as np
from safetensors.numpy import save_file

from capflow.errors import UsageError
from capflow.saes.named import digest_of, load_saes
from capflow_engine.compat import engine as compat
from capflow_engine.compat.versions.contract import Break
from capflow_engine.compat.versions.surface import BEAM_SEARCH
from capflow_engine.serve.api_keys import Keys, is_loopback, keys_of
from capflow_engine.serve.ask import ParsedRequest
from capflow_engine.serve.fields import FIELDS
from tests.kit.apps import LIMIT, WIDTH, server
from tests.kit.autoencoders import saelens, weights

VECTOR = [1.0] * WIDTH
ONE = {"vectors": {"post_block": {"1": VECTOR}}}
# The routes that change the engine, each with a body.
CHANGES = (("gain", {"owner": "global", "scale": 0.5}), ("freeze", {}), ("unfreeze", None))


@pytest.fixture
def servers(tmp_path):
    return server(tmp_path), server(tmp_path)


def test_the_state_is_what_either_server_was_told(servers):
    here, there = servers
    assert here.get("/v1/steering").json()["active"] is False
    clamps = {"post_block": {"2": [{"vector": VECTOR, "max": 1.0}, {"vector": VECTOR, "value": 0}]}}
    answer = here.post("/v1/steering/set", json={**ONE, "decode_clamps": clamps}).json()
    assert {**answer, "key": ""} == {"status": "ok", "hook_points": ["post_block"], "layers_updated": [1, 2], "key": ""}
    state = there.get("/v1/steering").json()
    assert state["active"] is True
    assert state["key"] == answer["key"] != "none"
    norm = pytest.approx(WIDTH**0.5)
    assert state["global"]["base"] == {"vectors": {"post_block": {"1": norm}}, "clamps": {}, "features": {}}
    assert state["global"]["decode"] == {"vectors": {}, "clamps": {"post_block": {"2": 2}}, "features": {}}
    more = {"vectors": {"post_block": {"0": {"vector": VECTOR, "scale": 2.0}, "1": {"vector": VECTOR, "scale": 0}}}}
    there.post("/v1/steering/set", json=more)
    assert list(here.get("/v1/steering").json()["global"]["base"]["vectors"]["post_block"]) == ["0"]
    there.post("/v1/steering/set", json={**ONE, "replace": True})
    state = here.get("/v1/steering").json()
    assert list(state["global"]["base"]["vectors"]["post_block"]) == ["1"]
    assert state["global"]["decode"]["clamps"] == {}
    assert here.post("/v1/steering/clear").json() == {"status": "ok"}
    assert there.get("/v1/steering").json()["key"] == "none"


@pytest.mark.parametrize("spelling", ["route", "verbs"])
def test_modules_come_and_go_in_either_spelling(servers, spelling):
    here, there = servers
    paths = ("/v1/steering/modules", "/v1/steering/modules")
    if spelling == "verbs":
        paths = ("/v1/steering/modules/register", "/v1/steering/modules/unregister")
    answer = here.post(paths[0], json={"name": "a/b", "steering_vectors": ONE["vectors"]})
    assert answer.json() == {"status": "ok", "name": "a/b", "modules": ["a/b"]}
    held = there.get("/v1/steering/modules").json()
    assert (held["modules"], held["count"]) == (["a/b"], 1)
    assert held["contents"]["a/b"] == there.get("/v1/steering/modules/a/b").json()
    forgotten = there.request("DELETE" if spelling == "route" else "POST", paths[1], json={"name": "a/b"})
    assert forgotten.json() == {"status": "ok", "name": "a/b", "modules": []}
    here.post(paths[0], json={"name": "a/b", **ONE})
    assert there.delete("/v1/steering/modules/a/b").status_code == 200
    assert here.delete("/v1/steering/modules/a/b").status_code == 404


def test_features_that_are_added_are_one_vector_of_the_state(tmp_path):
    tensors = weights(width=WIDTH)
    path = saelens(tmp_path / "sae", tensors)
    saes = (f"mood={path}",)
    here = server(None, saes=saes, saes_digest=digest_of(load_saes(saes, "saes")))
    decoder = tensors["W_dec"].astype(np.float64)
    body = {"features": {"sae": "mood", "features": {"3": 2.0, "5": -1}}, "vectors": ONE["vectors"]}
    here.post("/v1/steering/set", json=body)
    norm = pytest.approx(np.linalg.norm(2 * decoder[3] - decoder[5] + 1))
    base = here.get("/v1/steering").json()["global"]["base"]
    assert base == {"vectors": {"post_block": {"1": norm}}, "clamps": {}, "features": {}}
    here.post("/v1/steering/set", json={"features": {"sae": "mood", "features": {"3": 0}}})
    assert here.get("/v1/steering").json()["active"] is False


def test_api_servers_have_the_autoencoders_of_the_start(tmp_path):
    path = saelens(tmp_path / "sae", weights(width=WIDTH))
    digest = digest_of(load_saes(str(path), "saes"))

    def refused(given, message):
        with pytest.raises(UsageError, match=message):
            server(None, saes=(given,), saes_digest=digest)

    server(None, saes=(str(path),), saes_digest=digest)
    refused(
        f"other={path}", "^--sae: got weights that have changed since the start, expected the same in every API server"
    )
    refused(f"{path}@post_block:3", "site: got no tap at post_block:3")
    for name in ("W_dec", "b_enc"):
        tensors = weights(width=WIDTH)
        tensors[name][-1] += 1
        save_file(tensors, path / "sae_weights.safetensors")
        refused(str(path), "got weights that have changed")
    save_file(weights(width=16), path / "sae_weights.safetensors")
    refused(str(path), "decoder: got 16 numbers a row, expected 8, the model's width")


def test_packed_vectors_are_taken(servers):
    import base64

    data = base64.b64encode(np.full((2, WIDTH), 2.0, np.float16).tobytes()).decode()
    packed = {"dtype": "float16", "shape": [2, WIDTH], "layer_indices": [0, 2], "data": data, "scales": [1.0, 0.5]}
    servers[0].post("/v1/steering/set", json={"vectors": {"post_block": packed}})
    norms = servers[1].get("/v1/steering").json()["global"]["base"]["vectors"]["post_block"]
    assert norms == {"0": pytest.approx(2 * WIDTH**0.5), "2": pytest.approx(WIDTH**0.5)}


def test_where_the_model_can_be_steered(servers):
    answer = servers[0].get("/v1/steering/layers").json()
    assert answer == {
        "layers": {str(n): {"hook_points": ["post_block"]} for n in range(3)},
        "sites": ["post_block:0", "post_block:1", "post_block:2"],
        "num_layers": 4,
        "hidden_size": WIDTH,
        "dtype": "float32",
    }


CLAMP = {"vector": VECTOR, "value": 0}
HUGE = {"post_block": {"1": [3e38] * WIDTH}}
MANY = {"post_block": {str(n): [n + 1.0] * WIDTH for n in range(3)}}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("POST", "set", {"vectors": {"post_block": {"1": [1.0]}}}, 400, "vectors.post_block.1"),
        ("POST", "set", {"decode_vectors": {"post_block": {"1": [1e39] * WIDTH}}}, 400, "decode_vectors.post_block.1"),
        ("POST", "set", {"vectors": {"post_block": {"3": VECTOR}}}, 400, "vectors.post_block.3"),
        ("POST", "set", {"vectors": {"nowhere": {"1": VECTOR}}}, 400, "vectors"),
        ("POST", "set", {"clamps": {"post_block": {"1": {"vector": [0.0] * WIDTH}}}}, 400, "clamps.post_block.1"),
        ("POST", "set", {"vectors": MANY, "prefill_vectors": {"post_block": {"0": [7.0] * WIDTH}}}, 400, "vectors"),
        ("POST", "set", {"decode_vectors": HUGE, "prefill_clamps": {"post_block": {"1": CLAMP}},
                         "vectors": HUGE}, 400, "vectors.post_block.1"),
        ("POST", "set", {"prefill_clamps": {"post_block": {"1": [CLAMP] * 65}}}, 400, "prefill_clamps.post_block.1"),
        ("POST", "set", {"vectors": [1]}, 400, "body.vectors"),
        ("POST", "set", {"replace": "perhaps"}, 400, "body.replace"),
        ("POST", "set", {"vector": {}}, 400, "body.vector"),
        ("POST", "set", {}, 400, "global"),
        ("POST", "clear", {"target": "draft"}, 400, "body.target"),
        ("POST", "modules", ONE, 400, "body.name"),
        ("POST", "modules", {"name": "", **ONE}, 400, "name"),
        ("POST", "modules", {"name": "empty"}, 400, "module"),
        ("POST", "modules", {"name": "one", "patches": {}}, 400, "body.patches"),
        ("POST", "modules", {"name": "one", "vectors": {"post_block": {"1": [1.0]}}}, 400, "vectors.post_block.1"),
        ("POST", "modules", {"name": "one", "decode_vectors": MANY, "clamps": {"post_block": {"0": CLAMP}}}, 400,
         "decode_vectors"),
        ("POST", "modules", {"name": "one", "clamps": {"post_block": {"1": [CLAMP] * 65}}}, 400, "clamps.post_block.1"),
        ("DELETE", "modules", {"name": "gone"}, 404, "name"),
        ("POST", "modules/unregister", {"name": "gone"}, 404, "name"),
        ("GET", "modules/gone", None, 404, "name"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_by_its_field_and_changes_nothing(servers, method, path, body, status, field):
    answer = servers[0].request(method, f"/v1/steering/{path}", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(field)
    assert error["code"] == status
    state = servers[1].get("/v1/steering").json()
    assert (state["active"], state["modules"], state["generation"]) == (False, [], 0)


def test_a_state_that_would_outgrow_the_bank_is_refused_and_the_old_one_stays(servers):
    here, _ = servers
    for layer in range(3):
        here.post("/v1/steering/set", json={"vectors": {"post_block": {str(layer): [layer + 1.0] * WIDTH}}})
    before = here.get("/v1/steering").json()
    answer = here.post("/v1/steering/set", json={"clamps": {"post_block": {"0": {"vector": VECTOR, "value": 0}}}})
    assert answer.status_code == 400
    assert "--steering-bank-bytes" in answer.json()["error"]["message"]
    assert here.get("/v1/steering").json() == before


def test_two_keys_open_what_changes_and_nothing_is_needed_to_read(tmp_path):
    client = server(tmp_path, Keys(("old", "new")))
    for headers in ({"Authorization": "Bearer old"}, {"authorization": "bearer new"}, {"X-API-Key": "new"}):
        assert client.post("/v1/steering/set", json=ONE, headers=headers).status_code == 200
    both = {"Authorization": "Bearer of-the-server", "X-API-Key": "old"}
    assert client.post("/v1/steering/clear", headers=both).status_code == 200
    for headers in (
        {},
        {"Authorization": "Bearer ol"},
        {"Authorization": "old"},
        {"X-API-Key": ""},
        {"X-API-Key": "ö"},
    ):
        for method, path in (
            ("POST", "set"), ("POST", "clear"), ("POST", "modules"), ("POST", "modules/register"),
            ("DELETE", "modules"), ("DELETE", "modules/one"), ("POST", "modules/unregister"),
        ):  # fmt: skip
            body = {"name": "one"} if path.startswith("modules") else {}
            encoded = {name: value.encode() for name, value in headers.items()}
            answer = client.request(method, f"/v1/steering/{path}", json=body, headers=encoded)
            assert answer.status_code == 401, path
            assert "steering key" in answer.json()["error"]["message"]
    for path in ("", "/layers", "/modules"):
        assert client.get(f"/v1/steering{path}").status_code == 200
    assert "old" not in repr(client.app.state.capflow.keys)


def test_without_a_key_a_server_that_others_reach_is_changed_by_nobody(tmp_path):
    client = server(tmp_path, Keys(open=False))
    answer = client.post("/v1/steering/set", json=ONE)
    assert answer.status_code == 403
    assert "--steering-api-key" in answer.json()["error"]["message"]
    assert client.get("/v1/steering").status_code == 200


def test_an_engine_that_does_not_answer_is_503_and_its_state_is_null(servers):
    here, _ = servers
    for path, body in CHANGES:
        answer = here.post(f"/v1/steering/{path}", json=body)
        assert answer.status_code == 503, path
        assert "engine: it does not answer" in answer.json()["error"]["message"]
    state = here.get("/v1/steering").json()
    assert (state["gains"], state["frozen"]) == (None, None)


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        ("gain", {"owner": "global"}, "scale"),
        ("gain", {"owner": "global", "scale": "much"}, "scale"),
        ("gain", {"owner": "global", "scale": 1, "request": "r1"}, "request"),
        ("freeze", {"engine": "engine-1"}, "engine"),
        ("unfreeze", {"gains": {}}, "gains"),
    ],
)
def test_a_change_of_the_engine_with_a_wrong_body_is_refused_by_its_field(servers, path, body, wrong):
    answer = servers[0].post(f"/v1/steering/{path}", json=body)
    assert answer.status_code == 400
    assert wrong in answer.json()["error"]["message"]


@pytest.mark.parametrize(("keys", "status"), [(Keys(("old",)), 401), (Keys(open=False), 403)])
def test_the_engine_is_changed_by_who_has_a_key_only(tmp_path, keys, status):
    client = server(tmp_path, keys)
    for path, body in CHANGES:
        assert client.post(f"/v1/steering/{path}", json=body).status_code == status, path
        answer = client.post(f"/v1/steering/{path}", json=body, headers={"X-API-Key": "old"})
        assert answer.status_code == (503 if keys.secrets else 403), path


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.1.2.3", True), (None, False), ("", False),
     ("0.0.0.0", False), ("example.org", False), ("192.168.0.1", False)],
)  # fmt: skip
def test_a_server_is_reached_from_outside_unless_it_listens_on_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_keys_are_those_of_flags_and_of_the_environment():
    assert keys_of(["a", " b "], "c, a,,") == ("a", "b", "c")
    assert keys_of([], None) == ()
    assert not Keys(keys_of([""], "")).admit({"X-API-Key": ""})


@pytest.mark.parametrize(
    "path",
    [
        "/v1/steering/set",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/chat/completions/batch",
        "/v1/other",
    ],
)
def test_a_larger_body_is_413_however_it_is_sent(tmp_path, path):
    app = server(tmp_path).app

    async def body():
        for _ in range(100):
            yield b" " * (LIMIT // 4)

    async def ask(**request):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, headers={"Content-Type": "application/json"}, **request)

    for request in ({"content": body()}, {"content": b" " * (LIMIT + 1)}):
        answer = asyncio.run(ask(**request))
        assert answer.status_code == 413, answer.text
        assert "--steering-body-bytes-max" in answer.json()["error"]["message"]


def test_a_route_that_takes_no_fields_is_never_reached_with_them(servers):
    app, seen = servers[0].app, []

    @app.post("/v1/other")
    async def other(request: fastapi.Request) -> None:
        seen.append(await request.json())

    xargs = {"vllm_xargs": {"capflow": "{}"}}
    for message in (*({field: 1} for field in FIELDS), {"steering": 1}, xargs):
        answer = servers[0].post("/v1/other", json={"prompt": "one", **message})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(next(iter(message)))
    assert not seen
    others = [{"prompt": "steering_vectors " * 5_000, "vllm_xargs": {"theirs": 1}, "capture": None}, ["capture"]]
    for message in others:
        assert servers[0].post("/v1/other", json=message).status_code == 200
    assert seen == others


def given(client, prompt, params):
    """Return the parameters that the engine is given when it is to generate by these."""
    client.engine.generate(prompt, sampling_params=params)
    return client.given.params


def test_what_no_route_of_ours_has_seen_is_steered_by_the_global_state(servers):
    from vllm import SamplingParams

    here, there = servers
    params = SamplingParams(max_tokens=1, extra_args={"theirs": 1})
    assert given(here, "prompt", params) is params
    there.post("/v1/steering/set", json=ONE)
    steered = given(here, "prompt", params)
    assert set(steered.extra_args) == {"theirs", "capflow"}
    assert steered.extra_args["capflow"]["program"]
    assert params.extra_args == {"theirs": 1}
    assert given(here, "prompt", steered) is steered


@pytest.mark.parametrize(("max_tokens", "position", "expected"), [
    (3, -6, "-5 or later"), (3, -5, None), (3, 6, None), (3, 7, "below 7"), (None, 126, None), (None, 127, "below 127"),
])  # fmt: skip
def test_a_patch_out_of_a_request_s_reach_is_refused_before_there_is_an_answer(servers, max_tokens, position, expected):
    from vllm import SamplingParams

    engine, front = servers[0].engine, servers[0].app.state.capflow
    patches = {"post_block": {"2": {"positions": [0, position], "vector": VECTOR}}}
    ask = ParsedRequest.parse({"steering_patches": patches}, None, front.fit, front.store, id="x", prompts=1, samples=1)
    params = SamplingParams(max_tokens=max_tokens, extra_args={"capflow": ask.options[0].pack()})
    prompt = {"type": "token", "prompt_token_ids": [5] * 5}
    if expected is None:
        assert given(servers[0], prompt, params) is params
        return
    with pytest.raises(
        UsageError, match=f"^steering_patches.post_block.2.positions: got {position}, expected {expected}"
    ):
        engine.generate(prompt, params)


def test_the_schema_describes_every_route_and_field(servers):
    schema = servers[0].get("/openapi.json").json()
    message = json.dumps(schema)
    for path, methods in (
        ("/v1/steering", {"get"}), ("/v1/steering/set", {"post"}), ("/v1/steering/clear", {"post"}),
        ("/v1/steering/dynamic", {"get"}), ("/v1/steering/gain", {"post"}),
        ("/v1/steering/freeze", {"post"}), ("/v1/steering/unfreeze", {"post"}),
        ("/v1/steering/layers", {"get"}), ("/v1/steering/modules", {"get", "post", "delete"}),
        ("/v1/steering/modules/register", {"post"}), ("/v1/steering/modules/unregister", {"post"}),
        ("/v1/steering/modules/{name}", {"get", "delete"}),
    ):  # fmt: skip
        routes = schema["paths"][path]
        assert set(routes) == methods
        assert all(route["description"] for route in routes.values())
        for method, route in routes.items():
            assert bool(route.get("security")) is (method != "get"), path
    for model in ("SetBody", "ModuleBody", "NameBody", "SteeringState", "LayersState", "ModulesState", "TierState"):
        properties = schema["components"]["schemas"][model]["properties"]
        assert all("description" in each or "$ref" in each or "allOf" in each for each in properties.values()), model
    for model in ("CapflowCompletionRequest", "CapflowChatCompletionRequest", "CapflowResponsesRequest"):
        properties = schema["components"]["schemas"][model]["properties"]
        assert all(properties[field]["description"] for field in FIELDS)
    assert '"global"' in message


def test_a_form_is_refused_with_a_field_that_its_route_would_take_no_notice_of(servers):
    app, seen = servers[0].app, []

    @app.post("/v1/audio/transcriptions")
    async def other(request: fastapi.Request) -> None:
        async with request.form() as form:
            seen.append(set(form))

    audio = {"file": ("name=capture.wav", b"x" * 2 * LIMIT)}
    for field in ("capture", "steering_vectors", "steering_vector"):
        answer = servers[0].post("/v1/audio/transcriptions", data={"model": "tiny", field: "{}"}, files=audio)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    assert not seen
    assert servers[0].post("/v1/audio/transcriptions", data={"model": "tiny"}, files=audio).status_code == 200
    assert seen == [{"model", "file"}]


@pytest.mark.parametrize(
    ("path", "body", "twice"),
    [
        (
            "/v1/completions",
            '{"model": "tiny", "prompt": "a", "capture": {}, "capture": null, "capture_id": "x"}',
            "capture",
        ),
        (
            "/v1/completions",
            '{"model": "tiny", "prompt": "a", "capture": {"hooks": {"mlp_in": [0], "mlp_in": [1]}}}',
            "mlp_in",
        ),
        ("/v1/steering/set", '{"vectors": {"post_block": {"1": [1.0], "1": [2.0]}}}', "1"),
        ("/v1/steering/modules", '{"name": "a", "name": "b", "vectors": {}}', "name"),
    ],
)  # fmt: skip
def test_a_body_that_says_a_thing_twice_is_refused(servers, path, body, twice):
    """Who checks a body on its way to the server may read the first, where the server reads the last."""
    here, _ = servers
    answer = here.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"body: got {twice} twice in one object, expected each key once"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/steering/set", "/v1/embeddings"])
def test_a_body_that_is_nested_too_deeply_is_refused(servers, path):
    here, _ = servers
    answer = here.post(path, content='{"capture": ' + "[" * 50_000, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500


def test_the_state_names_what_does_not_work_with_this_vllm(servers, monkeypatch):
    here, _ = servers
    assert here.get("/v1/steering").json()["off"] == {}
    monkeypatch.setattr(compat, "features_off", lambda: {"KV offloading": "x: missing"})
    assert here.get("/v1/steering").json()["off"] == {"KV offloading": "x: missing"}


def test_steered_beams_are_refused_where_they_are_off(servers, monkeypatch):
    here, _ = servers
    broken = {BEAM_SEARCH: [Break(BEAM_SEARCH, "beam search", "1 of 3 tests failed")]}
    monkeypatch.setattr(compat, "off", lambda version: broken)
    body = {"model": "tiny", "prompt": "a", "use_beam_search": True, "steering_vectors": ONE["vectors"]}
    answer = here.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("beam search: off with ")
