"""A worker or a scheduler in the hub's own process: a real protocol session without a connection.

Invariant: messages reach the hub in the order in which they are sent, also from several peers that one thread drives.
No more frames are in flight than the hub's credit allows. The hub never times out a peer of its own process.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from capflow import limits
from capflow.capture.frame import Frame, FrameHeader
from capflow.errors import CapflowError, explain
from capflow.hub.hub import Hub
from capflow.protocol.message import Act, ActionOutcome, Bye, Hello
from capflow.protocol.session import Parts, PeerSession, State
from capflow.steering.action import Outcome, Rejected


def _reject(act: Act) -> Outcome:
    return Rejected(act.id, explain("action", got="an engine that only seems to run", expected="one that does"))


class LocalPeer:
    """A worker or a scheduler from its construction to `close`. One thread drives it.

    A worker gives each frame encoded, by `give`, and the hub decodes and checks it; or checked, by `hand`.

    Raises CapflowError with the hub's reason if the hub refuses it.

    seq: the number of the last frame of this boot that an earlier process sent.
    stopped: returns True to stop waiting for the hub.
    on_act: answers the actions that the hub sends a scheduler; `hear` calls it.
    """

    def __init__(
        self,
        hub: Hub,
        hello: Hello,
        *,
        seq: int = 0,
        stopped: Callable[[], bool] = lambda: False,
        on_act: Callable[[Act], Outcome] = _reject,
    ) -> None:
        self.hello = hello
        self._hub = hub
        self._stopped = stopped
        self._on_act = on_act
        self._session = PeerSession(hello, seq=seq)
        # The frames of `hand` since the last `flush`, and their size.
        self._handed: list[Frame] = []
        self._handed_bytes = 0
        # Filled by the hub's thread.
        self._heard: queue.SimpleQueue[Parts] = queue.SimpleQueue()
        self._peer = b"local" + os.urandom(8)
        hub.attach(self._peer, self._heard.put)
        hub.receive(self._peer, self._session.connected(time.monotonic()))
        while self._session.state is State.HELLO and not stopped():
            self.hear(limits.IDLE_S)

    @property
    def seq(self) -> int:
        """The number of the last frame."""
        return self._handed[-1].header.seq if self._handed else self._session.seq

    def give(self, frame: Frame) -> bool:
        """Give the hub a sealed frame with its number, waiting for credit; return False if `stopped` came first."""
        self._session.push_sealed(frame.header.seq, frame.encode())
        return self._out(self._hub.receive)

    def hand(self, frame: Frame) -> None:
        """Take a sealed and checked frame with its number; the hub gets it as it is, at the next `flush`.

        Raises RemoteProtocolError if its header is too large.
        """
        frame.measure()
        self._handed.append(frame)
        self._handed_bytes += frame.wire_bytes

    def push(self, header: FrameHeader) -> None:
        """Number and seal a frame without rows, then do as `hand`."""
        self.hand(Frame.seal(header, b"", seq=self.seq + 1))

    @property
    def full(self) -> bool:
        """Whether it is time for a `flush`."""
        return len(self._handed) >= limits.MESSAGE_FRAMES_MAX or self._handed_bytes >= limits.MESSAGE_FRAMES_BYTES_MAX

    def flush(self) -> bool:
        """Give the hub the frames of `hand`, waiting for credit; return False if `stopped` came first."""
        frames, self._handed = self._handed, []
        nbytes, self._handed_bytes = self._handed_bytes, 0
        if not frames:
            return True
        if nbytes <= self._session.credit_bytes:
            self._session.push_checked(frames)
        else:
            for frame in frames:
                self._session.push_checked((frame,))
        return self._out(self._hub.take)

    def settle(self, timeout_s: float = float("inf")) -> bool:
        """Wait until the hub has acknowledged every frame; return whether it has."""
        deadline = time.monotonic() + timeout_s
        while self._session.unacked and not self._stopped() and time.monotonic() < deadline:
            self.hear(limits.IDLE_S)
        return not self._session.unacked

    def hear(self, timeout_s: float = 0.0) -> None:
        """Receive the hub's messages; wait at most `timeout_s` for the first.

        Raises CapflowError if the hub ended the session.
        """
        if not timeout_s and self._heard.empty() and self._session.state is State.OPEN:
            return
        try:
            parts = self._heard.get(timeout=timeout_s) if timeout_s else self._heard.get_nowait()
            while True:
                message = self._session.receive(parts, time.monotonic())
                if isinstance(message, Act):
                    answer = ActionOutcome(self._on_act(message))
                    self._hub.receive(self._peer, self._session.send(answer, time.monotonic()))
                parts = self._heard.get_nowait()
        except queue.Empty:
            pass
        if self._session.state in (State.LOST, State.REFUSED) and not self._stopped():
            self._hub.detach(self._peer)
            got = self._session.refusal or "the hub ended the session"
            raise CapflowError(explain(f"the hub refused engine {self.hello.engine}", got=got))

    def close(self) -> None:
        """Send Bye: the peer does not come back, and its open requests end."""
        if self._session.state is State.OPEN:
            self._hub.receive(self._peer, self._session.send(Bye(), time.monotonic()))
        self._session.lost()
        self._hub.detach(self._peer)

    def _out(self, take: Callable[[bytes, Sequence[Any]], None]) -> bool:
        while self._session.waiting:
            parts = self._session.next_frame(time.monotonic())
            if parts is not None:
                take(self._peer, parts)
            elif self._stopped():
                return False
            else:
                self.hear(limits.IDLE_S)
        self.hear()
        return True
