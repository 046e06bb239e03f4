"""Mends undone, one at a time, so that it is seen that the simulation finds what they mend."""

from __future__ import annotations

import contextlib

from capflow.buffers.shares import Shares
from capflow.capture import frame as frames
from capflow.errors import RemoteProtocolError, RetryError
from capflow.hub.exchange.frames import Frames
from capflow.hub.lanes import lane
from capflow.hub.lanes.inbox import Inbox
from capflow.transport.promises import Promises
from capflow_consumers.duckdb.consumer import DuckdbConsumer
from capflow_consumers.duckdb.pending import PendingRows
from tests.simulation.volume import Volume


def _vouch_for_what_failed():
    """Forget what a full disk does not take, and count its frames as stored with the next that are."""

    def flush(self, tables):
        pending, requests = self._pending.tables()
        try:
            self._database.append({**pending, **tables})
        except RetryError:
            self._pending.clear()
            return
        self._pending.clear()
        for request in requests:
            request.commit()

    return DuckdbConsumer, "_flush", flush


class _BySite(dict):
    """Stages of pending rows by their site, whatever their width."""

    def get(self, key):
        return super().get(key[:1])

    def __setitem__(self, key, stage):
        super().__setitem__(key[:1], stage)


def _one_width():
    """Gather rows of engines of different widths as if all were alike."""
    make = PendingRows.__init__

    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self._stages = _BySite()

    return PendingRows, "__init__", init


def _acknowledge_errors():
    """Take an error that may go away for one that stays."""
    return lane, "kind_of", lambda _: "poison"


def _leak_credit():
    """Hold the credit of a frame that is refused, until the hub ends."""
    take = Frames.take

    def leaking(self, peer, worker, frame, parts=None):
        try:
            take(self, peer, worker, frame, parts)
        except RemoteProtocolError:
            if not worker.source.intake.has(frame.header.seq):
                worker.source.intake.take(frame.header.seq, frame.wire_bytes)
            raise

    return Frames, "take", leaking


def _overlap():
    """Let spans overlap."""

    def checked_numbers(header, counts):
        counts[:] = frames.Frame(header, b"").counts
        blocks = zip(header.blocks, header.widths, strict=True)
        return sum(len(block.sites) * block.rows * width for block, width in blocks)

    return frames, "_checked_numbers", checked_numbers


def _first_come():
    """Let whoever comes first have all of a bound."""
    return Shares, "_room", lambda self, _, back=0: self.total - self.used + back


def _promise_nothing():
    """Leave nothing of the rows that a worker has in memory."""
    return Promises, "add", lambda self, seq, header: None


def _forget_marks():
    """Take every frame that comes again for a new one."""
    return Inbox, "has", lambda self, header: False


def _sync_nothing():
    """Have disks say that they synced, and not do it."""
    return Volume, "fdatasync", lambda self, fd: None


MUTATIONS = {
    "D2": _vouch_for_what_failed,
    "D3": _one_width,
    "D4": _overlap,
    "D5": _acknowledge_errors,
    "D7": _first_come,
    "D8": _leak_credit,
    "D12": _promise_nothing,
    "frames-again": _forget_marks,
    "sync": _sync_nothing,
}


@contextlib.contextmanager
def undone(name):
    """Run with a mend undone."""
    owner, attribute, instead = MUTATIONS[name]()
    mended = getattr(owner, attribute)
    setattr(owner, attribute, instead)
    try:
        yield
    finally:
        setattr(owner, attribute, mended)
