"""Tapping: what one hub takes, brought live to another one, for consumers that only watch.

Each worker of the tapped hub is a worker here too, with a link of its own to this process's hub: to that hub and its
consumers nothing is special about them. Invariant: nothing here is waited for by the tapped hub or its engines;
rows that a request had before the tap joined, or that it skipped, are counted in the request's result as `not_tapped`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.policy import WhenFull
from capflow.capture.frame import Finished, Frame, FrameHeader, Rank, rows_of
from capflow.capture.losses import Losses, note_frame
from capflow.capture.model import ModelInfo
from capflow.capture.spec import CaptureSpec, Want, Wanted, join
from capflow.errors import CapflowError, HubUnreachableError, UsageError, explain
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer, ConfiguredController
from capflow.protocol.message import Hello, Watched
from capflow.transport.address import check_address
from capflow.transport.links.tap import TapLink
from capflow.transport.links.worker import WorkerLink

logger = logging.getLogger("capflow.tap")


def check_live(consumers: Sequence[ConfiguredConsumer], controllers: Sequence[ConfiguredController]) -> None:
    """Raise UsageError for a consumer that would have to be waited for, and for a controller: a tap only watches."""
    for controller in controllers:
        do = "give it to the hub that the engine is connected to"
        raise UsageError(explain(f"--consumer {controller.name}", got="a controller", expected="a consumer", do=do))
    for consumer in consumers:
        if consumer.policy not in (WhenFull.DROP, WhenFull.SKIP):
            got = f"policy {consumer.policy.value}"
            do = f"{consumer.name}:policy=drop, or give it to the watched hub: a watcher misses frames when it is slow"
            raise UsageError(
                explain(f"--consumer {consumer.name} with --tap", got=got, expected="policy drop or skip", do=do)
            )


def tap_all(
    stack: contextlib.ExitStack,
    tapped: Sequence[str],
    own: Hub,
    *,
    key: str | None,
    own_key: str | None,
    insecure: bool,
) -> None:
    """Bring the frames of several hubs, of the same engines or not, to a hub of this process until the stack ends.

    key, own_key, insecure: as in `Tapping`.
    Raises what `Tapping` and its `start` raise, and UsageError for an address that is given twice.
    """
    first: Tapping | None = None
    for address in tapped:
        if tapped.count(address) > 1:
            raise UsageError(explain("--tap", got=f"{address} twice", expected="each hub once"))
        tapping = Tapping(address, own, key=key, own_key=own_key, insecure=insecure, beside=first)
        stack.enter_context(tapping)
        first = first or tapping


class Tapping:
    """Brings the frames of the hub at an address to a hub of this process, from `start` to `close`.

    key: this side's, for the tapped hub.
    own_key: the own hub's, if it has one. Both are a name or a path.
    insecure: allow TCP off loopback without a key.
    beside: a tapping of another hub, whose engines may be the same ones; None if there is none.

    Raises UsageError for a wrong address or key.
    """

    def __init__(
        self,
        tapped: str,
        own: Hub,
        *,
        key: str | None = None,
        own_key: str | None = None,
        insecure: bool = False,
        beside: Tapping | None = None,
    ) -> None:
        check_address(tapped, insecure=insecure, where="--tap")
        self._own = own
        # The links of the tapped workers to the own hub.
        self.links: _Links = beside.links if beside is not None else _Links(own, own_key)
        # The model of each engine, until the engine is gone. Only the link's thread uses it, and `_workers`.
        self._models: dict[str, ModelInfo] = {}
        self._workers: dict[tuple[str, Rank], _Worker] = {}
        # The number of frames that the tapped hub skipped since the start.
        self.skipped_frames = 0
        self.link = TapLink(
            tapped, on_frame=self._take, on_tapped=self._note, on_event=own.tell, on_lost=self._end, key=key
        )

    def start(self) -> None:
        """Connect to the tapped hub.

        Raises HubUnreachableError if it does not answer, CapflowError if it refuses.
        """
        if not self.join():
            self.close()
            raise HubUnreachableError(explain(f"no hub answers at {self.link.address}", do="see --tap"))

    def join(self) -> bool:
        """Connect to the tapped hub, now or once it is there; return whether it has answered.

        Raises CapflowError if it refuses.
        """
        self.link.start()
        if self.link.wait_welcome(limits.HUB_WAIT_S_DEFAULT) is not None:
            return True
        refusal = self.link.refusal
        if refusal is not None:
            self.close()
            raise CapflowError(explain(f"the hub at {self.link.address} refused", got=refusal))
        return False

    def close(self) -> None:
        """Leave both hubs."""
        self.link.close()
        self._end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # On the link's thread.

    def _note(self, watched: Watched) -> None:
        if watched.model is None:
            self._end(watched.engine, watched.replica, watched.stage)
        else:
            if self._models.pop(watched.engine, None) != watched.model:
                self._tell_of_misses(watched.engine, watched.model)
            self._models[watched.engine] = watched.model
            # The watched hub has no more engines: the oldest is gone.
            keep_newest(self._models, limits.SESSIONS_MAX)

    def _tell_of_misses(self, engine: str, model: ModelInfo) -> None:
        """Say what consumers want of every request and the tapped hub does not: it is not captured for a tap's sake."""
        welcome = self.link.welcome
        captured = _resolved(model, () if welcome is None else welcome.captures)
        for consumer in self._own.consumers:
            spec = consumer.spec
            wanted = _resolved(model, () if spec is None else (spec,))
            missed = [str(site) for site, want in wanted.items() if not _covers(captured.get(site), want)]
            if missed:
                event = {"event": "tap_misses", "consumer": consumer.name, "sites": missed}
                text = "engine %s: nobody captures all that consumer %s wants at %s; it sees what others want there"
                logger.warning(text, engine, consumer.name, ", ".join(missed), extra=event)

    def _end(self, engine: str | None = None, replica: int | None = None, stage: int | None = None) -> None:
        """End the workers of a stage of an engine's replica; None is every one."""
        for key in list(self._workers):
            if engine in (None, key[0]) and replica in (None, key[1].dp) and stage in (None, key[1].pp):
                del self._workers[key]
                self.links.leave(key)

    def _take(self, frame: Frame) -> None:
        header = frame.header
        key = header.engine, header.rank
        worker = self._workers.get(key)
        if worker is None or worker.boot != header.boot:
            if worker is not None:
                self.links.leave(key)
            worker = self._workers[key] = _Worker(header, self.links.join(key, self._models[header.engine]))
        if (skipped := header.seq - worker.seq - 1) > 0:
            self.skipped_frames += skipped
            event = {"event": "tap_skipped", "skipped_frames": skipped}
            logger.warning("skipped %d frames of engine %s", skipped, header.engine, extra=event)
        worker.give(frame)


def _resolved(model: ModelInfo, specs: Sequence[CaptureSpec]) -> Wanted:
    """Return what specs want of a model; nothing of a spec that does not fit it, which the own hub refuses."""
    try:
        return join(spec.resolve(model.sites, num_layers=model.num_layers) for spec in specs)
    except UsageError:
        return {}


def _covers(captured: Want | None, want: Want) -> bool:
    return captured is not None and captured.positions | want.positions == captured.positions


class _SharedLink:
    """The link of a tapped worker to the own hub. An engine with several hubs has one, however many hubs are tapped."""

    def __init__(self, own: Hub, own_key: str | None, engine: str, rank: Rank, model: ModelInfo) -> None:
        hello = Hello("worker", engine, uuid.uuid4().hex, rank, model, former=True)
        self._boot = hello.boot
        self._lock = threading.Lock()
        self._link = WorkerLink(own.address, hello, policy="drop", key=own_key)
        self._link.start()
        self._link.wait_welcome(limits.HUB_WAIT_S_DEFAULT)
        # How many tappings use it.
        self.users = 0

    def send(self, header: FrameHeader, payload: object) -> str | None:
        """Send a frame in the name of the worker; return the reason if it was dropped."""
        with self._lock:
            return self._link.send(msgspec.structs.replace(header, boot=self._boot), payload)

    def close(self) -> None:
        """Leave the own hub."""
        self._link.close()


class _Links:
    """The links of all tapped workers to the own hub, for the threads of all tappings."""

    def __init__(self, own: Hub, own_key: str | None) -> None:
        self._own = own
        self._own_key = own_key
        self._lock = threading.Lock()
        self._links: dict[tuple[str, Rank], _SharedLink] = {}

    def join(self, key: tuple[str, Rank], model: ModelInfo) -> _SharedLink:
        """Return the link of a worker of an engine, for one more tapping."""
        with self._lock:
            link = self._links.get(key)
            if link is None:
                link = self._links[key] = _SharedLink(self._own, self._own_key, *key, model)
            link.users += 1
            return link

    def leave(self, key: tuple[str, Rank]) -> None:
        """Close the link of a worker if no other tapping uses it."""
        with self._lock:
            self._links[key].users -= 1
            closing = self._links.pop(key) if not self._links[key].users else None
        if closing is not None:
            closing.close()


class _Worker:
    """One worker of the tapped hub: how far its frames came, and what became of its requests' rows."""

    def __init__(self, first: FrameHeader, link: _SharedLink) -> None:
        self.boot = first.boot
        self.seq = first.seq - 1
        self._link = link
        # Rows by request, until it is over.
        self._given: Counter[str] = Counter()
        # The same.
        self._lost: dict[str, Losses] = {}

    def give(self, frame: Frame) -> None:
        """Give a frame to this process's hub, as far as that has room."""
        header = frame.header
        self.seq = header.seq
        rows = rows_of(header)
        reason = self._send(header, frame.payload, rows)
        if reason is None:
            self._given.update(rows)
        else:
            note_frame(self._lost, header, reason)
            if header.finished or header.acted:
                self._send(msgspec.structs.replace(header, requests=(), blocks=()), b"", Counter())
        for finished in header.finished:
            self._given.pop(finished.id, None)
            self._lost.pop(finished.id, None)

    def _send(self, header: FrameHeader, payload: object, more: Counter[str]) -> str | None:
        finished = tuple(self._told(one, self._given[one.id] + more[one.id]) for one in header.finished)
        return self._link.send(msgspec.structs.replace(header, finished=finished), payload)

    def _told(self, finished: Finished, given: int) -> Finished:
        """Return the end of a request with what of its rows was given here, and why the rest was not."""
        lost = Losses()
        lost.update(self._lost[finished.id].dropped if finished.id in self._lost else ())
        lost.count("not_tapped", max(0, finished.rows - given - lost.rows.total()))
        lost.update(finished.dropped)
        return msgspec.structs.replace(finished, rows=given, dropped=lost.dropped)
