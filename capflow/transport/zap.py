"""Answers ZMQ's authentication requests (ZAP, ZMQ RFC 27), and makes keys.

Why this is not `zmq.auth.Authenticator`: it admits peers without a key (mechanism NULL), answers in a coroutine, and
takes 80 us an answer instead of 47. With it this file had 61 lines, without it 60.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from capflow.transport.keys import KeyPair

logger = logging.getLogger("capflow.hub")

DOMAIN = b"capflow"
"""A socket with this domain asks before it admits a peer."""

_ADDRESS = "inproc://zeromq.zap.01"
_REQUEST_PARTS = 7  # version, request, domain, address, identity, mechanism, public key
_BATCH = 64  # requests answered before the hub reads its messages again


class Zap:
    """Answers on one context's thread until `close`.

    admit: returns whether a public key may connect.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admit: Callable[[str], bool]) -> None:
        self._admit = admit
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answer the waiting requests; never waits."""
        for _ in range(_BATCH):
            try:
                version, request, *asked = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            user = asked[-1].hex() if len(asked) == _REQUEST_PARTS - 2 and asked[3] == b"CURVE" else ""
            verdict = (b"200", b"OK", user.encode()) if self._admits(user) else (b"400", b"not allowed", b"")
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart([version, request, *verdict, b""])

    def close(self) -> None:
        """Stop answering: no peer is admitted any more."""
        self.socket.close()

    def _admits(self, user: str) -> bool:
        try:
            return bool(user) and self._admit(user)
        except Exception:
            logger.exception("a key is refused, because checking it failed")
            return False


def new_key() -> KeyPair:
    """Return a new key."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())
