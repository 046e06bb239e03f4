"""The link of a front end that shares the steering of its engine through a hub."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable

from capflow import limits
from capflow.capture.frame import Frame
from capflow.protocol.message import FollowSteering, HeldSteering, Hello, Message, SharedSteering, Version, Welcome
from capflow.protocol.session import State
from capflow.transport.links.link import Link
from capflow.transport.sockets import Dealer

OLD_HUB = "the hub is of an earlier version, which shares no steering"


class SteeringLink(Link):
    """Sends the parts of this front end, and receives those of the others. The callbacks run on the link's thread.

    part_of: returns a part as it is now, by its name.
    names: returns the names of all parts.
    on_part: called with each part of another front end.
    changed: notified when `greeted`, `trouble` or `answer` change.
    """

    def __init__(
        self,
        address: str,
        engine: str,
        *,
        part_of: Callable[[str], SharedSteering],
        names: Callable[[], Iterable[str]],
        on_part: Callable[[SharedSteering], None],
        changed: threading.Condition,
        key: str | None = None,
    ) -> None:
        super().__init__(address, Hello("client", "", uuid.uuid4().hex), key=key)
        self._engine = engine
        self._part_of = part_of
        self._names = names
        self._on_part = on_part
        # Guards what follows.
        self._changed = changed
        # Whether this front end has had all parts of the others since the hub was there.
        self.greeted = False
        # Parts to be sent, in order.
        self._owed: dict[str, None] = {}
        # The part that is on the way, and its version.
        self._sent: tuple[str, Version] | None = None
        # The hub's last answer about each part: the version, and why not all others have it.
        self._answered: dict[str, tuple[Version, str]] = {}
        # Why the hub passes nothing on, and when to ask it again.
        self._off, self._again_at = "", 0.0
        # The messages to the hub that wait for `_fill`; used by the thread alone.
        self._answers: list[Message] = []

    @property
    def trouble(self) -> str:
        """Why nothing is shared through this hub; empty if it is."""
        return self.refusal or ("" if self.connected else f"no hub answers at {self.address}") or self._off

    def answer(self, name: str, version: Version) -> str | None:
        """Return "" if all front ends have a version of a part, or a newer one; else why not, None before it is known.

        Call it while `changed` is held.
        """
        if self.trouble:
            return self.trouble
        answered, reason = self._answered.get(name, (Version(), ""))
        return reason if answered >= version else None

    def share(self, name: str) -> None:
        """Send a part as it is now; never waits."""
        with self._changed:
            self._owed[name] = None
        self._waker.wake()

    def _fill(self, dealer: Dealer, now: float) -> None:
        if self._session.state is not State.OPEN:
            return
        if self._off and now >= self._again_at:
            self._follow()
        answers, self._answers = self._answers, []
        for answer in answers:
            dealer.send(self._session.send(answer, now))
        with self._changed:
            if self._sent is not None or not self._owed or self._off:
                return
            name = next(iter(self._owed))
            del self._owed[name]
        part = self._part_of(name)
        with self._changed:
            self._sent = name, part.version
        dealer.send(self._session.send(part, now))

    def _received(self, message: Frame | Message) -> None:
        match message:
            case Welcome(shares=True):
                self._follow()
            case Welcome():
                self._turn_off(OLD_HUB, float("inf"))
            case SharedSteering():
                self._on_part(message)
                self._answers.append(HeldSteering(message.engine, message.module, message.version))
            case HeldSteering():
                self._held(message)
        self._waker.wake()

    def _follow(self) -> None:
        """Ask for all parts, and send all own ones, from the beginning."""
        names = list(self._names())
        with self._changed:
            self._sent, self._off, self.greeted = None, "", False
            self._owed = dict.fromkeys(names)
            self._answered.clear()
            self._changed.notify_all()
        self._answers = [FollowSteering(self._engine)]

    def _turn_off(self, reason: str, again_at: float) -> None:
        with self._changed:
            self._off, self._again_at = reason, again_at
            self._changed.notify_all()

    def _held(self, held: HeldSteering) -> None:
        if held.version is None and held.reason:
            self._turn_off(held.reason, time.monotonic() + limits.REFUSED_S)
            return
        with self._changed:
            if held.version is None:
                self.greeted = True
            elif self._sent == (held.module, held.version):
                self._sent = None
                self._answered[held.module] = held.version, held.reason
            self._changed.notify_all()
