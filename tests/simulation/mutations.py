"""Mends undone, one at a time, so that it is seen that the simulation finds what they mend."""

from __future__ import annotations

import contextlib

from capflow import frame as frames
from capflow.errors import RemoteProtocolError
from capflow.exchange import Exchange
from capflow.inbox import Inbox
from capflow.session import cost
from tests.simulation.volume import Volume


def _leak_credit():
    """Hold the credit of a frame that is refused, until the hub ends."""
    handle = Exchange._frame

    def frame(self, peer, known, frame, parts, now):
        try:
            handle(self, peer, known, frame, parts, now)
        except RemoteProtocolError:
            if not known.source.intake.has(frame.header.seq):
                known.source.intake.take(frame.header.seq, cost(parts))
            raise

    return Exchange, "_frame", frame


def _overlap():
    """Let spans overlap."""
    return frames, "_checked_rows", lambda header: sum(len(block.sites) * block.rows for block in header.blocks)


def _forget_marks():
    """Take every frame that comes again for a new one."""
    return Inbox, "has", lambda self, header: False


def _sync_nothing():
    """Have disks say that they synced, and not do it."""
    return Volume, "fdatasync", lambda self, fd: None


MUTATIONS = {
    "D4": _overlap,
    "D8": _leak_credit,
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
