"""A hub without sockets and without threads: peers speak by calls, and what they are sent is kept."""

from __future__ import annotations

from collections import defaultdict, deque

from capflow.capture.frame import Frame
from capflow.hub.dispatch import Dispatch
from capflow.hub.peers.guard import Guard
from capflow.plugins.configure import ConfiguredConsumer
from capflow.protocol import message
from tests.kit.frames import make_hello


class Desk:
    """A dispatch with its exchange, and consumers whose threads do not run: frames wait in their queues."""

    def __init__(self, *consumers, guard=None, policy="block", memory_bytes_max=None):
        made = [ConfiguredConsumer.of(consumer, policy=policy) for consumer in consumers]
        # Messages, by peer.
        self.sent = defaultdict(list)
        self._posted = deque()
        self.dispatch = Dispatch(
            made,
            (),
            send=self._send,
            post=self._posted.append,
            status=dict,
            guard=guard or Guard(),
            memory_bytes_max=memory_bytes_max,
        )
        self.exchange = self.dispatch.exchange
        self.lanes = self.dispatch.lanes

    def say(self, peer, sent, user=""):
        """Have a peer say a message or a frame; do what that leads to."""
        parts = sent.encode() if isinstance(sent, Frame) else [message.encode(sent)]
        self.dispatch.receive(peer, parts, user)
        self.turn()

    def hello(self, peer, user="", **hello):
        """Have a peer say Hello, by default a worker's; return what it is answered first."""
        self.sent[peer].clear()
        self.say(peer, make_hello(**hello), user)
        return self.sent[peer][0] if self.sent[peer] else None

    def turn(self):
        """Do what was posted, and acknowledge."""
        while self._posted:
            self._posted.popleft()()
        self.dispatch.acknowledge()

    def handle_all(self):
        """Have each consumer take all that waits for it, as its thread would."""
        for lane in self.lanes:
            while (item := lane.queue.get(0)) is not None:
                lane._safely_handle(item)
        self.turn()

    def _send(self, peer, parts):
        self.sent[peer].append(Frame.decode(*parts) if len(parts) > 1 else message.decode(parts[0]))
