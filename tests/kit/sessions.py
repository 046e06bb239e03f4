"""Sessions of the protocol that are open."""

from __future__ import annotations

from capflow.capture.frame import Frame
from capflow.protocol import message
from capflow.protocol.credit import Intake, Pool
from capflow.protocol.message import (
    Hello,
    Welcome,
)
from capflow.protocol.session import HubSession, PeerSession
from tests.kit.frames import make_hello

HELLOS = {
    "worker": make_hello(),
    "scheduler": make_hello(role="scheduler"),
    "client": Hello("client", "", "c"),
}


def encoded(thing):
    return thing.encode() if isinstance(thing, Frame) else [message.encode(thing)]


def open_peer(role="worker", credit=1_000_000, last_seq=0, now=0.0, **welcome) -> PeerSession:
    peer = PeerSession(HELLOS[role])
    peer.connected(now)
    peer.receive(encoded(Welcome("hub", credit, last_seq, **welcome)), now)
    return peer


def open_hub(role="worker", window=1_000_000) -> HubSession:
    hub = HubSession()
    hub.receive(encoded(HELLOS[role]), 0.0)
    list(hub.welcome(Welcome("hub", window), 0.0, Intake(Pool(window)) if role == "worker" else None))
    return hub
