"""Dashboards for tests: real servers, and a client that keeps what a page would."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections import Counter
from urllib.parse import urlsplit

import numpy as np
from websockets.sync.client import connect

from capflow_dashboard.consumer import Dashboard, DashboardConfig
from tests.kit.checked import checked
from tests.kit.frames import row_of


class CountingContext:
    """What a hub gives a consumer."""

    def __init__(self):
        self.counted = Counter()

    def act(self, action):
        raise AssertionError("a dashboard changes nothing")

    def count(self, name, amount=1):
        self.counted[name] += amount


def context():
    return CountingContext()


@contextlib.contextmanager
def dashboard(**options):
    """Yield a dashboard that is checked and not open; on any free port unless the options name one."""
    consumer = Dashboard(DashboardConfig(**({"port": 0} | options)))
    checked(consumer)
    yield consumer


@contextlib.contextmanager
def open_dashboard(**options):
    """Yield a dashboard that serves; `counted` is what it counted, `closed` whether it is over."""
    with dashboard(**options) as consumer:
        hub = context()
        consumer.counted = hub.counted
        consumer.closed = False
        consumer.open(hub)
        try:
            yield consumer
        finally:
            consumer.closed = True
            consumer.close()


def norm_of(request, site, position, dtype="float32", hidden=8):
    """Return the norm of a row of `frames.row_of`, in float64."""
    return float(np.linalg.norm(row_of(request, site, position, hidden, dtype).astype(np.float64)))


class Pageless:
    """The live socket without the page: merges what comes, as the page does."""

    def __init__(self, consumer):
        parts = urlsplit(consumer.address)
        self._connecting = connect(
            f"ws://{parts.netloc}/live?{parts.query}", origin=f"http://{parts.netloc}", compression=None, max_size=None
        )
        # Set by `with`.
        self.socket = None
        self.engines, self.counts, self.requests = [], {}, {}
        # Tokens in each second.
        self.rates = []
        self.received_bytes = 0
        # Messages with tokens.
        self.merged = 0
        # How many of these messages sent all tokens again.
        self.fresh = 0
        self.base, self.series, self.ids, self.texts = 0, [], [], []
        self.values = np.empty((0, 0), np.float32)

    def __enter__(self):
        self.socket = self._connecting.__enter__()
        return self

    def __exit__(self, *why):
        self._connecting.__exit__(*why)

    @property
    def columns(self):
        return len(self.ids)

    def select(self, key):
        self.socket.send(json.dumps({"select": key}))

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
        (length,) = struct.unpack_from("<I", message)
        head = json.loads(message[4 : 4 + length])
        numbers = np.frombuffer(message, "<f4", offset=4 + length)
        assert length % 4 == 0
        self.engines = head.get("engines", self.engines)
        self.counts = head.get("counts", self.counts)
        self.rates += head.get("rates", {}).get("tokens", [])
        self.requests |= {request["key"]: request for request in head.get("requests", [])}
        for key in head.get("gone", []):
            del self.requests[key]
        if "detail" in head:
            self._merge(head["detail"], numbers)
        else:
            assert not numbers.size

    def _merge(self, detail, numbers):
        self.merged += 1
        if detail["fresh"]:
            self.fresh += 1
            self.base, self.series, self.ids, self.texts = detail["base"], detail["series"], [], []
            self.values = np.empty((len(self.series), 0), np.float32)
        first, end = detail["first"], detail["first"] + detail["count"]
        assert first <= len(self.ids)
        self.ids[first:end] = detail["ids"]
        self.texts[first:end] = detail["texts"]
        if end > self.values.shape[1]:
            room = np.full((len(self.series), end - self.values.shape[1]), np.nan, np.float32)
            self.values = np.concatenate([self.values, room], axis=1)
        self.values[:, first:end] = numbers.reshape(len(self.series), detail["count"])
