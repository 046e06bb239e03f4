"""Hubs, links and consumers for tests: all of them real."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest
import zmq

from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from capflow.protocol import message
from capflow.protocol.message import Beat
from capflow.transport.links.scheduler import SchedulerLink
from capflow.transport.links.worker import WorkerLink
from tests.kit.frames import assert_rows, make_hello

EVERYTHING = CaptureSpec({"post_block": "all"})


class Recorder(Consumer):
    """Keeps what it is told, checks every row, and can be held up."""

    name = "recorder"
    reads_requests = False

    def __init__(self, name="recorder", spec=EVERYTHING, *, held=False, fails_on=(), reads_requests=False):
        super().__init__(None)
        self.name = name
        self.reads_requests = reads_requests
        self._spec = spec
        # Requests whose frames raise.
        self.fails_on = fails_on
        # What `on_frame` waits for.
        self.go = threading.Event()
        # Set while `on_frame` waits.
        self.waiting = threading.Event()
        if not held:
            self.go.set()
        self.events = []
        # By request.
        self.rows = Counter()
        # (request, site, position), in the order given.
        self.positions = []
        self.seqs = []
        self.threads = set()
        self.idle = 0
        # By request.
        self.done = {}

    def spec(self):
        return self._spec

    def open(self, context):
        self._note("open")
        self.context = context

    def on_session(self, engine, model):
        self._note(("session", engine))

    def on_frame(self, frame):
        self.threads.add(threading.current_thread())
        if not self.go.is_set():
            self.waiting.set()
            assert self.go.wait(60)
        for chunk in frame.chunks():
            if chunk.request.id in self.fails_on:
                raise ValueError(f"no {chunk.request.id}")
            self.rows[chunk.request.id] += assert_rows(chunk)
            self.positions += [
                (chunk.request.id, site, chunk.start + offset)
                for site in chunk.sites
                for offset in range(chunk.rows.shape[1])
            ]
        self.seqs.append(frame.header.seq)

    def on_request_done(self, done):
        self._note(("done", done.request))
        self.done[done.request] = done
        return CaptureResult("ok", payload={"rows": self.rows[done.request]})

    def on_idle(self):
        self.idle += 1

    def close(self):
        self._note("close")

    def _note(self, event):
        self.threads.add(threading.current_thread())
        self.events.append(event)


class Later(Recorder):
    """Has the result of a request when who tests says so, or at its close."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # By request.
        self.futures = {}

    def on_request_done(self, done):
        super().on_request_done(done)
        future = self.futures[done.request] = Future()
        return future

    def close(self):
        for future in self.futures.values():
            if not future.done():
                future.set_result(CaptureResult("ok"))
        super().close()


def configured(consumer, policy="block", queue_bytes_max=None, **spill):
    return ConfiguredConsumer.of(consumer, policy=policy, queue_bytes_max=queue_bytes_max, **spill)


@contextlib.contextmanager
def running_hub(address, *consumers, drain_s=20.0, **kwargs):
    """Run a hub with consumers, each given as one or as what `configured` returns."""
    made = [c if isinstance(c, ConfiguredConsumer) else configured(c) for c in consumers]
    hub = Hub(str(address), made, **kwargs)
    hub.start()
    try:
        yield hub
    finally:
        for consumer in made:
            if isinstance(consumer.consumer, Recorder):
                consumer.consumer.go.set()
        hub.stop(drain_s)


@contextlib.contextmanager
def worker_link(address, hello=None, *, wait=True, **kwargs):
    """Run a worker's link; connected unless told otherwise."""
    link = WorkerLink(str(address), hello or make_hello(), **kwargs)
    link.start()
    try:
        if wait:
            assert link.wait_welcome(20), link.refusal
        yield link
    finally:
        link.close(0.5)


@contextlib.contextmanager
def scheduler_link(address, hello=None, *, wait=True, **kwargs):
    """Run a scheduler's link; connected unless told otherwise."""
    link = SchedulerLink(str(address), hello or make_hello(role="scheduler", boot="scheduler"), **kwargs)
    try:
        if wait:
            assert link.wait_welcome(20), link.refusal
        yield link
    finally:
        link.close()


@pytest.fixture
def address():
    """Return an ipc address; pytest's own directories are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        yield f"ipc://{directory}/h"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def raw_peer(address):
    """A DEALER that says what it likes."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.set(zmq.LINGER, 0)
    peer.connect(str(address))
    try:
        yield peer
    finally:
        peer.close()
        context.term()


def answer(peer, limit_s=20.0):
    """Return the next message that a raw peer gets; signs of life are none."""
    deadline = time.monotonic() + limit_s
    while peer.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        parts = peer.recv_multipart()
        if len(parts) > 1 or not isinstance(message.decode(parts[0]), Beat):
            return parts
    raise AssertionError("no answer")
