"""The steering that the front ends of an engine share: the hub keeps its parts and passes each to the others.

A part is a module, or the global state; its content is bytes to the hub. A front end that follows gets all parts, and
later the newest version of each part that another one changes. Engines of different keys share nothing.

Invariants: the hub keeps the largest version of a part that it received. At most one part is on the way to a follower,
and at most `limits.SHARED_SENT_BYTES_MAX` bytes, or one larger part, to all. Parts are kept for as long as anybody
follows: followers bring theirs to a hub that was restarted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from capflow import limits
from capflow.buffers.shares import Shares
from capflow.errors import RoomError, UsageError, explain
from capflow.hub.effects import Effects
from capflow.hub.peers.roster import Peer
from capflow.protocol.message import FollowSteering, HeldSteering, SharedSteering, Version

_PART_BYTES = 1024

_Key = tuple[str, str]
"""The public key of a front end, "" without keys, and the id of its engine."""


class _Sent(NamedTuple):
    """A part on the way to a follower.

    until: when the follower must have answered.
    """

    module: str
    nbytes: int
    until: float


@dataclass
class _Follower:
    """A front end.

    owed: the parts that it does not have, in the order in which it gets them.
    sent: the part that is on the way to it.
    greeted: whether it has had all parts once.
    """

    owed: dict[str, None] = field(default_factory=dict)
    sent: _Sent | None = None
    greeted: bool = False

    def lacks(self, module: str) -> bool:
        return module in self.owed or (self.sent is not None and module == self.sent.module)


class _Change(NamedTuple):
    """A change that a front end waits for.

    until: when it is answered at the latest.
    """

    version: Version
    until: float


class _Engine:
    """What the front ends of one engine share."""

    def __init__(self, key: _Key) -> None:
        self.name = key[1]
        self.owner = key[0] or f"engine {key[1]}"
        self.parts: dict[str, SharedSteering] = {}
        self.followers: dict[bytes, _Follower] = {}
        # The changes that are not everywhere, by the front end that waits for one, and the part.
        self.changes: dict[tuple[bytes, str], _Change] = {}


class SharedStates:
    """The shared steering of all engines.

    state: the memory that it takes a part of.
    """

    def __init__(self, state: Shares, effects: Effects) -> None:
        self._state = state
        self._effects = effects
        self._engines: dict[_Key, _Engine] = {}
        # The engine that each follower follows.
        self._followed: dict[bytes, _Engine] = {}
        self._count = Shares("front ends that share steering", limits.SHARING_MAX, unit="front ends")
        # The owner of each follower's place.
        self._owners: dict[bytes, str] = {}
        # The bytes that are on the way to followers, and the followers that wait for others.
        self._sent_bytes = 0
        self._blocked: dict[bytes, None] = {}

    def receive(self, peer: bytes, member: Peer, message: FollowSteering | SharedSteering | HeldSteering) -> None:
        """Take a message of a client. Raises RoomError if it follows, and there are too many followers."""
        engine = self._followed.get(peer)
        if isinstance(message, FollowSteering):
            self.gone(peer)
            self._follow(peer, member, message.engine)
        elif engine is None or engine.name != message.engine:
            if isinstance(message, SharedSteering):
                got = "none" if engine is None else engine.name
                reason = explain("shared steering: the followed engine", got=got, expected=message.engine)
                self._effects.say(peer, HeldSteering(message.engine, message.module, message.version, reason))
        elif isinstance(message, SharedSteering):
            self._take(peer, engine, message)
        else:
            self._held(peer, engine, message)

    def _follow(self, peer: bytes, member: Peer, name: str) -> None:
        self._count.take(member.owner, 1)
        self._owners[peer] = member.owner
        key = member.session.user, name
        if key not in self._engines:
            self._engines[key] = _Engine(key)
        engine = self._followed[peer] = self._engines[key]
        engine.followers[peer] = _Follower(dict.fromkeys(engine.parts))
        self._proceed(peer)

    def _take(self, peer: bytes, engine: _Engine, part: SharedSteering) -> None:
        """Take a part of a follower. It is answered when the other followers have it, or it is refused."""
        kept = engine.parts.get(part.module)
        if kept is None or part.version > kept.version:
            try:
                self._keep(engine, part)
            except (UsageError, RoomError) as e:
                self._effects.say(peer, HeldSteering(part.engine, part.module, part.version, str(e)))
                return
            for follower in engine.followers.values():
                follower.owed[part.module] = None
        if engine.parts[part.module].version == part.version:
            engine.followers[peer].owed.pop(part.module, None)
        else:  # it missed a newer one
            engine.followers[peer].owed[part.module] = None
        engine.changes[peer, part.module] = _Change(part.version, self._effects.now + limits.SHARED_S_MAX)
        for other in list(engine.followers):
            self._proceed(other)
        self._answer(engine)

    def _held(self, peer: bytes, engine: _Engine, held: HeldSteering) -> None:
        """Note that a follower has the part that was sent to it."""
        follower = engine.followers[peer]
        if follower.sent is not None and follower.sent.module == held.module:
            self._arrived(follower)
            kept = engine.parts.get(held.module)
            if kept is not None and (held.version is None or held.version < kept.version):
                follower.owed[held.module] = None
        self._proceed(peer)
        self._unblock()
        self._answer(engine)

    def gone(self, peer: bytes) -> None:
        """Forget a client."""
        engine = self._followed.pop(peer, None)
        if engine is None:
            return
        self._count.give(self._owners.pop(peer), 1)
        self._blocked.pop(peer, None)
        self._arrived(engine.followers.pop(peer))
        engine.changes = {key: change for key, change in engine.changes.items() if key[0] != peer}
        if engine.followers:
            self._answer(engine)
        else:
            self._engines = {key: each for key, each in self._engines.items() if each is not engine}
            self._state.give(engine.owner, sum(map(_size, engine.parts.values())))
        self._unblock()

    def tick(self) -> None:
        """Answer the changes that took too long, and forget followers that do not answer; they may follow again."""
        now = self._effects.now
        for peer, engine in list(self._followed.items()):
            sent = engine.followers[peer].sent
            if sent is not None and now >= sent.until:
                self.gone(peer)
                reason = explain(f"shared steering: {sent.module or 'the global state'}", got="no answer", do="follow")
                self._effects.say(peer, HeldSteering(engine.name, reason=reason))
        for engine in list(self._engines.values()):
            self._answer(engine)

    def __len__(self) -> int:
        return len(self._followed)

    def _keep(self, engine: _Engine, part: SharedSteering) -> None:
        before = engine.parts.get(part.module)
        if before is None and len(engine.parts) >= limits.SHARED_PARTS_MAX:
            self._forget_removed(engine)
        back = 0 if before is None else _size(before)
        if (more := _size(part) - back) > 0:
            self._state.take(engine.owner, more, label="shared steering")
        else:
            self._state.give(engine.owner, -more)
        engine.parts[part.module] = part

    def _forget_removed(self, engine: _Engine) -> None:
        """Forget that the part was removed whose removal is the oldest. Raises UsageError if none was."""
        removed = [each for each in engine.parts.values() if each.content is None]
        if not removed:
            expected = f"at most {limits.SHARED_PARTS_MAX}"
            raise UsageError(explain("parts of shared steering", got=len(engine.parts) + 1, expected=expected))
        oldest = min(removed, key=lambda each: each.version).module
        self._state.give(engine.owner, _size(engine.parts.pop(oldest)))
        for follower in engine.followers.values():
            follower.owed.pop(oldest, None)

    def _proceed(self, peer: bytes) -> None:
        """Send a follower the next part that it lacks, unless one is on the way."""
        engine = self._followed[peer]
        follower = engine.followers[peer]
        if follower.sent is not None:
            return
        if not follower.owed:
            if not follower.greeted:
                follower.greeted = True
                self._effects.say(peer, HeldSteering(engine.name))
            return
        module = next(iter(follower.owed))
        nbytes = _size(engine.parts[module])
        if self._sent_bytes and self._sent_bytes + nbytes > limits.SHARED_SENT_BYTES_MAX:
            self._blocked[peer] = None
            return
        del follower.owed[module]
        follower.sent = _Sent(module, nbytes, self._effects.now + 2 * limits.SHARED_S_MAX)
        self._sent_bytes += nbytes
        self._effects.say(peer, engine.parts[module])

    def _arrived(self, follower: _Follower) -> None:
        if follower.sent is not None:
            self._sent_bytes -= follower.sent.nbytes
            follower.sent = None

    def _unblock(self) -> None:
        """Send the next parts to followers that waited for others."""
        blocked, self._blocked = self._blocked, {}
        for peer in blocked:
            self._proceed(peer)

    def _answer(self, engine: _Engine) -> None:
        """Answer the changes that no other follower lacks, and those that took too long."""
        for (peer, module), change in list(engine.changes.items()):
            others = (follower for other, follower in engine.followers.items() if other != peer)
            lacking, reason = sum(follower.lacks(module) for follower in others), ""
            if lacking:
                if self._effects.now < change.until:
                    continue
                reason = explain("shared steering", got=f"no answer from {lacking} front ends", expected="one in time")
            del engine.changes[peer, module]
            self._effects.say(peer, HeldSteering(engine.name, module, change.version, reason))


def _size(part: SharedSteering) -> int:
    return _PART_BYTES + 4 * len(part.module) + len(part.content or b"")
