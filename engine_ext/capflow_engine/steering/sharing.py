"""Sharing: the front ends of an engine that several commands start have the same modules and global state.

Each front end has a store of its own, and exchanges parts with the others through the engine's hubs. A part is a module
or the global state. Of two versions of a part the larger holds, in every store; of two changes of one part at the same
time, one is lost.
"""

from __future__ import annotations

import logging
import threading
from typing import Self

import msgspec

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain
from capflow.protocol.message import SharedSteering, Version
from capflow.steering.request import Steering
from capflow.transport.links.steering import SteeringLink
from capflow_engine.hubs import HubAt
from capflow_engine.settings import Settings
from capflow_engine.steering.store import SteeringStore, StoreState

logger = logging.getLogger("vllm.capflow")


class NotEverywhereError(CapflowError):
    """A change holds in this front end, and not in all others of the engine."""


class Sharing:
    """Shares a store with the other front ends of the engine, from `start` to `close`."""

    def __init__(self, settings: Settings, store: SteeringStore) -> None:
        self._engine = settings.engine
        self._store = store
        # Notified when a hub has answered.
        self._changed = threading.Condition()
        self._links = [self._link(hub) for hub in settings.hubs]

    @classmethod
    def start(cls, settings: Settings, store: SteeringStore) -> Self | None:
        """Start sharing, and wait a little for the parts of the others. Returns None if the engine has one command."""
        if not settings.shared:
            return None
        self = cls(settings, store)
        store.check_part, store.on_change = self._check_size, self._share
        for link in self._links:
            link.start()
        with self._changed:
            if not self._changed.wait_for(lambda: any(link.greeted for link in self._links), limits.SHARED_S_MAX):
                logger.warning("capflow: %s", self._trouble())
        return self

    def close(self) -> None:
        """Stop sharing."""
        for link in self._links:
            link.close()

    def _link(self, hub: HubAt) -> SteeringLink:
        link: SteeringLink

        def names() -> list[str]:
            return list(self._store.held.versions)

        link = SteeringLink(
            hub.address,
            self._engine,
            part_of=self._part,
            names=names,
            on_part=lambda part: self._take(part, link),
            changed=self._changed,
            key=hub.key,
        )
        return link

    def _part(self, name: str) -> SharedSteering:
        held: StoreState = self._store.held
        steering = held.part(name)
        content = None if steering is None else msgspec.msgpack.encode(steering)
        return SharedSteering(self._engine, name, held.versions.get(name, Version()), content)

    def _take(self, part: SharedSteering, source: SteeringLink) -> None:
        """Take a part of another front end, and pass it on to the other hubs."""
        try:
            content = None if part.content is None else msgspec.msgpack.decode(part.content, type=Steering)
            if self._store.merge(part.module, content, part.version):
                for link in self._links:
                    if link is not source:
                        link.share(part.module)
        except (CapflowError, msgspec.MsgspecError) as e:
            where = f"module {part.module}" if part.module else "the global state"
            logger.error("capflow: %s of another front end is not taken: %s", where, e)

    def _check_size(self, name: str, steering: Steering) -> None:
        """Raise UsageError for a part that is too large for one message."""
        size = len(msgspec.msgpack.encode(steering))
        if size > limits.SHARED_PART_BYTES_MAX:
            expected = f"at most {limits.SHARED_PART_BYTES_MAX}, for an engine of several commands"
            raise UsageError(
                explain(f"module {name}" if name else "global state", got=f"{size} bytes", expected=expected)
            )

    def _share(self, names: list[str]) -> None:
        """Share changed parts, and wait until all front ends have them. Raises NotEverywhereError if they do not."""
        versions = self._store.held.versions
        for name in names:
            for link in self._links:
                link.share(name)

        def answers() -> list[list[str | None]]:
            """Return what the hubs answered, by part."""
            return [[link.answer(name, versions.get(name, Version())) for link in self._links] for name in names]

        def settled() -> bool:
            return all("" in each or None not in each for each in answers())

        with self._changed:
            self._changed.wait_for(settled, 2 * limits.SHARED_S_MAX)
            wrong = [each for each in answers() if "" not in each]
        if wrong:
            raise NotEverywhereError(self._trouble(*wrong[0]))

    def _trouble(self, *answers: str | None) -> str:
        """Return why a change is not everywhere. answers: of the hubs, about it."""
        reasons = answers or [link.trouble for link in self._links]
        got = "; ".join(dict.fromkeys(reason or "no answer in time" for reason in reasons))
        do = "a change holds in this front end, and in the others as soon as a hub passes it on"
        return explain(f"steering of engine {self._engine}: it is not shared with its other front ends", got=got, do=do)
