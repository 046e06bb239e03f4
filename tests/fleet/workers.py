"""Synthetic workers: many sessions with several hubs, in one thread.

A worker has a session with each hub, as a real one. The sessions with one hub share one ROUTER socket, which has a
connection for each: a socket for each session would need a thread and three descriptors for each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from capflow import limits
from capflow.capture.frame import Frame
from capflow.protocol.message import Bye
from capflow.protocol.session import PeerSession, State
from tests.kit.frames import make_hello, make_model

TICK_S = 0.2
# Messages of one hub that are read in one turn.
READ_MAX = 2_000


class Fleet:
    """The sessions of `workers` workers with the hubs at some addresses; for one thread.

    hidden: the width of their model.
    """

    def __init__(self, workers: int, addresses: Sequence[str], hidden: int = 8) -> None:
        model = make_model(1, hidden)
        self._context = zmq.Context()
        self._addresses = tuple(addresses)
        self._workers = workers
        self._ticked = 0.0
        # By hub, then by worker.
        self.sessions = [
            [PeerSession(make_hello(f"engine-{n}", boot_of(n, hub), model=model)) for n in range(workers)]
            for hub in range(len(addresses))
        ]
        # By hub: the socket, the events of its connections, and whether a hub listens.
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._there = [False] * len(addresses)
        for hub in range(len(addresses)):
            socket, monitor = self._connect(hub)
            self._sockets.append(socket)
            self._monitors.append(monitor)
        # The sessions that may have something to send, as (hub, worker).
        self._busy: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[PeerSession]:
        return (session for hub in self.sessions for session in hub)

    @property
    def connected(self) -> bool:
        """Whether every session is open."""
        return all(session.state is State.OPEN for session in self)

    @property
    def unacked(self) -> int:
        """How many frames no hub has acknowledged."""
        return sum(session.unacked for session in self)

    def push(self, hub: int, worker: int, frame: Frame) -> None:
        """Queue a frame of a worker for a hub."""
        self.sessions[hub][worker].push(frame.header, frame.payload)
        self._busy.add((hub, worker))

    def push_sealed(self, hub: int, worker: int, frames: Iterable[tuple[int, list[bytes]]]) -> None:
        """Queue frames that were numbered and sealed before."""
        for seq, parts in frames:
            self.sessions[hub][worker].push_sealed(seq, parts)
        self._busy.add((hub, worker))

    def turn(self, timeout_s: float = 0.0) -> None:
        """Read what the hubs sent, send what may be sent, and keep the sessions alive."""
        zmq.select(self._sockets, [], [], timeout_s)
        for hub in range(len(self._sockets)):
            self._look(hub)
            self._read(hub, self._sockets[hub])
        now = time.monotonic()
        for hub, worker in list(self._busy):
            session = self.sessions[hub][worker]
            while (parts := session.next_frame(now)) is not None:
                self._send(hub, worker, parts)
            if not session.waiting:
                self._busy.discard((hub, worker))
        if now >= self._ticked + TICK_S:
            self._ticked = now
            self._keep_alive(now)

    def leave(self) -> None:
        """End all sessions and close the sockets."""
        now = time.monotonic()
        for hub, sessions in enumerate(self.sessions):
            for worker, session in enumerate(sessions):
                if session.state is State.OPEN:
                    self._send(hub, worker, session.send(Bye(), now))
        self._context.destroy(linger=1_000)

    def _connect(self, hub: int) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 1_000)
        # Credit bounds what is under way.
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, limits.MESSAGES_UNREAD_MAX)
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        for worker in range(self._workers):
            socket.set(zmq.CONNECT_ROUTING_ID, _identity(worker))
            socket.connect(self._addresses[hub])
        return socket, monitor

    def _look(self, hub: int) -> None:
        """Handle the events of a hub's connections. If the hub is gone, connect anew: old messages are not sent."""
        gone = False
        while self._monitors[hub].poll(0):
            event = recv_monitor_message(self._monitors[hub])["event"]
            self._there[hub] = event == zmq.EVENT_CONNECTED
            gone = gone or event == zmq.EVENT_DISCONNECTED
        if gone:
            self._sockets[hub].disable_monitor()
            self._sockets[hub].close(linger=0)
            for session in self.sessions[hub]:
                session.lost()
            self._there[hub] = False
            self._sockets[hub], self._monitors[hub] = self._connect(hub)

    def _read(self, hub: int, socket: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        for _ in range(READ_MAX):
            try:
                identity, *parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            worker = int.from_bytes(identity[1:], "big")
            session = self.sessions[hub][worker]
            session.receive(parts, now)
            if session.waiting:
                self._busy.add((hub, worker))

    def _keep_alive(self, now: float) -> None:
        for hub, sessions in enumerate(self.sessions):
            if not self._there[hub]:
                continue
            for worker, session in enumerate(sessions):
                # A hub with a thousand sessions may take long to answer. One that is gone closes the connection.
                if session.state is State.LOST:
                    self._send(hub, worker, session.connected(now))
                elif (beat := session.tick(now)) is not None:
                    self._send(hub, worker, beat)

    def _send(self, hub: int, worker: int, parts: Sequence[bytes]) -> None:
        # What cannot be sent is lost with the connection. The session keeps the frame, and sends it to the next hub.
        with contextlib.suppress(zmq.ZMQError):
            self._sockets[hub].send_multipart([_identity(worker), *parts], zmq.NOBLOCK, copy=False)


def boot_of(worker: int, hub: int) -> str:
    """Return the boot of a worker's session with a hub."""
    return f"boot-{worker}-{hub}"


def _identity(worker: int) -> bytes:
    return b"w" + worker.to_bytes(4, "big")
