"""Dashboards for tests: real servers, and a client that keeps what a page would."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections import Counter
from http.client import HTTPConnection
from urllib.parse import urlsplit

import numpy as np
from websockets.sync.client import connect

from capflow_dashboard import consumer as consumers
from capflow_dashboard.board.board import Board
from capflow_dashboard.consumer import Dashboard, DashboardConfig
from capflow_dashboard.lens.desk import LensDesk
from capflow_dashboard.lens.rows import KeptRows
from capflow_dashboard.pages import PageFiles
from capflow_dashboard.server import PageServer
from capflow_dashboard.serving import BoardWriter, again_of, desk_of, labels_of, lens_of
from capflow_dashboard.views.alerts.book import AlertBook
from capflow_dashboard.views.alerts.rules import read_rules
from capflow_dashboard.views.stored import StoredRows
from tests.kit.checked import checked
from tests.kit.frames import row_of


class CountingContext:
    """What a hub gives a consumer."""

    def __init__(self):
        self.counted = Counter()
        self.status = {"version": "test"}

    def act(self, action):
        raise AssertionError("a dashboard changes nothing")

    def count(self, name, amount=1):
        self.counted[name] += amount

    def hub_status(self):
        return self.status


def context():
    return CountingContext()


class NearProcess:
    """Serves the page in this process, in place of `PageProcess`, so that a test can look into it."""

    def __init__(self, setup, on_count, on_action):
        self.board = Board(setup.requests_max, setup.tokens_max)
        self.board.labels = labels_of(setup.labels) if setup.labels else {}
        self.board.alerts = AlertBook(read_rules(setup.alerts, "alerts"))
        self.desk = desk_of(setup, self.board, on_action)
        self.rows = KeptRows()
        self.lens = LensDesk(
            self.board, self.rows, lens_of(setup.lens) if setup.lens else None, other_weights=setup.other_weights
        )
        # The runs that would be logged.
        self.runs = []
        self.again = again_of(setup, self.board, self.desk, lambda text, event: self.runs.append((text, event)))
        self.server = PageServer(
            setup.host,
            setup.port,
            self.board,
            PageFiles(setup.token, steers=self.desk.allowed),
            self.desk,
            self.lens,
            self.again,
            StoredRows(self.board, setup.data),
            on_count=lambda name: on_count(name, 1),
            on_log=lambda text, event, _: self.troubles.append((text, event)),
            on_health=self._set_health,
        )
        self.troubles = []
        self.health_wanted = False
        self._writer = BoardWriter(
            self.board, self.rows, consumers.load_probes(setup.probes, "consumers.dashboard.probes"), self.desk
        )

    @property
    def port(self):
        return self.server.port

    def start(self):
        self.server.start()

    def send(self, message, rows=()):
        problems = self._writer.take(message, b"".join(bytes(part) for part in rows))
        self.troubles += [(problem, {}) for problem in problems]

    def stop(self):
        self.server.stop()

    def _set_health(self, wanted):
        self.health_wanted = wanted


@contextlib.contextmanager
def dashboard(**options):
    """Yield a dashboard that is checked and not open; on any free port unless the options name one."""
    token = options.pop("token", None)
    consumer = Dashboard(DashboardConfig(**({"port": 0} | options)))
    checked(consumer)
    consumer._token = token or consumer._token
    yield consumer


@contextlib.contextmanager
def open_dashboard(*, near=True, **options):
    """Yield a dashboard that serves; `counted` is what it counted, `closed` whether it is over.

    near: whether it serves in this process; `consumer.server` and `consumer.board` are its parts then.
    """
    with dashboard(**options) as consumer, served_near() if near else contextlib.nullcontext():
        hub = context()
        consumer.context = hub
        consumer.counted = hub.counted
        consumer.closed = False
        consumer.open(hub)
        if near:
            consumer.server, consumer.board = consumer._process.server, consumer._process.board
        try:
            yield consumer
        finally:
            consumer.closed = True
            consumer.close()


@contextlib.contextmanager
def served_near():
    """Let dashboards that are opened in this block serve in this process."""
    from capflow_dashboard import process

    before = process.PageProcess
    process.PageProcess = NearProcess
    try:
        yield
    finally:
        process.PageProcess = before


def norm_of(request, site, position, dtype="float32", hidden=8):
    """Return the norm of a row of `frames.row_of`, in float64."""
    return float(np.linalg.norm(row_of(request, site, position, hidden, dtype).astype(np.float64)))


def cookie_of(consumer):
    """Return the cookie that the page gets for its token."""
    parts = urlsplit(consumer.link)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.request("GET", "/session", headers={"Authorization": f"Bearer {parts.fragment.removeprefix('token=')}"})
    response = connection.getresponse()
    response.read()
    connection.close()
    assert response.status == 204
    return response.getheader("Set-Cookie").partition(";")[0]


class MergedTokens:
    """The tokens of one request, merged as the page does."""

    def __init__(self):
        # Messages with tokens.
        self.merged = 0
        # How many of these messages sent all tokens again.
        self.fresh = 0
        self.base, self.series, self.ids, self.texts, self.events = 0, [], [], [], []
        self.baseline, self.steered = None, set()
        self.values = np.empty((0, 0), np.float32)

    @property
    def columns(self):
        return len(self.ids)

    def merge(self, detail, numbers):
        self.merged += 1
        if detail["fresh"]:
            self.fresh += 1
            self.base, self.series, self.ids, self.texts = detail["base"], detail["series"], [], []
            self.values = np.empty((len(self.series), 0), np.float32)
            self.events, self.steered = [], set()
        self.baseline = detail.get("baseline", self.baseline)
        self.events += detail.get("events", [])
        runs = detail["steered"]
        for first, end in zip(runs[::2], runs[1::2], strict=True):
            self.steered |= set(range(first, end))
        first, end = detail["first"], detail["first"] + detail["count"]
        assert first <= len(self.ids)
        self.ids[first:end] = detail["ids"]
        self.texts[first:end] = detail["texts"]
        if end > self.values.shape[1]:
            room = np.full((len(self.series), end - self.values.shape[1]), np.nan, np.float32)
            self.values = np.concatenate([self.values, room], axis=1)
        self.values[:, first:end] = numbers.reshape(len(self.series), detail["count"])


class Pageless(MergedTokens):
    """The live socket without the page: merges what comes, as the page does."""

    def __init__(self, consumer, cookie=None):
        super().__init__()
        parts = urlsplit(consumer.address)
        self._connecting = connect(
            f"ws://{parts.netloc}/live",
            origin=f"http://{parts.netloc}",
            additional_headers={"Cookie": cookie or cookie_of(consumer)},
            compression=None,
            max_size=None,
        )
        # Set by `with`.
        self.socket = None
        self.hello, self.heartbeats = {}, []
        self.engines, self.counts, self.requests, self.sparks, self.health = [], {}, {}, {}, {}
        # Tokens in each second.
        self.rates = []
        self.received_bytes = 0
        self.messages = 0
        # The answers to asks for lenses, in the order in which they came.
        self.lenses = []
        # The last answer to an ask for stored rows.
        self.stored = {}
        self.acks, self.steering = [], None
        # News of its runs, in the order in which it came.
        self.again = []
        self.population = {}
        # The states of rules, and all changes.
        self.alerts, self.changes = [], []
        # The tokens of the request that it is compared with.
        self.other = MergedTokens()
        # The number of the last update, and whether updates are answered.
        self.seq, self.answers = 0, True
        self._shown = {}

    def __enter__(self):
        self.socket = self._connecting.__enter__()
        return self

    def __exit__(self, *why):
        self._connecting.__exit__(*why)

    def select(self, key):
        self.subscribe(request=key)

    def subscribe(self, **shown):
        self._shown |= shown
        self.send(subscribe=self._shown)

    def send(self, **message):
        self.socket.send(json.dumps(message))

    def ask(self, request, position, id=1):
        """Ask for the lens of a token."""
        self.socket.send(json.dumps({"lens": {"id": id, "request": request, "position": position}}))

    def lens(self, request, position, id=1):
        """Ask for the lens of a token, and return the answer."""
        count = len(self.lenses)
        self.ask(request, position, id)
        return self.until(lambda page: page.lenses[count:], 60.0)[0]

    def until(self, condition, limit_s=20.0):
        """Take messages until the condition holds; return its value."""
        deadline = time.monotonic() + limit_s
        while not (result := condition(self)):
            self.take(self.socket.recv(timeout=max(0.0, deadline - time.monotonic())))
        return result

    def drain(self, limit_s):
        """Take messages until the connection is closed, which raises ConnectionClosed."""
        self.until(lambda _: False, limit_s)

    def take(self, message):
        self.received_bytes += len(message)
        self.messages += 1
        (length,) = struct.unpack_from("<I", message)
        head = json.loads(message[4 : 4 + length])
        numbers = np.frombuffer(message, "<f4", offset=4 + length)
        assert length % 4 == 0
        self.hello = head.get("hello", self.hello)
        self.heartbeats += [head["heartbeat"]] if "heartbeat" in head else []
        self.engines = head.get("engines", self.engines)
        self.counts = head.get("counts", self.counts)
        self.rates += head.get("rates", {}).get("tokens", [])
        for request in head.get("requests", []):
            self.requests[request["key"]] = self.requests.get(request["key"], {}) | request
        self.sparks |= head.get("sparks", {})
        self.health = head.get("health", self.health)
        self.population = head.get("population", self.population)
        if "alerts" in head:
            self.alerts = head["alerts"]["states"]
            self.changes += head["alerts"]["changes"]
        self.acks += head.get("acks", [])
        self.steering = head.get("steering", self.steering)
        self.stored = head.get("stored", self.stored)
        for key in head.get("gone", []):
            del self.requests[key]
        if "lens" in head:
            assert "seq" not in head
            self.lenses.append(head["lens"])
        if "again" in head:
            assert "seq" not in head
            self.again.append(head["again"])
        rest = numbers
        if "other" in head:
            at = head["other"]["at"]
            numbers, rest = numbers[:at], numbers[at:]
            self.other.merge(head["other"], rest)
        if "detail" in head:
            self.merge(head["detail"], numbers)
        else:
            assert not numbers.size
        self.seq = head.get("seq", self.seq)
        if "seq" in head and self.answers:
            self.see()

    def see(self):
        """Say that the last update is drawn."""
        self.socket.send(json.dumps({"seen": self.seq, "frame_ms": 1.5}))
