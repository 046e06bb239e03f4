"""A worker whose hub is killed while its frames are stored."""

from __future__ import annotations

import time

from tests.kit.frames import make_finished, make_frame

HIDDEN = 64


ROWS = 4  # in a frame


SITE = (0, "post_block")


UNDER_WAY_MAX = 100  # frames


class Worker:
    """Sends short requests that overlap, one frame at a time."""

    def __init__(self, link, choose):
        self.link, self.choose = link, choose
        # The rows of each request that ended.
        self.lengths = {}
        # Rows sent and to be sent, by request.
        self.open = {}
        self.step = 0

    def turn(self):
        """Send a frame, unless much is under way."""
        counters = self.link.counters
        if counters["unacked_frames"] + counters["queued_frames"] > UNDER_WAY_MAX:
            # The pause between two looks.
            time.sleep(0.002)
            return
        if len(self.open) < 3:
            self.open[f"r{len(self.lengths) + len(self.open)}"] = 0, ROWS * self.choose.randrange(1, 8)
        name = self.choose.choice(list(self.open))
        sent, length = self.open[name]
        finished = [make_finished(name, ROWS, length)] if sent + ROWS == length else []
        self._send([(name, ROWS, sent, ROWS)], finished)
        self.open[name] = sent + ROWS, length
        if finished:
            self.lengths[name] = self.open.pop(name)[1]

    def end(self):
        """End what is open."""
        for name, (sent, _) in self.open.items():
            self._send([], [make_finished(name, ROWS, sent)])
            self.lengths[name] = sent

    def _send(self, parts, finished):
        self.step += 1
        frame = make_frame(parts, [SITE], hidden=HIDDEN, step=self.step, finished=finished)
        assert self.link.send(frame.header, frame.payload) is None
