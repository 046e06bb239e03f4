"""Credit: how many bytes a worker may have in flight, and the pool of memory that grants it."""

from __future__ import annotations

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.errors import RemoteProtocolError, explain
from capflow.protocol.message import Ack


class Pool:
    """The credit that the workers of a hub share.

    Each owner gets an even part of the pool, and each of its workers an even part of that, at most `each_bytes_max`.

    Invariant: the committed bytes, granted or held here, also for workers that are gone, are at most `bytes_max`. The
    exception is a frame larger than its worker's part; each worker may have one.

    each_bytes_max: the largest part of one worker.
    bytes_max: the size of the pool.
    shares: what each owner holds of the pool; None if there is one owner.
    """

    def __init__(
        self, each_bytes_max: int, bytes_max: int = limits.CREDIT_BYTES_TOTAL, shares: Shares | None = None
    ) -> None:
        self.each_bytes_max = each_bytes_max
        self.bytes_max = bytes_max
        self.shares = shares
        # The credit of all workers and the frames held.
        self.committed_bytes = 0
        # The number of connected workers of each owner.
        self._workers: dict[str, int] = {}
        # The results of `window_of`; cleared when `_workers` changes.
        self._windows: dict[str, int] = {}

    @property
    def workers(self) -> int:
        """The number of connected workers."""
        return sum(list(self._workers.values()))

    @property
    def window_bytes(self) -> int:
        """The part of the worker with the smallest part, in bytes."""
        return min(map(self.window_of, list(self._workers)), default=min(self.each_bytes_max, self.bytes_max))

    def window_of(self, owner: str) -> int:
        """Return the part of each worker of an owner in bytes, with the workers that are connected now."""
        window = self._windows.get(owner)
        if window is None:
            part = self.bytes_max // max(1, len(self._workers)) // max(1, self._workers[owner])
            window = self._windows[owner] = min(self.each_bytes_max, part)
        return window

    def connect(self, owner: str, workers: int) -> None:
        """Count this many more connected workers; a negative number counts disconnected ones."""
        self._windows.clear()
        self._workers[owner] = self._workers.get(owner, 0) + workers
        if not self._workers[owner]:
            del self._workers[owner]

    def commit(self, owner: str, nbytes: int) -> None:
        """Commit this many more bytes; a negative number frees them."""
        self.committed_bytes += nbytes
        if self.shares is not None:
            self.shares.force(owner, nbytes)

    def trade(self, owner: str, back_bytes: int, wanted_bytes: int) -> int:
        """Free `back_bytes`, then commit as many of `wanted_bytes` as there is room for; return how many."""
        granted = max(0, min(wanted_bytes, self.bytes_max - self.committed_bytes + back_bytes))
        if self.shares is not None:
            granted = self.shares.trade(owner, back_bytes, granted)
        self.committed_bytes += granted - back_bytes
        return granted


class Intake:
    """The frames that a hub has of one boot of one worker, and the credit that they hold.

    A frame holds its cost from `take` to `release`; the memory of its decoded header is held in the pool. All frames up
    to `acked` are released. Released frames return their credit up to the worker's part of the pool. So when more
    workers connect, the others give up credit as they send.

    pool: the pool that grants the credit.
    """

    def __init__(self, pool: Pool, owner: str = "") -> None:
        self.pool = pool
        self.owner = owner
        # True from `grant` to `revoke`.
        self.connected = False
        # The number of the last frame taken.
        self.last_seq = 0
        self.acked = 0
        # The bytes that the worker may still send.
        self.credit_bytes = 0
        self.held_bytes_peak = 0
        # The sum of the costs in `_held`.
        self._held_bytes = 0
        # By seq, in order: the cost of each frame taken and not released, and the memory of its header's objects.
        self._held: dict[int, tuple[int, int]] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes of frames taken and not released."""
        return self._held_bytes

    def grant(self) -> int:
        """Return the credit of a new connection: the worker's part, less the bytes held."""
        self.revoke()
        self.connected = True
        self.pool.connect(self.owner, 1)
        self._give(0)
        return self.credit_bytes

    def revoke(self) -> None:
        """Take back the credit when the connection is gone. Held frames stay held."""
        if self.connected:
            self.connected = False
            self.pool.connect(self.owner, -1)
            self._credit(-self.credit_bytes)

    def has(self, seq: int) -> bool:
        """Return whether this frame was taken before."""
        return seq <= self.last_seq

    def take(self, seq: int, nbytes: int, decoded_bytes: int = 0) -> bool:
        """Take a frame; return False for one that the hub has already.

        nbytes: the frame's cost.
        decoded_bytes: further memory for its header; it counts against the pool, not against the credit.

        Raises RemoteProtocolError if frames before it are missing, or its cost exceeds the credit.
        """
        if nbytes > self.credit_bytes and self._held:
            got = f"frame {seq} of {nbytes} bytes"
            raise RemoteProtocolError(explain("credit", got=got, expected=f"at most {self.credit_bytes} bytes"))
        if seq < 1 or (self.last_seq and seq > self.last_seq + 1):
            raise RemoteProtocolError(explain("frame number", got=seq, expected=str(self.last_seq + 1)))
        if self.has(seq):
            self._credit(-nbytes)
            return False
        if not self.last_seq:
            # An earlier hub has the frames before it.
            self.acked = seq - 1
        self.last_seq = seq
        self._held[seq] = nbytes, decoded_bytes
        if decoded_bytes:
            self.pool.commit(self.owner, decoded_bytes)
        # The bytes stay committed: first as credit, now as held.
        self.credit_bytes -= nbytes
        self._held_bytes += nbytes
        self.held_bytes_peak = max(self.held_bytes_peak, self._held_bytes)
        return True

    def refund(self) -> Ack:
        """Return the Ack that returns the cost of a frame that `take` did not take."""
        return Ack(self.acked, self._give(0))

    def release(self, *seqs: int) -> Ack:
        """Release frames that nothing needs any more; return the Ack for them."""
        costs = [self._held.pop(seq) for seq in seqs]
        self._held_bytes -= sum(nbytes for nbytes, _ in costs)
        self.acked = next(iter(self._held)) - 1 if self._held else self.last_seq
        return Ack(self.acked, self._give(sum(map(sum, costs))))

    def withdraw(self, ack: Ack) -> None:
        """Take back the credit of an Ack that could not be sent."""
        self._credit(-ack.credit_bytes)

    def _give(self, back_bytes: int) -> int:
        """Return the additional credit that the worker's part and the pool allow now; it may be 0.

        back_bytes: held bytes that return to the pool first.
        """
        part = self.pool.window_of(self.owner) - self._held_bytes - self.credit_bytes if self.connected else 0
        granted = self.pool.trade(self.owner, back_bytes, max(0, part))
        self.credit_bytes += granted
        return granted

    def _credit(self, nbytes: int) -> None:
        self.credit_bytes += nbytes
        self.pool.commit(self.owner, nbytes)
