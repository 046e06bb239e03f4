"""The nats consumer against the real server: what is in the stream, and that nothing is in it twice."""

import json
import math
import re
import time
from collections import Counter

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from capflow.capture.frame import Frame, Rank
from capflow.capture.site import Site
from capflow.probes.kinds import load_probe
from capflow.probes.probe import Probe
from capflow.steering.action import Abort, ActionApplied, Answered, Rejected, Steer, Unknown
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from capflow_consumers.filesystem.consumer import FilesystemConfig
from capflow_consumers.nats import messages as natsmessages
from capflow_consumers.nats.consumer import NatsConfig, NatsConsumer
from tests.kit.answers import answering
from tests.kit.frames import FIRST, make_frame, make_model, row_of, token_of
from tests.kit.hubs import address, configured, running_hub, scheduler_link, worker_link
from tests.kit.natsd import natsd
from tests.kit.networks import network
from tests.kit.shaped import SHAPES, SITES, frame_of, positions_of, rows_total, shaped_model, width_of
from tests.kit.sources import ROOT
from tests.kit.stored import Waiting
from tests.kit.streams import SITE, Counts, done, kinds, opened, probe_file, server, stream, vectors_of

__all__ = ["address", "server", "stream"]


def test_probes_of_any_kind_are_scored(server, stream, tmp_path):
    path = tmp_path / "net.safetensors"
    save_file(network((8, 5, 1)), path, {"site": str(SITE), "kind": "mlp"})
    frame = make_frame([("r1", 4, 0, 4)], [SITE])
    with opened(server, stream, probes=[str(path)]) as consumer:
        consumer.on_frame(frame)
    (message,) = [message for message in server.messages(stream) if ".rows." in message.subject]
    (chunk,) = frame.chunks()
    (sent,) = json.loads(message.data)["chunks"]
    (scores,) = sent["scores"].values()
    np.testing.assert_allclose(scores, load_probe(path).scores(chunk.rows[0])[:, 0], rtol=1e-6)


def test_a_message_says_which_rows_came_what_they_score_and_where_they_lie(server, stream, tmp_path):
    probe, path = probe_file(tmp_path)
    with opened(server, stream, probes=[path], rows="/mnt/nas/rows") as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4), ("a.b *", 2, 7, 1)], [SITE, (1, "post_block")], texts=True))
        assert consumer.on_request_done(done()).status == "ok"
    started, first, end = server.messages(stream)
    assert started.subject == f"{stream}.opened"
    assert json.loads(started.data)["probes"] == ["glad", "sad"]
    assert first.subject == f"{stream}.rows.engine-1.boot-1.0-0-0"
    body = json.loads(first.data)
    chunk, other = body.pop("chunks")
    assert body == {
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
        # More than `duplicate_window`: the stream forgets in this time.
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


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_finite_number_is_null(server, stream, tmp_path, number):
    _, path = probe_file(tmp_path)
    header = make_frame([("r1", 4, 0, 4)], [SITE]).header
    rows = np.zeros((4, 8), np.float32)
    rows[2, 0] = number
    with opened(server, stream, probes=[path]) as consumer:
        consumer.on_frame(Frame.seal(header, rows.reshape(-1).view(np.uint8)))
    (message,) = [message for message in server.messages(stream) if ".rows." in message.subject]
    (chunk,) = json.loads(message.data)["chunks"]
    for scores in chunk["scores"].values():
        assert scores[2] is None
        assert all(map(math.isfinite, scores[:2] + scores[3:]))


def test_what_came_of_an_action_is_sent_once_however_long_ago_it_was(server, stream):
    """The stream forgets ids after 0.1 s: an action is known by its subject."""

    async def make(js):
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], duplicate_window=0.1)

    server.js(make)
    vector = SteeringVector.make(Site(2, "post_block"), np.ones(8))
    steer = Answered.of(Steer("a.b *", (vector,)), ActionApplied("x", 7), engine="engine-1", asked_by="client")
    abort = Answered.of(Abort("gone"), Rejected("y", "not running"), engine="", asked_by="judge")
    for life in range(2):
        with opened(server, stream, create=False) as consumer:
            for answered in (steer, abort):
                consumer.on_action(answered)
            assert consumer.context.counts["messages_again"] == 2 * life
        # More than `duplicate_window`: the stream forgets in this time.
        time.sleep(0.3)
    first, second = [message for message in server.messages(stream) if ".actions." in message.subject]
    assert first.subject == f"{stream}.actions.engine-1.{natsmessages.token('a.b *')}.{steer.id}"
    assert json.loads(first.data) == {
        "id": steer.id,
        "engine": "engine-1",
        "request": "a.b *",
        "kind": "steer",
        "sites": ["post_block:2"],
        "asked_by": "client",
        "time_ns": steer.time_ns,
        "outcome": "applied",
        "step": 7,
        "reason": None,
        "position": None,
        "score": None,
        "threshold": None,
        "scale": 1.0,
        "label": None,
        "incarnation": None,
        "target": None,
    }
    assert second.subject == f"{stream}.actions.-.gone.{abort.id}"
    body = json.loads(second.data)
    assert (body["outcome"], body["step"], body["reason"], body["sites"]) == ("rejected", None, "not running", [])


@pytest.mark.parametrize(
    ("outcome", "name"), [(Unknown("z", "no answer"), "unknown"), (Rejected("z", "no"), "rejected")]
)
def test_a_message_tells_the_unknown_from_the_rejected(outcome, name):
    answered = Answered.of(Abort("r1"), outcome, engine="engine-1", asked_by="client")
    body = json.loads(natsmessages.action_message("p", answered).body)
    assert (body["outcome"], body["reason"]) == (name, outcome.reason)


def test_a_hub_brings_engines_and_actions_to_the_stream(server, stream, address, tmp_path):
    config = NatsConfig(stream=stream, servers=[server.url], create=True, prefix=stream)
    with (
        running_hub(address, configured(NatsConsumer(config), "spill", spool_dir=tmp_path / "spool")),
        worker_link(address) as worker,
        scheduler_link(address) as link,
        Client(address) as client,
    ):
        frame = make_frame()
        assert worker.send(frame.header, frame.payload) is None
        thread = answering(link, [lambda act: ActionApplied(act.id, 7)])
        assert client.act(Abort("r1"), 20).step == 7
        thread.join(20)
    bodies = {message.subject.split(".")[1]: json.loads(message.data) for message in server.messages(stream)}
    assert (bodies["actions"]["request"], bodies["actions"]["kind"], bodies["actions"]["step"]) == ("r1", "abort", 7)
    model = make_model()
    assert bodies["sessions"] == {
        "engine": "engine-1",
        "model": "test-model",
        "num_layers": 4,
        "hidden_size": 8,
        "dtype": "float32",
        "stages": 1,
        "sites": [str(site) for site in model.sites],
    }


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


def test_engines_of_different_widths_and_dtypes_share_a_stream(server, stream):
    models = {"narrow": (8, "float32"), "wide": (24, "bfloat16")}
    with opened(server, stream, sites=["post_block:0"], vectors=True) as consumer:
        for engine, (hidden, dtype) in models.items():
            consumer.on_session(engine, msgspec.structs.replace(make_model(hidden=hidden), dtype=dtype))
        for seq in range(1, 4):
            for engine, (hidden, dtype) in models.items():
                span = ("r1", 4, 4 * seq - 4, 4)
                consumer.on_frame(
                    make_frame([span], [SITE], hidden=hidden, dtype=dtype, engine=engine, boot=engine, seq=seq)
                )
        for engine in models:
            end = msgspec.structs.replace(done("r1", 12), engine=engine, rows=12, rows_promised=12)
            assert consumer.on_request_done(end).status == "ok"
    places = Counter()
    for message in server.messages(stream):
        if ".vectors." not in message.subject:
            continue
        engine = next(engine for engine in models if f".{engine}" in message.subject)
        hidden, dtype = models[engine]
        for chunk, rows in vectors_of(message):
            for offset, row in enumerate(rows[0]):
                assert row.tobytes() == row_of("r1", SITE, chunk["start"] + offset, hidden, dtype).tobytes()
                places[engine, chunk["start"] + offset] += 1
    assert places == Counter((engine, position) for engine in models for position in range(12))


def test_rows_of_several_shapes_have_their_shape_in_the_stream(server, stream, tmp_path, monkeypatch):
    """Some chunks fit into no part whole, and are cut between tokens."""
    monkeypatch.setattr(natsmessages, "PART_BYTES_MAX", 512)
    probe = Probe.make(Site(1, "heads"), np.random.default_rng(3).standard_normal((2, 12)), names=("glad", "sad"))
    probe.save(tmp_path / "heads.safetensors")
    options = {"sites": list(map(str, SITES)), "vectors": True, "probes": [str(tmp_path / "heads.safetensors")]}
    with opened(server, stream, **options) as consumer:
        consumer.on_session("engine-1", shaped_model())
        consumer.on_frame(frame_of([("r1", 4, 0, 6)]))
        assert consumer.on_request_done(done("r1", 6, rows_promised=rows_total(6), rows=rows_total(6))).status == "ok"
    messages = server.messages(stream)
    (session,) = (json.loads(message.data) for message in messages if ".sessions." in message.subject)
    assert session["shapes"] == {str(site): list(shape) for site, shape in SHAPES.items()}
    sent = {}
    for message in messages:
        for chunk, rows in vectors_of(message) if ".vectors." in message.subject else ():
            for name, values in zip(chunk["sites"], rows, strict=True):
                assert tuple(chunk.get("row_shape", ())) == SHAPES.get(Site.parse(name), ())
                sent |= {(name, position): row.tobytes() for position, row in enumerate(values, chunk["start"])}
    places = [(site, position) for site in SITES for position in positions_of(site, 6)]
    expected = {(str(site), position): row_of("r1", site, position, width_of(site)) for site, position in places}
    assert sent == {place: row.tobytes() for place, row in expected.items()}
    scores = {}
    for message in messages:
        for chunk in json.loads(message.data)["chunks"] if ".rows." in message.subject else ():
            scores |= dict(enumerate(zip(*chunk["scores"].values(), strict=True), chunk["start"]))
    rows = np.stack([expected["heads:1", position] for position in sorted(scores)]).astype(np.float64)
    assert sorted(scores) == positions_of(Site(1, "heads"), 6)
    assert np.allclose(
        [scores[position] for position in sorted(scores)], rows @ probe.weight.astype(np.float64).T, 1e-4
    )
