"""Two live API servers of one engine, steered by the OpenAI client: fields, modules, the global state."""

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from capflow_models import save_vectors
from tests.kit.autoencoders import saelens, weights
from tests.kit.engines import WIDTH
from tests.kit.hubs import free_port
from tests.kit.servers import environment, healthy, process, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

KEY, OLD, NEW = "of-the-server", "of-steering-before", "of-steering-after"
PROMPT = "w5 w77 w123 w9 w250"
CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"
VECTOR = [3.0 if n % 2 else -3.0 for n in range(WIDTH)]
OTHER = [-4.0 if n % 3 else 2.0 for n in range(WIDTH)]
ONE = {"post_block": {"1": VECTOR}}
SAE = weights(width=WIDTH)
BODY_BYTES_MAX = 200_000
FAR = {"steering_patches": {"post_block": {"1": {"positions": [-30], "vector": OTHER}}}}


@pytest.fixture(scope="module")
def port(tiny_with_words, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "chat.jinja").write_text(CHAT)
    (home / "one.json").write_text(json.dumps({"vectors": ONE, "decode_vectors": None}))
    save_file({"decode.post_block:1": np.array(OTHER, np.float32)}, home / "late.safetensors")
    save_vectors(home / "fitted.safetensors", {1: OTHER})
    np.savez(home / "other.npz", layer_1=OTHER)
    saelens(home / "sae", SAE)
    port = free_port()
    command = [
        "serve", tiny_with_words, "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "128", "--sae", f"mood={home}/sae",
        "--served-model-name", "tiny", "--api-key", KEY, "--chat-template", str(home / "chat.jinja"),
        "--api-server-count", "2", "--enable-scale-out",
        "--steering-modules", f"one={home}/one.json", f"late={home}/late.safetensors",
        f"fitted={home}/fitted.safetensors", f"other={home}/other.npz",
        "--steering-api-key", OLD, "--steering-body-bytes-max", str(BODY_BYTES_MAX),
    ]  # fmt: skip
    with process(*command, environment=environment(home, CAPFLOW_STEERING_API_KEY=f"{NEW},")) as (server, _):
        try:
            wait_until(lambda: healthy(port), 400, server)
            yield port
        finally:
            server.terminate()
    assert not list(home.glob("capflow/steering-*")), "the store goes with its server"


@pytest.fixture
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as client:
        yield client
    call(port, "POST", "steering/clear")


def call(port, method, path, body=None, key=NEW):
    """Call a route on a connection of its own, which either server may take; return the status and the answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"} | (
        {"X-API-Key": key} if key else {}
    )
    data = None if body is None else json.dumps(body).encode()
    url = urllib.parse.urljoin(f"http://127.0.0.1:{port}/v1/", path)
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def completed(client, tokens=8, **extra):
    """Return the text of a completion and the key of what steered it."""
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=PROMPT, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True, **extra}
    )
    return raw.parse().choices[0].text, raw.headers.get("x-capflow-steering")


def test_a_vector_changes_the_answer_and_scale_zero_does_not(client):
    plain, none = completed(client)
    steered, key = completed(client, steering_vectors=ONE)
    assert steered != plain
    assert none is None
    assert len(key) == 32
    zero = {"post_block": {"1": {"vector": VECTOR, "scale": 0.0}}}
    assert completed(client, steering_vectors=zero) == (plain, "none")


def test_features_steer_and_are_added_as_the_vectors_that_they_stand_for(client, port):
    features = {"sae": "mood", "features": {"3": 2.0}}
    vector = {"post_block": {"1": {"vector": SAE["W_dec"][3].tolist(), "scale": 2.0}}}
    expected = completed(client, steering_vectors=vector)
    assert completed(client, steering_features=features) == expected != completed(client)
    body = {"name": "glad", "features": {"sae": "mood", "features": {"3": {"set": 60.0}}}, "decode_features": features}
    assert call(port, "POST", "steering/modules", body)[0] == 200
    try:
        keys = {completed(client, steering_name="glad") for _ in range(4)}
        held = call(port, "GET", "steering/modules")[1]["contents"]["glad"]
    finally:
        call(port, "DELETE", "steering/modules", {"name": "glad"})
    assert len(keys) == 1
    assert keys != {expected, completed(client)}
    assert (held["base"]["features"], held["decode"]["features"]) == ({"post_block": {"1": 1}}, {})
    assert list(held["decode"]["vectors"]) == ["post_block"]
    status, refusal = call(port, "POST", "steering/modules", body | {"features": {"sae": "x", "features": {"1": 2}}})
    message = "features.features.1: got autoencoder x, expected a known one (mood); name it at the engine's start"
    assert (status, refusal["error"]["message"].startswith(message)) == (400, True), refusal
    with pytest.raises(openai.BadRequestError, match=r"features.99: got 99, expected a feature of .*, 0..23"):
        completed(client, steering_features={"sae": "mood", "features": {"99": 1.0}})


def test_the_same_in_other_forms_is_the_same(client):
    data = base64.b64encode(np.array([VECTOR], np.float16).tobytes()).decode()
    packed = {"post_block": {"dtype": "float16", "shape": [1, WIDTH], "layer_indices": [1], "data": data}}
    halves = {"post_block": {"1": {"vector": VECTOR, "scale": 0.5}}}
    expected = completed(client, steering_vectors=ONE)
    assert completed(client, steering_vectors=packed) == expected
    # What several owners add has another key: each may get a gain of its own.
    assert completed(client, steering_vectors=halves, steering_name="one", steering_scale=0.5)[0] == expected[0]
    assert completed(client, prefill_steering_vectors=ONE, decode_steering_vectors=ONE) == expected
    assert completed(client, vllm_xargs={"capflow": json.dumps({"steering_name": "one"})}) == expected


def test_streams_of_chat_and_of_responses_are_steered_and_say_so_at_their_end(client):
    extra = {"ignore_eos": True, "steering_name": "one", "steering_report": True}
    call = {"model": "tiny", "temperature": 0, "stream": True, "extra_body": extra}
    response = {**call, "input": PROMPT, "max_output_tokens": 8}
    text, key = completed(client, steering_vectors=ONE)
    talk = [{"role": "user", "content": PROMPT}]
    chunks = list(client.chat.completions.create(**call, messages=talk, max_tokens=8))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert [("steering_applied" in c.model_extra) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].model_extra["steering_applied"]["key"] == key
    with client.responses.with_streaming_response.create(**response) as raw:
        assert raw.headers["x-capflow-steering"] == key
        *_, last = raw.parse()
    assert (last.response.output_text, last.response.model_extra["steering_applied"]["key"]) == (text, key)


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_a_report_says_that_an_answer_of_one_token_has_no_steered_token(port, route):
    says = {"completions": {"prompt": PROMPT}, "responses": {"input": PROMPT}}
    prompt = says.get(route, {"messages": [{"role": "user", "content": PROMPT}]})
    body = {"model": "tiny", "steering_report": True, "decode_steering_vectors": ONE, **prompt}
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    result = []
    for tokens in (1, 2):
        status, answer = call(port, "POST", route, body | {limit: tokens})
        assert status == 200, answer
        result.append(answer["steering_applied"])
    assert [one["decode"] for one in result] == [{}, {"post_block:1": 1}]
    assert result[0]["prefill"] == result[1]["prefill"] == {}
    assert result[0]["key"] == result[1]["key"]


def test_the_global_state_steers_whoever_comes_after_it_at_either_server(client, port):
    plain, _ = completed(client)
    expected, key = completed(client, steering_vectors=ONE)
    for _ in range(3):
        assert call(port, "POST", "steering/set", {"vectors": ONE})[0] == 200
        for _ in range(6):
            assert call(port, "GET", "steering")[1]["key"] == key
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            assert call(port, "POST", "completions", body)[1]["choices"][0]["text"] == expected
        assert call(port, "POST", "steering/clear")[0] == 200
        for _ in range(6):
            assert call(port, "POST", "completions", body)[1]["choices"][0]["text"] == plain


def test_gains_and_freezes_need_no_hub_and_hold_at_every_server(client, port):
    plain, _ = completed(client)
    steered, _ = completed(client, steering_vectors=ONE)
    doubled, _ = completed(client, steering_vectors={"post_block": {"1": {"vector": VECTOR, "scale": 2.0}}})
    assert len({plain, steered, doubled}) == 3

    def state():
        states = [call(port, "GET", "steering")[1] for _ in range(4)]
        assert all((each["gains"], each["frozen"]) == (states[0]["gains"], states[0]["frozen"]) for each in states)
        return states[0]["gains"], states[0]["frozen"]

    assert state() == ({}, False)
    assert call(port, "POST", "steering/gain", {"owner": "global", "scale": 0.5}, key=None)[0] == 401
    call(port, "POST", "steering/set", {"vectors": ONE})
    status, answer = call(port, "POST", "steering/gain", {"owner": "global", "scale": 2.0})
    assert (status, answer["gains"], answer["frozen"]) == (200, {"global": 2.0}, False)
    assert completed(client)[0] == doubled
    assert state() == ({"global": 2.0}, False)
    assert call(port, "POST", "steering/freeze")[0] == 200
    assert completed(client)[0] == plain
    assert completed(client, steering_vectors=ONE)[0] == steered
    assert state()[1] is True
    status, answer = call(port, "POST", "steering/gain", {"owner": "global", "scale": 1.0})
    assert (status, answer["error"]["message"][:19]) == (400, "engine: got frozen,")
    status, answer = call(port, "POST", "steering/unfreeze", {})
    assert (status, answer["frozen"]) == (200, False)
    assert completed(client)[0] == doubled
    assert call(port, "POST", "steering/gain", {"owner": "global", "scale": 1.0})[1]["gains"] == {}
    assert completed(client)[0] == steered
    assert state() == ({}, False)
    status, answer = call(port, "POST", "steering/gain", {"owner": "nobody", "scale": 1.0})
    assert (status, "gain.owner: got nobody" in answer["error"]["message"]) == (400, True)


def test_the_global_state_is_added_to_what_a_request_asks_for_and_steers_other_routes_too(client, port):
    both = {"post_block": {"1": (2 * np.array(VECTOR)).tolist()}}
    expected, _ = completed(client, steering_vectors=both)
    one, _ = completed(client, steering_vectors=ONE)
    call(port, "POST", "steering/set", {"vectors": ONE})
    assert completed(client, steering_name="one")[0] == expected
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": PROMPT}]}
    status, answer = call(port, "POST", "messages", body)
    assert status == 200, answer
    assert one.strip().startswith(answer["content"][0]["text"].strip())
    assert answer["content"][0]["text"].strip()
    for message, got in (({"steering_vectors": ONE}, 200), ({"program": {}}, 400), ({"steering_name": "none"}, 404)):
        xargs = {"vllm_xargs": {"capflow": json.dumps(message)}}
        status, answer = call(port, "POST", "messages", body | xargs)
        assert status == got, answer
        if status == 200:
            assert expected.strip().startswith(answer["content"][0]["text"].strip())
            assert answer["content"][0]["text"].strip()
        else:
            assert "vllm_xargs.capflow" in json.dumps(answer)


def test_a_module_that_is_registered_again_leaves_those_that_run_with_it(client, port):
    expected, _ = completed(client, 110, steering_vectors={"post_block": {"1": VECTOR}})
    other, _ = completed(client, 110, steering_vectors={"post_block": {"1": OTHER}})
    assert expected != other
    call(port, "POST", "steering/modules", {"name": "again", "vectors": ONE})
    extra = {"ignore_eos": True, "steering_name": "again"}
    streams = [
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=110, temperature=0, stream=True, extra_body=extra
        )
        for _ in range(4)
    ]
    begun = [next(iter(stream)).choices[0].text for stream in streams]
    status, _ = call(
        port, "POST", "steering/modules/register", {"name": "again", "vectors": {"post_block": {"1": OTHER}}}
    )
    assert status == 200
    after, _ = completed(client, 110, steering_name="again")
    assert after == other
    call(port, "DELETE", "steering/modules", {"name": "again"})
    texts = [
        first + "".join(chunk.choices[0].text for chunk in stream) for first, stream in zip(begun, streams, strict=True)
    ]
    assert texts == [expected] * 4
    with pytest.raises(openai.NotFoundError):
        completed(client, steering_name="again")


def test_files_are_modules_from_the_start(client, port):
    assert call(port, "GET", "steering/modules", key=None)[1]["modules"] == ["fitted", "late", "one", "other"]
    late = completed(client, decode_steering_vectors={"post_block": {"1": OTHER}})
    assert completed(client, steering_name="late") == late
    everywhere = completed(client, steering_vectors={"post_block": {"1": OTHER}})
    assert completed(client, steering_name="fitted") == completed(client, steering_name="other") == everywhere != late


@pytest.mark.parametrize("route", ["completions", "chat/completions", "chat/completions/batch"])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"capture": {"hooks": {"post_block": "all"}}, "use_beam_search": True}, 400, "use_beam_search"),
        ({"steering_report": True, "n": 1_000_000_000}, 400, "n"),
        ({"user": "x" * BODY_BYTES_MAX}, 413, "body"),
        (FAR | {"stream": True}, 400, "steering_patches.post_block.1.positions"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(port, route, body, status, param):
    talk = [{"role": "user", "content": PROMPT}]
    prompt = {"messages": [talk] if route.endswith("batch") else talk} if "chat" in route else {"prompt": PROMPT}
    code, answer = call(port, "POST", route, {"model": "tiny", "max_tokens": 4, **prompt, **body})
    assert (code, answer["error"]["param"]) == (status, param), answer


@pytest.mark.parametrize(
    ("route", "more"),
    [
        ("generative_scoring", {"query": "w5 w7", "items": ["w8"], "label_token_ids": [3, 4]}),
        ("inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
    ],
)
def test_a_route_that_takes_no_fields_refuses_them_and_goes_on_without(port, route, more):
    body = {"model": "tiny", "max_tokens": 2, **more}
    asked = [{"steering_vectors": ONE}, {"capture": {"hooks": {"post_block": "all"}}}, {"steering_vector": ONE}]
    asked.append({"vllm_xargs": {"capflow": json.dumps({"steering_name": "one"})}})
    for fields in asked:
        status, answer = call(port, "POST", f"/{route}", body | fields)
        assert status == 400, answer
        (name,) = fields
        assert answer["error"]["param"].startswith(name)
        assert "/v1/completions" in answer["error"]["message"]
    status, answer = call(port, "POST", f"/{route}", body)
    assert status == 200, answer


def test_the_engine_s_own_parameters_steer_on_the_route_of_tokens(client, port):
    body = {
        "token_ids": [5, 77, 123, 9, 250],
        "sampling_params": {"max_tokens": 6, "temperature": 0, "ignore_eos": True},
    }
    plain = call(port, "POST", "/inference/v1/generate", body)[1]["choices"][0]["token_ids"]
    body["sampling_params"]["extra_args"] = {"capflow": {"steering_vectors": ONE}}
    status, answer = call(port, "POST", "/inference/v1/generate", body)
    assert status == 200, answer
    assert answer["choices"][0]["token_ids"] != plain
    body["sampling_params"]["extra_args"] = {"capflow": {"steering_vectors": {"post_block": {"1": [1.0]}}}}
    assert call(port, "POST", "/inference/v1/generate", body)[0] == 400


@pytest.mark.parametrize("tier", ["steering_vectors", "prefill_steering_vectors", "decode_steering_vectors"])
def test_beams_are_steered_in_their_phases(client, port, tier):
    """One beam is what greedy decoding finds; with several prompts each has its own beginning of the answer."""
    prompts = [PROMPT, "w9 w8 w7 w6 w5 w4"]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    beams = body | {"use_beam_search": True, "n": 1}

    def texts(body):
        status, answer = call(port, "POST", "completions", body)
        assert status == 200, answer
        return [choice["text"].strip() for choice in answer["choices"]]

    plain, greedy = texts(beams), texts(body | {tier: ONE})
    assert texts(beams | {tier: ONE}) == greedy != plain
    assert len(texts(beams | {tier: ONE, "n": 2})) == 4
    call(port, "POST", "steering/set", {tier.replace("steering_", ""): ONE})
    assert texts(beams) == greedy


def test_either_steering_key_opens_what_changes_and_the_server_s_key_alone_does_not(port):
    for key, status in ((OLD, 200), (NEW, 200), (KEY, 401), (None, 401)):
        assert call(port, "POST", "steering/clear", key=key)[0] == status
    assert call(port, "GET", "steering", key=None)[0] == 200
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/steering", headers={"X-API-Key": NEW})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 401, "vLLM's own key guards all of /v1"


def test_a_body_that_says_to_be_large_is_413_before_any_of_it_is_sent(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest("POST", "/v1/steering/set")
    for name, value in (("Authorization", f"Bearer {KEY}"), ("X-API-Key", NEW), ("Content-Length", str(2**40))):
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
