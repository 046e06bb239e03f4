"""The nats consumer and a server that is away, full, or not the one that it needs."""

import errno
import json
import re
import threading
import time

import pytest

from capflow.cli.hub.view import view
from capflow.errors import CapflowError, RetryError, UsageError
from capflow.hub.health import problems
from capflow.hub.monitor.metrics import registry_of
from capflow.steering.action import Abort, Answered, Rejected
from capflow.testing import MemoryHub
from capflow_consumers.nats import link as natslink
from capflow_consumers.nats import messages as natsmessages
from capflow_consumers.nats.consumer import NatsConfig, NatsConsumer
from tests.kit.frames import make_frame, make_model
from tests.kit.hubs import address, configured, free_port
from tests.kit.natsd import natsd
from tests.kit.screens import shown
from tests.kit.streams import SITE, Counts, done, kinds, opened, server, stream
from tests.kit.waiting import eventually

__all__ = ["address", "server", "stream"]


def again(call, *args):
    """Return what a call returns that is made again after each RetryError, as a lane makes it."""
    pause = threading.Event()
    deadline = time.monotonic() + 30
    while True:
        try:
            return call(*args)
        except RetryError:
            assert time.monotonic() < deadline
            pause.wait(0.05)


def test_a_hub_keeps_the_place_of_a_consumer_whose_server_is_away(tmp_path, stream):
    with natsd(tmp_path) as server:
        config = NatsConfig(stream=stream, servers=[server.url], create=True, prefix=stream, sites=["post_block:0"])
        made = configured(NatsConsumer(config), "spill", spool_dir=tmp_path / "spool")
        with MemoryHub(made) as hub:
            engine = hub.engine()
            engine.step([("r1", 4, 0, 4)])
            eventually(lambda: kinds(server.messages(stream))["rows"] == 1)
            server.kill()
            engine.step([("r1", 4, 4, 1)])
            engine.finish("r1")
            eventually(lambda: problems(hub.hub, time.monotonic()))
            (problem,) = problems(hub.hub, time.monotonic())
            assert re.fullmatch(r"consumer nats: waits and tries on_frame again: [A-Z][a-z ]+", problem)
            status = hub.hub.status()
            assert status["consumers"]["nats"]["retrying"]["method"] == "on_frame"
            assert "waits and tries on_frame again" in shown(view(status, None), 160)
            assert registry_of(hub.hub).get_sample_value("capflow_consumer_retrying", {"consumer": "nats"}) == 1
            server.start()
            assert hub.result("r1").status == "ok"
            assert problems(hub.hub, time.monotonic()) == []
            assert hub.stop()
        assert kinds(server.messages(stream)) == {"opened": 1, "sessions": 1, "rows": 2, "done": 1}


def test_a_frame_that_was_stored_in_part_is_stored_once(tmp_path, stream, monkeypatch):
    """The stream has room for two of the frame's messages, and forgets ids after 0.1 s: it is asked what it has."""
    monkeypatch.setattr(natsmessages, "PART_BYTES_MAX", 512)
    frame = make_frame([("r1", 200, 0, 200)], [SITE])

    async def make(js):
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], max_msgs=3, discard="new", duplicate_window=0.1)

    async def widen(js):
        config = (await js.stream_info(stream)).config
        await js.update_stream(config, max_msgs=-1)

    with natsd(tmp_path) as server:
        server.js(make)
        with opened(server, stream, sites=["post_block:0"], create=False) as consumer:
            for _ in range(2):
                with pytest.raises(RetryError, match="maximum messages exceeded; raise the stream's limits") as raised:
                    consumer.on_frame(frame)
                assert raised.value.__cause__.errno == errno.ENOSPC
                # The pause between two tries.
                time.sleep(0.2)
            server.js(widen)
            consumer.on_frame(frame)
            result = consumer.on_request_done(done("r1", 200))
            assert (result.status, result.payload["rows"]) == ("ok", 200)
            rows = [message for message in server.messages(stream) if ".rows." in message.subject]
            assert consumer.context.counts["messages"] == len(server.messages(stream))
    starts = [json.loads(message.data)["chunks"][0]["start"] for message in rows]
    assert len(starts) > 2
    assert starts == sorted(set(starts))


def test_calls_that_a_server_does_not_answer_are_made_again_without_trace(tmp_path, stream):
    with natsd(tmp_path) as server, opened(server, stream, sites=["post_block:0"]) as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE]))
        server.kill()
        answered = Answered.of(Abort("r1"), Rejected("y", "not running"), engine="", asked_by="judge")
        calls = [
            (consumer.on_session, "engine-1", make_model()),
            (consumer.on_frame, make_frame([("r1", 4, 4, 1)], [SITE], seq=2)),
            (consumer.on_action, answered),
            (consumer.on_request_done, done("r1", 5)),
        ]
        for call, *args in calls:
            with pytest.raises(RetryError, match=f"stream {stream} took no message for"):
                call(*args)
        server.start()
        *_, result = [again(call, *args) for call, *args in calls]
        assert (result.status, result.payload["rows"]) == ("ok", 5)
        assert kinds(server.messages(stream)) == {"opened": 1, "sessions": 1, "rows": 2, "actions": 1, "done": 1}


def test_a_server_that_stays_away_is_given_up_when_asked_to(tmp_path, stream):
    with natsd(tmp_path) as server, opened(server, stream, sites=["post_block:0"], give_up_s=0.5) as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE]))
        server.kill()
        again(consumer.on_frame, make_frame([("r1", 4, 4, 1)], [SITE], seq=2))
        server.start()
        eventually(lambda: consumer._link._client.is_connected)
        consumer.on_frame(make_frame([("r1", 4, 5, 1)], [SITE], seq=3))  # not without the one before
        result = consumer.on_request_done(done("r1", 6))
        assert result.status == "error"
        assert "took no message for" in result.error
        with opened(server, stream, sites=["post_block:0"]) as following:  # which is given them again
            for seq, (start, length) in enumerate([(0, 4), (4, 1), (5, 1)], 1):
                following.on_frame(make_frame([("r1", 4, start, length)], [SITE], seq=seq))
        rows = [m for m in server.messages(stream) if ".rows." in m.subject]
        assert [json.loads(m.data)["chunks"][0]["start"] for m in rows] == [0, 4, 5]


def test_a_stream_that_stays_full_is_the_requests_error_when_asked_to(server, stream):
    async def make(js):
        await js.add_stream(name=stream, subjects=[f"{stream}.>"], max_msgs=2, discard="new")

    server.js(make)
    with opened(server, stream, sites=["post_block:0"], create=False, give_up_s=0.3) as consumer:
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [SITE]))
        again(consumer.on_frame, make_frame([("r1", 4, 4, 1)], [SITE], seq=2))
        result = again(consumer.on_request_done, done("r1", 5))
        assert result.status == "error"
        assert "maximum messages exceeded" in result.error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"create": False},
            "^consumers.nats.stream: got t[0-9a-f]+, expected an existing stream; create it, or add create=true",
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
    ) as raised:
        consumer.open(Counts())
    assert "secret" not in str(raised.value)


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
            pytest.raises(CapflowError, match=r"[Aa]uthorization [Vv]iolation") as raised,
            opened(server, stream, servers=[f"nats://bob:wrong@{host}"]),
        ):
            pass
        assert "wrong" not in str(raised.value)


def test_a_server_without_jetstream_is_said(tmp_path, stream):
    config = tmp_path / "plain.conf"
    with natsd(tmp_path) as server:
        server.kill()
        config.write_text(f"listen: 127.0.0.1:{server.port}\n")
        server._config = config
        server.start()
        with pytest.raises(UsageError, match="JetStream"), opened(server, stream):
            pass
