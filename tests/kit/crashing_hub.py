"""A worker whose hub is killed while its frames are stored."""

from __future__ import annotations

import time

import msgspec

from capflow.capture.frame import Acted, ActedOn
from capflow.capture.site import Site
from tests.kit.frames import make_finished, make_frame

HIDDEN = 64


ROWS = 4  # in a frame


SITE = (0, "post_block")


UNDER_WAY_MAX = 100  # frames


def event_at(position, step):
    """Return the event that the worker sends with the rows of a step."""
    return Acted("gate g", "gate", (Site(0, "post_block"),), step, step, position, 1.5, 1.0, "g")


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
        steered = {name: (start + 1, start + 3) for name, _, start, _ in parts}
        frame = make_frame(parts, [SITE], hidden=HIDDEN, step=self.step, finished=finished, steered=steered)
        on = tuple(ActedOn(name, "", (event_at(start + 1, self.step),)) for name, _, start, _ in parts)
        assert self.link.send(msgspec.structs.replace(frame.header, acted=on), frame.payload) is None
