"""Runs of pages: what the server is asked, what the page gets, who may, and what ends a run."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from capflow.capture.site import Site
from capflow.probes.probe import save_vector
from capflow.steering.action import ActionApplied, Answered, Freeze, Unfreeze
from capflow_dashboard import limits
from capflow_dashboard.again.desk import RunAsk
from tests.kit.completions import DONE, broken, chunk, completions, held, usual
from tests.kit.dashboards import Pageless, open_dashboard
from tests.kit.frames import make_frame, make_model, token_of
from tests.kit.waiting import eventually

SITE = Site(2, "post_block")
SITES = tuple(Site(layer, "post_block") for layer in range(4))
WORDS = {"plain": ["a", "b", "c"], "steered": ["a", "x", "y", "z"]}
ASK = {"id": 7, "request": 1, "name": "calm", "ratio": 0.25, "tokens": 9}


@pytest.fixture
def calm(tmp_path):
    path = tmp_path / "calm.safetensors"
    save_vector(path, SITE, np.arange(8))
    return f"calm={path}"


@pytest.fixture
def shown(calm):
    """Return a function that opens a dashboard on a server, with one request of ten tokens, six of them its prompt."""
    with contextlib.ExitStack() as stack:

        def make(url, **more):
            options = {"allow_steering": True, "vectors": (calm,), "modules": ("glad",), "server": url} | more
            given = {name: value for name, value in options.items() if value is not None}
            consumer = stack.enter_context(open_dashboard(**given))
            consumer.context.act = lambda _: None
            consumer.on_session("engine-1", make_model())
            consumer.on_frame(make_frame([("r1", 6, 0, 10)], SITES, texts=True))
            return consumer

        yield make


def over(page, side):
    return any(news.get(side, {}).get("over") for news in page.again)


def run(page, **ask):
    """Run until both sides are over; return what each has sent: its pieces, and its last news."""
    page.send(again=ASK | ask)
    page.until(lambda p: over(p, "plain") and over(p, "steered"))
    return {side: sent_by(page, side) for side in ("plain", "steered")}


def sent_by(page, side):
    news = [one[side] for one in page.again if side in one]
    return [piece for one in news for piece in one["pieces"]], news[-1]


def refused(page, **ask):
    count = len(page.again)
    page.send(again=ASK | ask)
    page.until(lambda p: p.again[count:])
    return page.again[-1]["error"]


def test_a_prompt_is_run_twice_and_both_answers_come(shown):
    with completions(usual(WORDS)) as server, Pageless(consumer := shown(server.url)) as page:
        page.send(alive="abcd")
        sides = run(page)
        assert page.hello["again"] == {"server": server.url, "tokens_max": 2048, "temperature_max": 2.0}
        for side, words in WORDS.items():
            pieces, last = sides[side]
            assert pieces == [[[ord(word)], word] for word in words]
            assert (last["finish"], last["error"]) == ("length", "")
        asked = {body["capture_id"]: body for path, _, body in server.asked if path == "/v1/completions"}
        plain, steered = (asked.pop(sides[side][1]["request"]) for side in WORDS)
        assert asked == {}
        same = {
            "model": "test-model",
            "prompt": [token_of("r1", position) for position in range(6)],
            "max_tokens": 9,
            "temperature": 0.0,
            "seed": 0,
            "stream": True,
            "return_token_ids": True,
        }
        assert {name: plain[name] for name in plain if name != "capture_id"} == same
        vector = {"vector": list(map(float, range(8))), "scale": 0.25, "relative": True}
        assert {name: steered[name] for name in steered if name not in plain} == {
            "decode_steering_vectors": {"post_block": {"2": vector}}
        }
        ((text, event),) = consumer._process.runs
        assert event == {
            "event": "run_again",
            "engine": "engine-1",
            "request": "r1",
            "label": "calm +0.25 by page abcd #7",
            "plain": plain["capture_id"],
            "steered": steered["capture_id"],
        }
        assert "r1" in text
        assert {news["label"] for news in page.again} == {event["label"]}
        assert all("Authorization" not in headers for _, headers, _ in server.asked)


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        ({"kind": "gain", "name": "glad", "ratio": 0.5}, {"steering_name": "glad", "steering_scale": 0.5}),
        (
            {"mode": "remove", "ratio": 1.0},
            {"decode_steering_clamps": {"post_block": {"2": {"vector": ..., "value": 0.0, "strength": 1.0}}}},
        ),
        (
            {"everywhere": True, "ratio": -0.5},
            {"steering_vectors": {"post_block": {"2": {"vector": ..., "scale": -0.5, "relative": True}}}},
        ),
    ],
)
def test_each_kind_of_steering_has_its_fields(shown, ask, fields):
    with completions(usual(WORDS)) as server, Pageless(shown(server.url)) as page:
        page.send(again=ASK | ask)
        eventually(lambda: sum(path == "/v1/completions" for path, *_ in server.asked) == 2)
        bodies = [body for *_, body in server.asked if body is not None]
        (steered,) = (body for body in bodies if not body["capture_id"].endswith("plain"))
        text = json.dumps({name: value for name, value in steered.items() if "steering" in name})
        assert text == json.dumps(fields, default=lambda _: list(map(float, range(8))))


def test_the_key_is_sent_and_nowhere_else(shown, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sk-1234")
    with completions(usual(WORDS)) as server, Pageless(shown(server.url + "/v1")) as page:
        run(page)
        assert {headers["Authorization"] for _, headers, _ in server.asked} == {"Bearer sk-1234"}
        assert {path for path, *_ in server.asked} == {"/v1/models", "/v1/completions"}
        assert "sk-1234" not in json.dumps([page.hello, page.again])


def streaming(*parts, kind="text/event-stream", steers=True):
    def answer(handler, _):
        handler.begin(kind, steers=steers)
        for part in parts:
            handler.part(part)
        handler.end()

    return answer


VLLM = b'{"error": {"message": "steering_vectors: got 8 numbers", "type": "BadRequestError", "code": 400}}'
FAILING = {
    "vLLM's message": (broken(400, VLLM), "HTTP 400: steering_vectors: got 8 numbers"),
    "a message as text": (broken(401, b'{"error": "Unauthorized"}'), "HTTP 401: Unauthorized"),
    "FastAPI's message": (broken(422, b'{"detail": [{"msg": "odd"}]}'), "HTTP 422: [{'msg': 'odd'}]"),
    "no message": (broken(500, b"", kind="text/plain"), "HTTP 500: Internal Server Error"),
    "a page": (broken(502, b"<h1>Bad gateway</h1>", kind="text/html"), "HTTP 502: <h1>Bad gateway</h1>"),
    "a redirect": (broken(307, b"", Location="http://127.0.0.1:1/"), "HTTP 307: a redirect, which is not followed"),
    "no stream": (broken(), "got application/json, expected text/event-stream"),
    "no JSON": (streaming(b"data: {oops\n\n"), "got {oops: JSON is malformed"),
    "other JSON": (streaming(b"data: [1]\n\n"), "got [1]: Expected `object`"),
    "odd ids": (streaming(b'data: {"choices": [{"token_ids": "x"}]}\n\n'), "expected parts of a completion"),
    "an error event": (streaming(chunk("a", [1]), b"data: " + VLLM + b"\n\n"), "stream: got steering_vectors: got 8"),
    "a huge line": (streaming(*[b"x" * 65536] * 8), "got a longer event, expected events of at most 262144 bytes"),
    "too much": (streaming(*[chunk("x" * 60_000, [1])] * 300), "got more, expected at most 8388608 bytes"),
    "no end": (streaming(chunk("a", [1])), "got an end without [DONE]"),
    "no UTF-8": (streaming(b"data: \xff\xfe\n\n"), "expected UTF-8"),
}


@pytest.mark.parametrize("case", FAILING)
def test_what_the_server_does_wrong_is_said_and_ends_the_stream(shown, case):
    answer, message = FAILING[case]
    with completions(answer) as server, Pageless(shown(server.url)) as page:
        for _, last in run(page).values():
            assert message in last["error"]
            assert len(last["error"]) <= limits.AGAIN_ERROR_LENGTH_MAX
        # The page can run again.
        server.answer = usual(WORDS)
        page.again.clear()
        assert [last["error"] for _, last in run(page, id=8).values()] == ["", ""]


def test_a_server_that_does_not_steer_is_refused(shown):
    with completions(streaming(chunk("a", [1]), DONE, steers=False)) as server, Pageless(shown(server.url)) as page:
        sides = run(page)
        assert sides["plain"][1]["error"] == ""
        assert (
            "an answer without X-Capflow-Steering, expected `capflow serve`, which steers"
            in (sides["steered"][1]["error"])
        )
        assert sides["steered"][0] == []


def test_a_server_with_another_model_gets_no_prompt(shown):
    with completions(usual(WORDS), models=("other", "more")) as server, Pageless(shown(server.url)) as page:
        for _, last in run(page).values():
            assert last["error"] == "the server's model: got other, more, expected test-model, the request's"
        assert {path for path, *_ in server.asked} == {"/v1/models"}


def test_a_server_that_is_down_and_one_that_hangs_are_said(shown, monkeypatch):
    monkeypatch.setattr(limits, "AGAIN_SILENT_S_MAX", 0.3)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with Pageless(shown(url)) as page:
            for _, last in run(page).values():
                assert f"{url}: got ConnectionRefusedError" in last["error"]
                assert last["error"].endswith("expected a running `capflow serve`")
        closed.listen()
        with Pageless(shown(url)) as page:
            for _, last in run(page).values():
                assert last["error"] == f"{url}: got nothing for 0.3 s, expected tokens"


def test_a_run_ends_after_a_while(shown, monkeypatch):
    monkeypatch.setattr(limits, "AGAIN_S_MAX", 0.5)
    with completions(held) as server, Pageless(shown(server.url)) as page:
        for _, last in run(page).values():
            assert last["error"] == "stopped: it took 0.5 s"
        eventually(lambda: len(server.gone) == 2)


def started(page):
    page.until(
        lambda p: all(sent_by(p, side)[0] for side in WORDS if any(side in news for news in p.again)) and p.again
    )
    page.until(lambda p: all(any(side in news for news in p.again) for side in WORDS))


def test_stop_closes_both_streams_and_the_page_may_run_again(shown):
    with completions(held) as server, Pageless(shown(server.url)) as page:
        page.send(again=ASK)
        started(page)
        assert refused(page, id=8) == "run: got a second one, expected one of each page; stop the first"
        page.send(again={"id": 9, "stop": True})
        page.until(lambda p: over(p, "plain") and over(p, "steered"))
        assert {sent_by(page, side)[1]["error"] for side in WORDS} == {"stopped"}
        eventually(lambda: len(server.gone) == 2)
        server.answer = usual(WORDS)
        page.again.clear()
        assert [last["error"] for _, last in run(page, id=10).values()] == ["", ""]


def test_a_page_that_is_gone_ends_its_run(shown):
    with completions(held) as server:
        with Pageless(shown(server.url)) as page:
            page.send(again=ASK)
            started(page)
            assert server.gone == []
        eventually(lambda: len(server.gone) == 2)


@pytest.mark.parametrize("by", ["page", "hub"])
def test_the_kill_switch_ends_a_run_and_refuses_others(shown, by):
    with completions(held) as server, Pageless(consumer := shown(server.url)) as page:
        page.send(again=ASK)
        started(page)
        if by == "page":
            page.send(act={"id": 1, "kind": "kill"})
        else:
            consumer.on_action(Answered.of(Freeze(), ActionApplied("1", 5), engine="engine-1", asked_by="client"))
        page.until(lambda p: over(p, "plain") and over(p, "steered"))
        assert {sent_by(page, side)[1]["error"] for side in WORDS} == {"stopped: the kill switch is pressed"}
        eventually(lambda: len(server.gone) == 2)
        count = len(server.asked)
        assert refused(page, id=8) == "steering: got frozen by the kill switch; release it first"
        consumer.on_action(Answered.of(Unfreeze(), ActionApplied("2", 6), engine="engine-1", asked_by="client"))
        page.send(again=ASK | {"id": 9})
        eventually(lambda: len(server.asked) > count)


def test_no_run_slips_through_while_the_kill_switch_is_pressed(shown, monkeypatch):
    """The kill switch is pressed after a run was admitted and before its streams are there."""
    with completions(held) as server:
        process = shown(server.url)._process
        answered = Answered.of(Freeze(), ActionApplied("1", 5), engine="engine-1", asked_by="client")
        freezing = threading.Thread(target=process.desk.note, args=(answered,))
        fields = process.desk.fields

        def freeze_between(*arguments, **more):
            freezing.start()
            # It has to wait until the run can be stopped; without that it is over here.
            freezing.join(0.3)
            return fields(*arguments, **more)

        monkeypatch.setattr(process.desk, "fields", freeze_between)
        run = process.again.begin(process.desk.enter("racer"), RunAsk(**ASK), lambda: None)
        freezing.join(10)
        assert [side.news()["error"] for side in run.sides.values()] == ["stopped: the kill switch is pressed"] * 2
        eventually(lambda: not run.running)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"request": 99}, "request: got one that is not kept, expected one of the list"),
        ({"name": "nobody"}, "vector: got nobody, expected one of calm"),
        ({"kind": "gain", "name": "calm"}, "module: got calm, expected one of glad"),
        ({"ratio": 0.51}, "ratio: got 0.51, expected -0.5..0.5"),
        ({"kind": "gain", "name": "glad", "ratio": -0.1}, "ratio: got -0.1, expected 0..1"),
        ({"mode": "remove", "ratio": -0.1}, "ratio: got -0.1, expected 0..1"),
    ],
)
def test_what_goes_beyond_a_bound_is_refused_and_not_sent(shown, ask, message):
    with completions(usual(WORDS)) as server, Pageless(consumer := shown(server.url)) as page:
        assert refused(page, **ask) == message
        assert server.asked == []
        assert consumer._process.runs == []


@pytest.mark.parametrize("start", [2, 6])
def test_a_prompt_that_is_not_whole_is_refused(shown, start):
    with completions(usual(WORDS)) as server, Pageless(consumer := shown(server.url)) as page:
        consumer.on_frame(make_frame([("r2", 6, start, 6)], SITES, seq=2, texts=True))
        message = "got a prompt of 6 tokens, not all of which came to the dashboard, expected a whole prompt; capture"
        assert message in refused(page, request=2)
        # The middle of the prompt was lost.
        consumer.on_frame(make_frame([("r3", 6, 0, 2), ("r4", 6, 0, 6)], SITES, seq=3, texts=True))
        consumer.on_frame(make_frame([("r3", 6, 4, 2)], SITES, seq=4, texts=True))
        assert message in refused(page, request=3, id=8)
        # The rest of the prompt is still to come.
        consumer.on_frame(make_frame([("r5", 6, 0, 4)], SITES, seq=5, texts=True))
        assert message in refused(page, request=5, id=10)
        assert server.asked == []
        assert [last["error"] for _, last in run(page, request=4, id=9).values()] == ["", ""]


def test_all_pages_have_a_few_runs_in_all(shown):
    with completions(held) as server:
        consumer = shown(server.url)
        pages = [Pageless(consumer).__enter__() for _ in range(limits.AGAIN_RUNS_MAX + 1)]
        for page in pages[:-1]:
            page.send(again=ASK)
            started(page)
        assert refused(pages[-1]) == "runs: got 4, which go on, expected at most 4 of all pages"
        pages[0].__exit__(None, None, None)
        eventually(lambda: len(server.gone) == 2)
        eventually(lambda: sum(run.running for run in consumer._process.again._runs) == limits.AGAIN_RUNS_MAX - 1)
        pages[-1].send(again=ASK | {"id": 8})
        started(pages[-1])
        for page in pages[1:]:
            page.__exit__(None, None, None)


def test_pieces_come_at_most_eight_times_a_second(shown):
    def answer(handler, body):
        handler.begin()
        for number in range(300):
            handler.part(chunk("w", [number]))
            handler.server.pace.wait(0.005)
        handler.part(DONE)
        handler.end()

    with completions(answer) as server, Pageless(shown(server.url)) as page:
        server.pace = threading.Event()
        begun_s = time.monotonic()
        sides = run(page)
        took_s = time.monotonic() - begun_s
        assert [ids for ids, _ in sides["plain"][0]] == [[number] for number in range(300)]
        assert len(page.again) <= took_s * limits.UPDATES_PER_S_MAX + 2
        assert len(page.again) >= 5


WITHOUT = {
    "the right": ({}, False),
    "a server": ({"server": None}, True),
    "both": ({"allow_steering": None, "vectors": None, "modules": None, "server": None}, False),
}
FIELDS = st.fixed_dictionaries(
    {"id": st.integers(0, 2**53 - 1)},
    optional={
        "request": st.sampled_from([0, 1, 2]),
        "kind": st.sampled_from(["steer", "gain"]),
        "name": st.sampled_from(["calm", "glad", ""]),
        "mode": st.sampled_from(["add", "remove"]),
        "ratio": st.floats(-1, 1),
        "tokens": st.integers(1, 2048),
        "temperature": st.floats(0, 2),
        "everywhere": st.booleans(),
        "stop": st.booleans(),
        "server": st.just("http://127.0.0.1:1"),
    },
)


@pytest.mark.parametrize("without", WITHOUT)
def test_without_the_right_or_a_server_nothing_is_sent(shown, without, monkeypatch):
    from capflow_dashboard.again import stream

    def fail(*_, **__):
        raise AssertionError("a stream was made")

    monkeypatch.setattr(stream.CompletionStream, "__init__", fail)
    options, allowed = WITHOUT[without]
    consumer = shown("http://127.0.0.1:9", **options)
    consumer._process.desk.allowed = allowed

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @example(ASK)
    @given(FIELDS)
    def send(ask):
        if "server" in ask:
            with Pageless(consumer) as page:
                page.send(again=ask)
                with pytest.raises(Exception, match=r"server|closed|1008"):
                    page.drain(5)
            return
        page = pages[0]
        count = len(page.again)
        page.send(again=ask)
        if not ask.get("stop"):
            page.until(lambda p: p.again[count:])
            assert page.again[-1]["error"]

    with Pageless(consumer) as page:
        pages = [page]
        page.until(lambda p: p.hello)
        assert page.hello["again"] is None
        send()


@pytest.mark.parametrize(
    "ask",
    [
        {"tokens": 0},
        {"tokens": 2049},
        {"temperature": 2.5},
        {"temperature": -1},
        {"server": "http://127.0.0.1:1"},
        {"prompt": [1]},
        {"id": -1},
        {"kind": "kill"},
    ],
)
def test_a_message_out_of_bounds_closes_the_connection(shown, ask):
    with completions(usual(WORDS)) as server, Pageless(shown(server.url)) as page:
        page.send(again=ASK | ask)
        with pytest.raises(Exception, match="1008"):
            page.drain(10)
        assert server.asked == []
