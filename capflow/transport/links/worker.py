"""A worker's link: takes frames from the worker and delivers each to the hub once."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from capflow import limits
from capflow.buffers.policy import POLICY_DEFAULT, WhenFull
from capflow.buffers.queue import ByteQueue
from capflow.capture.frame import Frame, FrameHeader
from capflow.errors import CapflowError
from capflow.protocol.message import Beat, ControllerCounts, CpuTime, Determinism, Hello, Message, Welcome, WorkerCounts
from capflow.protocol.session import Parts, State
from capflow.transport.links.link import Link
from capflow.transport.outbox import Outbox
from capflow.transport.sockets import Dealer

logger = logging.getLogger("capflow.link")

# With policy `spill` the queue and the unacknowledged frames use only one part in this many of the bound. The rest is
# for the steps that run and for frames that wait for a sync.
_SPILL_AT = 4
# The weight of a queued frame besides its payload.
_FRAME_OVERHEAD_BYTES = 512


class Staged(NamedTuple):
    """The rows that a worker holds before it gives them to its link.

    nbytes: the size of the rows.
    bytes_max: the bound of that size.
    dropped_rows: the rows that the worker dropped, by reason.
    troubles: the reasons why the worker does not capture everything that was asked for.
    controllers: the counts of its controllers, by name.
    determinism: whether the ranks of the engine steer alike.
    cpu: as in `WorkerCounts`.
    """

    nbytes: int = 0
    bytes_max: int = 0
    dropped_rows: Mapping[str, int] = MappingProxyType({})
    troubles: tuple[str, ...] = ()
    controllers: Mapping[str, ControllerCounts] = MappingProxyType({})
    determinism: Determinism | None = None
    cpu: Mapping[str, CpuTime] = MappingProxyType({})


class WorkerLink(Link):
    """A worker's link, from `start` to `close`. One thread calls `send`.

    `send` returns None, or the reason why it dropped the frame:

    * `no_hub`: no hub was ever connected, and none is expected.
    * `hub_gone`: the hub is gone and the queue is full.
    * `queue_full`: the hub is connected and slower than the worker.
    * `refused`: the hub refuses this worker, and the policy is not `spill`.
    * `too_large`: the frame exceeds what a hub accepts, e.g. `limits.PAYLOAD_BYTES_MAX`.
    * `closed`: the link is closed.
    * `spool_full`, `disk_full`, `disk_failed`: the outbox refused the frame.

    With policy `spill` a frame goes to the outbox if it has no room in the queue, and every frame does while the hub is
    gone or refuses this worker. If the outbox is full, `fallback` applies. The link opens and closes the outbox.

    outbound_bytes_max: the bound of the frames in the queue. Frames that are sent and not acknowledged are bounded by
        the hub's credit and by `limits.UNACKED_BYTES_MAX`.
    policy: what `send` does when the queue has no room.
    block_s_max: the longest time for which `send` waits for room, in seconds.
    on_welcome: called on the link's thread with each Welcome.
    staged: returns the rows that are not given to this link yet, for the hub's status; called on the link's thread.
    outbox: needed for policy `spill`.
    fallback: the policy if the outbox is full.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        outbound_bytes_max: int = limits.OUTBOUND_BYTES_DEFAULT,
        policy: str = POLICY_DEFAULT,
        block_s_max: float = limits.BLOCK_S_MAX,
        on_welcome: Callable[[Welcome], None] | None = None,
        staged: Callable[[], Staged] = Staged,
        key: str | None = None,
        outbox: Outbox | None = None,
        fallback: str = POLICY_DEFAULT,
    ) -> None:
        super().__init__(address, hello, key=key)
        assert policy != "spill" or outbox is not None
        self.policy = WhenFull(policy)
        self.fallback = WhenFull(fallback)
        self.outbox = outbox
        self._spills = policy == "spill"
        self.block_s_max = block_s_max
        self.on_welcome = on_welcome
        self._staged = staged
        # When the hub last got the counts. Only the link's thread uses it.
        self._counted_at = 0.0
        self._queue: ByteQueue[tuple[int, FrameHeader, memoryview]] = ByteQueue(outbound_bytes_max)
        # Guards the next two fields: two threads may close the link.
        self._close_lock = threading.Lock()
        self._outbox_closed = False
        # Whether frames were left in the outbox when it was closed.
        self._frames_left = False
        # Whether `send` waited `block_s_max` without getting room while the hub was gone; cleared by the next Welcome.
        self._gave_up = False
        # Set by `expect`.
        self._expected = False
        # The frames and bytes that `send` accepted.
        self._frames = 0
        self._bytes = 0
        # Dropped frames by reason; written by the thread that calls `send`.
        self._dropped: Counter[str] = Counter()

    @property
    def patient(self) -> bool:
        """Whether `send` waits while the queue is full. After a wait that failed it does not, until the hub is back."""
        return not self._gave_up

    @property
    def found(self) -> bool:
        """Whether the hub was ever connected or is expected; with `spill` also one that refuses counts."""
        return self.ever_connected or self._expected or (self._spills and self.refused)

    def expect(self) -> None:
        """Keep frames from now on, also before the first connection: another process of the engine found the hub."""
        self._expected = True

    def give_up(self) -> None:
        """After a wait that failed: if the hub is gone, do not wait for room until it is back."""
        self._gave_up = not self.connected

    @property
    def acked(self) -> int:
        """The number up to which the hub has acknowledged all frames."""
        return self._session.acked

    @property
    def drained(self) -> bool:
        """Whether `close` has nothing to wait for."""
        return self._drained()

    @property
    def counters(self) -> dict[str, Any]:
        """The counters: frames and bytes accepted, waiting and unacknowledged, and drops by reason."""
        return {
            "frames": self._frames,
            "bytes": self._bytes,
            "queued_frames": len(self._queue),
            "queued_bytes": self._queue.nbytes,
            "unacked_frames": self._session.unacked,
            "credit_bytes": self._session.credit_bytes,
            "reconnects": self.reconnects,
            "dropped_frames": dict(self._dropped),
            "spool": self._spool_status(),
        }

    def start(self) -> None:
        """Start connecting. Raises CapflowError if policy `spill` needs the outbox and it cannot be opened."""
        if self.outbox is not None:
            try:
                self.outbox.open()
            except CapflowError as e:
                if self._spills:
                    raise
                event = {"event": "promises_failed", "path": str(self.outbox.promises.path)}
                logger.warning("the promises of this worker are not stored: %s", e, extra=event)
                self.outbox = None
        super().start()

    def send(self, header: FrameHeader, payload: Any) -> str | None:
        """Take a frame; return None, or the reason why it was dropped.

        header: its `seq`, `payload_bytes` and checksum are filled in later, on the link's thread.
        payload: a C-contiguous buffer (view bfloat16 as bytes) that does not change any more.
        """
        view = memoryview(payload).cast("B")
        reason = self._offer(header, view)
        if reason is not None:
            self._dropped[reason] += 1
            return reason
        self._frames += 1
        if self.outbox is not None:
            self.outbox.promise(self._frames, header)
        self._bytes += len(view)
        self._waker.wake()
        return None

    def _offer(self, header: FrameHeader, view: memoryview) -> str | None:
        if _is_too_large(header, view):
            return "too_large"
        if self._closing.is_set():
            return "closed"
        outbox = self.outbox if self._spills else None
        if outbox is None and self._session.state is State.REFUSED:
            return "refused"
        if not self.found:
            return "no_hub"
        if outbox is not None:
            return self._offer_or_spill(outbox, header, view)
        item, nbytes = (self._frames + 1, header, view), len(view) + _FRAME_OVERHEAD_BYTES
        if len(view) == 0 and self._queue.nbytes <= self._queue.bytes_max + limits.HEADER_BYTES_MAX:
            # A frame without rows carries ends of requests. It may exceed the bound by a little.
            self._queue.force(item, nbytes)
            return None
        if self.policy is WhenFull.DROP or self._gave_up:
            accepted = self._queue.offer(item, nbytes)
        else:
            accepted = self._queue.put(item, nbytes, self.block_s_max)
            if not accepted:
                self.give_up()
        if accepted:
            return None
        return "queue_full" if self.connected else "hub_gone"

    def _offer_or_spill(self, outbox: Outbox, header: FrameHeader, view: memoryview) -> str | None:
        """Queue a frame in memory if there is room and no earlier frame is on disk; else spill it.

        This keeps the order. Returns the reason if the outbox refuses the frame, else None.
        """
        seq = self._frames + 1
        item, nbytes = (seq, header, view), len(view) + _FRAME_OVERHEAD_BYTES
        in_memory = self._queue.nbytes + self._session.unacked_bytes + nbytes
        at_once = self.connected and not outbox.waiting and in_memory <= self._queue.bytes_max // _SPILL_AT
        if at_once and self._queue.offer(item, nbytes):
            return None
        reason = outbox.put(seq, header, view, 0.0)
        if reason is not None and self.fallback is WhenFull.BLOCK and not self._gave_up:
            reason = outbox.put(seq, header, view, self.block_s_max)
            self._gave_up = reason is not None and not self.connected
        return reason

    def close(self, drain_s: float = limits.LINGER_S) -> None:
        """Send the waiting frames until the hub has acknowledged them or `drain_s` is over, and stop.

        Frames in the outbox stay there for a later process. If there are any, no Bye is sent, so the hub keeps the
        state of this worker.
        """
        super().close(drain_s)
        self._queue.close()
        if not self._thread.is_alive():
            self._close_outbox()

    def _leaves_nothing(self) -> bool:
        return self._close_outbox()

    def _close_outbox(self) -> bool:
        """Close the outbox once; return whether no frame is left in it."""
        with self._close_lock:
            if self.outbox is not None and not self._outbox_closed:
                self._outbox_closed = True
                self._frames_left = not self.outbox.close(self._session.acked)
            return not self._frames_left

    def _fill(self, dealer: Dealer, now: float) -> None:
        if self.outbox is not None:
            self.outbox.acknowledge(self._session.acked)
        super()._fill(dealer, now)

    def _push(self) -> bool:
        if (item := self._queue.get(timeout_s=0)) is not None:  # older than the spilled frames
            self._push_queued(*item)
        elif self.outbox is not None and (spilled := self.outbox.take()) is not None:
            # Frames that were queued after the first look at the queue may be older than this one.
            while (item := self._queue.get(timeout_s=0)) is not None and item[0] < spilled.seq:
                self._push_queued(*item)
            self._skip(spilled.seq - 1)
            self._session.push_sealed(*spilled)
            if item is not None:
                self._push_queued(*item)
        else:
            return False
        return True

    def _push_queued(self, seq: int, header: FrameHeader, view: memoryview) -> None:
        self._skip(seq - 1)
        self._session.push(self.outbox.amended(header) if self.outbox is not None else header, view)

    def _skip(self, seq: int) -> None:
        """Send an empty frame for each lost frame: the hub counts their rows as missing."""
        while self._session.seq < seq:
            self._session.push(empty_header(self._session.hello), b"")

    def _beat(self, now: float) -> Parts | None:
        if self._session.state is not State.OPEN or now < self._counted_at + limits.HEARTBEAT_S:
            return None
        self._counted_at = now
        staged = self._staged()
        return self._session.send(
            Beat(
                self._counts(staged),
                staged.troubles[: limits.REASONS_MAX],
                dict(staged.controllers),
                staged.determinism,
            ),
            now,
        )

    def _counts(self, staged: Staged) -> WorkerCounts:
        return WorkerCounts(
            sent_frames=self._frames,
            sent_bytes=self._bytes,
            queued_frames=len(self._queue),
            queued_bytes=self._queue.nbytes,
            queue_bytes_max=self._queue.bytes_max,
            queue_bytes_peak=self._queue.bytes_peak,
            unacked_frames=self._session.unacked,
            unacked_bytes=self._session.unacked_bytes,
            unacked_bytes_peak=self._session.unacked_bytes_peak,
            staged_bytes=staged.nbytes,
            staged_bytes_max=staged.bytes_max,
            dropped_rows=dict(staged.dropped_rows),
            reconnects=self.reconnects,
            spool=self._spool_status(),
            cpu=dict(staged.cpu),
        )

    def _spool_status(self) -> dict[str, Any] | None:
        return self.outbox.status() if self._spills and self.outbox is not None else None

    def _drained(self) -> bool:
        waiting = len(self._queue) or self._session.unacked or (self.outbox is not None and self.outbox.waiting)
        return not self.found or not waiting

    def _received(self, message: Frame | Message) -> None:
        if isinstance(message, Welcome):
            self._gave_up = False
            self._counted_at = 0.0
            if self.on_welcome is not None:
                self.on_welcome(message)


def _is_too_large(header: FrameHeader, view: memoryview) -> bool:
    """Return whether a frame exceeds what a hub accepts."""
    spans = sum(len(block.spans) for block in header.blocks)
    tokens = sum(len(request.token_ids) for request in header.requests)
    return (
        len(view) > limits.PAYLOAD_BYTES_MAX
        or spans > limits.SPANS_PER_FRAME_MAX
        or tokens > limits.TOKENS_PER_FRAME_MAX
    )


def empty_header(hello: Hello) -> FrameHeader:
    """Return the header of an empty frame of a worker."""
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
