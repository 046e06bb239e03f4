"""Results later: `GET /v1/capture/{id}`, `capflow result` and gRPC, asked of real hubs; no engine."""

import asyncio
import json
import time

import pytest

pytest.importorskip("vllm")

import grpc
from click.testing import CliRunner

from capflow import limits
from capflow.capture.result import CaptureResult
from capflow.cli import cli
from capflow.protocol.routing import hub_of
from capflow.transport.client import Client
from capflow_engine.request.options import RequestOptions
from capflow_engine.serve.ask import ParsedRequest
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.serve.rpc import port
from capflow_engine.serve.rpc.capflow_pb2_grpc import CaptureStub
from capflow_engine.serve.rpc.server import served
from tests.kit.apps import server
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import Later, Recorder, address, free_port, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]


OTHER = make_hello("engine-2", "boot-2")


def send(link, name, *, over=True, of=None):
    own = {} if of is None else {"engine": of.engine, "boot": of.boot}
    made = make_frame([(name, 4, 0, 4)], finished=[make_finished(name)] if over else [], **own)
    assert link.send(made.header, made.payload) is None


@pytest.fixture
def client(address, tmp_path):
    return server(tmp_path, hubs=(address,))


def later(client, path):
    """Return the answer about a request, asked for again while a busy hub does not answer in time."""
    answers = []

    def is_answered():
        answers.append(client.get(f"/v1/capture/{path}"))
        return answers[-1].status_code != 503

    eventually(is_answered)
    return answers[-1].json()


def test_a_result_is_there_after_its_request_and_while_it_runs(client, address):
    consumer = Later()
    with running_hub(address, consumer), worker_link(address) as link:
        send(link, "a/b c", over=False)
        eventually(lambda: client.get("/v1/capture/a/b c").status_code == 200)
        running = {"id": "a/b c", "done": False, "capture_results": {"recorder": {"status": "pending"}}}
        answer = later(client, "a%2Fb%20c")
        answer["capture_results"]["recorder"] = {"status": answer["capture_results"]["recorder"]["status"]}
        assert answer == running
        made = make_frame([], finished=[make_finished("a/b c")])
        assert link.send(made.header, made.payload) is None
        eventually(lambda: "a/b c" in consumer.futures)
        assert later(client, "a/b c")["done"] is False
        consumer.futures["a/b c"].set_result(CaptureResult("ok", payload={"path": "here"}))
        done = later(client, "a/b c?wait=20")
        assert done["done"] is True
        assert done["capture_results"]["recorder"]["payload"] == {"path": "here"}
        assert "capture_results_by_choice" not in done


def test_an_unknown_request_is_404_at_once_however_long_is_waited(client, address):
    with running_hub(address, Recorder()):
        begun = time.monotonic()
        answer = client.get("/v1/capture/nobody?wait=60")
        assert answer.status_code == 404
        assert time.monotonic() - begun < 20
        message = answer.json()["error"]["message"]
        assert "nobody" in message
        assert f"{limits.RESULTS_KEPT_MAX:,}" in message


def test_a_request_that_this_server_ran_is_not_unknown_before_its_hub_hears_of_it(client, address):
    front = client.app.state.capflow
    ask = ParsedRequest((RequestOptions(id="slow"),), wait=False)
    with running_hub(address, Recorder()), worker_link(address) as link:
        front.begin(ask)
        assert later(client, "slow") == {"id": "slow", "done": False, "capture_results": {}}
        front.end(ask)
        assert later(client, "slow")["done"] is False
        send(link, "slow")
        assert later(client, "slow?wait=20")["done"] is True


def test_the_newest_request_of_an_id_answers(client, address):
    consumer = Later()
    with running_hub(address, consumer), worker_link(address) as link:
        send(link, "again")
        eventually(lambda: "again" in consumer.futures)
        consumer.futures.pop("again").set_result(CaptureResult("error", "no room"))
        assert later(client, "again?wait=20")["capture_results"]["recorder"]["status"] == "error"
        send(link, "again")
        eventually(lambda: "again" in consumer.futures)
        assert later(client, "again")["done"] is False


def test_a_request_of_another_engine_with_the_id_answers_nobody_here(client, address):
    with running_hub(address, Recorder()), worker_link(address) as link, worker_link(address, OTHER) as other:
        send(other, "same", of=OTHER)
        with Client(address) as asking:
            asking.results(["same"], timeout=20)
        assert client.get("/v1/capture/same").status_code == 404
        send(link, "same")
        answer = later(client, "same?wait=20")["capture_results"]["recorder"]
        assert answer["status"] == "ok"
        with Client(address) as asking:
            mine = asking.results(["same"], engine="engine-1", wait=False)["same"]["recorder"]
        assert answer["payload"] == mine.payload


def test_the_choices_of_a_request_answer_together_and_each(client, address):
    with running_hub(address, Recorder()), worker_link(address) as link:
        for name in ("many#0#0", "many#0#1", "many#1#0", "many#1#1", "two#0", "two#1"):
            send(link, name)
        each = later(client, "many?prompts=2&n=2&wait=20")
        assert [one["recorder"]["status"] for one in each["capture_results_by_choice"]] == ["ok"] * 4
        assert each["capture_results"]["recorder"]["status"] == "ok"
        assert later(client, "two%231?wait=20")["done"] is True
        for name, parameters in (("two", "n=2"), ("many", "prompts=2&n=2")):
            assert "n=" in later(client, name)["error"]["message"]
            assert client.get(f"/v1/capture/{name}?{parameters}").status_code == 200
        missing = client.get("/v1/capture/two?n=3")
        assert missing.status_code == 404
        assert "two#2" in missing.json()["error"]["message"]


def test_each_hub_answers_for_its_own_requests_and_one_that_is_away_for_none(address, tmp_path):
    addresses = (f"{address}0", f"{address}1")
    client = server(tmp_path, hubs=addresses)
    names = {hub_of(f"r{number}", 2): f"r{number}" for number in range(20)}
    with running_hub(addresses[0], Recorder()), worker_link(addresses[0]) as link:
        with running_hub(addresses[1], Recorder()), worker_link(addresses[1]) as other:
            send(link, names[0])
            send(other, names[1])
            for name in names.values():
                assert later(client, f"{name}?wait=20")["done"] is True
            result = CliRunner().invoke(cli, ["result", names[1], "--wait", "20", *_at(addresses)])
            assert result.exit_code == 0, result.output
        assert client.get(f"/v1/capture/{names[0]}").status_code == 200
        begun = time.monotonic()
        answer = client.get(f"/v1/capture/{names[1]}?wait=30")
        assert answer.status_code == 503
        assert "hub" in answer.json()["error"]["message"]
        assert time.monotonic() - begun < limits.HUB_AWAY_S + 5


def test_a_request_of_a_spare_hub_is_found_there_and_while_that_is_away_is_not_unknown(address, tmp_path):
    addresses = (f"{address}0", f"{address}1")
    client = server(tmp_path, hubs=addresses, spares=1)
    names = {hub_of(f"r{number}", 2): f"r{number}" for number in range(20)}
    with running_hub(addresses[0], Recorder()), worker_link(addresses[0]) as link:
        send(link, names[0])
        assert later(client, f"{names[0]}?wait=20")["done"] is True
        assert client.get(f"/v1/capture/{names[1]}").status_code == 404
        with running_hub(addresses[1], Recorder()), worker_link(addresses[1]) as other:
            send(other, names[1])
            assert later(client, f"{names[1]}?wait=20")["done"] is True
        assert later(client, names[0])["done"] is True
        assert client.get(f"/v1/capture/{names[1]}").status_code == 503


def test_a_hub_that_restarted_has_forgotten(client, address):
    with running_hub(address, Recorder()), worker_link(address) as link:
        send(link, "before")
        assert later(client, "before?wait=20")["done"] is True
    assert client.get("/v1/capture/before").status_code == 503
    with running_hub(address, Recorder()):
        assert client.get("/v1/capture/before").status_code == 404


@pytest.mark.parametrize(
    ("query", "field"),
    [("n=0", "n"), ("n=x", "n"), ("prompts=-1", "prompts"), ("n=99999&prompts=99999", "n"), ("wait=-1", "wait"),
     ("wait=nan", "wait"), ("wait=601", "wait"), ("wait=true", "wait"), ("samples=2", "samples")],
)  # fmt: skip
def test_a_wrong_parameter_is_400_with_its_name(client, query, field):
    answer = client.get(f"/v1/capture/mine?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_an_id_that_is_none_is_400(client):
    for name in ("", "x" * (limits.REQUEST_ID_LENGTH_MAX + 1)):
        assert client.get(f"/v1/capture/{name}").json()["error"]["param"] == "id"


def test_a_name_that_no_hub_takes_is_refused_and_disturbs_no_other_question(client, address):
    long = "x" * limits.REQUEST_ID_LENGTH_MAX
    with running_hub(address, Recorder()):
        assert client.get(f"/v1/capture/{long}").status_code == 404
        for query in ("n=2&wait=60", "prompts=2&wait=60"):
            answer = client.get(f"/v1/capture/{long}?{query}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "id"


def test_half_of_a_surrogate_pair_is_400_with_the_field(client):
    for field in ({"capture_id": "\ud800"}, {"capture": {"hooks": {"post_block": [1]}, "tag": "\ud800"}}):
        body = json.dumps({"model": "tiny", "prompt": "x", **field})
        answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("capture")


def test_grpc_and_the_command_line_answer_the_same(client, address):
    """And say what they do not know, or that the hub is away, by a code."""

    async def get(**fields):
        at = port.address("127.0.0.1", free_port())
        async with served(client.app.state, client.app.state.capflow, at), grpc.aio.insecure_channel(at) as channel:
            try:
                return await CaptureStub(channel).Get(pb.GetCaptureRequest(**fields))
            except grpc.aio.AioRpcError as e:
                return e.code()

    def command(*arguments):
        return CliRunner().invoke(cli, ["result", *arguments, "--address", address])

    with running_hub(address, Recorder()), worker_link(address) as link:
        for name in ("one", "two#0", "two#1"):
            send(link, name)
        answer = asyncio.run(get(id="one", wait=20))
        assert answer.done
        assert answer.capture_results["recorder"].status == "ok"
        assert (
            answer.capture_results["recorder"].payload["rows"]
            == later(client, "one")["capture_results"]["recorder"]["payload"]["rows"]
        )
        both = asyncio.run(get(id="two", n=2, wait=20))
        assert [one.results["recorder"].status for one in both.capture_results_by_choice] == ["ok", "ok"]
        assert asyncio.run(get(id="nobody")) == grpc.StatusCode.NOT_FOUND
        assert asyncio.run(get(id="one", wait=1e9)) == grpc.StatusCode.INVALID_ARGUMENT
        assert asyncio.run(get()) == grpc.StatusCode.INVALID_ARGUMENT

        status = command("one", "two#1", "--json", "--wait", "20")
        assert json.loads(status.output)["one"]["recorder"]["status"] == "ok"
        assert "recorder" in command("one").output
        unknown = command("one", "nobody")
        assert (unknown.exit_code, "nobody" in str(unknown.exception)) == (1, True)
        assert "two#0" in str(command("two").exception)
    assert asyncio.run(get(id="one")) == grpc.StatusCode.UNAVAILABLE
    assert "no hub answers" in str(command("one").exception)


def test_the_command_line_says_which_ids_there_are(address):
    with running_hub(address, Recorder()):
        for length, words in ((0, "ID: got "), (1, "ID: got "), (-1, "unknown to the hub")):
            name = "x" * (limits.REQUEST_ID_LENGTH_MAX + length) if length else ""
            status = CliRunner().invoke(cli, ["result", name, *_at([address])])
            assert words in str(status.exception)


def _at(addresses):
    return [part for one in addresses for part in ("--address", one)]
