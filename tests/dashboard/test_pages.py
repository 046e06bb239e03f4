"""The dashboard's HTTP: the page's files, the session, and what is refused."""

from __future__ import annotations

import gzip
import socket
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from capflow_dashboard.pages import is_loopback
from tests.kit.dashboards import cookie_of, open_dashboard
from tests.kit.waiting import eventually


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
    return urlsplit(consumer.link).fragment.removeprefix("token=")


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_the_page_and_its_files_come_with_headers_that_hold_it_in(served):
    response, body = get(served, "/")
    assert response.status == 200
    assert body.startswith(b"<!doctype html>")
    policy = response.getheader("Content-Security-Policy")
    assert "default-src 'none'; script-src 'self';" in policy
    assert "unsafe" not in policy
    assert response.getheader("X-Content-Type-Options") == "nosniff"
    assert response.getheader("Referrer-Policy") == "no-referrer"
    assert response.getheader("Server") is None


@pytest.mark.parametrize(
    ("path", "kind"), [("/app.js", "text/javascript"), ("/style.css", "text/css"), ("/icon.svg", "image/svg")]
)
def test_files_of_the_package_need_no_token_and_are_sent_once(served, path, kind):
    response, body = get(served, path)
    assert response.status == 200
    assert response.getheader("Content-Type").startswith(kind)
    assert len(body) == int(response.getheader("Content-Length"))
    packed, small = get(served, path, {"Accept-Encoding": "br, gzip"})
    assert packed.getheader("Content-Encoding") == "gzip"
    assert gzip.decompress(small) == body
    again, nothing = get(served, path, {"If-None-Match": response.getheader("ETag")})
    assert (again.status, nothing) == (304, b"")


def test_a_token_is_exchanged_for_a_cookie_that_scripts_and_other_sites_cannot_use(served):
    response, _ = get(served, "/session", bearer(token_in(served)))
    assert response.status == 204
    cookie = response.getheader("Set-Cookie")
    assert cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")
    assert response.getheader("Cache-Control") == "no-store"
    pair = cookie.partition(";")[0]
    for header in (pair, f"other=1; {pair}", f'bad="x; {pair}; z'):
        assert get(served, "/session", {"Cookie": header})[0].status == 204
    for header in ("", pair[:-1], pair.replace("=", "=x"), "capflow=" + token_in(served), pair.upper()):
        assert get(served, "/session", {"Cookie": header})[0].status == 403


@pytest.mark.parametrize("sent", ["", "x", "Bearer", "bearer {t}", "Bearer {t}x", "Bearer x{t}", "Basic {t}", "{t}"])
def test_another_token_gets_no_cookie(served, sent):
    response, _ = get(served, "/session", {"Authorization": sent.format(t=token_in(served))})
    assert response.status == 403
    assert response.getheader("Set-Cookie") is None


@pytest.mark.parametrize("path", ["/live", "/live?token={t}", "/live#token={t}"])
def test_the_live_socket_takes_no_token_in_its_address(served, path):
    assert get(served, path.format(t=token_in(served)))[0].status == 403
    assert get(served, path.format(t=token_in(served)), bearer(token_in(served)))[0].status == 403


@pytest.mark.parametrize(
    "path",
    ["/nowhere", "/../consumer.py", "/web/app.js", "/%2e%2e/consumer.py", "//", "/app.js/", "/vendor/", "/vendor"],
)
def test_there_is_nothing_else(served, path):
    assert get(served, path)[0].status == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost@evil"]
)
@pytest.mark.parametrize("path", ["/", "/session", "/live", "/app.js"])
def test_another_host_is_refused(served, host, path):
    response, body = get(served, path, {"Host": host} | bearer(token_in(served)))
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
        assert get(served, "/", {"Host": host})[0].status == 200
        assert get(served, "/session", {"Host": host} | bearer(token_in(served)))[0].status == 204
    assert not is_loopback("127.0.0.1:x")
    assert not is_loopback("[::1")


@pytest.mark.parametrize(
    "origin", [None, "http://evil.example", "null", "http://127.0.0.1", "https://{host}", "http://{host}.evil.example"]
)
def test_another_origin_is_refused(served, origin):
    host = urlsplit(served.address).netloc
    cookie = {"Cookie": cookie_of(served)}
    with (
        pytest.raises(InvalidStatus) as raised,
        connect(
            f"ws://{host}/live", origin=origin and origin.format(host=host), additional_headers=cookie, compression=None
        ),
    ):
        pass
    assert raised.value.response.status_code == 403


def test_what_is_refused_is_counted():
    with open_dashboard() as consumer:
        get(consumer, "/session")
        get(consumer, "/nowhere")
        eventually(lambda: consumer.counted["requests_refused"] == 2)
