"""The dashboard's live socket: what pages get, and pages that are slow, dead, wrong or too many."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from capflow.capture.frame import Dropped
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow_dashboard import limits
from capflow_dashboard.board.series import MISSING
from tests.kit.dashboards import Pageless, cookie_of, norm_of, open_dashboard
from tests.kit.frames import make_frame, make_model, token_of
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

SITES = tuple(Site(layer, "post_block") for layer in range(4))


def done(request, *, dropped=()):
    return RequestDone("engine-1", request, "stop", 4, 6, 24, 24, tuple(dropped))


def test_a_page_follows_a_request_token_by_token():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        assert page.until(lambda p: p.engines)[0]["model"] == "test-model"
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, dtype="bfloat16", texts=True))
        page.until(lambda p: p.requests)
        page.select(1)
        page.until(lambda p: p.columns == 4)
        for position in (4, 5):
            frame = make_frame([("r1", 4, position, 1)], SITES, dtype="bfloat16", seq=position, texts=True)
            consumer.on_frame(frame)
            page.until(lambda p, n=position: p.columns == n + 1)
        assert page.fresh == 1
        assert page.ids == [token_of("r1", position) for position in range(6)]
        assert page.texts == [f" {token}" for token in page.ids]
        assert [one["site"] for one in page.series] == [str(site) for site in SITES]
        expected = [[norm_of("r1", site, position, "bfloat16") for position in range(6)] for site in SITES]
        np.testing.assert_allclose(page.values, expected, rtol=2e-6)
        consumer.on_request_done(done("r1", dropped=[Dropped(8, "queue_full")]))
        page.until(lambda p: p.requests[1]["status"] == "stop")
        assert page.counts["dropped"] == {"queue_full": 8}


def test_requests_from_before_the_page_was_opened_are_whole():
    with open_dashboard() as consumer:
        consumer.on_session("engine-1", make_model())
        for position in range(6):
            consumer.on_frame(make_frame([("r1", 4, position, 1)], SITES, seq=position + 1))
        consumer.on_request_done(done("r1"))
        with Pageless(consumer) as page:
            page.until(lambda p: p.requests)
            page.select(1)
            page.until(lambda p: p.columns == 6)
            expected = [[norm_of("r1", site, position) for position in range(6)] for site in SITES]
            np.testing.assert_allclose(page.values, expected, rtol=2e-6)


def test_rows_that_did_not_come_are_missing_and_not_zero():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 2)], SITES[:2]))
        consumer.on_frame(make_frame([("r1", 4, 3, 1)], SITES, seq=3))
        page.until(lambda p: p.requests)
        page.select(1)
        page.until(lambda p: p.columns == 4)
        assert page.ids[2] == -1
        assert (page.values == MISSING).tolist() == [[False, False, True, False]] * 2 + [[True, True, True, False]] * 2


def test_nan_and_infinity_reach_the_page():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        frame = make_frame([("r1", 4, 0, 4)], SITES)
        rows = np.frombuffer(frame.payload, np.float32).copy()
        rows[0], rows[8] = np.nan, np.inf
        consumer.on_frame(type(frame).seal(frame.header, rows.view(np.uint8)))
        page.until(lambda p: p.requests)
        page.select(1)
        page.until(lambda p: p.columns == 4)
        assert np.isnan(page.values[0][0])
        assert page.values[0][1] == np.inf
        assert np.isfinite(page.values).sum() == 14


@pytest.mark.parametrize(
    "message",
    [
        "{}",
        "nonsense",
        '{"select": 1}',
        '{"subscribe": {"request": "1"}}',
        '{"subscribe": {"request": -1}}',
        '{"subscribe": {"request": 1, "x": 2}}',
        json.dumps({"subscribe": {"window": list(range(limits.WINDOW_MAX + 1))}}),
        '{"subscribe": {}, "seen": 1}',
        '{"seen": 1.5}',
        b"\xff\x00",
        "[" * 900,
    ],
)
def test_a_page_that_says_something_else_is_cut_off(message):
    with open_dashboard() as consumer, Pageless(consumer) as page:
        page.socket.send(message)
        with pytest.raises(ConnectionClosed) as raised:
            page.drain(10)
        assert raised.value.rcvd.code == 1008


def test_a_page_that_says_too_much_is_cut_off():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        page.socket.send("x" * (limits.MESSAGE_BYTES_MAX + 1))
        with pytest.raises(ConnectionClosed) as raised:
            page.drain(10)
        assert raised.value.rcvd.code == 1009


def test_a_page_that_draws_slowly_has_one_update_in_flight(monkeypatch):
    monkeypatch.setattr(limits, "UPDATES_PER_S_MAX", 500)
    monkeypatch.setattr(limits, "UNSEEN_S", 30.0)
    with open_dashboard() as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        page.until(lambda p: p.engines)
        page.answers = False
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
        page.until(lambda p: p.requests)
        seen = page.seq
        for position in range(4, 40):
            consumer.on_frame(make_frame([("r1", 4, position, 1)], SITES, seq=position))
        page.until(lambda p: len(p.heartbeats) >= 4)  # which come nevertheless
        assert page.seq == seen
        page.answers = True
        page.subscribe(request=1)
        page.see()
        page.until(lambda p: p.columns == 40)
        assert page.seq <= seen + 3


def test_a_hidden_page_that_draws_nothing_still_gets_news(monkeypatch):
    monkeypatch.setattr(limits, "UNSEEN_S", 0.2)
    with open_dashboard() as consumer, Pageless(consumer) as page:
        page.answers = False
        consumer.on_session("engine-1", make_model())
        page.until(lambda p: p.engines)
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
        page.until(lambda p: p.requests)


def test_the_hubs_counters_come_while_a_page_shows_them():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        page.until(lambda p: p.hello)
        consumer.context.status = {"uptime_s": 1}

        def has_health(page):
            consumer.on_idle()
            return page.health

        page.subscribe(health=True)
        page.until(has_health)
        assert page.health == {"status": {"uptime_s": 1}}
        page.subscribe(health=False)
        eventually(lambda: not consumer._process.health_wanted)
        page.subscribe(health=True)
        eventually(lambda: consumer._process.health_wanted)
        page.socket.close()
        eventually(lambda: not consumer._process.health_wanted)


def test_pages_are_told_when_it_is_over():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        consumer.close()
        with pytest.raises(ConnectionClosed) as raised:
            page.drain(10)
        assert raised.value.rcvd.code == 1001


def test_there_are_only_so_many_pages(monkeypatch):
    monkeypatch.setattr(limits, "CLIENTS_MAX", 2)
    with open_dashboard() as consumer, Pageless(consumer) as one:
        with Pageless(consumer) as two, Pageless(consumer) as three:
            one.until(lambda p: p.counts)
            two.until(lambda p: p.counts)
            with pytest.raises(ConnectionClosed) as raised:
                three.drain(10)
            assert raised.value.rcvd.code == 1013
        eventually(lambda: len(consumer.server.connections) == 1)
        with Pageless(consumer) as four:
            four.until(lambda p: p.counts)


def stalled_client(consumer):
    """Return a connection that opened the live socket and will not read from it."""
    parts = urlsplit(consumer.address)
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect((parts.hostname, parts.port))
    peer.sendall(
        f"GET /live HTTP/1.1\r\nHost: {parts.netloc}\r\nOrigin: http://{parts.netloc}\r\n"
        f"Cookie: {cookie_of(consumer)}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    text = json.dumps({"subscribe": {"request": 1}}).encode()
    peer.sendall(struct.pack("!BB4x", 0x81, 0x80 | len(text)) + text)  # masked with zeros
    return peer


def buffered(consumer):
    """Return the bytes that wait in the server for slow pages."""
    return [connection.transport.get_write_buffer_size() for connection in list(consumer.server.connections)]


def wide_frame(tokens=500, layers=64):
    """Return a frame that is much news, as often as it is given: every value of it counts as changed."""
    return make_frame([("r1", tokens, 0, tokens)], [(layer, "post_block") for layer in range(layers)])


def test_a_page_that_does_not_read_stalls_nobody_and_grows_nothing(monkeypatch):
    monkeypatch.setattr(limits, "UNSEEN_S", 0.01)
    monkeypatch.setattr(limits, "UPDATES_PER_S_MAX", 500)
    frame, most, slowest = wide_frame(), 0, 0.0
    with open_dashboard() as consumer, stalled_client(consumer) as stalled, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model(64))
        consumer.on_frame(frame)
        page.until(lambda p: p.requests)
        page.select(1)
        page.until(lambda p: p.columns == 500)
        number = full = 0  # rounds; those since the kernel takes no more for the page that does not read
        while full < 50:
            begun = time.thread_time()
            consumer.on_frame(frame)
            slowest = max(slowest, time.thread_time() - begun)
            page.until(lambda p, n=number: p.merged >= n + 2)
            most = max([most, *buffered(consumer)])
            number, full = number + 1, full + (most > 0)
        sent = page.received_bytes / page.merged
        assert most < 2 * sent + limits.WRITE_BUFFER_BYTES
        assert slowest < 0.5
        assert len(consumer.server.connections) == 2
        assert stalled.fileno() > 0


def test_a_page_that_never_reads_is_cut_off(monkeypatch):
    monkeypatch.setattr(limits, "STALL_S_MAX", 0.3)
    monkeypatch.setattr(limits, "UNSEEN_S", 0.01)
    monkeypatch.setattr(limits, "UPDATES_PER_S_MAX", 500)
    frame = wide_frame()

    def cut_off():
        consumer.on_frame(frame)
        return consumer.counted["pages_stalled"] == 1 and not consumer.server.connections

    with open_dashboard() as consumer, stalled_client(consumer):
        consumer.on_session("engine-1", make_model(64))
        eventually(cut_off)


def flood(consumer, number):
    """Return connections that were opened, as fast as it goes, and say nothing."""
    parts = urlsplit(consumer.address)
    return [socket.create_connection((parts.hostname, parts.port), 20) for _ in range(number)]


def test_connections_without_a_token_are_bounded_and_a_page_still_opens():
    with open_dashboard() as consumer, contextlib.ExitStack() as opened:
        most = 0
        for _ in range(12):
            for peer in flood(consumer, 25):
                opened.enter_context(peer)
            most = max(most, len(consumer.server.visitors))
        eventually(lambda: consumer.counted["visitors_cut"] == 300 - limits.VISITORS_MAX)
        assert most <= limits.VISITORS_MAX
        with Pageless(consumer) as page:
            page.until(lambda p: p.counts)
            assert len(consumer.server.visitors) < limits.VISITORS_MAX  # a page took the place of one
            for peer in flood(consumer, 50):
                opened.enter_context(peer)
            consumer.on_session("engine-1", make_model())
            page.until(lambda p: p.engines)  # what is open is not cut off
        assert cookie_of(consumer)


def test_a_connection_that_says_nothing_is_over_in_time(monkeypatch):
    monkeypatch.setattr(limits, "OPEN_S_MAX", 0.3)
    with open_dashboard() as consumer, contextlib.ExitStack() as opened:
        for peer in flood(consumer, 5):
            opened.enter_context(peer)
        eventually(lambda: len(consumer.server.visitors) == 5)
        eventually(lambda: not consumer.server.visitors)


WITHOUT_DESCRIPTORS = """
import os, resource, sys
from tests.kit.dashboards import open_dashboard

with open_dashboard() as consumer:
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    print(consumer.address, flush=True)
    sys.stdin.readline()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    print(consumer.counted["failures"], flush=True)
    print([text for text, _ in consumer._process.troubles], file=sys.stderr)
    sys.stdin.readline()
"""


def test_a_process_without_descriptors_says_so_once_and_goes_on():
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        parts = urlsplit(process.stdout.readline().strip())
        with contextlib.ExitStack() as opened:
            for _ in range(10):
                opened.enter_context(socket.create_connection((parts.hostname, parts.port), 20))
            # The event loop tries again each second, and must do so more than once.
            time.sleep(2.5)
        process.stdin.write("\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) >= 2
        connection = HTTPConnection(parts.netloc, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        _, errors = process.communicate("\n", timeout=30)
    assert errors.count("Too many open files") == 1, errors
    assert "Traceback" not in errors
