"""The nats consumer against the real server: what is in the stream, and that kills neither lose nor repeat any of it."""

import contextlib
import json
import math
import random
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from frames import FIRST, make_finished, make_frame, make_hello, make_model, row_of, token_of
from hubs import address, free_port, worker_link
from natsd import natsd
from safetensors.numpy import save_file
from sources import ROOT
from test_filesystem import Waiting
from test_hub_crash import HIDDEN, Worker
from test_probekinds import network
from waiting import eventually

from capflow.errors import CapflowError, UsageError
from capflow.frame import Rank
from capflow.probe import Probe
from capflow.probekinds import load_probe
from capflow.result import RequestDone
from capflow.site import Site
from capflow_consumers import natslink, natsmessages
from capflow_consumers.filesystem import FilesystemConfig
from capflow_consumers.nats import NatsConfig, NatsConsumer

__all__ = ["address"]

SITE = Site(0, "post_block")


class Counts:
    def __init__(self):
        self.counts = Counter()

    def count(self, name, amount=1):
        self.counts[name] += amount


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with natsd(tmp_path_factory.mktemp("natsd")) as running:
        yield running


@pytest.fixture
def stream(request):
    """Return a stream's name, this test's own."""
    return f"t{zlib.crc32(request.node.name.encode()):x}"


def probe_file(directory, hidden=8):
    probe = Probe.make(SITE, np.random.default_rng(3).standard_normal((2, hidden)), names=("glad", "sad"))
    probe.save(directory / "mood.safetensors")
    return probe, str(directory / "mood.safetensors")


@contextlib.contextmanager
def opened(server, name, **options):
    """Yield a consumer with its context, whose subjects begin with the stream's name."""
    config = NatsConfig(**({"stream": name, "servers": [server.url], "create": True, "prefix": name} | options))
    consumer = NatsConsumer(config)
    consumer.check()
    consumer.context = Counts()
    consumer.open(consumer.context)
    try:
        yield consumer
    finally:
        consumer.close()


def done(request="r1", computed_length=4, **more):
    fields = {"rows_promised": computed_length, "rows": computed_length, "dropped": ()} | more
    return RequestDone("engine-1", request, "stop", 4, computed_length, **fields)


def vectors_of(message):
    """Yield what a message of vectors says of each of its chunks, and the chunk's rows."""
    about = json.loads(message.headers[natsmessages.ROWS_HEADER])
    numbers = np.frombuffer(message.data, {"float32": np.float32, "bfloat16": np.uint16}[about["dtype"]])
    for chunk in about["chunks"]:
        size = math.prod(chunk["shape"])
        yield chunk, numbers[:size].reshape(chunk["shape"])
        numbers = numbers[size:]
    assert not numbers.size


def test_probes_of_any_kind_are_scored(server, stream, tmp_path):
    path = tmp_path / "net.safetensors"
    save_file(network((8, 5, 1)), path, {"site": str(SITE), "kind": "mlp"})
    frame = make_frame([("r1", 4, 0, 4)], [SITE])
    with opened(server, stream, probes=[str(path)]) as consumer:
        consumer.on_frame(frame)
    (message,) = [message for message in server.messages(stream) if ".rows." in message.subject]
    (chunk,) = frame.chunks()
    (said,) = json.loads(message.data)["chunks"]
    (scores,) = said["scores"].values()
    np.testing.assert_allclose(scores, load_probe(path).scores(chunk.rows[0])[:, 0], rtol=1e-6)


def kinds(messages):
    return Counter(message.subject.split(".")[1] for message in messages)


def test_a_message_says_which_rows_came_what_they_score_and_where_they_lie(server, stream, tmp_path):
    probe, path = probe_file(tmp_path)
    with opened(server, stream, probes=[path], rows="/mnt/nas/rows") as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4), ("a.b *", 2, 7, 1)], [SITE, (1, "post_block")], texts=True))
        assert consumer.on_request_done(done()).status == "ok"
    started, first, end = server.messages(stream)
    assert started.subject == f"{stream}.opened"
    assert json.loads(started.data)["probes"] == ["glad", "sad"]
    assert first.subject == f"{stream}.rows.engine-1.boot-1.0-0-0"
    said = json.loads(first.data)
    chunk, other = said.pop("chunks")
    assert said == {
        "engine": "engine-1",
        "boot": "boot-1",
        "rank": [0, 0, 0],
        "seq": 1,
        "step": 1,
        "time_ns": 1_700_000_000_000_000_001,
        "root": "/mnt/nas/rows",
    }
    scores = chunk.pop("scores")
    tokens = [token_of("r1", position) for position in range(4)]
    texts = [f" {token}" for token in tokens]
    assert chunk == {
        "request": "r1",
        "prompt_length": 4,
        "sites": ["post_block:0", "post_block:1"],
        "start": 0,
        "token_ids": tokens,
        "texts": texts,
    }
    expected = probe.scores(np.stack([row_of("r1", SITE, position) for position in range(4)]))
    assert np.array_equal(np.array([scores["glad"], scores["sad"]], np.float32).T, expected)
    assert (other["request"], other["start"], len(other["scores"]["sad"])) == ("a.b *", 7, 1)
    assert end.subject == f"{stream}.done.engine-1.r1"
    assert json.loads(end.data) == {
        "engine": "engine-1",
        "request": "r1",
        "status": "stop",
        "prompt_length": 4,
        "computed_length": 4,
        "rows": 8,
        "capture_status": "ok",
        "error": None,
        "dropped": [],
        "root": "/mnt/nas/rows",
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_sent_when_asked_for_in_parts_that_the_server_takes(server, stream, dtype):
    hidden = 4096
    frame = make_frame([("r1", 200, 0, 200)], [SITE, (1, "post_block")], hidden=hidden, dtype=dtype)
    with opened(server, stream, sites=["post_block:0"], vectors=True) as consumer:
        consumer.on_frame(frame)
    messages = [m for m in server.messages(stream) if ".vectors." in m.subject]
    assert len(messages) > 1
    places = []
    for message in messages:
        about = json.loads(message.headers[natsmessages.ROWS_HEADER])
        assert about["dtype"] == dtype
        assert len(message.data) <= natsmessages.PART_BYTES_MAX
        for chunk, rows in vectors_of(message):
            for number, site in enumerate(map(Site.parse, chunk["sites"])):
                for offset, row in enumerate(rows[number]):
                    position = chunk["start"] + offset
                    assert row.tobytes() == row_of("r1", site, position, hidden, dtype).tobytes()
                    places.append((site, position))
    assert len(places) == len(set(places)) == 400


def test_frames_given_again_are_not_sent_again_however_long_ago_they_were(server, stream):
    """The stream forgets ids after 0.1 s: what is there is known by the place in its last message."""

    async def make(js):
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], duplicate_window=0.1)

    server.js(make)
    frames = [make_frame([("r1", 4, 0, 4)], [SITE]), make_frame([("r1", 4, 4, 1), ("r2", 4, 0, 4)], [SITE], seq=2)]
    for life in range(2):
        with opened(server, stream, sites=["post_block:0"], create=False, vectors=True) as consumer:
            for frame in frames:
                consumer.on_frame(frame)
            assert consumer.on_request_done(done("r1", 5)).status == "ok"
            assert consumer.context.counts["messages_again"] == (5 if life else 0)
        time.sleep(0.3)
    assert kinds(server.messages(stream)) == {"opened": 2, "rows": 2, "vectors": 2, "done": 1}
    with opened(server, stream, sites=["post_block:0"], create=False) as consumer:  # the same id, another time
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE], seq=3))
        consumer.on_request_done(done())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE], boot="boot-2"))
        consumer.on_request_done(done())
    assert kinds(server.messages(stream)) == {"opened": 3, "rows": 4, "vectors": 2, "done": 3}


def test_stages_of_a_pipeline_do_not_stand_for_each_other(server, stream):
    with opened(server, stream, sites=["post_block:0"]) as consumer:
        for rank, site in ((FIRST, (0, "post_block")), (Rank(1, 0, 0), (1, "post_block"))):
            consumer.on_frame(make_frame([("r1", 4, 0, 4)], [site], rank=rank, boot=f"boot-{rank.pp}"))
    assert kinds(server.messages(stream))["rows"] == 2


def test_a_server_that_is_away_is_waited_for(tmp_path, stream):
    with natsd(tmp_path) as server, opened(server, stream, sites=["post_block:0"]) as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE]))
        server.kill()
        later = subprocess.Popen(["sleep", "1"])
        thread = threading.Thread(target=lambda: (later.wait(), server.start()))
        thread.start()
        consumer.on_frame(make_frame([("r1", 4, 4, 1)], [SITE], seq=2))
        assert consumer.on_request_done(done("r1", 5)).status == "ok"
        thread.join()
        assert kinds(server.messages(stream)) == {"opened": 1, "rows": 2, "done": 1}


def test_a_server_that_stays_away_is_given_up_when_asked_to(tmp_path, stream):
    with natsd(tmp_path) as server, opened(server, stream, sites=["post_block:0"], give_up_s=0.5) as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE]))
        server.kill()
        consumer.on_frame(make_frame([("r1", 4, 4, 1)], [SITE], seq=2))
        server.start()
        eventually(lambda: consumer._link._client.is_connected)
        consumer.on_frame(make_frame([("r1", 4, 5, 1)], [SITE], seq=3))  # not without the one before
        result = consumer.on_request_done(done("r1", 6))
        assert result.status == "error"
        assert "took nothing for" in result.error
        with opened(server, stream, sites=["post_block:0"]) as following:  # which is given them again
            for seq, (start, length) in enumerate([(0, 4), (4, 1), (5, 1)], 1):
                following.on_frame(make_frame([("r1", 4, start, length)], [SITE], seq=seq))
        rows = [m for m in server.messages(stream) if ".rows." in m.subject]
        assert [json.loads(m.data)["chunks"][0]["start"] for m in rows] == [0, 4, 5]


def test_a_stream_that_is_full_is_the_requests_error(server, stream):
    async def make(js):
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], max_msgs=2, discard="new")

    server.js(make)
    with opened(server, stream, sites=["post_block:0"], create=False, give_up_s=0.3) as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE]))
        consumer.on_frame(make_frame([("r1", 4, 4, 1)], [SITE], seq=2))
        result = consumer.on_request_done(done("r1", 5))
        assert result.status == "error"
        assert "maximum messages exceeded" in result.error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"create": False},
            "^consumers.nats.stream: got t[0-9a-f]+, expected a stream that is there; make it, or add create=true",
        ),
        ({"stream": "a.b"}, "consumers.nats.stream: got a.b, expected letters"),
        ({"prefix": "a.>"}, "consumers.nats.prefix: got a.>, expected letters"),
        ({"give_up_s": 0.0}, "consumers.nats.give_up_s: got 0.0, expected above 0"),
        ({"servers": []}, "consumers.nats.servers: got none"),
        ({"sites": ["nope"]}, "site: got nope"),
        ({"probes": ["/no/such"]}, "/no/such: got no such file"),
        (
            {"stream": "other", "prefix": "mine"},
            "consumers.nats.stream: got other with theirs.>, expected one with mine.>",
        ),
    ],
)
def test_what_cannot_work_is_refused(server, stream, options, words):
    if options.get("prefix") == "mine":

        async def make(js):
            await js.add_stream(name="other", subjects=["theirs.>"])

        server.js(make)
    with pytest.raises(UsageError, match=words), opened(server, stream, **options):
        pass


def test_a_server_that_cannot_be_reached_is_said_without_its_password(stream, monkeypatch):
    monkeypatch.setattr(natslink, "CONNECT_S", 0.5)
    url = f"nats://ann:secret@127.0.0.1:{free_port()}"
    consumer = NatsConsumer(NatsConfig(stream=stream, servers=[url]))
    with pytest.raises(
        CapflowError, match=r"consumers.nats.servers: nats://127.0.0.1:.* expected a NATS server"
    ) as said:
        consumer.open(Counts())
    assert "secret" not in str(said.value)


def test_rights_that_are_missing_are_said(tmp_path, stream, monkeypatch):
    monkeypatch.setattr(natslink, "ACK_S", 0.5)
    reader = f'permissions: {{ publish: ["$JS.API.>"], subscribe: ["_INBOX.>", "{stream}.>"] }}'
    users = f"{{user: ann, password: right, {reader}}}, {{user: bob, password: right}}"
    with natsd(tmp_path, f"authorization {{ users: [{users}] }}") as server:
        host = server.url.removeprefix("nats://")
        with opened(server, stream, servers=[f"nats://bob:right@{host}"]):
            pass
        with (
            pytest.raises(CapflowError, match=r"[Pp]ermissions [Vv]iolation"),
            opened(server, stream, servers=[f"nats://ann:right@{host}"]),
        ):
            pass
        monkeypatch.setattr(natslink, "CONNECT_S", 2.0)
        with (
            pytest.raises(CapflowError, match=r"[Aa]uthorization [Vv]iolation") as said,
            opened(server, stream, servers=[f"nats://bob:wrong@{host}"]),
        ):
            pass
        assert "wrong" not in str(said.value)


def test_a_server_without_jetstream_is_said(tmp_path, stream):
    config = tmp_path / "plain.conf"
    with natsd(tmp_path) as server:
        server.kill()
        config.write_text(f"listen: 127.0.0.1:{server.port}\n")
        server._config = config
        server.start()
        with pytest.raises(UsageError, match="JetStream"), opened(server, stream):
            pass


class HubProcess:
    """`capflow run` with the nats consumer, on an inbox that the next one finds."""

    def __init__(self, address, server, directory, drain_s, *options):
        said = [f"servers={server.url}", f"spool_dir={directory / 'spool'}", "create=true", *options]
        command = [sys.executable, "-m", "capflow", "run", "--address", address, "--drain-s", str(drain_s)]
        self.process = subprocess.Popen([*command, "--consumer", f"nats:{','.join(said)}"])

    def kill(self):
        self.process.kill()
        self.process.wait(60)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(120)


@contextlib.contextmanager
def linked(address, model):
    """Yield a worker's link to a hub that is about to start."""
    eventually(Path(address.removeprefix("ipc://")).exists, 120)
    with worker_link(address, make_hello(model=model), wait=False) as link:
        eventually(lambda: link.connected, 60)
        yield link


def taken(link):
    """Return whether the hub has all that was sent."""
    return link.counters["unacked_frames"] + link.counters["queued_frames"] == 0


@pytest.mark.long
def test_a_hub_stops_though_the_server_is_away_and_the_next_one_goes_on(tmp_path, address):
    with natsd(tmp_path) as server, contextlib.ExitStack() as stack:

        def start():
            hub = HubProcess(address, server, tmp_path, 1, "stream=CF", "sites=post_block:0")
            stack.callback(hub.kill)
            return hub

        hub = start()
        with linked(address, make_model()) as link:
            server.kill()
            frame = make_frame([("r1", 4, 0, 4)], [SITE], finished=[make_finished("r1", 4, 4)])
            assert link.send(frame.header, frame.payload) is None
            eventually(lambda: taken(link))
            begun = time.monotonic()
            hub.stop()
            assert time.monotonic() - begun < 60
            server.start()
            hub = start()
            eventually(lambda: link.connected, 120)
            eventually(lambda: kinds(server.messages("CF"))["done"], 60)
            assert hub.stop() == 0
        assert kinds(server.messages("CF")) == {"opened": 2, "rows": 1, "done": 1}


def ended(server, stream):
    """Return how many requests a stream has the end of."""

    async def look(js):
        return (await js.stream_info(stream, subjects_filter="capflow.done.>")).state.subjects or {}

    return len(server.js(look))


def test_the_reader_in_the_documentation_runs(tmp_path, capsys):
    text = (ROOT / "docs" / "nats.md").read_text()
    for field in msgspec.structs.fields(NatsConfig):
        assert re.search(rf"^\| `{field.name}` \|", text, re.MULTILINE), field.name
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    frame = make_frame([("r1", 4, 0, 4)], [SITE, (1, "post_block")])
    files = Waiting(FilesystemConfig(root=str(tmp_path / "rows")))
    with (
        natsd(tmp_path) as server,
        opened(server, "CAPFLOW", prefix="capflow", rows=str(tmp_path / "rows")) as consumer,
    ):
        for each in (files, consumer):
            if each is files:
                each.open(Counts())
            each.on_frame(frame)
            assert each.on_request_done(done("r1", 4, rows_promised=8, rows=8)).status == "ok"
        exec(snippet.replace("nats://127.0.0.1:4222", server.url), {})  # noqa: S102  our own documentation
    assert capsys.readouterr().out == "r1 ok\n(4, 8)\n"


def kill_often(address, directory, *, hub_kills, server_kills, seed):
    """Kill hub and server at random moments under load; hold the stream against what was sent."""
    choose = random.Random(seed)
    probe, path = probe_file(directory, HIDDEN)
    kills = ["hub"] * hub_kills + ["server"] * server_kills
    choose.shuffle(kills)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(natsd(directory))
        options = ("stream=CHAOS", "vectors=true", f"probes={path}")

        def start_hub():
            hub = HubProcess(address, server, directory, 60, *options)
            stack.callback(hub.kill)
            return hub

        hub = start_hub()
        link = stack.enter_context(linked(address, make_model(1, HIDDEN)))
        worker = Worker(link, choose)

        def work():
            worker.turn()
            time.sleep(0.005)  # about as fast as the server writes through; what is too much waits in the inbox

        for which in kills:
            until = time.monotonic() + choose.uniform(0.1, 1.5)
            while time.monotonic() < until:
                work()
            if which == "hub":
                hub.kill()
                hub = start_hub()
                eventually(lambda: link.connected, 120)
            else:
                server.kill()
                until = time.monotonic() + choose.uniform(0, 0.7)
                while time.monotonic() < until:
                    work()
                server.start()
        worker.end()
        eventually(lambda: taken(link), 120)
        eventually(lambda: ended(server, "CHAOS") >= len(worker.lengths), 240)
        assert hub.stop() == 0
        messages = server.messages("CHAOS")
    check_stream(messages, worker.lengths, probe)
    return len(worker.lengths), len(messages)


def check_stream(messages, lengths, probe):
    """Each row of each request is there once, in order, with its scores and its vector; each end is there once."""
    scored, vectors, ends = {}, {}, Counter()
    for message in messages:
        kind = message.subject.split(".")[1]
        if kind == "done":
            said = json.loads(message.data)
            assert said["capture_status"] == "ok", said
            assert said["computed_length"] == lengths[said["request"]]
            ends[said["request"]] += 1
        elif kind == "rows":
            for chunk in json.loads(message.data)["chunks"]:
                values = np.array([chunk["scores"]["glad"], chunk["scores"]["sad"]], np.float32).T
                scored.setdefault(chunk["request"], []).extend(enumerate(values, chunk["start"]))
        elif kind == "vectors":
            for chunk, rows in vectors_of(message):
                vectors.setdefault(chunk["request"], []).extend(enumerate(rows[0], chunk["start"]))
    assert ends == Counter(lengths.keys())
    for name, length in lengths.items():
        expected = np.stack([row_of(name, SITE, position, HIDDEN) for position in range(length)]) if length else []
        for kept, values in ((scored, probe.scores(expected) if length else []), (vectors, expected)):
            assert [position for position, _ in kept.get(name, [])] == list(range(length)), name
            if length:
                np.testing.assert_allclose(np.stack([row for _, row in kept[name]]), values, rtol=1e-5, atol=1e-4)


def test_a_hub_and_a_server_that_are_killed_lose_and_repeat_nothing(address, tmp_path):
    requests, messages = kill_often(address, tmp_path, hub_kills=1, server_kills=2, seed=0)
    assert requests
    assert messages > 2 * requests


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hub_and_a_server_that_are_killed_often_lose_and_repeat_nothing(address, tmp_path, seed):
    requests, messages = kill_often(address, tmp_path, hub_kills=15, server_kills=25, seed=seed)
    print(requests, "requests,", messages, "messages")
    assert requests > 100
