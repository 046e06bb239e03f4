"""Too large bodies, sent to a real HTTP server by clients that read the answer after they have sent all."""

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm")

import uvicorn

from capflow import limits
from tests.kit.apps import LIMIT, server
from tests.kit.hubs import free_port
from tests.kit.waiting import eventually

LARGE = 32 * limits.MIB  # more than sockets hold between two processes
PATHS = ["/v1/steering/set", "/v1/completions", "/v1/other"]


@pytest.fixture(scope="module", params=["httptools", "h11"])
def port(request, tmp_path_factory):
    app = server(tmp_path_factory.mktemp("store")).app
    port = free_port()
    serving = uvicorn.Server(uvicorn.Config(app, port=port, http=request.param, log_level="error"))
    thread = threading.Thread(target=serving.run)
    thread.start()
    eventually(lambda: serving.started)
    yield port
    serving.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_sends_all_of_its_body_reads_the_refusal(port, path, connection, announced):
    piece = b" " * limits.MIB
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = piece * (LARGE // len(piece)) if announced else iter([piece] * (LARGE // len(piece)))
    headers = {"Content-Type": "application/json", "Connection": connection}
    client.request("POST", path, body, headers, encode_chunked=not announced)
    answer = client.getresponse()
    assert answer.status == 413
    assert "--steering-body-bytes-max" in json.load(answer)["error"]["message"]
    client.close()


def test_a_client_that_asks_first_is_refused_and_sends_nothing(port):
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {LARGE}\r\nExpect: 100-continue\r\n\r\n"
        )
        client.sendall(head.encode())
        begun = time.monotonic()
        answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"100 Continue" not in answer
        assert time.monotonic() - begun < 20, "the connection is closed, and nothing waited for"


def test_a_client_that_reads_while_it_sends_is_answered_at_once(port):
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(f"POST /v1/steering/set HTTP/1.1\r\nHost: x\r\nContent-Length: {LARGE}\r\n\r\n".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_end_is_cut_off(port, monkeypatch):
    monkeypatch.setattr(limits, "BODY_DRAIN_BYTES_MAX", 4 * LIMIT)
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(b"POST /v1/steering/set HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b" " * limits.MIB + b"\r\n"
        with pytest.raises(OSError):
            client.sendall(piece * 100)


def test_a_body_that_stops_is_not_waited_for(port, monkeypatch):
    monkeypatch.setattr(limits, "BODY_DRAIN_S_MAX", 0.3)
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(f"POST /v1/steering/set HTTP/1.1\r\nHost: x\r\nContent-Length: {LARGE}\r\n\r\n".encode())
        assert b"413" in b"".join(iter(lambda: client.recv(65536), b""))


def test_an_ordinary_client_of_the_standard_library_reads_the_refusal(port):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/steering/set", b" " * LARGE)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 413
    refused.value.close()
