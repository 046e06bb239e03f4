"""The outlets: how a worker's rows leave it, from the loading of the model to the worker's end.

For each hub a link with a queue of its own, and with `spill` an outbox of its own; the sender before them; and what workers that
are gone left on disk, which is sent in their names. What lies in the directory `hub-N` of the spool directory is for hub number N; what is
for hub 0 lies beside these. So a hub that moved is still the hub that it was, as long as its place in the list is the same.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capflow import limits
from capflow.buffers.spool import default_root
from capflow.capture.frame import Rank
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.protocol.message import Hello
from capflow.transport.address import without_key
from capflow.transport.links.former import FormerLink
from capflow.transport.links.worker import Staged, WorkerLink
from capflow.transport.outbox import Outbox, left_behind
from capflow_engine.hubs import HubAt
from capflow_engine.settings import Settings
from capflow_engine.worker.ring import Ring
from capflow_engine.worker.sender import Computed, Sender, Way

logger = logging.getLogger("vllm.capflow.worker")

_DIRECTORY = re.compile(r"hub-(\d+)")


class Outlets:
    """The links of one worker, one for each hub, and the thread that feeds them. It begins when it is made.

    ring: where the rows lie until they are sent.
    troubles: says, on any thread, why a hub's controllers do nothing, by its number.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: Rank,
        info: ModelInfo,
        sites: tuple[Site, ...],
        ring: Ring,
        text_of: Callable[[int], str] | None,
        troubles: Callable[[int], tuple[str, ...]] = lambda _: (),
    ) -> None:
        self._settings = settings
        self._troubles = troubles
        self._ring = ring
        # For what workers that are gone left on disk.
        self.former: list[FormerLink] = []
        # Each hub has a boot of its own, as it has numbers of its own: a spool given to another hub is never mistaken.
        boots = [uuid.uuid4().hex for _ in settings.hubs]
        self.links = tuple(
            self._link(number, hub, Hello("worker", settings.engine, boot, rank, info))
            for number, (hub, boot) in enumerate(zip(settings.hubs, boots, strict=True))
        )
        ways = list(map(Way, self.links, boots))
        if settings.outbound.policy == "spill":
            _tell_of_others(Path(settings.outbound.spool_dir), settings.hubs)
        self._sender = Sender(ways, engine=settings.engine, rank=rank, info=info, sites=sites, text_of=text_of)
        for link in (*self.former, *self.links):
            link.start()
        self._sender.start()

    @property
    def ever_connected(self) -> bool:
        """Whether any hub was ever there."""
        return any(link.ever_connected for link in self.links)

    @property
    def patient(self) -> bool:
        """Whether it is worth to wait for room: not once that was in vain, for as long as no hub is there."""
        return any(link.patient for link in self.links)

    def give_up(self) -> str:
        """Note that it was waited for room in vain, or not at all; return the reason for which rows are lost."""
        for link in self.links:
            link.give_up()
        return "queue_full" if any(link.connected for link in self.links) else "hub_gone"

    def put(self, step: Computed) -> None:
        """Take a step to send; never waits."""
        self._sender.put(step)

    def close(self) -> None:
        """Send what was put, for as long as the hubs take it and at most `limits.DRAIN_S_MAX` seconds, and leave them.

        A hub that acknowledges nothing for `limits.HANG_S_MAX` is not waited for any longer.
        """
        _leave(self.former)
        there = any(link.connected for link in self.links)
        drain_s = limits.DRAIN_S_MAX if there else limits.LINGER_S  # nobody takes what waits for a hub
        closing = threading.Thread(target=self._sender.close, args=(drain_s,), name="capflow-closing", daemon=True)
        closing.start()
        deadline = time.monotonic() + drain_s
        got_on = {link: (link.acked, time.monotonic()) for link in self.links}  # how far, and when it was there
        while got_on and closing.is_alive() and time.monotonic() < deadline:
            closing.join(limits.IDLE_S)
            now = time.monotonic()
            for link, (acked, since) in list(got_on.items()):
                if link.drained or link.acked != acked:
                    got_on[link] = (link.acked, now)
                elif now - since > limits.HANG_S_MAX:
                    logger.error("the hub at %s takes nothing; the engine ends without it", link.address)
                    del got_on[link]
                    _leave([link])
        closing.join(limits.GIVE_UP_S)

    def _link(self, number: int, hub: HubAt, hello: Hello) -> WorkerLink:
        settings, outbound = self._settings, self._settings.outbound
        spills, address = outbound.policy == "spill", without_key(hub.address)
        root = _directory(Path(outbound.spool_dir) if spills else default_root(), number)
        left = left_behind(root, address, only=not spills)
        self.former += [FormerLink(hub.address, outbox, key=hub.key) for outbox in left]
        outbox = Outbox.of(root, hello, outbound.spool_bytes, address)
        return WorkerLink(
            hub.address,
            hello,
            outbound_bytes_max=settings.outbound_bytes_max,
            policy=outbound.policy,
            block_s_max=limits.BLOCK_S_MAX,
            staged=lambda: self._staged(number),
            key=hub.key,
            outbox=outbox,
            fallback=outbound.spill_fallback,
        )

    def _staged(self, number: int) -> Staged:
        dropped = dict(self._sender.dropped[number])
        return Staged(self._ring.bytes_lent, self._ring.bytes_max, dropped, self._troubles(number))


def _leave(links: Sequence[FormerLink | WorkerLink]) -> None:
    """Stop links at once, all together."""
    closing = [threading.Thread(target=link.close, args=(0.0,), daemon=True) for link in links]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def _directory(root: Path, number: int) -> Path:
    """Return the directory below which a hub's outboxes lie."""
    return root if number == 0 else root / f"hub-{number}"


def _tell_of_others(root: Path, hubs: Sequence[Any]) -> None:
    """Say what lies there for hubs that this engine does not have: it stays."""
    for path in sorted(root.glob("hub-*")):
        found = _DIRECTORY.fullmatch(path.name)
        if found is not None and int(found[1]) >= len(hubs) and any(path.iterdir()):
            logger.error(
                "spool %s stays: it is for hub %s, and there are %d, counted from 0", path, found[1], len(hubs)
            )
