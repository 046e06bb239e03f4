"""The link: one peer's connection to its hub, driven by a thread of its own.

A link reconnects by itself, as often as it takes, whatever ended its connection. Nothing that the engine calls waits for a socket;
`WorkerLink.send` waits for room, if its policy says so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from capflow import limits
from capflow.capture.frame import Frame
from capflow.errors import RemoteProtocolError, explain
from capflow.protocol.message import Bye, Hello, Message, Refused, Welcome
from capflow.protocol.session import Parts, PeerSession, State, cost
from capflow.transport.address import check_address
from capflow.transport.keys import peer_key
from capflow.transport.sockets import Dealer, Event, Waker, why_not

logger = logging.getLogger("capflow.link")

_RECEIVE_BATCH = 256  # messages handled before frames are sent again
_SEND_BATCH = 256  # frames sent before messages are handled again: what is acknowledged meanwhile makes room


class Link:
    """One thread, which owns one `PeerSession` and its connections; from `start` to `close`.

    message_bytes_max: the largest part that the hub sends.

    key: this peer's, by name or path, for an address with the hub's. Raises UsageError when one is needed and missing.
    """

    message_bytes_max = limits.HEADER_BYTES_MAX

    def __init__(self, address: str, hello: Hello, *, key: str | None = None, seq: int = 0) -> None:
        self.address = check_address(address, insecure=True)
        self._key = peer_key(address, key)
        # Why no connection is made, keys being the reason; cleared when one is.
        self._unmade: str | None = None
        # Set by the first Welcome.
        self.ever_connected = False
        # Connections lost.
        self.reconnects = 0
        # The thread's alone; others read plain fields of it.
        self._session = PeerSession(hello, seq=seq)
        # How long the message is that `_received` takes; the thread's.
        self._said_bytes = 0
        # Closed by the thread when it ends.
        self._waker = Waker()
        # What the last connection failed with; the thread's.
        self._failed_at: type[Exception] | None = None
        # When the hub refused this connection; the thread's.
        self._refused_at = 0.0
        # Why, as it was logged last; the thread's.
        self._refused_for = ""
        # Set by `close`.
        self._closing = threading.Event()
        # Set by `close` before `_closing`: when to leave although frames are left.
        self._close_by = 0.0
        # Set by every Welcome or Refused, cleared when the connection is lost.
        self._welcomed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"capflow-{hello.role}-link", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether a hub has welcomed this peer and is there."""
        return self._session.state is State.OPEN

    @property
    def refusal(self) -> str | None:
        """Why the hub refused this peer or its key, None if it did not."""
        return self._session.refusal or self._unmade

    @property
    def welcome(self) -> Welcome | None:
        """The hub's latest Welcome; it stays when the hub goes away."""
        return self._session.welcome

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        """Wait until a hub has answered; return its Welcome, None when it refused or none came in time."""
        self._welcomed.wait(timeout_s)
        return self.welcome if self.connected else None

    def close(self, drain_s: float = limits.LINGER_S) -> None:
        """Get out what was taken, for at most `drain_s` seconds, say Bye unless something is left on disk, and stop. A second call may shorten what the first allowed."""
        close_by = time.monotonic() + drain_s
        if not self._closing.is_set() or close_by < self._close_by:
            self._close_by = close_by
            self._closing.set()
            self._waker.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(drain_s + 4 * limits.LINGER_S)

    # What subclasses bring; all of it is called on the thread.

    def _fill(self, dealer: Dealer, now: float) -> None:
        """Send what there is to send, or begin to: frames, as `_push` has them."""
        session = self._session
        for _ in range(_SEND_BATCH):
            if session.state is not State.OPEN or not (session.waiting or self._push()):
                return
            if (parts := session.next_frame(now)) is None:
                return
            dealer.send(parts)
        self._waker.wake()

    def _push(self) -> bool:
        """Give the session its next frame; return whether there was one."""
        return False

    def _beat(self, now: float) -> Parts | None:
        """Return a sign of life if one is due."""
        return self._session.tick(now)

    def _drained(self) -> bool:
        """Return whether nothing is left that `close` should wait for."""
        return True

    def _leaves_nothing(self) -> bool:
        """Return whether no frames are on disk that a later process would send: after a Bye the hub would take them for new ones."""
        return True

    def _received(self, said: Frame | Message) -> None:
        """Take what the hub said."""

    # The thread.

    def _run(self) -> None:
        try:
            pause_s = limits.RECONNECT_S_MIN
            while not self._done(time.monotonic()):
                since = time.monotonic()
                try:
                    self._connect()
                    self._failed_at = None
                except Exception as e:  # noqa: BLE001  no descriptor left, or a bug here: the engine runs on, and we try on
                    self._failed(e)
                lasted_s = time.monotonic() - since
                pause_s = limits.RECONNECT_S_MIN if lasted_s > limits.RECONNECT_S_MAX else pause_s * 2
                self._closing.wait(min(pause_s, limits.RECONNECT_S_MAX))
        finally:
            self._session.lost()
            self._welcomed.set()
            self._waker.close()

    def _connect(self) -> None:
        dealer = Dealer(self.address, key=self._key, waker=self._waker, message_bytes_max=self.message_bytes_max)
        with contextlib.closing(dealer):
            self._serve(dealer)

    def _failed(self, e: Exception) -> None:
        """Say once of failures in a row that are of a kind what it is, and take the connection for lost."""
        if type(e) is not self._failed_at:
            event = {"event": "link_failed", "address": self.address}
            logger.error("the link to %s failed; trying on", self.address, exc_info=e, extra=event)
        self._failed_at = type(e)
        try:
            self._lost("the link failed")
        except Exception:
            logger.exception("the link to %s failed once more", self.address, extra={"event": "link_failed"})

    def _serve(self, dealer: Dealer) -> None:
        """Drive one connection until it is lost or the link is closed."""
        session = self._session
        while True:
            dealer.poll(self._timeout(time.monotonic()))
            self._waker.clear()
            now = time.monotonic()
            for event in dealer.events():
                if event is Event.CONNECTED:
                    self._unmade = None
                    dealer.send(session.connected(now))
                elif (why := why_not(event, self.address, self._key)) is not None:
                    if why != self._unmade:
                        logger.error("%s; trying on", why)
                    self._unmade = why
                else:
                    self._lost("it closed the connection or is gone")
                    return
            if not self._read(dealer, now):
                return
            if session.state is State.REFUSED and now >= self._refused_at + limits.REFUSED_S:
                return
            if session.silent(now):
                self._lost(f"it was silent for {limits.SILENCE_S_MAX:g} s")
                return
            self._fill(dealer, now)
            if (beat := self._beat(now)) is not None:
                dealer.send(beat)
            if self._done(now):
                if session.state is State.OPEN and self._leaves_nothing():
                    dealer.send(session.send(Bye(), now))
                return

    def _timeout(self, now: float) -> float | None:
        due = self._session.due()
        if self._session.state is State.REFUSED:
            due = self._refused_at + limits.REFUSED_S
        if self._closing.is_set():
            due = self._close_by if due is None else min(due, self._close_by)
        return None if due is None else max(0.0, due - now)

    def _done(self, now: float) -> bool:
        return self._closing.is_set() and (self._drained() or now >= self._close_by)

    def _lost(self, why: str) -> None:
        if self._welcomed.is_set():
            what, expected = f"the hub at {self.address} went away", "one that answers"
            do = "connecting again and again: start it again at this address, if it does not come back by itself"
            logger.warning("%s", explain(what, got=why, expected=expected, do=do))
            self.reconnects += 1
        self._session.lost()
        self._welcomed.clear()

    def _read(self, dealer: Dealer, now: float) -> bool:
        """Take what came; return False when the connection is of no use any more."""
        for _ in range(_RECEIVE_BATCH):
            parts = dealer.receive()
            if parts is None:
                return True
            try:
                said = self._session.receive(parts, now)
            except RemoteProtocolError as e:
                self._lost(str(e))
                return False
            self._said_bytes = cost(parts)
            match said:
                case Bye() if self._session.state is State.LOST:
                    self._lost("it said goodbye")
                    return False
                case Refused():
                    self._refused_at = now
                    if said.reason != self._refused_for:
                        role = self._session.hello.role
                        logger.error("the hub at %s refuses this %s: %s; trying on", self.address, role, said.reason)
                    self._refused_for = said.reason
                    self._welcomed.set()
                case Welcome():
                    self.ever_connected = True
                    self._received(said)
                    self._welcomed.set()
                case _:
                    self._received(said)
        self._waker.wake()
        return True
