"""Exports of the dashboard: the same numbers as on the board, in files that spreadsheets and readers accept."""

from __future__ import annotations

import csv
import http.client
import io
import socket
from urllib.parse import urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest

from capflow.capture.frame import Dropped
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow_dashboard import limits
from capflow_dashboard.views import exports
from tests.kit.dashboards import cookie_of, open_dashboard
from tests.kit.frames import make_frame, make_model, token_of
from tests.kit.pages import SITES, done, frame_of, with_norms, with_texts

FORMULAS = ["=1+1", "+1", "-2", "@SUM(A1)", "\tx", "\r=1", "  =1", "＝1", "\n=cmd|' /C calc'!A0"]  # noqa: RUF001


def get(consumer, path, cookie=None):
    """Return the status, the headers and the body of an answer."""
    parts = urlsplit(consumer.address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    headers = {} if cookie == "" else {"Cookie": cookie or cookie_of(consumer)}
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def table(body):
    """Return the columns of a CSV file by name."""
    names, *rows = csv.reader(io.StringIO(body.decode(), newline=""))
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def probe_file(tmp_path, name="truth", site=SITES[1], **more):
    path = tmp_path / f"{name}.safetensors"
    settings = {"names": (name,), "threshold": 12.5} | more
    Probe.make(site, np.eye(8)[3:4], **settings).save(path)
    return str(path)


def as_float(cells):
    return np.array([np.nan if cell == "NaN" else float(cell) if cell else -np.inf for cell in cells], np.float32)


def test_tokens_have_the_numbers_of_the_rows(tmp_path):
    norms = np.random.default_rng(3).uniform(1e-3, 1e6, (4, 30))
    norms[0, 4], norms[1, 5], norms[2, 6] = np.nan, np.inf, 0.1
    with open_dashboard(probes=(probe_file(tmp_path),)) as consumer:
        consumer.on_session("engine-1", make_model())
        # Two stages send their sites apart; the second lacks some positions.
        consumer.on_frame(frame_of("r1", norms[:2], prompt=20))
        second = make_frame([("r1", 20, 5, 25)], SITES[2:], seq=2, steered={"r1": (8, 11)})
        consumer.on_frame(with_norms(second, norms[2:, 5:]))
        status, headers, body = get(consumer, "/api/requests/1.csv")
        assert status == 200
        assert headers["Content-Type"] == "text/csv; charset=utf-8; header=present"
        assert headers["Content-Disposition"] == 'attachment; filename="capflow-r1.csv"'
        assert headers["Cache-Control"] == "no-store"
        read = table(body)
        _, _, packed = get(consumer, "/api/requests/1.parquet")
    assert body.count(b"\r\n") >= 31
    assert read["position"] == [str(position) for position in range(30)]
    assert read["part"] == ["prompt"] * 20 + ["generated"] * 10
    assert read["token_id"] == [str(token_of("r1", position)) for position in range(30)]
    assert read["steered"] == ["1" if 8 <= position < 11 else "0" for position in range(30)]
    expected = norms.astype(np.float32)
    expected[2:, :5] = -np.inf
    for place, site in enumerate(SITES):
        np.testing.assert_array_equal(as_float(read[f"norm {site}"]), expected[place])
    scores = expected[1].copy()
    # A row with infinity has a score that is no number.
    scores[5] = as_float(read["truth@post_block:1"])[5]
    np.testing.assert_array_equal(as_float(read["truth@post_block:1"]), scores)
    assert read["norm post_block:2"][:5] == [""] * 5
    assert read["norm post_block:0"][4] == "NaN"
    stored = pq.read_table(io.BytesIO(packed))
    assert stored.schema.metadata[b"request"] == b"r1"
    assert stored.column_names == list(read)
    assert stored["norm post_block:2"].null_count == 5
    np.testing.assert_array_equal(stored["norm post_block:0"].to_numpy(), expected[0])
    assert stored["position"].to_pylist() == list(range(30))


def test_no_text_is_a_formula_in_csv_and_every_text_is_whole_in_parquet():
    texts = [*FORMULAS, 'say "hi"', "a,b", "line\nbreak", "é😀", ""]
    with open_dashboard() as consumer:
        consumer.on_session("=engine", make_model())
        frame = make_frame([("=HYPERLINK(1)", 4, 0, len(texts))], SITES[:1], engine="=engine")
        consumer.on_frame(with_texts(frame, {"=HYPERLINK(1)": texts}))
        _, headers, body = get(consumer, "/api/requests/1.csv")
        _, _, packed = get(consumer, "/api/requests/1.parquet")
        _, _, listed = get(consumer, "/api/requests.csv")
    assert headers["Content-Disposition"] == 'attachment; filename="capflow-HYPERLINK_1.csv"'
    written = table(body)["text"]
    assert written == [f"'{text}" for text in FORMULAS] + texts[len(FORMULAS) :]
    assert pq.read_table(io.BytesIO(packed))["text"].to_pylist() == texts
    read = table(listed)
    assert read["id"] == ["'=HYPERLINK(1)"]
    assert read["engine"] == ["'=engine"]
    assert not any(cell[:1] in "=+-@" for column in read.values() for cell in column if cell)


def test_a_long_request_begins_where_its_tokens_are_kept():
    with open_dashboard(tokens_max=64) as consumer:
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 60, 0, 60)], SITES))
        consumer.on_frame(make_frame([("r1", 60, 60, 20)], SITES, seq=2))
        read = table(get(consumer, "/api/requests/1.csv")[2])
    assert read["position"] == [str(position) for position in range(16, 80)]
    assert read["text"] == [""] * 64


def test_the_list_has_all_requests_and_the_probes_of_each_engine(tmp_path):
    wide = probe_file(tmp_path, "wide", Site(1, "post_block"))
    deep = probe_file(tmp_path, "deep", Site(3, "post_block"))
    with open_dashboard(probes=(wide, deep)) as consumer:
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("r1", np.full((4, 6), 13.0)))
        consumer.on_request_done(done("r1", dropped=[Dropped(3, "queue_full")]))
        # The second engine has no fourth layer, so one of the probes does not fit.
        consumer.on_session("engine-2", make_model(num_layers=2))
        consumer.on_frame(frame_of("r2", np.full((2, 4), 5.0), engine="engine-2"))
        read = table(get(consumer, "/api/requests.csv")[2])
        assert len(consumer.board._engines["engine-2"].measures.problems) == 1
    assert read["id"] == ["r2", "r1"]
    assert read["status"] == ["live", "stop"]
    assert read["lost_rows"] == ["0", "3"]
    assert read["wide max"] == ["5.0", "13.0"]
    assert read["wide fired"] == ["0", "6"]
    assert read["deep mean"] == ["", "13.0"]
    assert all(one.endswith("+00:00") for one in read["started"])


def test_exports_need_a_session_and_a_request_that_is_kept(monkeypatch):
    with open_dashboard() as consumer:
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
        for path in ("/api/requests.csv", "/api/requests/1.csv", "/api/requests/1.parquet", "/api/x"):
            status, headers, body = get(consumer, path, cookie="")
            assert (status, b"r1" in body) == (403, False)
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert get(consumer, path, cookie="capflow-x=1")[0] == 403
        for path in ("/api/requests/2.csv", "/api/requests/1.txt", "/api/requests/%31.csv", "/api/", "/api/requests"):
            assert get(consumer, path)[0] == 404
        assert exports.formats() == ["csv", "parquet"]
        monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None)
        assert exports.formats() == ["csv"]
        assert get(consumer, "/api/requests/1.parquet")[0] == 404
        assert get(consumer, "/api/requests/1.csv?x=1")[0] == 200


@pytest.mark.long
def test_a_slow_reader_gets_all_and_the_server_goes_on(monkeypatch):
    monkeypatch.setattr(limits, "OPEN_S_MAX", 0.2)
    with open_dashboard() as consumer:
        consumer.on_session("engine-1", make_model())
        norms = np.random.default_rng(1).uniform(1, 2, (4, 30_000))
        consumer.on_frame(frame_of("r1", norms))
        parts = urlsplit(consumer.address)
        with socket.create_connection((parts.hostname, parts.port), timeout=20) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            cookie = cookie_of(consumer)
            head = f"GET /api/requests/1.csv HTTP/1.1\r\nHost: {parts.netloc}\r\nCookie: {cookie}\r\n\r\n"
            reader.sendall(head.encode())
            first = reader.recv(100)
            # A connection that sends nothing is cut off after the same time, and a page can be loaded.
            with socket.create_connection((parts.hostname, parts.port), timeout=20) as silent:
                assert silent.recv(1) == b""
            assert get(consumer, "/")[0] == 200
            content = first + b"".join(iter(lambda: reader.recv(1 << 16), b""))
    assert content.endswith(b"\r\n0\r\n\r\n")
    assert content.count(b",generated") + content.count(b",prompt") == 30_000


@pytest.mark.parametrize("count", [0, 1, limits.EXPORT_ROWS, limits.EXPORT_ROWS + 1])
def test_parts_join_without_a_seam(count):
    with open_dashboard() as consumer:
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 1 + count)], SITES[:1]))
        assert table(get(consumer, "/api/requests/1.csv")[2])["position"] == [str(one) for one in range(count + 1)]
