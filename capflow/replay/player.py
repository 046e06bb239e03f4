"""Replay: what a recording says, said again to a hub of this process, as the engines said it.

Each boot of each worker is a worker here, with the name, rank, boot and frame numbers that it had, so that consumers are told what they were
told live. What always holds: frames come in the order of the recording; a request ends where it ended; rows of a request that
are not in the recording are counted in its result as `not_recorded`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from capflow import limits
from capflow.buffers.spool import Lost
from capflow.capture.frame import Dropped, Finished, Frame, FrameHeader, Rank, WorkerBoot, rows_of
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.errors import CapflowError, RemoteProtocolError, explain
from capflow.hub.hub import Hub
from capflow.protocol.message import Hello
from capflow.protocol.recording import RecordedEngine, Said
from capflow.protocol.row_format import RowFormat
from capflow.replay.peer import LocalPeer
from capflow.transport.links.worker import empty_header

logger = logging.getLogger("capflow.replay")


class ReplayPace:
    """When frames are due.

    speed: how many seconds of the recording pass in one.
    steps_per_s: so many frames of each worker, instead. None: at once.
    """

    def __init__(self, speed: float | None = None, steps_per_s: float | None = None) -> None:
        self._speed = speed
        self._steps_per_s = steps_per_s
        # The wall clock of the first frame, and when it was said here.
        self._first: tuple[int, float] | None = None
        self._steps: Counter[WorkerBoot] = Counter()

    def due(self, header: FrameHeader, now: float) -> float:
        """Return when a frame is due, on the clock of `now`; a clock that was set back is not waited for."""
        if self._first is None:
            self._first = header.time_ns, now
        began_ns, began = self._first
        if self._steps_per_s is not None:
            self._steps[header.source] += 1
            return began + (self._steps[header.source] - 1) / self._steps_per_s
        return now if self._speed is None else began + (header.time_ns - began_ns) / 1e9 / self._speed


class Replay:
    """One replay into a hub that runs.

    stopped: whether to end early.

    `frames` and `rows` count what was said; `records_lost` what could not be read.
    """

    def __init__(self, hub: Hub, pace: ReplayPace, *, stopped: Callable[[], bool] = lambda: False) -> None:
        self.frames = 0
        self.rows = 0
        self.records_lost = 0
        self._hub = hub
        self._pace = pace
        self._stopped = stopped
        self._models: dict[str, ModelInfo] = {}
        # Likewise, by engine.
        self._formats: dict[str, RowFormat] = {}
        # Of the engines that are connected.
        self._schedulers: dict[str, LocalPeer] = {}
        self._workers: dict[tuple[str, Rank], _Worker] = {}
        # Of open requests: their workers, by stage.
        self._told: dict[tuple[str, str], dict[int, Rank]] = {}
        # Likewise: the stages that said that they are over.
        self._ended: dict[tuple[str, str], set[int]] = {}

    def run(self, said: Iterable[Said]) -> None:
        """Say all of it, and wait until the hub's consumers with policies `block` and `spill` have it.

        Raises CapflowError when the hub refuses an engine: a consumer wants what its model lacks.
        """
        try:
            for what in said:
                if self._stopped():
                    return
                self._say(what)
            self._end_pending()
            for worker in self._workers.values():
                worker.link.settle()
        finally:
            for engine in list(self._schedulers):
                self._lose(engine)

    def _say(self, what: Said) -> None:
        for scheduler in self._schedulers.values():
            scheduler.hear()
        if not isinstance(what, RequestDone):
            self._end_pending()
        match what:
            case RecordedEngine(name, model):
                if self._models.get(name) != model:
                    self._lose(name)
                self._models[name] = model
                self._formats[name] = RowFormat(model)
                self._connect(name)
            case Frame():
                self._frame(what)
            case RequestDone():
                self._done(what)
            case Lost():
                self.records_lost += what.last - what.first + 1
                logger.warning("records %d to %d of the recording are lost: %s", what.first, what.last, what.reason)

    def _frame(self, frame: Frame) -> None:
        header = frame.header
        try:
            frame.check(hashed=False)  # the spool has a checksum of its own
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
        self._rest(self._pace.due(header, time.monotonic()))
        if self._stopped():
            return
        rows = rows_of(header)
        worker.given.update(rows)
        self.frames += 1
        self.rows += rows.total()
        for part in header.requests:
            self._told.setdefault((header.engine, part.id), {})[header.rank.pp] = header.rank
        for finished in header.finished:
            self._ended.setdefault((header.engine, finished.id), set()).add(header.rank.pp)
        worker.say(frame)

    def _rest(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0 and not self._stopped():
            time.sleep(min(left, limits.IDLE_S))

    def _done(self, done: RequestDone) -> None:
        """End a request as it ended: by what its workers said that no recorded frame holds, or with its engine."""
        key = done.engine, done.request
        ranks, ended = self._told.pop(key, {}), self._ended.pop(key, set())
        model = self._models.get(done.engine)
        if model is None:
            return  # the record that names it is lost, and was counted
        if len(done.finished) < model.stages:
            if ranks:
                self._end_pending()
                self._lose(done.engine, next(iter(ranks.values())).dp)
            return
        replica = next(iter(ranks.values())).dp if ranks else 0
        for stage, finished in enumerate(done.finished):
            if stage not in ended:
                rank = ranks.get(stage, Rank(stage, replica, 0))
                known = self._workers.get((done.engine, rank)) or self._worker(done.engine, "replayed", rank)
                known.ends.append(finished)

    def _end_pending(self) -> None:
        for worker in self._workers.values():
            worker.end()

    def _worker(self, engine: str, boot: str, rank: Rank) -> _Worker:
        key = engine, rank
        worker = self._workers.get(key)
        if worker is None or worker.link.hello.boot != boot:
            if worker is not None:
                worker.link.close()
            hello = Hello("worker", engine, boot, rank, self._connect(engine), former=True)
            worker = self._workers[key] = _Worker(LocalPeer(self._hub, hello, stopped=self._stopped))
        return worker

    def _connect(self, engine: str) -> ModelInfo:
        """Have an engine be there: its scheduler connects. Return its model."""
        model = self._models.get(engine)
        if model is None:
            do = "its first records are lost"
            raise CapflowError(explain("recording", got=f"a frame of engine {engine} before its model", do=do))
        if engine not in self._schedulers:
            hello = Hello("scheduler", engine, "scheduler", model=model, former=True)
            self._schedulers[engine] = LocalPeer(self._hub, hello, stopped=self._stopped)
        return model

    def _lose(self, engine: str, replica: int | None = None) -> None:
        """Have an engine, or one replica of it, go away: what it has not ended is over, with status `error`."""
        for key in [key for key in self._workers if key[0] == engine and replica in (None, key[1].dp)]:
            self._workers.pop(key).link.close()
        if engine in self._schedulers and not any(name == engine for name, _ in self._workers):
            self._schedulers.pop(engine).close()
        for request, ranks in list(self._told.items()):
            if request[0] == engine and replica in (None, *(rank.dp for rank in ranks.values())):
                del self._told[request]
                self._ended.pop(request, None)


class _Worker:
    """One boot of one worker."""

    def __init__(self, link: LocalPeer) -> None:
        self.link = link
        # The number of its last frame in the recording.
        self.recorded = 0
        # Rows by request, until it is over.
        self.given: Counter[str] = Counter()
        # What it said in frames that were not recorded, and is to be said.
        self.ends: list[Finished] = []

    def say(self, frame: Frame) -> None:
        """Say a frame with the number that it had, having said an empty one for each that was not recorded."""
        header = frame.header
        self.recorded = header.seq
        while self.link.seq and self.link.seq < header.seq - 1 and self.link.push(empty_header(self.link.hello)):
            pass
        seq = max(header.seq, self.link.seq + 1)  # where more ends were said than there were frames left out
        finished = tuple(map(self._told, header.finished))
        if (seq, finished) != (header.seq, header.finished):
            frame = Frame(msgspec.structs.replace(header, seq=seq, finished=finished), frame.payload)
        self.link.give(frame)

    def end(self) -> None:
        """Say which requests are over."""
        while self.ends:
            ends, self.ends = self.ends[: limits.FINISHED_PER_FRAME_MAX], self.ends[limits.FINISHED_PER_FRAME_MAX :]
            header = empty_header(self.link.hello)
            self.link.push(msgspec.structs.replace(header, finished=tuple(map(self._told, ends))))

    def _told(self, finished: Finished) -> Finished:
        missing = finished.rows - self.given.pop(finished.id, 0)
        if missing <= 0:
            return finished
        dropped = (*finished.dropped, Dropped(missing, "not_recorded"))
        return msgspec.structs.replace(finished, rows=finished.rows - missing, dropped=dropped)
