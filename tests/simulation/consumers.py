"""Models of consumers: what they have lasts as a file system's does, or ends with the hub."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.plugins.consumer import Consumer
from capflow_consumers.framelog import FrameLog

EVERYTHING = CaptureSpec({"post_block": "all"})


@dataclass
class Capture:
    """A request on a shelf.

    frames: the frames that it was made of, by worker.
    """

    frames: FrameLog
    rows: Counter
    status: str


class Shelf:
    """The storage of a consumer, which outlives hubs: whole requests.

    broken: the errno with which writing fails at present; None if it works.
    """

    def __init__(self):
        # Lists, by engine and request.
        self.captures = {}
        self.broken = None


@dataclass
class _Request:
    frames: FrameLog = field(default_factory=FrameLog)
    rows: Counter = field(default_factory=Counter)
    published: Capture | None = None


class Filing(Consumer):
    """Collects the rows of a request in memory and puts them on its shelf at its end, like the filesystem consumer."""

    name: ClassVar[str] = "filing"
    policy: ClassVar = "spill"

    def __init__(self, world, oracle, shelf):
        super().__init__(None)
        self._world, self._oracle, self._shelf = world, oracle, shelf
        self._requests = {}

    def spec(self):
        """Everything."""
        return EVERYTHING

    def on_frame(self, frame):
        """Collect the rows."""
        self._world.point("on_frame")
        header = frame.header
        for (name, site, at), count in self._oracle.check_rows(self.name, frame).items():
            key = header.engine, name
            request = self._requests.get(key)
            if request is None:
                request = self._requests[key] = _Request()
                request.published = next(
                    (each for each in self._shelf.captures.get(key, ()) if each.frames.has(header)), None
                )
            request.frames.add(header)
            if request.published is None:
                request.rows[site, at] += count

    def on_request_done(self, done):
        """Put the request on the shelf; while that is full, everything stays as it is, for another try."""
        key = done.engine, done.request
        request = self._requests.get(key) or _Request()
        if request.published is not None:
            del self._requests[key]
            return CaptureResult(request.published.status)
        problems = done.problems
        if request.rows.total() != done.rows:
            problems.append(f"rows seen: got {request.rows.total()}, expected {done.rows}")
        status = "ok" if not problems else "partial_error" if request.rows else "error"
        self._world.point("publish")
        if self._shelf.broken is not None:
            raise OSError(self._shelf.broken, os.strerror(self._shelf.broken))
        self._requests.pop(key, None)
        self._shelf.captures.setdefault(key, []).append(Capture(request.frames, request.rows, status))
        took = self._oracle.took[self.name, 0][key]
        took.rows.update(request.rows)
        return CaptureResult(status, "; ".join(problems) or None)


class Listening(Consumer):
    """Has the rows in memory, and takes its time."""

    name: ClassVar[str] = "listening"

    def __init__(self, world, oracle, name, policy, life, slow_s=0.0):
        super().__init__(None)
        self.name, self.policy = name, policy
        self._world, self._oracle, self._life, self._slow_s = world, oracle, life, slow_s

    def spec(self):
        """Everything."""
        return EVERYTHING

    def on_frame(self, frame):
        """Take the rows."""
        self._world.point("on_frame")
        if self._slow_s:
            self._world.sleep(self._world.choose.expovariate(1 / self._slow_s))
        for (name, site, at), count in self._oracle.check_rows(self.name, frame).items():
            self._oracle.took[self.name, self._life][frame.header.engine, name].rows[site, at] += count
