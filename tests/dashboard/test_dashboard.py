"""The dashboard's board and server: real sockets, real clients. The page itself is in `test_dashboard_page`."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import capflow
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Dropped, RequestRows
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.plugins.configure import configure, load_plugins
from capflow.probes.probe import Probe
from capflow_dashboard import limits
from capflow_dashboard.board import Board, PageState
from capflow_dashboard.consumer import Dashboard, DashboardConfig
from capflow_dashboard.pages import is_loopback
from capflow_dashboard.rates import RateSeries
from capflow_dashboard.record import RequestRecord
from capflow_dashboard.series import MISSING, Measures, norms
from tests.kit.captured import write
from tests.kit.checked import checked
from tests.kit.dashboards import Pageless, context, dashboard, norm_of, open_dashboard
from tests.kit.frames import make_finished, make_frame, make_model, row_of, token_of
from tests.kit.hubs import address, running_hub, worker_link  # noqa: F401
from tests.kit.networks import network
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

SITES = tuple(Site(layer, "post_block") for layer in range(4))


def done(request, *, status="stop", prompt_length=4, dropped=()):
    return RequestDone("engine-1", request, status, prompt_length, 6, 24, 24, tuple(dropped))


# Numbers.


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 8), (18, 5, 640), (2, 700, 640), (1, 9, 65_536), (2, 0, 8)])
def test_norms_are_those_of_float64(dtype, shape):
    rows = np.random.default_rng(7).normal(0, 30, shape).astype(DTYPES[dtype])
    got = norms(rows)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.linalg.norm(rows.astype(np.float64), axis=-1), rtol=5e-6)


def test_norms_of_views_are_those_of_copies():
    rows = np.random.default_rng(7).normal(size=(6, 40, 64)).astype(DTYPES["bfloat16"])
    view = rows[1:5, 7:33]
    np.testing.assert_array_equal(norms(view), norms(view.copy()))


def test_nan_and_infinity_stay_what_they_are(recwarn):
    rows = np.ones((1, 3, 8), np.float32)
    rows[0, 0, 3], rows[0, 1, 3] = np.nan, -np.inf
    np.testing.assert_array_equal(norms(rows), np.array([[np.nan, np.inf, np.sqrt(8)]], np.float32))
    probe = Probe.make(Site(0, "post_block"), np.ones(8))
    indices, values = Measures(make_model(), SITES, [probe]).of(SITES[:1], rows)
    assert indices == [0, 4]
    np.testing.assert_array_equal(values[1], np.array([np.nan, np.nan, 8], np.float32))
    assert not len(recwarn)


def test_scores_are_those_of_float64():
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(4, 9, 8)).astype(DTYPES["bfloat16"])
    probe = Probe.make(Site(2, "post_block"), rng.normal(size=(2, 8)), [0.5, -1], names=("a", "b"), threshold=0.25)
    measures = Measures(make_model(), SITES, [probe])
    assert [(s.site.layer, s.probe, s.threshold) for s in measures.series[4:]] == [(2, "a", 0.25), (2, "b", 0.25)]
    indices, values = measures.of(SITES, rows)
    assert indices == [0, 1, 2, 3, 4, 5]
    expected = rows[2].astype(np.float64) @ probe.weight.astype(np.float64).T + probe.bias
    np.testing.assert_allclose(values[4:], expected.T, rtol=1e-5, atol=1e-6)


def test_sites_of_one_stage_give_their_own_series():
    probe = Probe.make(Site(3, "post_block"), np.ones(8))
    measures = Measures(make_model(), SITES, [probe])
    rows = np.ones((2, 1, 8), np.float32)
    assert measures.of((Site(3, "post_block"), Site(1, "mlp_in")), rows)[0] == [3, 4]
    assert measures.of((Site(1, "mlp_in"), Site(2, "mlp_in")), rows)[0] == []


def test_a_network_is_a_probe_like_any(tmp_path):
    path = tmp_path / "net.safetensors"
    save_file(network((8, 5, 1)), path, {"site": "post_block:2", "kind": "mlp"})
    (probe,) = Dashboard(DashboardConfig(probes=(str(path),)))._probes
    rows = np.random.default_rng(0).normal(size=(1, 3, 8)).astype(np.float32)
    indices, values = Measures(make_model(), SITES, [probe]).of((Site(2, "post_block"),), rows)
    np.testing.assert_allclose(values[indices.index(4)], probe.scores(rows[0])[:, 0], rtol=1e-6)


def test_a_probe_that_does_not_fit_is_named_and_left_out():
    measures = Measures(make_model(hidden=8), SITES, [Probe.make(Site(0, "post_block"), np.ones(9))])
    assert len(measures) == 4
    assert measures.problems == ["probe: weight: got 9 numbers, expected 8, the model's width"]


# The board.


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def board(requests_max=4, tokens_max=64, probes=()):
    made = Board(requests_max, tokens_max, clock=Clock(), wall=lambda: 1000.0)
    made.greet("engine-1", make_model(), SITES, probes)
    return made


def feed(made, frame):
    made.count(frame.header)
    for chunk in frame.chunks():
        made.put(frame.header.engine, chunk)


def keys_of(made):
    return {record.id: key for key, record in made._records.items()}


def test_a_full_board_forgets_the_oldest_that_is_over_and_not_looked_at():
    made = board(requests_max=3)
    for number, request in enumerate(("a", "b", "c")):
        feed(made, make_frame([(request, 2, 0, 2)], SITES, seq=number + 1))
    seen = PageState()
    made.look(seen, keys_of(made)["a"])
    for request in ("a", "b", "c"):
        made.finish(done(request))
    assert made.news(seen) is not None
    gone = keys_of(made)["b"]
    feed(made, make_frame([("d", 2, 0, 2)], SITES, seq=4))
    assert set(keys_of(made)) == {"a", "c", "d"}
    head, _ = made.news(seen)
    assert head["gone"] == [gone]
    assert [request["id"] for request in head["requests"]] == ["d"]


def test_when_all_run_new_ones_are_counted_and_never_half_kept():
    made = board(requests_max=2)
    feed(made, make_frame([("a", 2, 0, 2), ("b", 2, 0, 2), ("c", 2, 0, 2)], SITES))
    assert made.news(PageState())[0]["counts"] | {"bytes": 0} == {
        "open": 3,
        "done": 0,
        "not_kept": 1,
        "dropped": {},
        "tokens": 6,
        "rows": 24,
        "bytes": 0,
    }
    made.finish(done("a"))
    feed(made, make_frame([("c", 2, 2, 1)], SITES, seq=2))
    assert set(keys_of(made)) == {"a", "b"}
    made.finish(done("c"))
    assert made.news(PageState())[0]["counts"]["not_kept"] == 0
    assert not made._not_kept


def test_an_engine_that_is_gone_is_shown_as_long_as_a_request_of_it_is():
    made = board(requests_max=1)
    seen = PageState()
    for number in range(3):
        name = f"e{number}"
        made.greet(name, make_model(), SITES, ())
        feed(made, make_frame([("r", 2, 0, 2)], SITES, engine=name))
        made.finish(msgspec.structs.replace(done("r"), engine=name))
        made.forget(name)
    made.forget("engine-1")
    assert [engine["name"] for engine in made.news(seen)[0]["engines"]] == ["e2"]
    made.greet("e2", make_model(), SITES, ())
    feed(made, make_frame([("r", 2, 0, 2)], SITES, engine="e2", seq=2))
    made.forget("never-told")
    assert [engine["name"] for engine in made.news(seen)[0]["engines"]] == ["e2"]
    assert made._gone == set()


def test_an_id_that_comes_again_is_another_request():
    made = board()
    feed(made, make_frame([("a", 2, 0, 2)], SITES))
    made.finish(done("a", status="abort", dropped=[Dropped(3, "consumer_queue_full")]))
    feed(made, make_frame([("a", 2, 0, 1)], SITES, seq=2))
    head = made.news(PageState())[0]
    assert [(r["key"], r["status"], r["tokens"], r["rows_lost"]) for r in head["requests"]] == [
        (1, "abort", 2, 3),
        (2, "live", 1, 0),
    ]
    assert head["counts"]["dropped"] == {"consumer_queue_full": 3}


def test_a_step_of_several_stages_counts_once_and_a_new_boot_again():
    made = board()
    for _ in range(2):
        made.count(make_frame([("a", 2, 0, 2)], SITES, step=5, step_tokens=7).header)
    assert made.news(PageState())[0]["counts"]["tokens"] == 7
    made.greet("engine-1", make_model(), SITES, ())
    made.count(make_frame([("a", 2, 0, 2)], SITES, step=1, step_tokens=2).header)
    assert made.news(PageState())[0]["counts"]["tokens"] == 9


def test_an_engine_that_comes_back_goes_on_with_its_requests():
    made = board()
    feed(made, make_frame([("a", 2, 0, 2)], SITES))
    made.greet("engine-1", make_model(), SITES, ())
    feed(made, make_frame([("a", 2, 2, 1)], SITES, seq=2))
    assert made._records[1].count == 3
    made.greet("engine-1", make_model(num_layers=2), SITES[:2], ())
    feed(made, make_frame([("a", 2, 3, 1), ("b", 2, 0, 1)], SITES[:2], seq=3))
    assert made._records[1].count == 3
    assert len(made._records[2].measures) == 2


def test_a_page_with_nothing_new_is_told_nothing():
    made, seen = board(), PageState()
    feed(made, make_frame([("a", 2, 0, 2)], SITES))
    made.look(seen, 1)
    assert made.news(seen) is not None
    assert made.news(seen) is None
    made.look(seen, 0)
    made.look(seen, 1)
    assert made.news(seen) is None


def test_choosing_another_request_brings_all_of_it():
    made, seen = board(), PageState()
    feed(made, make_frame([("a", 2, 0, 2), ("b", 3, 0, 3)], SITES))
    for key in (1, 2, 1):
        made.look(seen, key)
        head, values = made.news(seen)
        assert head["detail"]["fresh"]
        assert head["detail"]["key"] == key
        assert values.shape == (4, key + 1)


def test_tokens_max_is_lowered_for_models_with_many_sites(monkeypatch):
    monkeypatch.setattr(limits, "VALUES_BYTES_MAX", 4 * 4 * 4 * 20)
    made = board(requests_max=4, tokens_max=1000)
    feed(made, make_frame([("a", 200, 0, 200)], SITES))
    assert made._records[1]._values.nbytes <= 4 * 4 * 20


@given(
    st.integers(16, 40),
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 50), st.integers(0, 3), st.booleans()), max_size=25),
)
@settings(max_examples=150, deadline=None)
def test_what_a_page_merges_is_what_came(tokens_max, puts):
    """Against a plain dictionary: any order of positions and sites, forgetting, and pages that look now and then."""
    measures = Measures(make_model(), SITES, ())
    record = RequestRecord(
        1, "e", "r", measures, prompt_length=4, base=puts[0][0] if puts else 0, tokens_max=tokens_max, started_s=0
    )
    expected, page = {}, None
    seen = -1
    for version, (start, length, row, looks) in enumerate(puts, 1):
        values = np.arange(length, dtype=np.float32)[None] + 1000 * version
        ids = list(range(start, start + length))
        record.put(version, start, ids, [str(i) for i in ids], [row], values)
        expected |= {(row, start + i): values[0, i] for i in range(length)}
        if looks or version == len(puts):
            fresh = page is None or page[0] != record.base
            change = record.since(-1 if fresh else seen)
            seen = version
            if change is not None:
                columns, news = change
                if fresh:
                    page = (columns["base"], {})
                for column in range(columns["count"]):
                    for series in range(4):
                        page[1][series, columns["base"] + columns["first"] + column] = news[series, column]
    assert record.count <= tokens_max
    if page is None:
        return
    kept = {(row, position) for row in range(4) for position in range(record.base, record.base + record.count)}
    assert {at: value for at, value in page[1].items() if value != MISSING} == {
        at: value for at, value in expected.items() if at in kept
    }
    assert max(position for _, position in expected) < record.base + tokens_max


def test_rates_are_told_by_whole_seconds_and_bounded():
    clock = Clock()
    rates = RateSeries(clock)
    rates.add(5, 50, 500)
    assert rates.since(-1) is None
    clock.now += 1
    rates.add(1, 1, 1)
    assert rates.since(-1) == {"last": 100, "tokens": (5,), "rows": (50,), "bytes": (500,)}
    assert rates.since(100) is None
    clock.now += 3
    assert rates.since(100) == {"last": 103, "tokens": (1, 0, 0), "rows": (1, 0, 0), "bytes": (1, 0, 0)}
    clock.now += 10_000
    assert len(rates.since(103)["tokens"]) == limits.RATES_S
    assert len(rates._past) == limits.RATES_S


# Options.


def test_the_plugin_brings_it_and_its_options_are_as_described():
    plugins = load_plugins()
    made = configure("dashboard", {"port": "0", "layers": "0+2", "probes": ""}, plugins)
    assert isinstance(made.consumer, Dashboard)
    assert made.policy.value == "skip"
    assert made.consumer.spec().hooks == {"post_block": [0, 2]}
    assert configure("dashboard", {"port": "0", "layers": "3"}, plugins).consumer.spec().hooks == {"post_block": [3]}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("host", "0.0.0.0", "host: got 0.0.0.0, expected one of 127.0.0.1, ::1, localhost; reach it from elsewhere"),
        ("host", "192.168.1.2", "host: got 192.168.1.2, expected"),
        ("port", 70_000, "port: got 70000, expected 0..65535; remove it"),
        ("port", -1, "port: got -1, expected 0..65535"),
        ("requests_max", 0, "requests_max: got 0, expected 1..512"),
        ("tokens_max", 15, "tokens_max: got 15, expected 16..32768"),
        ("token", "short", "token: got 5 characters, expected 16 or more letters"),
        ("token", "a/b?c&d=0123456789", "token: got 18 characters, expected 16 or more letters"),
        ("hook", "nowhere", "hooks: got nowhere, expected a hook"),
        ("positions", "some", "positions: got some, expected one of"),
        ("layers", "most", 'layers: got most, expected "all", layer numbers'),
    ],
)
def test_options_are_checked(option, value, message):
    with pytest.raises(UsageError) as raised:
        checked(Dashboard(DashboardConfig(**({"port": 0} | {option: value}))))
    assert f"consumers.dashboard.{message}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_token_is_not_repeated_in_an_error():
    with pytest.raises(UsageError) as raised:
        Dashboard(DashboardConfig(port=0, token="secret!")).check()
    assert "secret" not in str(raised.value)


def test_probes_are_read_and_their_sites_asked_for(tmp_path):
    Probe.make(Site(2, "mlp_in"), np.ones(8), names=("a",)).save(tmp_path / "a.safetensors")
    Probe.make(Site(3, "post_block"), np.ones(8), names=("b",)).save(tmp_path / "b.safetensors")
    paths = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    assert Dashboard(DashboardConfig(probes=paths)).spec().hooks == {"post_block": "all", "mlp_in": [2]}
    assert Dashboard(DashboardConfig(probes=paths, layers="0-1")).spec().hooks == {
        "post_block": [3, "0-1"],
        "mlp_in": [2],
    }
    assert Dashboard(DashboardConfig(probes=paths, layers=[0])).spec().hooks == {"post_block": [0, 3], "mlp_in": [2]}
    with pytest.raises(UsageError, match="probes: got a twice, expected different names"):
        checked(Dashboard(DashboardConfig(port=0, probes=[paths[0], paths[0]])))
    with pytest.raises(UsageError, match="no such file"):
        checked(Dashboard(DashboardConfig(port=0, probes=("nowhere.safetensors",))))


def test_a_port_in_use_is_one_line_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        consumer = Dashboard(DashboardConfig(port=port))
        for attempt in (consumer.check, lambda: consumer.open(context())):
            with pytest.raises(UsageError) as raised:
                attempt()
            assert str(raised.value) == (
                f"consumers.dashboard.port: got {port}, in use, expected a free port; "
                "end the program that uses it, or use port=0 for any free port"
            )


def test_the_address_is_known_once_open_and_the_port_free_once_closed():
    with open_dashboard(host="localhost") as consumer:
        parts = urlsplit(consumer.address)
        assert parts.hostname == "localhost"
        assert len(parts.query) > len("token=") + 20
        port = parts.port
    Dashboard(DashboardConfig(port=port)).check()


def test_each_start_has_a_token_of_its_own_unless_given():
    with open_dashboard() as one, open_dashboard() as other, open_dashboard(token="t" * 16) as given_one:
        assert urlsplit(one.address).query != urlsplit(other.address).query
        assert urlsplit(given_one.address).query == "token=" + "t" * 16


# The server.


def get(consumer, path, headers=None):
    """GET a path, with exactly these headers besides Host."""
    parts = urlsplit(consumer.address)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=10)
    sent = {"Host": parts.netloc} | (headers or {})
    connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@pytest.fixture(scope="module")
def served():
    with open_dashboard() as consumer:
        yield consumer


def token_in(consumer):
    return urlsplit(consumer.address).query


def test_the_page_and_its_files_come_with_headers_that_hold_it_in(served):
    response, body = get(served, f"/?{token_in(served)}")
    assert response.status == 200
    assert body.startswith(b"<!doctype html>")
    policy = response.getheader("Content-Security-Policy")
    assert "default-src 'none'; script-src 'self';" in policy
    assert response.getheader("X-Content-Type-Options") == "nosniff"
    assert response.getheader("Referrer-Policy") == "no-referrer"
    assert response.getheader("Cache-Control") == "no-store"
    assert response.getheader("Server") is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/app.js", "text/javascript"), ("/style.css", "text/css"), ("/icon.svg", "image/svg"), ("/plotly.js", "text/j")],
)
def test_files_of_the_package_need_no_token(served, path, kind):
    response, body = get(served, path)
    assert response.status == 200
    assert response.getheader("Content-Type").startswith(kind)
    assert len(body) == int(response.getheader("Content-Length"))
    assert "plotly" not in path or response.getheader("Cache-Control") == "private, max-age=3600"


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=x", "/live", "/?{t}&{t}", "/?other={t}", "/live?token=x"])
def test_no_token_no_page(served, path):
    response, body = get(served, path.format(t=token_in(served)))
    assert response.status == 403
    assert b"doctype" not in body


@pytest.mark.parametrize(
    "path", ["/nowhere", "/../consumer.py", "/web/app.js", "/%2e%2e/consumer.py", "//", "/app.js/"]
)
def test_there_is_nothing_else(served, path):
    assert get(served, path)[0].status == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost@evil"]
)
@pytest.mark.parametrize("path", ["/?{t}", "/live?{t}", "/app.js"])
def test_another_host_is_refused(served, host, path):
    response, body = get(served, path.format(t=token_in(served)), {"Host": host})
    assert response.status == 403
    assert b"loopback" in body


def test_no_host_and_two_hosts_are_refused(served):
    parts = urlsplit(served.address)
    for headers in (b"", b"Host: 127.0.0.1\r\nHost: evil.example\r\n"):
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as peer:
            peer.sendall(b"GET /app.js HTTP/1.1\r\n" + headers + b"\r\n")
            assert peer.recv(64).split()[1] in (b"400", b"403")


def test_any_port_is_a_tunnel_and_fine(served):
    for host in ("127.0.0.1:9999", "localhost:1", "[::1]:8765", "LOCALHOST"):
        assert get(served, f"/?{token_in(served)}", {"Host": host})[0].status == 200
    assert not is_loopback("127.0.0.1:x")
    assert not is_loopback("[::1")


def live_url(consumer):
    parts = urlsplit(consumer.address)
    return f"ws://{parts.netloc}/live?{parts.query}"


@pytest.mark.parametrize(
    "origin", [None, "http://evil.example", "null", "http://127.0.0.1", "https://{host}", "http://{host}.evil.example"]
)
def test_another_origin_is_refused(served, origin):
    host = urlsplit(served.address).netloc
    with (
        pytest.raises(InvalidStatus) as raised,
        connect(live_url(served), origin=origin and origin.format(host=host), compression=None),
    ):
        pass
    assert raised.value.response.status_code == 403


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


def test_results_say_where_and_keep_the_token_to_themselves():
    with open_dashboard() as consumer:
        consumer.on_session("engine-1", make_model())
        result = consumer.on_request_done(done("r1"))
        assert result.status == "ok"
        parts = urlsplit(consumer.address)
        assert result.payload == {"address": f"http://{parts.netloc}/"}
        assert consumer.on_request_done(done("r2", dropped=[Dropped(1, "x")])).status == "partial_error"


@pytest.mark.parametrize(
    "message", ["{}", "nonsense", '{"select": "1"}', '{"select": 1, "x": 2}', b"\xff\x00", "[" * 900]
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
        eventually(lambda: len(consumer._server.connections) == 1)
        with Pageless(consumer) as four:
            four.until(lambda p: p.counts)


def stalled_client(consumer):
    """Return a connection that opened the live socket and will not read from it."""
    parts = urlsplit(consumer.address)
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect((parts.hostname, parts.port))
    peer.sendall(
        f"GET /live?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nOrigin: http://{parts.netloc}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    text = json.dumps({"select": 1}).encode()
    peer.sendall(struct.pack("!BB4x", 0x81, 0x80 | len(text)) + text)  # masked with zeros
    return peer


def buffered(consumer):
    """Return the bytes that wait in the server for slow pages."""
    return [connection.transport.get_write_buffer_size() for connection in list(consumer._server.connections)]


def wide_frame(tokens=500, layers=64):
    """Return a frame that is much news, as often as it is given: every value of it counts as changed."""
    return make_frame([("r1", tokens, 0, tokens)], [(layer, "post_block") for layer in range(layers)])


def test_a_page_that_does_not_read_stalls_nobody_and_grows_nothing(monkeypatch):
    monkeypatch.setattr(limits, "UPDATES_PER_S_MAX", 500)
    frame, most, slowest = wide_frame(), 0, 0.0
    with open_dashboard() as consumer, stalled_client(consumer) as stalled, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model(64))
        consumer.on_frame(frame)
        page.until(lambda p: p.requests)
        page.select(1)
        page.until(lambda p: p.columns == 500)
        for number in range(100):
            begun = time.thread_time()
            consumer.on_frame(frame)
            slowest = max(slowest, time.thread_time() - begun)
            page.until(lambda p, n=number: p.merged >= n + 2)
            most = max([most, *buffered(consumer)])
        sent = page.received_bytes / page.merged
        assert page.received_bytes > 10 * limits.MIB  # more than the kernel takes for a page that does not read
        assert 0 < most < 2 * sent + limits.WRITE_BUFFER_BYTES
        assert slowest < 0.5
        assert len(consumer._server.connections) == 2
        assert stalled.fileno() > 0


def test_a_page_that_never_reads_is_cut_off(monkeypatch):
    monkeypatch.setattr(limits, "STALL_S_MAX", 0.3)
    monkeypatch.setattr(limits, "UPDATES_PER_S_MAX", 500)
    frame = wide_frame()

    def cut_off():
        consumer.on_frame(frame)
        return consumer.counted["pages_stalled"] == 1 and not consumer._server.connections

    with open_dashboard() as consumer, stalled_client(consumer):
        consumer.on_session("engine-1", make_model(64))
        eventually(cut_off)


def test_what_is_refused_is_counted():
    with open_dashboard() as consumer:
        get(consumer, "/")
        get(consumer, "/nowhere")
        eventually(lambda: consumer.counted["requests_refused"] == 2)


# In a hub.


def test_a_hub_feeds_it_and_answers_with_it(address):  # noqa: F811
    before = set(threading.enumerate())
    with dashboard(port=0, token="t" * 20) as consumer, running_hub(address, consumer) as hub:
        with Pageless(consumer) as page, worker_link(address) as link:
            page.until(lambda p: p.engines)
            first = make_frame([("r1", 4, 0, 4)], SITES)
            link.send(first.header, first.payload)
            last = make_frame([("r1", 4, 4, 1)], SITES, seq=2, finished=[make_finished("r1", 4, 5, rows=20)])
            link.send(last.header, last.payload)
            page.until(lambda p: p.requests and p.requests[1]["status"] == "stop")
            page.select(1)
            page.until(lambda p: p.columns == 5)
            expected = [[norm_of("r1", site, position) for position in range(5)] for site in SITES]
            np.testing.assert_allclose(page.values, expected, rtol=2e-6)
            assert page.counts["done"] == 1
            assert page.counts["rows"] == 20
        assert hub.status()["consumers"]["dashboard"]["errors"] == 0
    assert len(set(threading.enumerate()) - before) < 20


def test_it_asks_nothing_of_requests_that_ask_for_other_rows():
    assert Dashboard.reads_requests is False
    assert RequestRows("r", 1, 0, ()).capture is None
    assert np.isfinite(row_of("r", SITES[0], 0)).all()


# Floods.


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
            most = max(most, len(consumer._server.visitors))
        eventually(lambda: consumer.counted["visitors_cut"] == 300 - limits.VISITORS_MAX)
        assert most <= limits.VISITORS_MAX
        with Pageless(consumer) as page:
            page.until(lambda p: p.counts)
            assert len(consumer._server.visitors) < limits.VISITORS_MAX  # a page took the place of one
            for peer in flood(consumer, 50):
                opened.enter_context(peer)
            consumer.on_session("engine-1", make_model())
            page.until(lambda p: p.engines)  # what is open is not cut off
        assert get(consumer, f"/?{urlsplit(consumer.address).query}")[0].status == 200


def test_a_connection_that_says_nothing_is_over_in_time(monkeypatch):
    monkeypatch.setattr(limits, "OPEN_S_MAX", 0.3)
    with open_dashboard() as consumer, contextlib.ExitStack() as opened:
        for peer in flood(consumer, 5):
            opened.enter_context(peer)
        eventually(lambda: len(consumer._server.visitors) == 5)
        eventually(lambda: not consumer._server.visitors)


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
        connection.request("GET", f"/?{parts.query}")
        assert connection.getresponse().status == 200
        _, errors = process.communicate("\n", timeout=30)
    assert errors.count("Too many open files") == 1, errors
    assert "Traceback" not in errors


def test_a_flood_costs_other_consumers_no_rows(tmp_path):
    """In a hub with 128 descriptors, of which a flood would take all."""
    write(tmp_path / "rows", {f"r{n}": (4, 30) for n in range(40)}, layout="packed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "capflow", "replay", tmp_path / "rows", "--steps-per-s", "300"]
    command += ["--consumer", "filesystem:root=again,layout=per_file,fsync=false"]
    command += ["--consumer", f"dashboard:port={port}"]
    limited = ["/bin/sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *command]
    with (
        subprocess.Popen(limited, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as opened,
    ):
        opened.callback(process.kill)
        peers = 0
        while process.poll() is None and peers < 700:
            try:
                opened.enter_context(socket.create_connection(("127.0.0.1", port), 1))
                peers += 1
            except OSError:
                # The pause between two tries.
                time.sleep(0.01)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "Too many open files" not in errors
    assert len(capflow.open(tmp_path / "again").requests()) == 40
