"""The two ends of a connection: a hub's `Router` and a peer's `Dealer`, each with a way to wake its thread.

With a hub's key in the address the connection is encrypted, and both sides prove their keys (CURVE, ZMQ RFC 26). A
connection is closed if the handshake takes too long or if the other machine is gone. A socket belongs to the thread
that opened it. Received parts are views of ZMQ's memory, which they keep alive. Large sent parts are not copied and
must not be changed.

No socket uses ZMQ's heartbeat: libzmq 4.3.5 aborts the process if the heartbeat is due on a connection that is closed
and not read to its end (https://github.com/zeromq/libzmq/issues/4364). Sessions have beats of their own, and TCP
keepalive detects machines that are gone.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from capflow import limits
from capflow.errors import CapflowError, explain
from capflow.protocol.session import Parts
from capflow.system import descriptors
from capflow.transport.address import hub_key, in_use, without_key
from capflow.transport.connections import Connections
from capflow.transport.keys import KeyPair
from capflow.transport.zap import DOMAIN, Zap

_MONITOR = "inproc://connections"
_EVENTS_BATCH = 1_024  # connection events handled before the hub reads its messages again
_COPY_BYTES_MAX = 16 * 1024  # a smaller part is copied, which is cheaper than tracking it
# What the system holds of what is sent over ipc and not read, if it may. Its default is three frames of 64 KiB: then
# both sides sleep and wake for each frame.
_UNREAD_BYTES = 1024 * 1024
# As plain numbers: Python takes longer to join the flags than ZMQ takes to queue a part.
_LAST = int(zmq.NOBLOCK)
_MORE = _LAST | int(zmq.SNDMORE)


class Waker:
    """Wakes the one thread that polls it, from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # Whether a byte is in the pair; set by `wake`, cleared by `clear`.
        self._awake = False

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the thread must wake."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the thread, if it is not awake already."""
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    def clear(self) -> None:
        """Clear the wake-up; call it before handling the work."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        self._awake = False

    def close(self) -> None:
        """Close the descriptors."""
        self._reader.close()
        self._writer.close()


class Event(enum.Enum):
    """An event of a connection."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    NOT_ALLOWED = "not allowed"
    """The hub does not know this peer's key; DISCONNECTED follows."""
    NO_HANDSHAKE = "no handshake"
    """One side has a key and the other has none or another; DISCONNECTED follows."""


_EVENTS = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Event.CONNECTED,
    zmq.EVENT_DISCONNECTED: Event.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Event.NOT_ALLOWED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Event.NO_HANDSHAKE,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Event.NO_HANDSHAKE,
}


def why_not(event: Event, address: str, key: KeyPair | None) -> str | None:
    """Return the message for an event that keys caused; None for other events."""
    if event is Event.NOT_ALLOWED and key is not None:
        do = f"on its machine: capflow keys allow {key.public} --name NAME --rights capture,read"
        return explain(f"the hub at {address} does not allow this key", do=do)
    if event is Event.NO_HANDSHAKE and not address.startswith("ipc://"):  # without keys the hub went away
        do = "use the address that the hub prints when it starts"
        return explain(f"keys of the hub at {address}", got="no key, or another one", expected="the hub's key", do=do)
    return None


class Received(NamedTuple):
    """A message that a hub received.

    peer: the connection.
    user: the peer's public key; empty without keys.
    """

    peer: bytes
    parts: Parts
    user: str


class Dealer:
    """One connection to a hub. It retries until it connects; after DISCONNECTED make a new Dealer.

    key: this peer's key, if the address has the hub's key.
    message_bytes_max: the largest part that it accepts.
    """

    def __init__(
        self,
        address: str,
        *,
        key: KeyPair | None = None,
        waker: Waker | None = None,
        message_bytes_max: int = limits.HEADER_BYTES_MAX,
    ) -> None:
        self._context = zmq.Context()
        # Whether `_monitor` exists and must be closed.
        self._watched = False
        try:
            self._open(address, key, message_bytes_max)
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._monitor, zmq.POLLIN)
            if waker is not None:
                self._poller.register(waker.fileno(), zmq.POLLIN)
            self._socket.connect(without_key(address))
        except zmq.ZMQError as e:
            self.close()
            expected, do = (
                "a hub's address, and a free descriptor",
                "see `capflow status` for the hub, `ulimit -n` for the descriptors",
            )
            raise CapflowError(explain(f"cannot connect to {address}", got=e.strerror, expected=expected, do=do)) from e

    def _open(self, address: str, key: KeyPair | None, message_bytes_max: int) -> None:
        self._context.set(zmq.MAX_SOCKETS, 8)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, int(limits.LINGER_S * 1000))
        self._socket.set(zmq.SNDHWM, 0)  # credit bounds what is sent
        self._socket.set(zmq.RCVHWM, limits.MESSAGES_UNREAD_MAX)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.RECONNECT_IVL, int(limits.RECONNECT_S_MIN * 1000))
        self._socket.set(zmq.RECONNECT_IVL_MAX, int(limits.RECONNECT_S_MAX * 1000))
        self._socket.set(zmq.MAXMSGSIZE, message_bytes_max)
        _watch(self._socket)
        hub = hub_key(address)
        if hub is not None and key is not None:
            self._socket.set(zmq.CURVE_SERVERKEY, bytes.fromhex(hub))
            self._socket.set(zmq.CURVE_PUBLICKEY, bytes.fromhex(key.public))
            self._socket.set(zmq.CURVE_SECRETKEY, bytes.fromhex(key.secret))
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(sum(_EVENTS) | zmq.EVENT_CONNECTED)
        self._watched = True
        self._is_local = address.startswith("ipc://")

    def poll(self, timeout_s: float | None) -> None:
        """Wait for a message, an event or a wake-up."""
        self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000) + 1))

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        events = []
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] != zmq.EVENT_CONNECTED:
                events.append(_EVENTS[zmq.Event(event["event"])])
            elif self._is_local:
                _widen(event["value"])
        return events

    def send(self, parts: Parts) -> None:
        """Send a message; never waits."""
        try:
            _send(self._socket, parts)
        except zmq.Again:  # the connection has just been lost; an event follows
            return

    def receive(self) -> Parts | None:
        """Return the next message; None if there is none."""
        try:
            return [part.buffer for part in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def close(self) -> None:
        """Disconnect; sent messages have `limits.LINGER_S` to leave."""
        if self._watched:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._context.destroy()  # and its sockets, each with its time to linger


class Router:
    """A hub's socket: bound to one address, connected to any number of peers.

    message_bytes_max: a peer that sends a larger part is disconnected before memory is allocated for it.
    key: the hub's key.
    admit: with a key, returns whether a public key may connect; called on the thread that polls.
    """

    def __init__(
        self,
        address: str,
        *,
        message_bytes_max: int = limits.PAYLOAD_BYTES_MAX,
        key: KeyPair | None = None,
        admit: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.waker = Waker()
        self.connections = Connections(descriptors.connections_max())
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, limits.SESSIONS_MAX)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, int(limits.LINGER_S * 1000))
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, limits.MESSAGES_UNSENT_MAX)  # a hub sends small messages
        self._socket.set(zmq.RCVHWM, limits.MESSAGES_READ_AHEAD_MAX)
        self._socket.set(zmq.MAXMSGSIZE, message_bytes_max)
        _watch(self._socket)
        self._monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 0)  # otherwise the library's thread waits for this thread
        self._monitor.set(zmq.LINGER, 0)
        self._socket.monitor(_MONITOR, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor.connect(_MONITOR)
        # Set until `close`.
        self._zap: Zap | None = None
        if key is not None:
            self._zap = Zap(self._context, admit)
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, bytes.fromhex(key.secret))
            self._socket.set(zmq.ZAP_DOMAIN, DOMAIN)  # without an answer of `Zap` no peer is admitted
        try:
            self._socket.bind(address)
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).chmod(0o600)
        except (zmq.ZMQError, OSError) as e:
            self.close()
            if e.errno == zmq.EADDRINUSE:
                raise in_use(address) from e
            expected, do = "an address of this machine, and a free descriptor", "name another with --address"
            got = os.strerror(e.errno or 0)
            raise CapflowError(explain(f"cannot listen at {address}", got=got, expected=expected, do=do)) from e
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.waker.fileno(), zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        if self._zap is not None:
            self._poller.register(self._zap.socket, zmq.POLLIN)

    def poll(self, timeout_s: float) -> None:
        """Wait for a message, a new connection or a wake-up."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000) + 1) if timeout_s else 0))
        if self._monitor in ready:
            self._look_at_connections()
        if self._zap is not None:
            self._zap.answer()

    def sweep(self, settled: Callable[[bytes], bool], allows: Callable[[str], bool]) -> None:
        """Close connections that have no session for too long, and those whose key is no longer allowed.

        settled: returns whether a connection has a session.
        allows: returns whether a key may connect.
        """
        self._look_at_connections()
        self.connections.sweep(time.monotonic(), settled, allows)

    def send(self, peer: bytes, parts: Parts) -> bool:
        """Send a message to a peer; return False if its queue is full, so it should be given up.

        A message to a peer that is no longer connected is lost.
        """
        try:
            _send(self._socket, [peer, *parts])
        except zmq.Again:
            return False
        except zmq.ZMQError:
            return True
        return True

    def receive(self) -> Received | None:
        """Return the next message with its sender; None if there is none."""
        try:
            peer = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        part = self._socket.recv(copy=False)  # all parts of a message arrive together
        user = str(part.get("User-Id")) if self._zap is not None else ""
        if not self.connections.knows(peer):
            self.connections.speaks(peer, _descriptor(part), user)
        parts = [part.buffer]
        while part.more:
            part = self._socket.recv(copy=False)
            parts.append(part.buffer)
        return Received(peer, parts, user)

    def wait_gone(self, peers: Iterable[bytes]) -> None:
        """Wait for at most `limits.LINGER_S` until peers have closed their connections.

        A peer that a message tells to go reads it, and those before it, only while it is connected: libzmq drops what
        is unread when a connection is lost.
        """
        until = time.monotonic() + limits.LINGER_S
        while any(map(self.connections.knows, peers)) and (left_s := until - time.monotonic()) > 0:
            self._monitor.poll(int(left_s * 1000) + 1)
            self._look_at_connections()

    def close(self) -> None:
        """Stop listening; sent messages have `limits.LINGER_S` to leave."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        self.waker.close()

    def _look_at_connections(self) -> None:
        """Handle the events of connections that came and went."""
        came = False
        for _ in range(_EVENTS_BATCH):
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            kind, descriptor = struct.unpack("=Hi", event)
            if kind == zmq.EVENT_ACCEPTED:
                self.connections.accepted(descriptor, time.monotonic())
                came = True
            elif kind == zmq.EVENT_DISCONNECTED:
                self.connections.gone(descriptor)
        if came:
            self.connections.close_most()


def _descriptor(part: zmq.Frame) -> int:
    """Return the descriptor that a message came from; -1 if the peer speaks ZMTP 1 or 2."""
    try:
        return int(part.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _widen(descriptor: int) -> None:
    """Let the system hold more of what is sent over a local connection; ZMQ's own option is for TCP.

    The connection may be gone: then nothing happens, or another socket of this process gets a larger bound.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        copied = os.dup(descriptor)
        opened.callback(os.close, copied)
        connection = socket.socket(fileno=copied)
        opened.callback(connection.detach)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)


def _watch(over: zmq.Socket[bytes]) -> None:
    """Let the library close connections whose handshake takes too long or whose machine is gone."""
    over.set(zmq.HANDSHAKE_IVL, int(limits.HANDSHAKE_S_MAX * 1000))
    over.set(zmq.TCP_KEEPALIVE, 1)
    over.set(zmq.TCP_KEEPALIVE_IDLE, max(1, int(limits.SILENCE_S_MAX)))
    over.set(zmq.TCP_KEEPALIVE_INTVL, max(1, int(limits.SILENCE_S_MAX / 3)))
    over.set(zmq.TCP_KEEPALIVE_CNT, 3)
    over.set(zmq.TCP_MAXRT, int(limits.DEAD_S_MAX * 1000))


def _send(to: zmq.Socket[bytes], parts: Parts) -> None:
    last: Any
    *first, last = parts
    for part in first:
        to.send(part, _MORE, copy=len(part) <= _COPY_BYTES_MAX)
    to.send(last, _LAST, copy=len(last) <= _COPY_BYTES_MAX)
