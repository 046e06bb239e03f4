"""A hub whose consumer spills, and a sender of frames for it."""

from __future__ import annotations

import pytest

from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import configured

ROWS = 4  # of each frame of a request


@pytest.fixture
def spills(tmp_path):
    """Return what configures a recorder that spills, always to the same place."""

    def spilling(recorder, **options):
        return configured(recorder, "spill", spool_dir=tmp_path / "spool", **options)

    return spilling


class Sender:
    """Sends frames of requests, and their ends."""

    def __init__(self, link, **header):
        self.link = link
        self.header = header
        self.steps = 0
        # Rows by request.
        self.sent = {}

    def rows(self, *requests):
        """Send a frame with the next rows of some requests."""
        parts = [(name, ROWS, self.sent.get(name, 0), ROWS) for name in requests]
        for name in requests:
            self.sent[name] = self.sent.get(name, 0) + ROWS
        self._send(parts)

    def end(self, *requests, **more):
        """Send the ends of some requests."""
        self._send(finished=[make_finished(name, ROWS, self.sent.get(name, 0), **more) for name in requests])

    def _send(self, parts=(), **kwargs):
        frame = make_frame(parts, step=self.steps, **self.header, **kwargs)
        assert self.link.send(frame.header, frame.payload) is None
        self.steps += 1

    @property
    def acknowledged(self):
        counters = self.link.counters
        return counters["frames"] - counters["unacked_frames"] - counters["queued_frames"] == self.steps


def waiting(hub):
    """Return how many frames wait in the inbox of the hub's only consumer."""
    return hub.lanes[0].inbox.unread


def once(positions):
    assert len(positions) == len(set(positions))
    return positions
