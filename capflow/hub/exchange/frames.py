"""The frames: each frame goes to the lanes that want it, and each request ends once.

A frame holds the credit of its worker until every lane that holds the frame has released it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence

from capflow import limits
from capflow.capture.frame import Frame, FrameHeader
from capflow.capture.model import ModelInfo
from capflow.errors import explain
from capflow.hub.counts import Counts
from capflow.hub.effects import (
    Effects,
    End,
    Give,
    Greet,
    Hold,
    Log,
    LogLate,
    Lose,
    NoteFull,
    Tell,
)
from capflow.hub.exchange.answers import LEFT, Answers
from capflow.hub.exchange.watchers import Watchers
from capflow.hub.peers.departures import FAILED, Departures
from capflow.hub.peers.roster import Peer, WorkerState
from capflow.hub.requests.index import RequestIndex
from capflow.hub.requests.request import KnownEngine, Request
from capflow.protocol.session import Parts


class Frames:
    """The frames of all workers, and the requests that begin and end with them."""

    def __init__(
        self,
        index: RequestIndex,
        answers: Answers,
        watchers: Watchers,
        departures: Departures,
        counts: Counts,
        effects: Effects,
    ) -> None:
        # Whether workers keep new frames for the next hub; set by `drain`.
        self.draining = False
        self._index = index
        self._answers = answers
        self._watchers = watchers
        self._departures = departures
        self._counts = counts
        self._effects = effects
        # Frames that came since the last `acknowledge`, each held by the exchange.
        self._taken: list[Hold] = []
        # Frames that nobody holds any more, by worker; emptied by `acknowledge` and by `released`.
        self._released: dict[WorkerState, list[int]] = {}
        # Names of consumers that requests named, that this hub does not have, and that were logged.
        self._strangers: set[str] = set()

    def drain(self, engines: Iterable[KnownEngine]) -> None:
        """Take no more frames, and end the open requests of all engines."""
        self.draining = True
        for engine in engines:
            self._end_all(self._index.lose(engine))

    # Frames.

    def take(self, peer: bytes, worker: Peer, frame: Frame, parts: Parts | None = None) -> None:
        """Take a frame of a worker.

        Raises RemoteProtocolError when it fits no request, RoomError when it has no room.

        parts: the frame as it came; None for a frame of this process.
        """
        if self.draining:
            return  # without an acknowledgement its worker keeps it for the next hub
        source, header, nbytes = worker.source, frame.header, frame.wire_bytes
        assert source is not None
        intake = source.intake
        if not intake.has(header.seq):
            self._index.admit(header, source.engine)
        if not intake.take(header.seq, nbytes, limits.STATE_PER_BYTE_MAX * frame.header_bytes):
            self._counts.duplicates += 1
            self._effects.say(peer, intake.refund())
            return
        self._hand_out(frame, source)
        if len(self._watchers):
            self._watchers.frame(frame.encode() if parts is None else parts, nbytes)

    def _count(self, source: WorkerState, header: FrameHeader) -> None:
        rows = sum([len(block.sites) * block.rows for block in header.blocks])
        source.count(header, rows, self._effects.now)
        counts = self._counts
        counts.frame_at = self._effects.now
        counts.count(source.engine.name, rows, header.payload_bytes)
        for on in header.acted:
            counts.events += len(on.acted)
            counts.events_lost += on.lost
        if header.step > source.engine.step_last.get(header.rank.dp, -1):  # every stage sends the same step
            source.engine.step_last[header.rank.dp] = header.step
            counts.tokens += header.step_tokens

    def _hand_out(self, frame: Frame, source: WorkerState) -> None:
        """Give a frame with its events, and the ends of requests in it, to the lanes.

        Frames of a worker that follow each other are given together.
        """
        header, engine, hold = frame.header, source.engine, Hold(source, frame.header.seq)
        was_full = engine.full
        self._taken.append(hold)  # first: the worker gets the credit back also when the hub fails at the frame
        self._count(source, header)
        arrival = self._index.take(frame, engine)
        last = self._effects.last
        if type(last) is Give and last.holds[0].source is source:
            last.arrivals.append(arrival)
            last.holds.append(hold)
        else:
            self._effects.add(Give([arrival], [hold]))
        if header.finished:
            self._note_late(header, engine)
            for request in self._index.finish(header, engine):
                self.end(request, hold)
        if engine.full and not was_full:
            self._note_full(engine)

    def release(self, holds: Iterable[Hold]) -> None:
        """Note that one lane fewer needs each of some frames."""
        released = self._released
        for hold in holds:
            hold.left -= 1
            if hold.left:
                continue
            if hold.source in released:
                released[hold.source].append(hold.seq)
            else:
                released[hold.source] = [hold.seq]

    def released(self, source: WorkerState) -> Sequence[int]:
        """Return the frames of a worker that were released and are not acknowledged; the caller acknowledges them."""
        self._release_taken()
        return self._released.pop(source, ())

    def _release_taken(self) -> None:
        """Release what came since the last call. The lanes have it by now, since a frame's effects are done at once."""
        taken, self._taken = self._taken, []
        self.release(taken)

    def acknowledge(self) -> None:
        """Acknowledge to each worker, once, the frames that were released since the last call."""
        self._release_taken()
        while self._released:
            source = next(iter(self._released))
            ack = source.intake.release(*self._released.pop(source))
            if source.peer is None:
                continue
            try:
                self._effects.say(source.peer, ack)
            except BaseException:
                source.intake.withdraw(ack)
                self._released[source] = []  # the next turn gives the credit, after the other workers
                raise

    # Requests.

    def end(self, request: Request, hold: Hold | None = None) -> None:
        """Tell the lanes that a request is over.

        hold: the frame that ended it; None if no frame did.
        """
        lanes = []
        for lane, share in enumerate(request.shares):
            if share is not None:
                lanes.append(lane)
                continue
            for answered in request.acted():
                self._effects.add(Tell(answered, lane))
        self._effects.add(End(request, lanes, hold))
        for name in request.strangers:
            self._log_stranger(request.id, name)
        self._answers.answer(request)

    def _end_all(self, lost: Iterable[Request]) -> None:
        for request in lost:
            if self.draining:
                for lane, wish in enumerate(self._index.wishes):
                    if wish.durable:
                        request.results[lane] = request.results[lane] or LEFT
            try:
                self.end(request)
            except Exception as e:  # noqa: BLE001  it is logged, with its traceback
                self._effects.add(Log(logging.ERROR, FAILED, (), {"event": "hub_failed"}, error=e))

    def _log_stranger(self, request: str, name: str) -> None:
        """Log, once for each name, that a request named a consumer that is not here."""
        if name not in self._strangers and len(self._strangers) < limits.REFUSALS_MAX:
            self._strangers.add(name)
            event = {"event": "consumer_unknown", "request": request, "consumer": name}
            args = (request, self._index.refusal(name))
            self._effects.add(Log(logging.WARNING, "request %s: %s; logged once for each name", args, event))

    def _note_late(self, header: FrameHeader, engine: KnownEngine) -> None:
        """Count and log the lost rows of requests that were ended with their engine, when their own ends arrive."""
        untold = {}
        for finished in header.finished:
            if self._index.was_lost(finished, engine):
                late = self._index.late(finished, engine, header.rank.pp)
                if late is not None and late.given and late.untold:
                    untold[finished.id] = late.untold
                    for lost in late.untold:
                        self._index.dropped[lost.reason] += lost.rows
        if untold:
            self._effects.add(LogLate(untold, engine.name))

    def _note_full(self, engine: KnownEngine) -> None:
        """Log, once for an engine, that there is no room for its requests."""
        self._effects.add(NoteFull(engine.name))
        state = self._index.state
        got = f"{len(engine.open):,} open requests, and {state.held(engine.owner):,} bytes for them and their specs"
        subject = f"engine {engine.name}: no room for more of its requests, whose rows are lost"
        expected = f"at most {state.held(engine.owner) + state.room(engine.owner):,} bytes"
        do = "run fewer at once, or start the hub with more --memory-bytes-max"
        event = {"event": "engine_full", "engine": engine.name}
        self._effects.add(Log(logging.ERROR, "%s", (explain(subject, got=got, expected=expected, do=do),), event))

    # Engines.

    def greet(self, engine: KnownEngine) -> None:
        """Note that an engine connected."""
        self._watchers.greet(engine)
        self.greet_lanes(engine.name, engine.model, worker=False)

    def greet_lanes(self, engine: str, model: ModelInfo, *, worker: bool) -> None:
        """Tell the lanes that an engine connected, or one more worker of it, when earlier departures of it are done."""
        greet = Greet(engine, model, worker)
        self._departures.call(engine, functools.partial(self._effects.add, greet))

    def lose(
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, restarted: bool = False
    ) -> None:
        """Note that a part of an engine is gone; the arguments are those of `RequestIndex.lose`."""
        self._watchers.lose(engine, replica, stage)
        self._departures.add(engine.name, self._losing(engine, replica, stage, restarted))

    def _losing(self, engine: KnownEngine, replica: int | None, stage: int | None, restarted: bool) -> Iterator[None]:
        """End the requests that a part of an engine has not ended, in slices, and then tell the lanes."""
        left = len(engine.open)
        for lost in self._index.losing(engine, replica, stage, restarted=restarted):
            self._end_all(lost)
            left -= limits.SLICE_REQUESTS
            if left > 0:
                yield
        self._effects.add(Lose(engine.name, replica, stage, restarted))
