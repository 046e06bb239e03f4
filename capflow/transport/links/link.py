"""The link: one peer's connection to its hub, driven by a thread of its own.

A link reconnects by itself, for as long as it takes, whatever ended the connection. No call of the engine waits for a
socket; `WorkerLink.send` waits for room if its policy is `block`.
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
from capflow.protocol.session import FRAME_PARTS, Parts, PeerSession, State, cost
from capflow.transport.address import check_address
from capflow.transport.keys import peer_key
from capflow.transport.sockets import Dealer, Event, Waker, why_not

logger = logging.getLogger("capflow.link")

_RECEIVE_BATCH = 256  # messages handled before frames are sent again
_SEND_BATCH = 256  # frames sent, about, before messages are handled again: acknowledgements make room


class Link:
    """One thread that owns one `PeerSession` and its connections, between `start` and `close`.

    `message_bytes_max` is the largest part that the hub sends. Raises UsageError if a key is needed and missing.

    key: this peer's key, by name or path, for an address with the hub's key.
    seq: the number of the last frame of this boot.
    """

    message_bytes_max = limits.HEADER_BYTES_MAX

    def __init__(self, address: str, hello: Hello, *, key: str | None = None, seq: int = 0) -> None:
        self.address = check_address(address, insecure=True)
        self._key = peer_key(address, key)
        # Why keys prevent a connection; None once there is one.
        self._unmade: str | None = None
        # Set by the first Welcome.
        self.ever_connected = False
        # How many connections were lost.
        self.reconnects = 0
        # Written by the thread alone; others read plain fields.
        self._session = PeerSession(hello, seq=seq)
        # The length of the message that `_received` handles; used by the thread alone.
        self._message_bytes = 0
        # The thread closes it at its end.
        self._waker = Waker()
        # Used by the thread alone: the error of the last connection, and when the hub refused this peer on this one.
        self._failed_at: type[Exception] | None = None
        self._refused_at: float | None = None
        # The last logged reason of a refusal; empty before the first. Written by the thread.
        self._refused_for = ""
        # Set by `close`.
        self._closing = threading.Event()
        # Set by `close` before `_closing`: when to end although frames are left.
        self._close_by = 0.0
        # Set by each Welcome or Refused, cleared when the connection is lost.
        self._welcomed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"capflow-{hello.role}-link", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether a hub has welcomed this peer and is connected."""
        return self._session.state is State.OPEN

    @property
    def refusal(self) -> str | None:
        """Why the hub refused this peer or its key; None if it did not."""
        return self._session.refusal or self._unmade

    @property
    def refused(self) -> bool:
        """Whether a hub ever refused this peer."""
        return bool(self._refused_for)

    @property
    def welcome(self) -> Welcome | None:
        """The hub's last Welcome; it stays after the connection is lost."""
        return self._session.welcome

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def wait_welcome(self, timeout_s: float) -> Welcome | None:
        """Wait until a hub has answered; return its Welcome, None if it refused or did not answer in time."""
        self._welcomed.wait(timeout_s)
        return self.welcome if self.connected else None

    def close(self, drain_s: float = limits.LINGER_S) -> None:
        """Send the waiting frames for at most `drain_s` seconds, send Bye unless frames are left on disk, and stop.

        A second call may shorten the time of the first.
        """
        close_by = time.monotonic() + drain_s
        if not self._closing.is_set() or close_by < self._close_by:
            self._close_by = close_by
            self._closing.set()
            self._waker.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(drain_s + 4 * limits.LINGER_S)

    # For subclasses to override. All of it is called on the thread.

    def _fill(self, dealer: Dealer, now: float) -> None:
        """Send the frames that `_push` gives, up to a batch."""
        session, left = self._session, _SEND_BATCH
        while left > 0:
            if session.state is not State.OPEN or (parts := session.next_frames(now, self._push)) is None:
                return
            dealer.send(parts)
            left -= len(parts) // FRAME_PARTS
        self._waker.wake()

    def _push(self) -> bool:
        """Give the session its next frame; return whether there was one."""
        return False

    def _beat(self, now: float) -> Parts | None:
        """Return a beat if one is due."""
        return self._session.tick(now)

    def _drained(self) -> bool:
        """Return whether `close` has nothing to wait for."""
        return True

    def _leaves_nothing(self) -> bool:
        """Return whether no frames are left on disk.

        A later process sends them; after a Bye the hub would take them as new.
        """
        return True

    def _received(self, message: Frame | Message) -> None:
        """Handle a message of the hub."""

    # The thread.

    def _run(self) -> None:
        try:
            pause_s = limits.RECONNECT_S_MIN
            while not self._done(time.monotonic()):
                since = time.monotonic()
                try:
                    self._connect()
                    self._failed_at = None
                except Exception as e:  # noqa: BLE001  the engine runs on, and the link tries again
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
        """Log an error once for several of the same type in a row, and count the connection as lost."""
        if type(e) is not self._failed_at:
            event = {"event": "link_failed", "address": self.address}
            logger.error("the link to %s failed; trying again", self.address, exc_info=e, extra=event)
        self._failed_at = type(e)
        try:
            self._lost("the link failed")
        except Exception:
            logger.exception("the link to %s failed again", self.address, extra={"event": "link_failed"})

    def _serve(self, dealer: Dealer) -> None:
        """Drive one connection until it is lost or the link is closed."""
        session, self._refused_at = self._session, None
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
                        logger.error("%s; trying again", why)
                    self._unmade = why
                else:
                    self._lost("it closed the connection or is gone")
                    return
            if not self._read(dealer, now):
                return
            if self._refused_at is not None and now >= self._refused_at + limits.REFUSED_S:
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
        if self._refused_at is not None:
            due = self._refused_at + limits.REFUSED_S
        if self._closing.is_set():
            due = self._close_by if due is None else min(due, self._close_by)
        return None if due is None else max(0.0, due - now)

    def _done(self, now: float) -> bool:
        return self._closing.is_set() and (self._drained() or now >= self._close_by)

    def _lost(self, why: str) -> None:
        if self._welcomed.is_set():
            where, expected = f"the hub at {self.address} went away", "one that answers"
            do = "start it again at this address, if it does not come back by itself; the link keeps trying"
            logger.warning("%s", explain(where, got=why, expected=expected, do=do))
            self.reconnects += 1
        self._session.lost()
        self._welcomed.clear()

    def _read(self, dealer: Dealer, now: float) -> bool:
        """Handle the received messages; return False if the connection is lost."""
        for _ in range(_RECEIVE_BATCH):
            parts = dealer.receive()
            if parts is None:
                return True
            try:
                message = self._session.receive(parts, now)
            except RemoteProtocolError as e:
                self._lost(str(e))
                return False
            self._message_bytes = cost(parts)
            match message:
                case Bye() if self._session.state is State.LOST:
                    self._lost("it ended the session")
                    return False
                case Refused():
                    self._refused_at = now
                    if message.reason != self._refused_for:
                        role = self._session.hello.role
                        logger.error(
                            "the hub at %s refuses this %s: %s; trying again", self.address, role, message.reason
                        )
                    self._refused_for = message.reason
                    self._welcomed.set()
                case Welcome():
                    self.ever_connected = True
                    self._received(message)
                    self._welcomed.set()
                case _:
                    self._received(message)
        self._waker.wake()
        return True
