"""One live server, the OpenAI client, and what capflow adds to its routes: fields, refusals, results."""

import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.steering.action import ActionApplied, Steer
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from tests.kit.adapters import AdaptedReference
from tests.kit.doors import CAPTURE, KEY, PROMPT, PROMPTS, post
from tests.kit.engines import vector
from tests.kit.rows import ALL, check_rows
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

CALL = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
LONG = 4000  # tokens, so many that a client can act while they come
STEERED = 1500  # of a request that is steered by who waits for it to begin


@pytest.fixture(scope="module")
def served(served):
    """The client, the port, and where the rows lie."""
    return served.client, served.port, served.root


def ask(client, **changes):
    extra = {**CALL["extra_body"], **changes.pop("extra_body", {})}
    return client.completions.create(**{**CALL, "prompt": PROMPT, **changes, "extra_body": extra})


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
    message = json.loads(answer.model_dump_json())
    return {key: value for key, value in message.items() if key not in ("id", "created", "capture_results")}


def test_fields_change_nothing_of_the_answer_but_what_they_add(served):
    client, _, _ = served
    assert plain(ask(client, extra_body={"capture": CAPTURE})) == plain(ask(client))
    assert "capture_results" not in ask(client).model_extra


def test_an_adapters_name_as_the_model_gives_its_rows_steered_too(served, tiny_with_words):
    client, _, root = served
    vectors = {"post_block": {"1": vector(7).tolist()}}
    body = {"capture": ALL, "capture_id": "adapted", "capture_wait": True, "return_token_ids": True}
    answer = ask(client, model="adapted", extra_body={**body, "steering_vectors": vectors})
    (choice,) = answer.choices
    tokens = [*choice.model_extra["prompt_token_ids"], *choice.model_extra["token_ids"]]
    reference = AdaptedReference(tiny_with_words, root.parent / "lora")
    check_rows(capflow.open(root)["adapted"], tokens, reference, {1: 7})
    result = answer.model_extra["capture_results"]["filesystem"]
    assert (result["adapter"], [weights["version"] for weights in result["weights"]]) == ("adapted", [0])


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
    message = ["capture_results" in chunk.model_extra for chunk in chunks]
    assert message == [False] * (len(chunks) - 1) + [True]
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
    message = last.model_extra["steering_applied"]
    assert message["key"] == "dynamic"
    assert message["controllers"] == []
    (action,) = message["actions"]
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
    assert last.type in ("response.completed", "response.incomplete")  # the latter from vLLM 0.33 on
    assert last.response.model_extra["capture_results"]["filesystem"]["status"] == "ok"
    assert last.response.output_text == answer.output_text
    assert "streamed" in capflow.open(root)


def test_a_message_has_the_results_too(served):
    """Whole and streamed; where it has no name of its own, by the response's id."""
    _, port, root = served
    body = {"model": "tiny", **PROMPTS["messages"], "temperature": 0}
    asks = {"capture": CAPTURE, "capture_wait": True}
    status, plain = post(port, "messages", body)
    assert (status, "capture_results" in plain) == (200, False)
    status, answer = post(port, "messages", body | asks)
    assert status == 200, answer
    assert answer.pop("capture_results")["filesystem"]["status"] == "ok"
    capture = capflow.open(root)[answer["id"]]
    assert capture.prompt_length == answer["usage"]["input_tokens"]
    usage = answer["usage"]
    assert capture[Site(1, "post_block")].rows.shape[0] == usage["input_tokens"] + usage["output_tokens"] - 1
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
    plain = post(port, "chat/completions/batch", body)[1]
    asks = {"capture": CAPTURE, "capture_wait": True, "capture_id": "batch"}
    status, answer = post(port, "chat/completions/batch", body | asks)
    assert status == 200, answer
    assert [one["filesystem"]["status"] for one in answer["capture_results_by_choice"]] == ["ok", "ok"]
    assert [choice["message"] for choice in answer["choices"]] == [choice["message"] for choice in plain["choices"]]
    data = capflow.open(root)
    tokens = [data[f"batch#{number}"][Site(1, "post_block")].token_ids.tolist() for number in range(2)]
    assert (77 in tokens[0], 77 in tokens[1], 8 in tokens[1]) == (True, False, True)
    assert get(port, "/v1/capture/batch?prompts=2")["done"] is True
    status, answer = post(port, "chat/completions/batch", body | {"capture": CAPTURE, "capture_wait": True})
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
    status, answer = post(port, "completions", body)
    stream.close()
    assert status == 400
    assert answer["error"]["param"] == "capture_id"
