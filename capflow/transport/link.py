"""Links: a worker's and a scheduler's connection to the hub, each driven by one thread of its own.

A link reconnects by itself, as often as it takes. Nothing that the engine calls here waits for a
socket; `WorkerLink.send` waits for room, if its policy says so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from capflow import limits
from capflow.action import Outcome
from capflow.address import check_address
from capflow.consumer import Fallback, Policy
from capflow.errors import RemoteProtocolError
from capflow.frame import Frame, FrameHeader
from capflow.keys import peer_key
from capflow.message import Act, ActionOutcome, Beat, Bye, Hello, Message, Refused, Welcome, WorkerCounts
from capflow.queue import ByteQueue, Overload
from capflow.session import Parts, PeerSession, State, cost
from capflow.transport.outbox import Outbox
from capflow.transport.sockets import Dealer, Event, Waker, why_not

logger = logging.getLogger("capflow.link")

_RECEIVE_BATCH = 256  # messages handled before frames are sent again
_SEND_BATCH = 256  # frames sent before messages are handled again: what is acknowledged meanwhile makes room
_SEQ_MAX = 1 << 62  # not below any number of a frame
_SPILL_AT = 4  # with an outbox, memory holds this part of its bound: the rest is for steps under way, and for what is being synced
_FRAME_OVERHEAD_BYTES = 512  # what a queued frame weighs besides its payload


class Staged(NamedTuple):
    """What a worker holds before its link: bytes of rows, their bound, and the rows it dropped, by reason."""

    nbytes: int = 0
    bytes_max: int = 0
    dropped_rows: Mapping[str, int] = MappingProxyType({})


class _Link:
    """One thread, which owns one `PeerSession` and its connections; from `start` to `close`.

    message_bytes_max: the largest part that the hub sends. key: this peer's, by name or path, for an address with the hub's. Raises UsageError when one is needed and missing.
    """

    message_bytes_max = limits.HEADER_BYTES_MAX

    def __init__(self, address: str, hello: Hello, *, key: str | None = None, seq: int = 0) -> None:
        self.address = check_address(address, insecure=True)
        self._key = peer_key(address, key)
        self._unmade: str | None = None  # why no connection is made, keys being the reason; cleared when one is
        self.ever_connected = False  # set by the first Welcome
        self.reconnects = 0  # connections lost
        self._session = PeerSession(hello, seq=seq)  # the thread's alone; others read plain fields of it
        self._said_bytes = 0  # how long the message is that `_received` takes; the thread's
        self._waker = Waker()  # closed by the thread when it ends
        self._closing = threading.Event()  # set by `close`
        self._close_by = 0.0  # set by `close` before `_closing`: when to leave although frames are left
        self._welcomed = threading.Event()  # set by every Welcome or Refused, cleared when the connection is lost
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
        """Get out what was taken, for at most `drain_s` seconds, say Bye and stop."""
        if not self._closing.is_set():
            self._close_by = time.monotonic() + drain_s
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

    def _received(self, said: Frame | Message) -> None:
        """Take what the hub said."""

    # The thread.

    def _run(self) -> None:
        try:
            pause_s = limits.RECONNECT_S_MIN
            while not self._done(time.monotonic()):
                since = time.monotonic()
                dealer = Dealer(
                    self.address, key=self._key, waker=self._waker, message_bytes_max=self.message_bytes_max
                )
                with contextlib.closing(dealer):
                    self._serve(dealer)
                lasted_s = time.monotonic() - since
                pause_s = limits.RECONNECT_S_MIN if lasted_s > limits.RECONNECT_S_MAX else pause_s * 2
                self._closing.wait(min(pause_s, limits.RECONNECT_S_MAX))
        except Exception:  # a bug here: the engine must run on without us
            logger.exception("the link to %s ended", self.address)
        finally:
            self._session.lost()
            self._welcomed.set()
            self._waker.close()

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
                    self._lost("the hub went away")
                    return
            if not self._read(dealer, now):
                return
            if session.silent(now):
                self._lost(f"the hub was silent for {limits.SILENCE_S_MAX:g} s")
                return
            self._fill(dealer, now)
            if (beat := self._beat(now)) is not None:
                dealer.send(beat)
            if self._done(now):
                if session.state is State.OPEN:
                    dealer.send(session.send(Bye(), now))
                return

    def _timeout(self, now: float) -> float | None:
        due = self._session.due()
        if self._closing.is_set():
            due = self._close_by if due is None else min(due, self._close_by)
        return None if due is None else max(0.0, due - now)

    def _done(self, now: float) -> bool:
        return self._closing.is_set() and (self._drained() or now >= self._close_by)

    def _lost(self, why: str) -> None:
        if self._welcomed.is_set():
            logger.warning("%s (%s); connecting again", why, self.address)
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
                    self._lost("the hub said goodbye")
                    return False
                case Refused():
                    logger.error(
                        "the hub at %s refuses this %s: %s", self.address, self._session.hello.role, said.reason
                    )
                    self._welcomed.set()
                case Welcome():
                    self.ever_connected = True
                    self._received(said)
                    self._welcomed.set()
                case _:
                    self._received(said)
        self._waker.wake()
        return True


class WorkerLink(_Link):
    """A worker's link: takes frames from one thread and gets each to the hub once.

    outbound_bytes_max bounds the frames that wait here; those sent and not acknowledged are bounded by the hub's
    credit besides. policy: what `send` does when there is no room, waiting at most block_s_max seconds
    for it. on_welcome: called on the link's thread with every Welcome. staged: gives, on the link's thread, what the hub
    is told of what comes before this link.

    `send` answers `None`, or why the frame was dropped: `no_hub`, no hub was ever there; `hub_gone`, there was one
    and the queue is full; `queue_full`, the hub is there and takes less than is sent; `refused`, the hub
    refused this worker; `too_large`, the payload is above `limits.PAYLOAD_BYTES_MAX`; `closed`. With an outbox, which is
    for policy `spill`, what has no room goes there, as does everything while the hub is gone; when it takes nothing, `fallback` holds
    and the reason is the spool's: `spool_full`, `disk_full`, `disk_failed`. The outbox is opened and closed by the link.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        outbound_bytes_max: int = limits.OUTBOUND_BYTES_DEFAULT,
        policy: Policy = "block",
        block_s_max: float = limits.BLOCK_S_MAX,
        on_welcome: Callable[[Welcome], None] | None = None,
        staged: Callable[[], Staged] = Staged,
        key: str | None = None,
        outbox: Outbox | None = None,
        fallback: Fallback = "block",
    ) -> None:
        super().__init__(address, hello, key=key)
        assert (policy == "spill") == (outbox is not None)
        self.policy = Overload(policy)
        self.fallback = Overload(fallback)
        self.outbox = outbox
        self.block_s_max = block_s_max
        self.on_welcome = on_welcome
        self._staged = staged
        self._told_at = 0.0  # when the hub was last told the counts; the thread's
        self._queue: ByteQueue[tuple[int, FrameHeader, memoryview]] = ByteQueue(outbound_bytes_max)
        self._gave_up = False  # a whole `block_s_max` was waited for a hub that is gone; cleared by its return
        self._frames = 0  # accepted by `send`
        self._bytes = 0
        self._dropped: Counter[str] = Counter()  # frames by reason; written by the thread that calls `send`

    @property
    def patient(self) -> bool:
        """Whether a full queue is waited for: not once that was in vain, for as long as the hub is gone."""
        return not self._gave_up

    def give_up(self) -> None:
        """Note that it was waited for room in vain."""
        self._gave_up = not self.connected

    @property
    def counters(self) -> dict[str, Any]:
        """What went through: frames and bytes accepted, waiting and unacknowledged, and drops by reason."""
        return {
            "frames": self._frames,
            "bytes": self._bytes,
            "queued_frames": len(self._queue),
            "queued_bytes": self._queue.nbytes,
            "unacked_frames": self._session.unacked,
            "credit_bytes": self._session.credit_bytes,
            "reconnects": self.reconnects,
            "dropped_frames": dict(self._dropped),
            "spool": self.outbox.status() if self.outbox is not None else None,
        }

    def start(self) -> None:
        """Start connecting. Raises CapflowError when the outbox cannot be opened."""
        if self.outbox is not None:
            self.outbox.open()
        super().start()

    def send(self, header: FrameHeader, payload: Any) -> str | None:
        """Take a frame; return None, or why it was dropped.

        payload: any C-contiguous buffer (view bfloat16 as bytes), not changed from here on. The header's
        seq, payload_bytes and checksum are filled in later, on the link's thread.
        """
        view = memoryview(payload).cast("B")
        reason = self._offer(header, view)
        if reason is not None:
            self._dropped[reason] += 1
            return reason
        self._frames += 1
        self._bytes += len(view)
        self._waker.wake()
        return None

    def _offer(self, header: FrameHeader, view: memoryview) -> str | None:
        if len(view) > limits.PAYLOAD_BYTES_MAX:
            return "too_large"
        if self._closing.is_set():
            return "closed"
        if self._session.state is State.REFUSED:
            return "refused"
        if not self.ever_connected:
            return "no_hub"
        if self.outbox is not None:
            return self._offer_or_spill(self.outbox, header, view)
        item, nbytes = (self._frames + 1, header, view), len(view) + _FRAME_OVERHEAD_BYTES
        if len(view) == 0 and self._queue.nbytes <= self._queue.bytes_max + limits.HEADER_BYTES_MAX:
            self._queue.force(item, nbytes)  # the ends of requests are worth a little room of their own
            return None
        if self.policy is Overload.DROP or self._gave_up:
            accepted = self._queue.offer(item, nbytes)
        else:
            accepted = self._queue.put(item, nbytes, self.block_s_max)
            if not accepted:
                self.give_up()
        if accepted:
            return None
        return "queue_full" if self.connected else "hub_gone"

    def _offer_or_spill(self, outbox: Outbox, header: FrameHeader, view: memoryview) -> str | None:
        """Take a frame into memory if it is the hub's next and there is room, else onto disk: so they stay in order."""
        seq = self._frames + 1
        item, nbytes = (seq, header, view), len(view) + _FRAME_OVERHEAD_BYTES
        in_memory = self._queue.nbytes + self._session.unacked_bytes + nbytes
        at_once = self.connected and not outbox.waiting and in_memory <= self._queue.bytes_max // _SPILL_AT
        if at_once and self._queue.offer(item, nbytes):
            return None
        reason = outbox.put(seq, header, view, 0.0)
        if reason is not None and self.fallback is Overload.BLOCK and not self._gave_up:
            reason = outbox.put(seq, header, view, self.block_s_max)
            self._gave_up = reason is not None and not self.connected
        return reason

    def close(self, drain_s: float = limits.LINGER_S) -> None:
        """Get out what was taken, until the hub has acknowledged it or `drain_s` is over, say Bye and stop.

        What is in an outbox by then stays there, for a later process.
        """
        super().close(drain_s)
        self._queue.close()
        if self.outbox is not None and not self._thread.is_alive():
            self.outbox.close()

    def _fill(self, dealer: Dealer, now: float) -> None:
        if self.outbox is not None:
            self.outbox.acknowledge(self._session.acked)
        super()._fill(dealer, now)

    def _push(self) -> bool:
        session = self._session
        if (item := self._queue.get(timeout_s=0)) is not None:  # older than what is spilled
            seq, header, view = item
            self._skip(seq - 1)
            session.push(self.outbox.amended(header) if self.outbox is not None else header, view)
        elif self.outbox is not None and (spilled := self.outbox.take()) is not None:
            self._skip(spilled.seq - 1)
            session.push_sealed(*spilled)
        else:
            return False
        return True

    def _skip(self, seq: int) -> None:
        """Say an empty frame for each that the disk did not give back: the hub counts their rows as missing."""
        while self._session.seq < seq:
            self._session.push(empty_header(self._session.hello), b"")

    def _beat(self, now: float) -> Parts | None:
        if self._session.state is not State.OPEN or now < self._told_at + limits.HEARTBEAT_S:
            return None
        self._told_at = now
        return self._session.send(Beat(self._counts()), now)

    def _counts(self) -> WorkerCounts:
        staged = self._staged()
        return WorkerCounts(
            sent_frames=self._frames,
            sent_bytes=self._bytes,
            queued_frames=len(self._queue),
            queued_bytes=self._queue.nbytes,
            queue_bytes_max=self._queue.bytes_max,
            unacked_frames=self._session.unacked,
            unacked_bytes=self._session.unacked_bytes,
            staged_bytes=staged.nbytes,
            staged_bytes_max=staged.bytes_max,
            dropped_rows=dict(staged.dropped_rows),
            reconnects=self.reconnects,
            spool=None if self.outbox is None else self.outbox.status(),
        )

    def _drained(self) -> bool:
        waiting = len(self._queue) or self._session.unacked or (self.outbox is not None and self.outbox.waiting)
        return not self.ever_connected or not waiting

    def _received(self, said: Frame | Message) -> None:
        if isinstance(said, Welcome):
            self._gave_up = False
            self._told_at = 0.0
            if self.on_welcome is not None:
                self.on_welcome(said)


class FormerLink(_Link):
    """Sends what a worker that is gone left on disk, in its name, and ends when the hub has all of it.

    What the worker had in memory went with it; the hub counts it as missing. outbox: opened; its thread closes it at the end.
    """

    def __init__(self, address: str, outbox: Outbox, *, key: str | None = None) -> None:
        super().__init__(address, outbox.hello, key=key, seq=_SEQ_MAX)
        self.outbox = outbox
        self._begun = False  # set with the first frame, from which on numbers are without a gap

    def _fill(self, dealer: Dealer, now: float) -> None:
        session, outbox = self._session, self.outbox
        outbox.acknowledge(session.acked)
        super()._fill(dealer, now)
        if not outbox.waiting and not session.unacked:
            outbox.acknowledge(_SEQ_MAX)
            logger.info("what engine %s left on disk was delivered", session.hello.engine)
            self._closing.set()

    def _push(self) -> bool:
        session, outbox = self._session, self.outbox
        assert session.welcome is not None
        while (spilled := outbox.take()) is not None:
            if not self._begun:
                session.seq = session.welcome.last_seq or spilled.seq - 1
                self._begun = True
            if spilled.seq > session.seq:
                while session.seq < spilled.seq - 1:
                    session.push(empty_header(session.hello), b"")
                session.push_sealed(*spilled)
                return True
            outbox.acknowledge(spilled.seq)  # the hub had it from the worker itself
        return False

    def _run(self) -> None:
        super()._run()
        self.outbox.close()

    def _drained(self) -> bool:
        return not self.outbox.waiting and not self._session.unacked


def empty_header(hello: Hello) -> FrameHeader:
    """Return the header of a frame of a worker that says nothing."""
    assert hello.model is not None
    return FrameHeader(
        engine=hello.engine,
        boot=hello.boot,
        rank=hello.rank,
        seq=0,
        step=0,
        time_ns=0,
        dtype=hello.model.dtype,
        hidden_size=hello.model.hidden_size,
        requests=(),
        blocks=(),
    )


class SchedulerLink(_Link):
    """A scheduler's link: what the hub wants captured, and actions to take. It starts when it is made."""

    def __init__(self, address: str, hello: Hello, *, key: str | None = None) -> None:
        super().__init__(address, hello, key=key)
        self._acts: deque[Act] = deque(maxlen=limits.ACTIONS_WAITING_MAX)  # filled by the thread, emptied by `actions`
        self._outcomes: deque[Outcome] = deque()  # filled by `outcome`, emptied by the thread
        self.start()

    def actions(self) -> list[Act]:
        """Return the actions that came since the last call; never waits."""
        acts = []
        while self._acts:
            acts.append(self._acts.popleft())
        return acts

    def outcome(self, outcome: Outcome) -> None:
        """Say what came of an action; never waits."""
        self._outcomes.append(outcome)
        self._waker.wake()

    def _fill(self, dealer: Dealer, now: float) -> None:
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if self._session.state is State.OPEN:  # otherwise the hub that asked is gone
                dealer.send(self._session.send(ActionOutcome(outcome), now))

    def _drained(self) -> bool:
        return not self._outcomes or not self.connected

    def _received(self, said: Frame | Message) -> None:
        if isinstance(said, Act):
            self._acts.append(said)
