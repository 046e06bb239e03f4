"""The nats consumer and a server that is away, full, or not the one that it needs."""

import json
import subprocess
import threading

import pytest
from frames import make_frame
from hubs import address, free_port
from natsd import natsd
from test_nats import SITE, Counts, done, kinds, opened, server, stream
from waiting import eventually

from capflow.errors import CapflowError, UsageError
from capflow_consumers import natslink
from capflow_consumers.nats import NatsConfig, NatsConsumer

__all__ = ["address", "server", "stream"]


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
