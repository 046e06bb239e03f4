"""One live server, the OpenAI client, and what capflow adds to its routes: fields, refusals, results."""

import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import openai
import pytest

import capflow
from capflow.capture.site import Site
from capflow.steering.action import ActionApplied, Steer
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from tests.kit.engines import LAYERS, relative_error
from tests.kit.hubs import free_port
from tests.kit.servers import environment, healthy, process, wait_until
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

KEY = "for-the-tests"
CAPTURE = {"hooks": {"post_block": [1, 3]}, "positions": "all"}
CALL = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
PROMPT = "w5 w77 w123 w9 w250"
LONG = 2500  # tokens, so many that a client can act while they come
STEERED = 600  # of a request that is steered by who waits for it to begin
PROMPTS = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": PROMPT}]]},
}
CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def served(tiny_with_words, tmp_path_factory):
    """A hub, and a server that it serves: the client, the port and where the rows lie."""
    home = tmp_path_factory.mktemp("home")
    (home / "chat.jinja").write_text(CHAT)
    variables = environment(home)
    port = free_port()
    command = [
        "serve", tiny_with_words, "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
        "--hf-overrides", '{"max_position_embeddings": 4096}', "--served-model-name", "tiny", "--api-key", KEY,
        "--chat-template", str(home / "chat.jinja"),
    ]  # fmt: skip
    hub = process("run", "--consumer", f"filesystem:root={home}/rows,capture=requests", environment=variables)
    with hub as (_hub, _), process(*command, environment=variables) as (server, _):
        try:
            wait_until(lambda: healthy(port), 400, server)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
            yield client, port, home / "rows"
        finally:
            server.terminate()
            _hub.terminate()


def ask(client, **changes):
    extra = {**CALL["extra_body"], **changes.pop("extra_body", {})}
    return client.completions.create(**{**CALL, "prompt": PROMPT, **changes, "extra_body": extra})


def post(port, path, body, key=KEY):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def get(port, path):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def streamed(port, path, body):
    """The events of a stream."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]


def plain(answer):
    """An answer without what differs from one call to the next."""
    said = json.loads(answer.model_dump_json())
    return {key: value for key, value in said.items() if key not in ("id", "created", "capture_results")}


def test_a_completion_has_its_rows_when_it_waited_for_them(served, reference):
    client, _, root = served
    answer = ask(client, extra_body={"capture": CAPTURE, "capture_wait": True, "capture_id": "waited"})
    (result,) = answer.capture_results.values()
    assert result["status"] == "ok"
    text = answer.choices[0].text
    tokens = [int(word[1:]) for word in f"{PROMPT} {text}".split()]
    expected = reference.post_block(tokens)
    capture = capflow.open(root)["waited"]
    assert set(capture.sites) == {Site(1, "post_block"), Site(3, "post_block")}
    for site in capture.sites:
        assert capture[site].token_ids.tolist() == tokens[:-1]
        assert relative_error(capture[site].rows, expected[site.layer][:-1]) < 1e-5


def test_a_spec_by_consumer_has_its_rows_and_its_tag(served):
    client, _, root = served
    capture = {"filesystem": {**CAPTURE, "positions": "last_prompt", "tag": "mine"}}
    answer = ask(client, extra_body={"capture": capture, "capture_wait": True, "capture_id": "tagged"})
    result = answer.capture_results["filesystem"]
    assert (result["status"], result["tag"]) == ("ok", "mine")
    found = capflow.open(root)["tagged"]
    assert (found.tag, [len(found[site].rows) for site in found.sites]) == ("mine", [1, 1])


def test_fields_change_nothing_of_the_answer_but_what_they_add(served):
    client, _, _ = served
    assert plain(ask(client, extra_body={"capture": CAPTURE})) == plain(ask(client))
    assert "capture_results" not in ask(client).model_extra


def test_a_chat_completion_captures_too(served):
    client, _, root = served
    messages = [{"role": "user", "content": PROMPT}]
    extra = {"ignore_eos": True, "capture": CAPTURE, "capture_wait": True, "capture_id": "chatted"}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, temperature=0, extra_body=extra
    )
    assert answer.model_extra["capture_results"]["filesystem"]["status"] == "ok"
    assert capflow.open(root)["chatted"].prompt_length == answer.usage.prompt_tokens


@pytest.mark.parametrize("usage", [None, {"include_usage": True}], ids=["without usage", "with usage"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_a_stream_says_the_results_on_its_last_chunk(served, usage, chat):
    client, _, _ = served
    extra = {"ignore_eos": True, "capture": CAPTURE, "capture_wait": True}
    call = {"model": "tiny", "max_tokens": 5, "stream": True, "stream_options": usage, "extra_body": extra}
    if chat:
        chunks = list(client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **call))
    else:
        chunks = list(client.completions.create(prompt=PROMPT, **call))
    said = ["capture_results" in chunk.model_extra for chunk in chunks]
    assert said == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].model_extra["capture_results"]["filesystem"]["status"] == "ok"
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in finishes if reason] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_has_its_rows_and_no_more(served, stream):
    client, _, root = served
    words = ask(client, max_tokens=12).choices[0].text.split()
    name = f"stopped-{stream}"
    extra = {"capture": CAPTURE, "capture_wait": True, "capture_id": name}
    call = {"max_tokens": 12, "stop": [" ".join(words[4:6])], "extra_body": {**extra, "return_token_ids": True}}
    if stream:
        chunks = [chunk for chunk in ask(client, stream=True, **call) if chunk.choices]
        generated = [token for chunk in chunks for token in chunk.choices[0].token_ids or ()]
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = ask(client, **call).choices[0]
        generated, reason = choice.token_ids, choice.finish_reason
    assert reason == "stop"
    capture = capflow.open(root)[name]
    assert capture.sidecar.status == "stop"
    tokens = [*(int(word[1:]) for word in PROMPT.split()), *generated]
    for site in capture.sites:
        assert capture[site].token_ids.tolist() == tokens[:-1]


def steering(name, outcomes, connected):
    """Steer a request as soon as it runs."""
    vector = SteeringVector.make(Site(1, "post_block"), np.ones(64, np.float32))
    with Client() as client:
        connected.set()
        deadline = time.monotonic() + 60
        while not outcomes and time.monotonic() < deadline:
            outcome = client.act(Steer(name, (vector,)), timeout=60)
            if isinstance(outcome, ActionApplied):
                outcomes.append(outcome)
            # The pause between two tries.
            time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_steered_while_it_ran_does_not_say_that_nothing_did(served, monkeypatch, stream):
    client, _, root = served
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root.parent))
    name, outcomes, connected = f"acted-{stream}", [], threading.Event()
    thread = threading.Thread(target=steering, args=(name, outcomes, connected))
    thread.start()
    assert connected.wait(60)
    extra = {"ignore_eos": True, "capture_id": name, "steering_report": True}
    call = {"model": "tiny", "prompt": PROMPT, "max_tokens": STEERED, "temperature": 0, "extra_body": extra}
    raw = client.completions.with_raw_response.create(**call, stream=stream)
    last = list(raw.parse())[-1] if stream else raw.parse()
    thread.join(60)
    assert outcomes
    said = last.model_extra["steering_applied"]
    assert said["key"] == "dynamic"
    assert said["controllers"] == []
    (action,) = said["actions"]
    assert 5 <= action.pop("position") < 5 + STEERED
    assert action == {"request": name, "kind": "steer", "sites": ["post_block:1"]}
    # The header of a stream goes out before it is known, and claims nothing.
    assert raw.headers.get("x-capflow-steering") == (None if stream else "dynamic")
    assert "kv_transfer_params" not in (last.model_extra or {}) or last.model_extra["kv_transfer_params"] is None


def test_every_choice_has_its_own_result(served):
    client, _, root = served
    extra = {"capture": CAPTURE, "capture_wait": True, "capture_id": "many"}
    answer = ask(client, prompt=[PROMPT, "w7 w8"], n=2, temperature=1.0, extra_body=extra)
    each = answer.model_extra["capture_results_by_choice"]
    assert [result["filesystem"]["status"] for result in each] == ["ok"] * 4
    data = capflow.open(root)
    lengths = [data[f"many#{prompt}#{sample}"].prompt_length for prompt in range(2) for sample in range(2)]
    assert lengths == [5, 5, 2, 2]


def test_who_does_not_wait_is_answered_at_once_and_the_rows_come_after(served):
    client, _, root = served
    answer = ask(client, extra_body={"capture": CAPTURE, "capture_wait": False, "capture_id": "impatient"})
    assert answer.capture_results["filesystem"]["status"] in ("pending", "ok")
    eventually(lambda: "impatient" in capflow.open(root), 30)


def test_a_response_has_the_results_too(served):
    client, _, root = served
    extra = {"ignore_eos": True, "capture": CAPTURE, "capture_wait": True, "capture_id": "responded"}
    call = {"model": "tiny", "input": PROMPT, "max_output_tokens": 4, "temperature": 0}
    answer = client.responses.create(**call, extra_body=extra)
    assert answer.model_extra["capture_results"]["filesystem"]["status"] == "ok"
    assert capflow.open(root)["responded"].prompt_length == answer.usage.input_tokens
    *_, last = client.responses.create(**call, stream=True, extra_body={**extra, "capture_id": "streamed"})
    assert last.type == "response.completed"
    assert last.response.model_extra["capture_results"]["filesystem"]["status"] == "ok"
    assert last.response.output_text == answer.output_text
    assert "streamed" in capflow.open(root)


def test_a_message_has_the_results_too(served):
    """Whole and streamed; where it has no name of its own, by the response's id."""
    _, port, root = served
    body = {"model": "tiny", **PROMPTS["/v1/messages"], "temperature": 0}
    asks = {"capture": CAPTURE, "capture_wait": True}
    status, plain = post(port, "/v1/messages", body)
    assert (status, "capture_results" in plain) == (200, False)
    status, answer = post(port, "/v1/messages", body | asks)
    assert status == 200, answer
    assert answer.pop("capture_results")["filesystem"]["status"] == "ok"
    capture = capflow.open(root)[answer["id"]]
    assert capture.prompt_length == answer["usage"]["input_tokens"]
    assert capture[Site(1, "post_block")].rows.shape[0] == sum(answer["usage"][f"{way}_tokens"] for way in ("input", "output")) - 1  # fmt: skip
    assert answer | {"id": ""} == plain | {"id": ""}

    events = streamed(port, "/v1/messages", body | asks | {"stream": True, "capture_id": "told"})
    assert [event["type"] for event in events][:1] + [event["type"] for event in events][-2:] == [
        "message_start", "message_delta", "message_stop"
    ]  # fmt: skip
    assert events[-1]["capture_results"]["filesystem"]["status"] == "ok"
    assert not any("capture_results" in event for event in events[:-1])
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert text == plain["content"][0]["text"]
    assert "told" in capflow.open(root)
    assert get(port, "/v1/capture/told")["done"] is True


def test_each_conversation_of_a_batch_has_its_own_result(served):
    _, port, root = served
    talks = [[{"role": "user", "content": text}] for text in (PROMPT, "w7 w8")]
    body = {"model": "tiny", "messages": talks, "max_tokens": 4, "temperature": 0, "seed": 1}
    plain = post(port, "/v1/chat/completions/batch", body)[1]
    asks = {"capture": CAPTURE, "capture_wait": True, "capture_id": "batch"}
    status, answer = post(port, "/v1/chat/completions/batch", body | asks)
    assert status == 200, answer
    assert [one["filesystem"]["status"] for one in answer["capture_results_by_choice"]] == ["ok", "ok"]
    assert [choice["message"] for choice in answer["choices"]] == [choice["message"] for choice in plain["choices"]]
    data = capflow.open(root)
    tokens = [data[f"batch#{number}"][Site(1, "post_block")].token_ids.tolist() for number in range(2)]
    assert (77 in tokens[0], 77 in tokens[1], 8 in tokens[1]) == (True, False, True)
    assert get(port, "/v1/capture/batch?prompts=2")["done"] is True
    status, answer = post(port, "/v1/chat/completions/batch", body | {"capture": CAPTURE, "capture_wait": True})
    assert status == 200
    assert f"{answer['id']}#1" in capflow.open(root)


def test_what_was_pending_is_answered_later_with_the_server_s_key(served):
    client, port, _ = served
    answer = ask(client, extra_body={"capture": CAPTURE, "capture_wait": False})
    assert answer.capture_results["filesystem"]["status"] in ("pending", "ok")
    later = get(port, f"/v1/capture/{answer.id}?wait=60")
    assert (later["id"], later["done"]) == (answer.id, True)
    assert later["capture_results"]["filesystem"]["status"] == "ok"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/capture/{answer.id}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 401


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        ({"capture": {"hooks": {"post_block": [LAYERS]}}}, "capture.hooks.post_block", f"layer {LAYERS}"),
        ({"capture": {"hooks": {"mlp_in": [0]}}}, "capture.hooks.mlp_in", "--sites"),
        ({"capture": {"hooks": {"nowhere": [0]}}}, "capture.hooks", "nowhere"),
        ({"capture": {"hooks": {"post_block": "all"}, "position": "all"}}, "capture.position", "one of"),
        ({"capture": {"hooks": {"post_block": "all"}, "positions": {"last": -1}}}, "capture.positions.last", "-1"),
        ({"capture": "everything"}, "capture", "everything"),
        ({"capture": {"filesystem": {"hooks": {"nowhere": [0]}}}}, "capture.filesystem.hooks", "nowhere"),
        ({"capture": {"nobody": CAPTURE}}, "capture", "consumer nobody, expected one of the hub's: filesystem"),
        ({"capture": {**CAPTURE, "tag": "a\nb"}}, "capture.tag", "printable"),
        ({"capture": {"hooks": {"post_block": "all"}}, "capture_wait": "yes"}, "capture_wait", "true or false"),
        ({"capture": {"hooks": {"post_block": "all"}}, "capture_id": 7}, "capture_id", "characters"),
        ({"steering_vectors": {"post_block": {"1": [1.0, 2.0]}}}, "steering_vectors.post_block.1", "width"),
        ({"steering": {"post_block": {"1": [1.0, 2.0]}}}, "steering", "steering_vectors"),
        ({"vllm_xargs": {"capflow": "{"}}, "vllm_xargs.capflow", "JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("route", PROMPTS)
def test_a_bad_field_is_400_with_its_path_before_anything_runs(served, route, body, path, words):
    _, port, _ = served
    status, answer = post(port, route, {"model": "tiny", **PROMPTS[route], **body})
    assert status == 400
    assert answer["error"]["param"] == path
    assert words in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_the_key_guards_the_routes(served):
    _, port, _ = served
    for route, prompt in PROMPTS.items():
        assert post(port, route, {"model": "tiny", **prompt, "capture": CAPTURE}, key="wrong")[0] == 401


def test_a_client_that_leaves_ends_its_capture_with_what_there_was(served):
    client, _, root = served
    extra = {"ignore_eos": True, "capture": CAPTURE, "capture_id": "left"}
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=LONG, stream=True, temperature=0, extra_body=extra
    )
    next(iter(stream))
    stream.close()
    eventually(lambda: "left" in capflow.open(root), 30)
    capture = capflow.open(root)["left"]
    rows = capture[Site(1, "post_block")]
    assert rows.positions.tolist() == list(range(capture.computed_length))
    assert capture.sidecar.status == "abort"


def test_an_id_that_runs_is_refused_to_another_request(served):
    client, port, _ = served
    extra = {"ignore_eos": True, "capture": CAPTURE, "capture_id": "one"}
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=LONG, stream=True, extra_body=extra)
    next(iter(stream))
    body = {"model": "tiny", "max_tokens": 2, "prompt": PROMPT, "capture": CAPTURE, "capture_id": "one"}
    status, answer = post(port, "/v1/completions", body)
    stream.close()
    assert status == 400
    assert answer["error"]["param"] == "capture_id"
