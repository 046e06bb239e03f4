"""Credit: how many bytes a worker may have in flight, and the pool of memory that it is granted from."""

from __future__ import annotations

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.errors import RemoteProtocolError, explain
from capflow.protocol.message import Ack


class Pool:
    """The credit that the workers of a hub share: each owner an even part, of that each of its workers, and none more than `each_bytes_max`.

    What is committed, to be sent or held here, also of workers that are gone, is at most `bytes_max`, but for frames
    larger than their worker's part, of which each may have one.

    shares: what each owner has of it; None where there is one owner.
    """

    def __init__(
        self, each_bytes_max: int, bytes_max: int = limits.CREDIT_BYTES_TOTAL, shares: Shares | None = None
    ) -> None:
        self.each_bytes_max = each_bytes_max
        self.bytes_max = bytes_max
        self.shares = shares
        # The credit of all of them, and the frames held.
        self.committed_bytes = 0
        # That are connected, by owner.
        self._workers: dict[str, int] = {}
        # What `window_of` returned since that changed.
        self._windows: dict[str, int] = {}

    @property
    def workers(self) -> int:
        """How many workers are connected."""
        return sum(list(self._workers.values()))

    @property
    def window_bytes(self) -> int:
        """What the worker with the smallest part may have under way."""
        return min(map(self.window_of, list(self._workers)), default=min(self.each_bytes_max, self.bytes_max))

    def window_of(self, owner: str) -> int:
        """Return what each worker of an owner may have under way, as many as there are now."""
        window = self._windows.get(owner)
        if window is None:
            part = self.bytes_max // max(1, len(self._workers)) // max(1, self._workers[owner])
            window = self._windows[owner] = min(self.each_bytes_max, part)
        return window

    def connect(self, owner: str, workers: int) -> None:
        """Note that so many more workers are connected."""
        self._windows.clear()
        self._workers[owner] = self._workers.get(owner, 0) + workers
        if not self._workers[owner]:
            del self._workers[owner]

    def commit(self, owner: str, nbytes: int) -> None:
        """Note that so many more bytes are committed."""
        self.committed_bytes += nbytes
        if self.shares is not None:
            self.shares.force(owner, nbytes)

    def trade(self, owner: str, back_bytes: int, wanted_bytes: int) -> int:
        """Note that so much is committed no longer, then commit as much as there is room for of what is wanted; return it."""
        given = max(0, min(wanted_bytes, self.bytes_max - self.committed_bytes + back_bytes))
        if self.shares is not None:
            given = self.shares.trade(owner, back_bytes, given)
        self.committed_bytes += given - back_bytes
        return given


class Intake:
    """What a hub has of one boot of one worker: which frames, and how much of the credit they hold.

    A frame holds its cost from `take` to `release`, and of the pool the memory of its decoded header. `acked` is the last frame up to which all are released. Credit comes back with
    released frames, up to the worker's part of the pool: so what more workers need is taken of what the others have when they next send.
    """

    def __init__(self, pool: Pool, owner: str = "") -> None:
        self.pool = pool
        self.owner = owner
        # From `grant` to `revoke`.
        self.connected = False
        # The last frame taken.
        self.last_seq = 0
        self.acked = 0
        # What the worker may still send.
        self.credit_bytes = 0
        self.held_bytes_peak = 0
        # The sum of the next.
        self._held_bytes = 0
        # Cost of each frame taken and not released, and the memory of its header's objects, by seq, in order.
        self._held: dict[int, tuple[int, int]] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes of frames taken and not released."""
        return self._held_bytes

    def grant(self) -> int:
        """Return the credit of a new connection: the worker's part, less what is held."""
        self.revoke()
        self.connected = True
        self.pool.connect(self.owner, 1)
        self._give(0)
        return self.credit_bytes

    def revoke(self) -> None:
        """Take back the credit, the connection being gone; what is held stays so."""
        if self.connected:
            self.connected = False
            self.pool.connect(self.owner, -1)
            self._credit(-self.credit_bytes)

    def has(self, seq: int) -> bool:
        """Return whether a frame was taken before."""
        return seq <= self.last_seq

    def take(self, seq: int, nbytes: int, decoded_bytes: int = 0) -> bool:
        """Note that a frame came; return False when it is one that the hub has already.

        decoded_bytes: of memory beside its cost; they count against the pool, not against the credit. Raises
            RemoteProtocolError when frames are missing before it, or it was not paid for.
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
            self.acked = seq - 1  # an earlier hub has those before
        self.last_seq = seq
        self._held[seq] = nbytes, decoded_bytes
        if decoded_bytes:
            self.pool.commit(self.owner, decoded_bytes)
        self.credit_bytes -= nbytes  # what was committed as credit is committed as held
        self._held_bytes += nbytes
        self.held_bytes_peak = max(self.held_bytes_peak, self._held_bytes)
        return True

    def refund(self) -> Ack:
        """Return the Ack that gives back what a frame cost that `take` did not take."""
        return Ack(self.acked, self._give(0))

    def release(self, *seqs: int) -> Ack:
        """Note that nothing needs these frames any more; return the Ack that says so."""
        costs = [self._held.pop(seq) for seq in seqs]
        self._held_bytes -= sum(nbytes for nbytes, _ in costs)
        self.acked = next(iter(self._held)) - 1 if self._held else self.last_seq
        return Ack(self.acked, self._give(sum(map(sum, costs))))

    def withdraw(self, ack: Ack) -> None:
        """Take back the credit of an Ack that could not be sent."""
        self._credit(-ack.credit_bytes)

    def _give(self, back_bytes: int) -> int:
        """Return the credit that the worker is given now: what its part and the pool allow, perhaps nothing.

        back_bytes: what was held before and comes back to the pool first.
        """
        part = self.pool.window_of(self.owner) - self._held_bytes - self.credit_bytes if self.connected else 0
        given = self.pool.trade(self.owner, back_bytes, max(0, part))
        self.credit_bytes += given
        return given

    def _credit(self, nbytes: int) -> None:
        self.credit_bytes += nbytes
        self.pool.commit(self.owner, nbytes)
