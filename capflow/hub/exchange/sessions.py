"""The sessions: who is let in, who is refused or given up, and what each peer may say."""

from __future__ import annotations

import logging
from collections.abc import Container, Generator, Iterator, Sequence
from typing import Any

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.capture.frame import Frame
from capflow.capture.spec import CaptureSpec
from capflow.errors import RemoteProtocolError, RoomError, UsageError
from capflow.hub.counts import Counts
from capflow.hub.effects import Effects, Log, Refuse, Send
from capflow.hub.exchange.actions import Actions
from capflow.hub.exchange.answers import Answers
from capflow.hub.exchange.frames import Frames
from capflow.hub.exchange.handover import Handover
from capflow.hub.exchange.shared_steering import SharedStates
from capflow.hub.exchange.watchers import Watchers
from capflow.hub.peers.departures import Departures
from capflow.hub.peers.guard import Guard
from capflow.hub.peers.roster import Peer, Roster
from capflow.protocol.message import (
    Act,
    ActBatch,
    ActionOutcome,
    Await,
    Bye,
    FollowSteering,
    HeldSteering,
    Hello,
    Message,
    SharedSteering,
    Status,
    WatchRequest,
    Welcome,
    encode,
)
from capflow.protocol.session import HubSession, UnexpectedMessageError
from capflow.steering.action import Rejected

OTHER_REASONS = "other reasons"
"""The reason under which further refusals are counted after `limits.REFUSALS_MAX` different reasons."""

_RIGHT: dict[type[Any], str] = {Act: "steer", ActBatch: "steer", Await: "read", Status: "read", WatchRequest: "read"}
"""The right that a client needs for each message."""


class Sessions:
    """The sessions of all peers.

    captures: the specs of consumers, for every Welcome.
    readers: the consumers that a request may name.
    minds_actions: whether any consumer handles the outcomes of actions.
    hub_id: an id that no other hub has.
    """

    def __init__(
        self,
        roster: Roster,
        frames: Frames,
        actions: Actions,
        answers: Answers,
        watchers: Watchers,
        shared: SharedStates,
        departures: Departures,
        handover: Handover,
        guard: Guard,
        counts: Counts,
        effects: Effects,
        *,
        captures: Sequence[CaptureSpec],
        readers: tuple[str, ...],
        minds_actions: bool,
        hub_id: str,
    ) -> None:
        self._roster = roster
        self._frames = frames
        self._actions = actions
        self._answers = answers
        self._watchers = watchers
        self._shared = shared
        self._departures = departures
        self._handover = handover
        self._guard = guard
        self._counts = counts
        self._effects = effects
        self._welcome_scheduler = Welcome(
            hub_id,
            0,
            captures=tuple(captures),
            controllers=tuple(controller.spec() for controller in roster.controllers),
            actions=minds_actions,
        )
        self._welcome_client = Welcome(hub_id, 0, captures=tuple(captures), readers=readers, shares=True)
        # A worker's credit comes from its intake.
        self._welcome_worker = Welcome(hub_id, 0, frames_max=limits.MESSAGE_FRAMES_MAX)
        # Peers that were refused and may stay connected, the oldest first.
        self._refused: dict[bytes, None] = {}
        # Refusals that were logged, by engine and reason.
        self._logged: set[tuple[str, str]] = set()
        # The state of the allow-list by which sessions were checked last.
        self._rights = 0

    def settled(self, peer: bytes) -> bool:
        """Return whether a connection has a session, or was refused and may stay connected."""
        return peer in self._roster.peers or peer in self._refused

    # What peers may do.

    def may(self, peer: bytes, member: Peer, message: Frame | Message) -> bool:
        """Return whether a peer has the right to a message. If not, the action or the peer is refused."""
        right = _RIGHT.get(type(message)) or ("capture" if member.hello.role != "client" else None)
        if isinstance(message, FollowSteering | SharedSteering):
            # Front ends have the key of their engine. Without keys, anyone could steer, as by an action.
            right = "capture" if member.session.user else "steer"
        reason = None if right is None else self._guard.refusal(member.session.user, right)
        if reason is None:
            return True
        if isinstance(message, Act | ActBatch):
            for act in (message,) if isinstance(message, Act) else message.acts:
                self._effects.say(peer, ActionOutcome(Rejected(act.id, reason)))
        elif isinstance(message, FollowSteering | SharedSteering):
            self._effects.say(peer, HeldSteering(message.engine, reason=reason))
        else:
            self._expel(peer, member, reason)
        return False

    def check_rights(self) -> None:
        """Refuse each peer that lost the right to its session, its tap or its results, if the allow-list has changed.

        Peers that were refused earlier may connect again, because they may have the right now.
        """
        if self._guard.version == self._rights:
            return
        self._rights = self._guard.version
        self._refused.clear()
        for peer, member in list(self._roster.peers.items()):
            rights: tuple[str, ...] = ("capture",)
            if member.hello.role == "client":
                rights = ("read",) if peer in self._watchers or peer in self._answers else ("read", "steer")
            if (reason := self._guard.refusal(member.session.user, *rights)) is not None:
                self._expel(peer, member, reason)

    def _expel(self, peer: bytes, member: Peer, reason: str) -> None:
        self._refuse(peer, member.session, reason)
        self.leave(peer, member)

    # Beginnings.

    def hello(self, peer: bytes, session: HubSession, hello: Hello) -> Iterator[None]:
        """Let a peer in, or refuse it. Yields between slices."""
        if self._frames.draining:
            return
        self.forget(peer, for_good=False)
        self._refused.pop(peer, None)
        if hello.role != "client":
            # So a peer that says Hello and Bye again and again waits for its own departures.
            yield from self._departures.done(hello.engine)
        member = yield from self._joined(peer, session, hello)
        if member is not None:
            self._welcome(peer, member)

    def _joined(self, peer: bytes, session: HubSession, hello: Hello) -> Generator[None, None, Peer | None]:
        """Let a peer in and return it, or refuse it.

        If there is no room, waits for the departures that are under way, and tries once more.
        """
        rights = ("read", "steer") if hello.role == "client" else ("capture",)
        for again in (False, True):
            if self._frames.draining:
                break
            if (reason := self._guard.refusal(session.user, *rights)) is not None:
                self._refuse(peer, session, reason)
                break
            before = self._departures.engines
            try:
                return self._roster.join(peer, session, hello, self._effects.now)
            except (UsageError, RoomError) as e:
                left = self._departures.engines - before
                if again or not left or not isinstance(e, RoomError):
                    self._refuse(peer, session, str(e))
                    break
            for engine in left:
                yield from self._departures.done(engine)
        return None

    def _welcome(self, peer: bytes, member: Peer) -> None:
        session, hello, source = member.session, member.hello, member.source
        welcome = self._welcome_client
        intake = None
        if source is not None:  # after the lanes know that an earlier boot of it is gone
            welcome, intake = self._welcome_worker, source.intake
            intake.release(*self._frames.released(source))  # the Welcome acknowledges them
            self._frames.greet_lanes(hello.engine, source.engine.model, worker=True)
        elif hello.role == "scheduler":
            welcome = self._welcome_scheduler
        if hello.role != "client":
            text = "engine %s: its %s %s connected"
            self._log("session_opened", logging.INFO, peer, session, text, hello.engine, hello.role, tuple(hello.rank))
        welcome = msgspec.structs.replace(welcome, clock_s=self._effects.now)
        for parts in session.welcome(welcome, self._effects.now, intake):
            self._effects.add(Send(peer, parts))
        if hello.role == "scheduler":
            self._actions.again(peer, hello.boot)
            self._handover.greet(peer)

    # Refusals.

    def turn_down(
        self, peer: bytes, member: Peer | None, session: HubSession, error: RemoteProtocolError | RoomError
    ) -> None:
        """Answer a message that is not taken."""
        if isinstance(error, RoomError):  # no offence: it may come again
            self._refuse(peer, session, str(error))
            if member is not None:
                self.leave(peer, member)
        elif member is None and isinstance(error, UnexpectedMessageError):
            self._effects.add(Send(peer, [encode(Bye())]))  # its session is over: it says Hello again
        else:
            self.cut_off(peer, session, str(error))

    def cut_off(self, peer: bytes, session: HubSession, reason: str) -> None:
        """Refuse and forget a peer that broke the protocol. After several times it is ignored for a while."""
        self._counts.protocol_errors += 1
        offences = self._guard.offences.note(session.user or peer, self._effects.now)
        name = name_of_peer(peer, session)
        if offences == 1:
            self._log("session_refused", logging.ERROR, peer, session, "cut off %s: %s", name, reason, reason=reason)
        elif offences >= limits.OFFENCES_MAX:
            text, args = "ignoring %s for %g s after %d invalid messages", (name, limits.IGNORED_S, offences)
            self._log("peer_ignored", logging.ERROR, peer, session, text, *args, reason=reason)
        self._refuse(peer, session, reason, cut_off=True)
        self.forget(peer, for_good=True)

    def _refuse(self, peer: bytes, session: HubSession, reason: str, *, cut_off: bool = False) -> None:
        """Refuse a peer. A peer that is not cut off may stay connected until it is let in."""
        refused = self._counts.refused
        refused[reason if reason in refused or len(refused) < limits.REFUSALS_MAX else OTHER_REASONS] += 1
        engine = session.hello.engine if session.hello is not None else ""
        is_client = session.hello is None or session.hello.role == "client"
        is_new, has_room = (engine, reason) not in self._logged, len(self._logged) < limits.SESSIONS_MAX
        if is_new and has_room:
            self._logged.add((engine, reason))
        if is_new and not cut_off:
            args = (name_of_peer(peer, session), reason)
            self._log("session_refused", logging.ERROR, peer, session, "refused %s: %s", *args, reason=reason)
        if not cut_off:
            self._refused[peer] = None
            keep_newest(self._refused, limits.REFUSED_KEPT_MAX)
        parts = session.refuse(reason, self._effects.now)
        self._effects.add(Refuse(peer, parts, "" if is_client else engine, reason, is_new and has_room))

    # Ends.

    def tick(self, waiting: Container[bytes]) -> None:
        """Send beats, and give up silent peers.

        waiting: peers whose messages are not handled yet.
        """
        now = self._effects.now
        for peer, member in list(self._roster.peers.items()):
            if member.session.silent(now) and peer not in waiting:
                if member.hello.role != "client":
                    self._note_lost(peer, member, "engine %s: its %s fell silent")
                self.leave(peer, member)
            elif (beat := member.session.tick(now)) is not None:
                self._effects.add(Send(peer, beat))

    def give_up(self, peer: bytes) -> None:
        """Forget a peer that does not read its messages; it may say Hello again."""
        member = self._roster.peers.get(peer)
        if member is not None:
            self._note_lost(peer, member, "engine %s: its %s does not read its messages")
            self.leave(peer, member)

    def _note_lost(self, peer: bytes, member: Peer, text: str) -> None:
        self._counts.sessions_lost += member.hello.role != "client"
        args = (member.hello.engine, member.hello.role)
        self._log("session_lost", logging.WARNING, peer, member.session, text, *args)

    def leave(self, peer: bytes, member: Peer) -> None:
        """Forget a peer that may come back. Its open requests end."""
        self.forget(peer, for_good=False)
        if member.source is not None:
            self._frames.lose(member.source.engine, member.hello.rank.dp, member.hello.rank.pp)

    def forget(self, peer: bytes, *, for_good: bool) -> None:
        """Forget a connection.

        for_good: its worker does not come back.
        """
        member = self._roster.leave(peer, for_good=for_good)
        if member is None:
            return
        if member.hello.role == "client":
            self._answers.gone(peer)
            self._watchers.gone(peer)
            self._shared.gone(peer)
        elif for_good:
            args = (member.hello.engine, member.hello.role)
            self._log("session_closed", logging.INFO, peer, member.session, "engine %s: its %s left", *args)

    def _log(
        self, event: str, level: int, peer: bytes, session: HubSession, text: str, *args: object, **fields: object
    ) -> None:
        fields = {"event": event, **fields, **about(session.hello)}
        self._effects.add(Log(level, text, args, fields, session.user or peer))


def about(hello: Hello | None) -> dict[str, Any]:
    """Return the fields of a log record that identify a peer."""
    if hello is None:
        return {}
    fields: dict[str, Any] = {"role": hello.role, "engine": hello.engine, "rank": list(hello.rank)}
    return fields if hello.model is None else fields | {"model": hello.model.name}


def name_of_peer(peer: bytes, session: HubSession) -> str:
    """Return the name of a peer in a log."""
    role = session.hello.role if session.hello is not None else "peer"
    return f"{role} with key {session.user}" if session.user else f"{role} {peer.hex()}"
