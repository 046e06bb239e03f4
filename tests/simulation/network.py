"""The two ends of a connection, on a scheduler: the parts of ZMQ that `capflow.transport` uses.

The messages of a connection arrive in the order in which they were sent, each after a delay. When a connection is cut,
or its hub is killed, messages that have not arrived are lost. The peer learns of that after a delay; a hub never does.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from capflow import limits
from capflow.transport.sockets import Event


class Received(NamedTuple):
    """A message, from which connection, and of which key."""

    peer: bytes
    parts: list
    user: str


class Waker:
    """Wakes the one task that polls it."""

    def __init__(self, world):
        self._world = world
        self.awake = False
        # The task that polls.
        self.task = None

    def wake(self):
        """Wake it."""
        self.awake = True
        if self.task is not None:
            self._world.wake(self.task)

    def clear(self):
        """Sleep again."""
        self.awake = False

    def close(self):
        """Nothing is left to close."""


class Network:
    """Every connection there is. router: of the hub that listens."""

    def __init__(self, world):
        self.world = world
        self.router = None
        self.dealers = []
        self.latency_s = world.choose.choice([1e-4, 1e-3, 0.02])
        # Whether nothing arrives: a switch that is off.
        self.silent = False

    def latency(self):
        """Return how long a message takes."""
        return self.world.choose.expovariate(1 / self.latency_s)

    def listen(self, router):
        """Let a hub listen; peers that try to connect get through."""
        self.router = router
        for dealer in list(self.dealers):
            dealer.try_to_connect()

    def hub_gone(self, router):
        """Cut every connection of a hub that ended or was killed."""
        if self.router is router:
            self.router = None
        router.closed = True
        for dealer in list(self.dealers):
            if dealer.router is router:
                dealer.cut()

    def cut_one(self):
        """Cut a connection."""
        connected = [dealer for dealer in self.dealers if dealer.router is not None]
        if connected:
            self.world.choose.choice(connected).cut()


class Router:
    """A hub's socket."""

    def __init__(self, network, address, message_bytes_max=limits.PAYLOAD_BYTES_MAX, **_):
        self.address, self._network, self._world = address, network, network.world
        self.message_bytes_max = message_bytes_max
        self.waker = Waker(network.world)
        self.connections = self
        self.closed = False
        self._inbox = deque()
        # Dealers, by connection.
        self._peers = {}
        process = network.world.process
        process.on_kill.append(lambda: network.hub_gone(self))
        network.listen(self)

    def join(self, dealer):
        """Take a connection; return its name."""
        name = b"\0" + self._world.choose.randbytes(4)
        self._peers[name] = dealer
        return name

    def leave(self, name):
        """Forget a connection."""
        self._peers.pop(name, None)

    def sweep(self, *_):
        """Close nothing: that connections without a session go is the real one's."""

    def cut(self, name):
        """Close the connection of a peer."""
        if name in self._peers:
            self._peers[name].cut()

    def wait_gone(self, peers):
        """Wait a while for connections to end."""
        until = self._world.now + limits.LINGER_S
        while any(peer in self._peers for peer in peers) and self._world.now < until:
            self._world.block(limits.LINGER_S / 10)

    def arrive(self, name, parts):
        """Take a message."""
        if self.closed:
            return
        if any(len(part) > self.message_bytes_max for part in parts):
            self._peers[name].cut()
            return
        self._inbox.append(Received(name, parts, ""))
        if self.waker.task is not None:
            self._world.wake(self.waker.task)

    def poll(self, timeout_s):
        """Wait until there is something to read, or a wake-up."""
        self._world.point("poll")
        if not self._inbox and not self.waker.awake:
            self.waker.task = self._world.current
            self._world.block(timeout_s)
            self.waker.task = None

    def receive(self):
        """Return the next message, None when there is none."""
        self._world.point("receive")
        return self._inbox.popleft() if self._inbox else None

    def send(self, peer, parts):
        """Send a message; return False when the peer takes no more."""
        dealer = self._peers.get(peer)
        if dealer is None or self.closed or self._world.process.dead:
            return True
        return dealer.sent_by_hub([bytes(part) for part in parts])

    def close(self):
        """Stop listening."""
        self._network.hub_gone(self)


class Dealer:
    """One connection of a peer, and the attempts at it before."""

    def __init__(self, network, address, *, key=None, waker=None, message_bytes_max=limits.HEADER_BYTES_MAX):
        self._network, self._world = network, network.world
        self._waker = waker or Waker(network.world)
        self.router, self.name = None, b""
        # Whether it reads; a hostile peer may not.
        self.reads = True
        self._events, self._inbox = deque(), deque()
        # When the last message that is on the way arrives.
        self._out_at = self._in_at = 0.0
        # Messages to this peer that it has not read.
        self._under_way = 0
        # The number of the connection; what is under way on another is lost.
        self._connection = 0
        self._trying = False
        # When the peer hears that its last connection is lost.
        self._told_at = 0.0
        process = network.world.process
        process.on_kill.append(self.close)
        network.dealers.append(self)
        self.try_to_connect()

    def try_to_connect(self):
        """Connect soon, if a hub listens."""
        if self._trying or self.router is not None or self._network.router is None:
            return
        self._trying = True

        def connect():
            self._trying = False
            router = self._network.router
            if router is None or router.closed or self not in self._network.dealers:
                return
            self.router = router
            self.name = router.join(self)
            self._happen(Event.CONNECTED)

        self._world.at_time(max(self._told_at, self._world.now + self._network.latency() * 2), connect)

    def cut(self):
        """Lose the connection."""
        if self.router is None:
            return
        self.router.leave(self.name)
        self.router = None
        self._connection += 1
        self._told_at = self._world.now + self._network.latency() * 3
        self._world.at_time(self._told_at, lambda: self._happen(Event.DISCONNECTED))

    def _happen(self, event):
        self._events.append(event)
        self._wake()

    def _wake(self):
        if self._waker.task is not None:
            self._world.wake(self._waker.task)

    def sent_by_hub(self, parts):
        """Take a message on its way to this peer; return False when too many wait."""
        if self._under_way >= limits.MESSAGES_UNSENT_MAX:
            return False
        self._under_way += 1
        connection = self._connection

        def arrive():
            if connection == self._connection:
                self._inbox.append(parts)
                self._wake()

        self._in_at = max(self._in_at, self._world.now + self._network.latency())
        self._world.at_time(self._in_at, arrive)
        return True

    def poll(self, timeout_s):
        """Wait until there is something to read, an event, or a wake-up."""
        self._world.point("poll")
        if not (self._inbox or self._events or self._waker.awake):
            self._waker.task = self._world.current
            self._world.block(timeout_s)
            self._waker.task = None

    def events(self):
        """Return what happened since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def send(self, parts):
        """Send a message; never waits."""
        self._world.point("send")
        if self.router is None:
            return
        parts = [bytes(part) for part in parts]
        connection, router, name = self._connection, self.router, self.name

        def arrive():
            if connection == self._connection:
                router.arrive(name, parts)

        self._out_at = max(self._out_at, self._world.now + self._network.latency())
        self._world.at_time(self._out_at, arrive)

    def receive(self):
        """Return the next message, None when there is none."""
        if not self._inbox or not self.reads:
            return None
        self._under_way -= 1
        return self._inbox.popleft()

    def close(self):
        """Leave; what was sent arrives."""
        if self in self._network.dealers:
            self._network.dealers.remove(self)
        if self.router is not None:
            router, name = self.router, self.name
            self.router = None
            self._world.at_time(max(self._out_at, self._world.now), lambda: router.leave(name))
