"""Targets that read messages. Each has inputs that are right, and reads one; it raises nothing but a CapflowError."""

from __future__ import annotations

import json
import logging
import socket
import tempfile
from pathlib import Path

import msgspec

from capflow.capture.spec import CaptureSpec
from capflow.hub.dispatch import Dispatch
from capflow.hub.peers.guard import Guard
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from capflow.protocol import message
from capflow.protocol.session import PeerSession
from capflow.steering.clamp import parse_clamps
from capflow.steering.vector import parse_steering
from capflow.transport.sockets import Router
from capflow_dashboard import wire
from tests.fuzz.mutator import mutated
from tests.kit.frames import make_hello
from tests.kit.mutations import CORPUS
from tests.kit.mutations import mutated as nearly_right

PARTS = b"\0|\0"
"""Between the parts of a message, in one input."""


class _Counting(Consumer):
    name = "counting"

    def spec(self):
        return CaptureSpec({"post_block": "all"})

    def on_frame(self, frame):
        for chunk in frame.chunks():
            assert chunk.rows.shape[1] == len(chunk.token_ids)


class _Failures(logging.Handler):
    """Raises what a hub only logs: that it failed at a message."""

    def emit(self, record):
        if getattr(record, "event", "") in ("hub_failed", "consumer_failed"):
            raise AssertionError(record.getMessage()) from (record.exc_info[1] if record.exc_info else None)

    def handleError(self, record):  # noqa: N802  the base class's
        raise  # noqa: PLE0704  what `emit` raised


class Messages:
    """One message.

    taken: whether every input must be accepted. If False, some inputs are meant for only some of the readers.
    """

    taken = False

    def mutate(self, choose, data, others):
        """Return an input after a mutation or a few."""
        return mutated(choose, data, others)


class Wire(Messages):
    """What a hub does with a message of a peer of each role, and a peer with one of its hub."""

    def __init__(self, _):
        self.inputs = [PARTS.join(parts) for parts in CORPUS]
        logger = logging.getLogger("capflow.hub")
        logger.propagate = False
        logger.addHandler(_Failures())

    def mutate(self, choose, data, others):
        """Return a message, half of the time one that decodes but for a little."""
        if choose.random() < 0.5:
            return PARTS.join(nearly_right(choose.getrandbits(48)))
        return super().mutate(choose, data, others)

    def read(self, data):
        """Give it to a hub that has met a worker, a scheduler and a client, as each of these; then to a worker."""
        parts = data.split(PARTS)
        posted = []
        dispatch = Dispatch(
            [ConfiguredConsumer.of(_Counting(None), policy="drop")],
            [],
            send=lambda *_: None,
            post=posted.append,
            status=dict,
            guard=Guard(),
        )
        for role in ("worker", "scheduler", "client"):
            dispatch.receive(role.encode(), [message.encode(make_hello(role=role))])
        for peer in (b"worker", b"scheduler", b"client", b"new"):
            dispatch.receive(peer, parts)
            while posted:
                posted.pop()()
        dispatch.acknowledge()
        dispatch.tick(1e9)
        while (item := dispatch.lanes[0].queue.get(0)) is not None:
            for delivery in getattr(item, "deliveries", ()):
                dispatch.lanes[0].consumer.on_frame(delivery.frame)
        peer = PeerSession(make_hello())
        peer.connected(0.0)
        peer.receive(parts, 1.0)


class Zmtp(Messages):
    """Bytes as they come to a hub's socket, before ZMQ makes messages of them."""

    GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
    READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"

    def __init__(self, root):
        self.root = Path(tempfile.mkdtemp(dir=root))
        self.root.chmod(0o700)
        hellos = [message.encode(make_hello()), message.encode(make_hello(role="client"))]
        framed = [b"\0" + bytes([len(each)]) + each for each in hellos if len(each) < 256]
        self.inputs = [self.GREETING + self.READY + b"".join(framed), self.GREETING, self.GREETING + self.READY]
        self.router = Router(f"ipc://{self.root}/s")

    def read(self, data):
        """Send it over a connection of its own; the socket serves on."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(1.0)
            peer.connect(str(self.root / "s"))
            try:
                peer.sendall(data)
                self.router.poll(0.001)
            except OSError:
                return  # closed on it
            while (received := self.router.receive()) is not None:
                self.router.send(received.peer, [b"x"])


class Page(Messages):
    """What a page of the dashboard says over its websocket."""

    taken = True

    def __init__(self, _):
        self.inputs = [
            b'{"seen":7,"frame_ms":12.5}',
            b'{"subscribe":{"request":3,"window":[1,2],"probe":"code","health":true}}',
            b'{"subscribe":{}}',
        ]

    def read(self, data):
        """Read it as bytes, and as text."""
        try:
            wire.decode(data)
        finally:
            wire.decode(data.decode("utf-8", "replace"))


class Body(Messages):
    """What a request over HTTP or gRPC, or a file of prompts, asks for, in JSON."""

    READERS = (
        lambda value: CaptureSpec.parse(value, where="capture"),
        lambda value: parse_steering(value, where="steering_vectors"),
        lambda value: parse_clamps(value, where="steering_clamps"),
    )

    def __init__(self, _):
        spec = {
            "hooks": {"post_block": [0, "1-3", -1], "mlp_in": "all"},
            "positions": [1, {"last": 3}, {"generated": [0, None]}],
        }
        packed = {"dtype": "float32", "shape": [1, 2], "layer_indices": [0], "data": "AAAAAAAAAAA=", "scales": [1.5]}
        self.inputs = [
            json.dumps(each).encode()
            for each in (
                spec,
                {**spec, "max_rows": 7, "dtype": "float32", "tag": "x"},
                {"post_block": {"0": [1.0, 2.0], "1": {"vector": [1, 2], "scale": 2.0, "relative": True}}},
                {"post_block": packed},
                {"post_block": {"0": {"vector": [1, 2], "value": 0}}},
                {"post_block": {"0": [{"vector": [1, 2], "min": -1, "max": 1, "strength": 0.5}]}},
            )
        ]

    def read(self, data):
        """Read it as each of what it may be."""
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        errors = []
        for reader in self.READERS:
            try:
                reader(value)
            except Exception as e:  # noqa: BLE001  it is raised again
                errors.append(e)
        for error in errors:
            raise error


MESSAGES = {"wire": Wire, "zmtp": Zmtp, "page": Page, "body": Body}
