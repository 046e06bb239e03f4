"""A real HTTP server with OpenAI's routes for completions, whose answers a test writes."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from capflow_dashboard.again.stream import STEERED_HEADER


def chunk(text, ids, finish=None):
    """Return an event with a part of a completion."""
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Answering(BaseHTTPRequestHandler):
    """Answers one connection by the functions of its server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers), None))
        self.server.models(self)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        try:
            self.server.answer(self, body)
        except OSError:
            self.close_connection = True

    def send(self, status, body=b"", kind="application/json", **headers):
        """Send an answer with a length."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def begin(self, kind="text/event-stream; charset=utf-8", *, steers=True):
        """Send the head of a stream."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        if steers:
            self.send_header(STEERED_HEADER, "k")
        self.end_headers()

    def part(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self):
        self.part(b"")

    def wait_gone(self, limit_s=20):
        """Wait until the client has closed the connection; note that it has."""
        self.connection.settimeout(limit_s)
        if self.connection.recv(1) == b"":
            self.server.gone.append(self)

    def name_of(self, body):
        return "steered" if any("steering" in name for name in body) else "plain"


def usual(words):
    """Return an answer: the words of `plain` or `steered`, a token each with its number as id, then the end."""

    def answer(handler, body):
        handler.begin()
        side = words[handler.name_of(body)]
        for number, word in enumerate(side):
            ids = [sum(map(ord, word)) % 1000]
            handler.part(chunk(word, ids, "length" if number + 1 == len(side) else None))
        handler.part(DONE)
        handler.end()

    return answer


def held(handler, body):
    """Answer with one token, and then with nothing until the client is gone."""
    handler.begin()
    handler.part(chunk("one", [1]))
    handler.wait_gone()


def broken(status=200, body=b"{}", kind="application/json", **headers):
    """Return an answer that is no stream."""
    return lambda handler, _: handler.send(status, body, kind, **headers)


@contextlib.contextmanager
def completions(answer, *, models=("test-model",)):
    """Yield a server; `asked` is what it was asked, as (path, headers, body), `gone` the streams that were closed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    server.asked, server.gone, server.answer = [], [], answer
    listed = json.dumps({"object": "list", "data": [{"id": model} for model in models]}).encode()
    server.models = lambda handler: handler.send(200, listed)
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
