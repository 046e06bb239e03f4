"""Replay: sends the entries of a recording to a hub of this process, as the engines sent them.

Each boot of each worker connects with its name, rank, boot and frame numbers, so consumers get what they got live.

Invariant: frames come in the order of the recording, and a request ends where it ended. A request's result counts rows
that the recording does not have as `not_recorded`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from capflow import limits
from capflow.buffers.policy import WhenFull
from capflow.buffers.spool import Lost
from capflow.capture.frame import Dropped, Finished, Frame, FrameHeader, Rank, WorkerBoot
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.errors import CapflowError, RemoteProtocolError, explain
from capflow.hub.hub import Hub
from capflow.protocol.message import Hello
from capflow.protocol.recording import Entry, RecordedEngine
from capflow.protocol.row_format import RowFormat
from capflow.replay.peer import LocalPeer
from capflow.steering.action import Answered
from capflow.transport.links.worker import empty_header

logger = logging.getLogger("capflow.replay")


class ReplayPace:
    """When each frame is due.

    speed: how many recorded seconds pass in one second; None for as fast as possible.
    steps_per_s: this many steps a second of each worker instead.
    """

    def __init__(self, speed: float | None = None, steps_per_s: float | None = None) -> None:
        self._speed = speed
        self._steps_per_s = steps_per_s
        # The recorded time of the first frame, and when it was replayed.
        self._first: tuple[int, float] | None = None
        # By worker, its last step, and how many it had; a step may be in several frames.
        self._steps: dict[WorkerBoot, tuple[int, int]] = {}

    def due(self, header: FrameHeader, now: float) -> float:
        """Return when a frame is due, on the clock of `now`.

        If the recorded clock went back, the frame is due at once.
        """
        if self._first is None:
            self._first = header.time_ns, now
        began_ns, began = self._first
        if self._steps_per_s is not None:
            step, count = self._steps.get(header.source, (-1, 0))
            count += header.step != step
            self._steps[header.source] = header.step, count
            return began + (count - 1) / self._steps_per_s
        return now if self._speed is None else began + (header.time_ns - began_ns) / 1e9 / self._speed


class Replay:
    """One replay into a running hub.

    `frames` and `rows` count the replayed ones, `records_lost` the records that cannot be read.

    stopped: returns True to end early.
    """

    def __init__(self, hub: Hub, pace: ReplayPace, *, stopped: Callable[[], bool] = lambda: False) -> None:
        self.frames = 0
        self.rows = 0
        self.records_lost = 0
        self._hub = hub
        self._pace = pace
        self._stopped = stopped
        # The model and the row format of each engine.
        self._models: dict[str, ModelInfo] = {}
        self._formats: dict[str, RowFormat] = {}
        # The scheduler and the workers of each connected engine.
        self._schedulers: dict[str, LocalPeer] = {}
        self._workers: dict[tuple[str, Rank], _Worker] = {}
        # The worker that was handed frames which the hub does not have; only one has such frames.
        self._handing: _Worker | None = None
        # Whether ends of requests wait at a worker.
        self._is_ending = False
        # For each open request, by engine and id: the rank of its worker in each stage.
        self._open: dict[tuple[str, str], dict[int, Rank]] = {}
        # For each open request: the stages whose frames ended it.
        self._ended: dict[tuple[str, str], set[int]] = {}

    def run(self, entries: Iterable[Entry]) -> None:
        """Send all entries, and wait until the consumers with policies `block` and `spill` have the frames.

        Raises CapflowError if the hub refuses an engine, because a consumer asks for a site that its model lacks.
        """
        try:
            for entry in entries:
                if self._stopped():
                    return
                self._give(entry)
            self._flush()
            self._end_pending()
            for worker in self._workers.values():
                worker.link.settle()
        finally:
            for engine in list(self._schedulers):
                self._lose(engine)

    def _give(self, entry: Entry) -> None:
        if not isinstance(entry, Frame):
            self._flush()
            self._hear()
        if not isinstance(entry, RequestDone):
            self._end_pending()
        match entry:
            case RecordedEngine(name, model):
                if self._models.get(name) != model:
                    self._lose(name)
                self._models[name] = model
                self._formats[name] = RowFormat(model)
                self._connect(name)
            case Frame():
                self._frame(entry)
            case Answered():
                self._event(entry)
            case RequestDone():
                self._done(entry)
            case Lost():
                self.records_lost += entry.last - entry.first + 1
                logger.warning("records %d to %d of the recording are lost: %s", entry.first, entry.last, entry.reason)

    def _frame(self, frame: Frame) -> None:
        header = frame.header
        try:
            frame.check()  # the hub takes it as it is
            if (format_ := self._formats.get(header.engine)) is not None:
                format_.check(header)
        except RemoteProtocolError as e:
            self.records_lost += 1
            text = "frame %d of the recording, of engine %s, is left out: %s"
            logger.warning(
                text, header.seq, header.engine, e, extra={"event": "frame_refused", "engine": header.engine}
            )
            return
        worker = self._worker(*header.source)
        if header.seq <= worker.recorded:
            return
        now = time.monotonic()
        if (due := self._pace.due(header, now)) > now:
            self._flush()
        self._rest(due)
        if self._stopped():
            return
        self.frames += 1
        for part, rows in zip(header.requests, frame.counts, strict=True):
            worker.given[part.id] += rows
            self.rows += rows
            self._open.setdefault((header.engine, part.id), {})[header.rank.pp] = header.rank
        for finished in header.finished:
            self._ended.setdefault((header.engine, finished.id), set()).add(header.rank.pp)
        if worker is not self._handing:
            self._flush()
            self._handing = worker
        worker.give(frame)
        if worker.link.full:
            self._flush()
            self._hear()

    def _flush(self) -> None:
        """Give the hub the frames that a worker was handed: before it hears of another peer, and before a pause."""
        worker, self._handing = self._handing, None
        if worker is not None:
            worker.link.flush()

    def _hear(self) -> None:
        for scheduler in self._schedulers.values():
            scheduler.hear()

    def _event(self, answered: Answered) -> None:
        """Tell consumers an event. Unlike a frame it needs no credit, so it waits for consumers that are waited for."""
        while not self._stopped() and any(
            lane.policy is WhenFull.BLOCK and lane.notes.nbytes > limits.NOTES_BYTES_MAX // 2
            for lane in self._hub.lanes
        ):
            time.sleep(limits.IDLE_S)
        self._hub.tell(answered)

    def _rest(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0 and not self._stopped():
            time.sleep(min(left, limits.IDLE_S))

    def _done(self, done: RequestDone) -> None:
        """End a request as it ended live: by its workers' ends that no recorded frame holds, or with its engine."""
        key = done.engine, done.request
        ranks, ended = self._open.pop(key, {}), self._ended.pop(key, set())
        model = self._models.get(done.engine)
        if model is None:
            return  # the record of the engine is lost and counted
        if len(done.finished) < model.stages:
            if ranks:
                self._end_pending()
                self._lose(done.engine, next(iter(ranks.values())).dp)
            return
        replica = next(iter(ranks.values())).dp if ranks else 0
        for stage, finished in enumerate(done.finished):
            if stage not in ended:
                rank = ranks.get(stage, Rank(stage, replica, 0))
                worker = self._workers.get((done.engine, rank)) or self._worker(done.engine, "replayed", rank)
                worker.ends.append(finished)
                self._is_ending = True

    def _end_pending(self) -> None:
        if not self._is_ending:
            return
        self._is_ending = False
        self._flush()
        for worker in self._workers.values():
            worker.end()

    def _worker(self, engine: str, boot: str, rank: Rank) -> _Worker:
        key = engine, rank
        worker = self._workers.get(key)
        if worker is None or worker.link.hello.boot != boot:
            self._flush()
            if worker is not None:
                worker.link.close()
            hello = Hello("worker", engine, boot, rank, self._connect(engine), former=True)
            worker = self._workers[key] = _Worker(LocalPeer(self._hub, hello, stopped=self._stopped))
        return worker

    def _connect(self, engine: str) -> ModelInfo:
        """Connect an engine's scheduler unless it is connected; return the engine's model."""
        model = self._models.get(engine)
        if model is None:
            do = "its first records are lost"
            raise CapflowError(explain("recording", got=f"a frame of engine {engine} before its model", do=do))
        if engine not in self._schedulers:
            hello = Hello("scheduler", engine, "scheduler", model=model, former=True)
            self._schedulers[engine] = LocalPeer(self._hub, hello, stopped=self._stopped)
        return model

    def _lose(self, engine: str, replica: int | None = None) -> None:
        """Disconnect an engine, or one replica of it: its open requests end with status `error`."""
        self._flush()
        for key in [key for key in self._workers if key[0] == engine and replica in (None, key[1].dp)]:
            self._workers.pop(key).link.close()
        if engine in self._schedulers and not any(name == engine for name, _ in self._workers):
            self._schedulers.pop(engine).close()
        for request, ranks in list(self._open.items()):
            if request[0] == engine and replica in (None, *(rank.dp for rank in ranks.values())):
                del self._open[request]
                self._ended.pop(request, None)


class _Worker:
    """One boot of one worker."""

    def __init__(self, link: LocalPeer) -> None:
        self.link = link
        # The number of its last frame in the recording.
        self.recorded = 0
        # The replayed rows of each open request.
        self.given: Counter[str] = Counter()
        # Ends of requests whose frames were not recorded, to be sent.
        self.ends: list[Finished] = []

    def give(self, frame: Frame) -> None:
        """Hand over a frame with its number, after an empty frame for each number that was not recorded."""
        header = frame.header
        self.recorded = header.seq
        while self.link.seq and self.link.seq < header.seq - 1:
            self.link.push(empty_header(self.link.hello))
            if self.link.full and not self.link.flush():
                break
        seq = max(header.seq, self.link.seq + 1)  # higher if there were more ends to send than missing frames
        finished = tuple(map(self._without_missing, header.finished)) if header.finished else ()
        if (seq, finished) != (header.seq, header.finished):
            frame = Frame(msgspec.structs.replace(header, seq=seq, finished=finished), frame.payload)
        self.link.hand(frame)

    def end(self) -> None:
        """Send the ends of requests that wait."""
        while self.ends:
            ends, self.ends = self.ends[: limits.FINISHED_PER_FRAME_MAX], self.ends[limits.FINISHED_PER_FRAME_MAX :]
            header = empty_header(self.link.hello)
            self.link.push(msgspec.structs.replace(header, finished=tuple(map(self._without_missing, ends))))
            self.link.flush()

    def _without_missing(self, finished: Finished) -> Finished:
        missing = finished.rows - self.given.pop(finished.id, 0)
        if missing <= 0:
            return finished
        dropped = (*finished.dropped, Dropped(missing, "not_recorded"))
        return msgspec.structs.replace(finished, rows=finished.rows - missing, dropped=dropped)
