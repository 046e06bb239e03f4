"""The roster: which peers are connected, which engines they belong to, and what the hub has of each worker.

It belongs to the hub's thread and does no I/O. A worker's source outlives its connections, so that it can resume; it
ends with the worker's Bye, or when the worker comes back with another boot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.capture.frame import FrameHeader, Rank
from capflow.capture.model import ModelInfo
from capflow.errors import UsageError, explain
from capflow.hub.counts import age_s
from capflow.hub.requests.request import KnownEngine
from capflow.plugins.configure import ConfiguredController
from capflow.protocol.credit import Intake, Pool
from capflow.protocol.message import ControllerCounts, Determinism, Hello, WorkerCounts
from capflow.protocol.session import HubSession
from capflow.text.engine_name import name_of

# The memory of the state of a worker.
SOURCE_BYTES = 4 * limits.KIB


@dataclass(eq=False)
class WorkerState:
    """The state of one boot of one worker, and the counts of its frames so far."""

    boot: str
    rank: Rank
    engine: KnownEngine
    intake: Intake
    # Its connection, while it has one.
    peer: bytes | None = None
    # The time since which it has no connection, on the monotonic clock.
    silent_since: float | None = None
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    step_tokens: int = 0
    # The step of the last frame.
    step_last: int = -1
    # When the last frame was taken, on the monotonic clock.
    frame_at: float | None = None
    # The counters that the worker reported last.
    reported: WorkerCounts | None = None
    # What it reported of its controllers.
    troubles: tuple[str, ...] = ()
    controllers: Mapping[str, ControllerCounts] = field(default_factory=dict)
    # Whether the ranks of its engine steer alike, as it reported last.
    determinism: Determinism | None = None

    def count(self, header: FrameHeader, rows: int, now: float) -> None:
        """Count a frame."""
        self.frame_at = now
        self.frames += 1
        self.rows += rows
        self.bytes += header.payload_bytes
        if header.step != self.step_last:  # a step may come in several frames
            self.step_last = header.step
            self.step_tokens += header.step_tokens


class Peer(NamedTuple):
    """One connection that said Hello and was let in.

    owner: the owner of the memory that the peer takes, as in `capflow.buffers.shares`.
    troubles: why the hub's controllers do not work, as a scheduler reported last.
    """

    session: HubSession
    hello: Hello
    # Set for a worker.
    source: WorkerState | None
    owner: str
    troubles: list[str]

    def status(self, now: float) -> dict[str, Any]:
        """Return what is shown of a session."""
        fields: dict[str, Any] = {"role": self.hello.role, "engine": self.hello.engine, "rank": list(self.hello.rank)}
        if self.hello.model is not None:
            fields["model"] = self.hello.model.name
        if self.hello.off:
            fields["off"] = self.hello.off
        if self.source is not None:
            fields |= {
                "frames": self.source.frames,
                "rows": self.source.rows,
                "bytes": self.source.bytes,
                "step_tokens": self.source.step_tokens,
                "credit_bytes": self.source.intake.credit_bytes,
                "held_bytes": self.source.intake.held_bytes,
                "held_bytes_peak": self.source.intake.held_bytes_peak,
                "last_frame_age_s": age_s(self.source.frame_at, now),
                "worker": None if self.source.reported is None else msgspec.to_builtins(self.source.reported),
            }
        return fields


class OnLost(Protocol):
    """Called with the part of an engine that is gone, as `RequestIndex.lose` takes it."""

    def __call__(
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, restarted: bool = False
    ) -> None:
        """Take note of it."""


class Roster:
    """All peers, sources and engines of a hub.

    fits: raises UsageError if consumers want what a model lacks.
    on_engine: called with an engine that connected or came back.
    on_lost: called with the part of an engine that is gone, as `RequestIndex.lose` takes it.
    """

    def __init__(
        self,
        pool: Pool,
        state: Shares,
        controllers: Sequence[ConfiguredController],
        *,
        fits: Callable[[ModelInfo], None],
        on_engine: Callable[[KnownEngine], None],
        on_lost: OnLost,
    ) -> None:
        # The credit that the workers share.
        self.pool = pool
        self.controllers = tuple(controllers)
        self.sessions = Shares("sessions", limits.SESSIONS_MAX, unit="sessions", do="close some, or try again later")
        # The memory that peers share.
        self.state = state
        # The peers that were let in, by connection, until they leave.
        self.peers: dict[bytes, Peer] = {}
        # The engines of which a worker or a scheduler is known, by name.
        self.engines: dict[str, KnownEngine] = {}
        # Workers that came back with the boot that they had.
        self.resumed = 0
        self._sources: dict[tuple[str, Rank], WorkerState] = {}
        self._fits = fits
        self._on_engine = on_engine
        self._on_lost = on_lost

    def schedulers(self) -> Iterator[tuple[bytes, Hello]]:
        """Yield the connected schedulers."""
        return ((peer, member.hello) for peer, member in self.peers.items() if member.hello.role == "scheduler")

    def engines_connected(self) -> int:
        """Return how many engines have a peer that is connected."""
        return len({member.hello.engine for member in list(self.peers.values()) if member.hello.role != "client"})

    def frames_spilled(self) -> int:
        """Return how many frames went to the spools of the workers that are connected, as they say."""
        reports = [member.source.reported for member in list(self.peers.values()) if member.source is not None]
        return sum(counts.spool.get("frames_spilled", 0) for counts in reports if counts is not None and counts.spool)

    def troubles(self) -> list[str]:
        """Return why controllers in the engines that are connected do not do what they are there for."""
        members = list(self.peers.values())
        each = [(member, member.troubles if member.source is None else member.source.troubles) for member in members]
        reasons = {f"engine {member.hello.engine}: {reason}": None for member, some in each for reason in list(some)}
        return list(reasons)  # each once, whichever pipeline stages and replicas say it

    def determinism(self) -> dict[str, dict[str, Any]]:
        """Return by engine whether its ranks steer alike; of several replicas, the one that does not, or the first."""
        reports: dict[str, Determinism] = {}
        for member in list(self.peers.values()):
            report = None if member.source is None else member.source.determinism
            if report is not None and (member.hello.engine not in reports or not report.consistent):
                reports[member.hello.engine] = report
        return {engine: msgspec.structs.asdict(report) for engine, report in sorted(reports.items())}

    def join(self, peer: bytes, session: HubSession, hello: Hello, now: float) -> Peer:
        """Let a peer in, in the place of any connection it had before.

        Raises UsageError when consumers want what its model lacks, RoomError when the hub has no room for it.
        """
        self.leave(peer, for_good=False)
        owner = owner_of(session.user, hello, peer)
        self.sessions.take(owner, 1)
        try:
            source = None
            if hello.role != "client":
                assert hello.model is not None
                self._check_name(hello, now)
                engine = self._engine(hello.engine, hello.model, session.user)
                self._check_place(hello, now)
                session.hello = hello = msgspec.structs.replace(hello, model=engine.model)  # kept once
                source = self._source(engine, hello, peer) if hello.role == "worker" else None
        except BaseException:
            self.sessions.give(owner, 1)
            self._forget_unexpected(hello.engine)
            raise
        member = self.peers[peer] = Peer(session, hello, source, owner, [])
        return member

    def leave(self, peer: bytes, *, for_good: bool) -> Peer | None:
        """Forget a connection; return what it was.

        The engine is forgotten when each pipeline stage has left for good, or when it was away for a while
        (`forget_missed`).

        for_good: its worker does not come back. Nothing is kept to resume it, and its open requests are over.
        """
        member = self.peers.pop(peer, None)
        if member is None:
            return None
        self.sessions.give(member.owner, 1)
        name = member.hello.engine
        if member.source is not None:
            member.source.peer = None
            member.source.intake.revoke()
            if for_good:
                self._drop(member.source)
                member.source.engine.stages_left.add(member.hello.rank.pp)
                self._on_lost(member.source.engine, member.hello.rank.dp, member.hello.rank.pp)
            elif not member.source.intake.last_seq:  # no frame came: there is nothing to resume
                self._drop(member.source)
        engine = self.engines.get(name)
        if engine is not None and len(engine.stages_left) >= engine.model.stages:
            self._forget_unexpected(name)
        return member

    def _check_name(self, hello: Hello, now: float) -> None:
        """Raise UsageError if a live engine has the same name. An engine that was silent lately counts as gone."""
        if hello.former is True:
            return
        name = name_of(hello.engine)
        for peer, member in list(self.peers.items()):
            other = member.hello
            if other.role == "client" or other.former is True or other.engine == hello.engine:
                continue
            if name_of(other.engine) != name:
                continue
            if now - member.session.heard_at < limits.NAME_KEPT_S:
                do = "give this engine another --engine-name, or stop the other"
                raise UsageError(explain(f"engine name {name}", got="that of an engine that is connected", do=do))
            self.leave(peer, for_good=False)
            if member.source is not None:
                self._on_lost(member.source.engine, other.rank.dp)

    def _check_place(self, hello: Hello, now: float) -> None:
        """Raise UsageError if a live peer has the same place in the same engine. One that was silent counts as gone."""
        if hello.former is True:
            return
        place = hello.engine, hello.role, hello.rank
        for member in self.peers.values():
            other = member.hello
            if other.former is True or (other.engine, other.role, other.rank) != place or other.boot == hello.boot:
                continue
            if now - member.session.heard_at < limits.NAME_KEPT_S:
                stage, replica, rank = hello.rank
                got = f"a second {hello.role} of stage {stage}, replica {replica}, rank {rank}"
                do = "give each engine an --engine-id of its own, and each of its commands another rank"
                expected = "one; the first is connected"
                raise UsageError(explain(f"engine {hello.engine}", got=got, expected=expected, do=do))

    def forget_missed(self, now: float) -> None:
        """Forget workers that were silent for `limits.RESUME_S_MAX`, and engines that were away for `limits.MISSED_S`.

        The open requests of such an engine are over, and those of a replica without a connected worker for
        `limits.MISSED_S`.
        """
        self._end_missed_replicas(now)
        for source in list(self._sources.values()):
            if source.peer is not None:
                source.silent_since = None
            elif source.silent_since is None:
                source.silent_since = now
            elif now - source.silent_since >= limits.RESUME_S_MAX:
                self._drop(source)
                self._on_lost(source.engine, source.rank.dp, source.rank.pp)
        here = {member.hello.engine for member in self.peers.values() if member.hello.role != "client"}
        here |= {name for name, _ in self._sources}
        for name, engine in list(self.engines.items()):
            if name in here:
                engine.missed_since = None
            elif engine.missed_since is None:
                engine.missed_since = now
            elif now - engine.missed_since >= limits.MISSED_S:
                self._forget_unexpected(name)

    def _end_missed_replicas(self, now: float) -> None:
        """End the requests of replicas that had no connected worker for `limits.MISSED_S`."""
        here = {(peer.hello.engine, peer.hello.rank.dp) for peer in self.peers.values() if peer.source is not None}
        for engine in list(self.engines.values()):
            for replica, since in list(engine.replicas.items()):
                if (engine.name, replica) in here:
                    engine.replicas[replica] = None
                elif since is None:
                    engine.replicas[replica] = now
                elif now - since >= limits.MISSED_S:
                    del engine.replicas[replica]
                    self._on_lost(engine, replica)

    def _expected(self, engine: str) -> bool:
        """Return whether somebody of an engine is connected, or may resume."""
        return self.connected(engine) or any(name == engine for name, _ in self._sources)

    def connected(self, engine: str) -> bool:
        """Return whether a worker or a scheduler of an engine is connected."""
        return any(member.hello.engine == engine and member.hello.role != "client" for member in self.peers.values())

    def _engine(self, name: str, model: ModelInfo, user: str) -> KnownEngine:
        engine = self.engines.get(name)
        if engine is not None and engine.user != user:
            raise UsageError(explain(f"engine {name}", got="another key than its other workers", expected="the same"))
        connected = self.connected(name)
        if engine is not None and engine.model == model:
            if not connected:
                self._on_engine(engine)
            return engine
        if connected:
            raise UsageError(explain(f"engine {name}", got="another model than its other workers", expected="the same"))
        self._fits(model)
        for controller in self.controllers:
            controller.check(model)
        if engine is not None:
            self._forget(engine)
        new = KnownEngine(name, model, user)
        self._take(new, new.nbytes)
        self.engines[name] = new
        self._on_engine(new)
        return new

    def _source(self, engine: KnownEngine, hello: Hello, peer: bytes) -> WorkerState:
        """Return what the hub has of a worker, new if it is a new boot of it."""
        key = engine.name, hello.rank
        source = self._sources.get(key)
        if source is not None and source.peer is not None:
            self._replace(source.peer)
        if source is None or source.boot != hello.boot:
            if source is not None:
                source.intake.revoke()
                self._drop(source)
                self._on_lost(source.engine, hello.rank.dp, hello.rank.pp, restarted=True)
            self._take(engine, SOURCE_BYTES)
            source = self._sources[key] = WorkerState(hello.boot, hello.rank, engine, Intake(self.pool, engine.owner))
        else:
            self.resumed += 1
        source.engine = engine
        source.peer = peer
        engine.stages_left.discard(hello.rank.pp)
        engine.replicas[hello.rank.dp] = None
        return source

    def _replace(self, peer: bytes) -> None:
        """Forget a connection, its worker having another one."""
        member = self.peers.pop(peer, None)
        if member is not None:
            self.sessions.give(member.owner, 1)
            if member.source is not None:
                # Acknowledgements of its frames are not for the next peer with this name.
                member.source.peer = None

    def _take(self, engine: KnownEngine, nbytes: int) -> None:
        """Take memory for an engine.

        When there is no room, its owner's workers that fell silent are forgotten. Raises RoomError.
        """
        if nbytes > self.state.room(engine.owner):
            for source in [each for each in self._sources.values() if each.peer is None]:
                if source.engine.owner == engine.owner:
                    self._drop(source)
                    self._on_lost(source.engine, source.rank.dp, source.rank.pp)
            for each in [each for each in self.engines.values() if each.owner == engine.owner]:
                if each.name != engine.name:
                    self._forget_unexpected(each.name)
        self.state.take(engine.owner, nbytes, label="engines and workers")

    def _drop(self, source: WorkerState) -> None:
        """Forget a worker."""
        key = source.engine.name, source.rank
        if self._sources.get(key) is source:
            del self._sources[key]
            self.state.give(source.engine.owner, SOURCE_BYTES)

    def _forget_unexpected(self, name: str) -> None:
        """Forget an engine of which nobody is connected or may resume; its open requests are over."""
        engine = self.engines.get(name)
        if engine is not None and not self._expected(name):
            self._forget(engine)

    def _forget(self, engine: KnownEngine) -> None:
        del self.engines[engine.name]
        self._on_lost(engine)
        self.state.give(engine.owner, engine.nbytes)


def owner_of(user: str, hello: Hello, peer: bytes) -> str:
    """Return the owner of a peer's memory: its key; without keys its engine, or the connection of a client."""
    return user or (f"client {peer.hex()}" if hello.role == "client" else f"engine {hello.engine}")
