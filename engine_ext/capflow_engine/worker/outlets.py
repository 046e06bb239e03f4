"""The outlets: the ways by which rows leave a worker, from the loading of the model to the worker's end.

Each hub has a link with its own queue and, with `spill`, its own outbox. One sender feeds all links. Frames that former
workers left on disk are sent in their names. In the spool directory, the directory `hub-N` is for the hub with index N;
the files of hub 0 lie beside these directories. So a hub keeps its outbox when its address changes, as long as its
index in the list of hubs is the same.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from capflow import limits
from capflow.buffers.spool import default_root
from capflow.capture.frame import Rank
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.protocol.message import ControllerCounts, CpuTime, Determinism, Hello
from capflow.transport.address import without_key
from capflow.transport.links.former import FormerLink
from capflow.transport.links.worker import Staged, WorkerLink
from capflow.transport.outbox import Outbox, left_behind
from capflow_engine.hubs import HubAt
from capflow_engine.settings import Settings
from capflow_engine.taps.widths import Width
from capflow_engine.worker.ring import Ring
from capflow_engine.worker.sender import Computed, Sender, Way

logger = logging.getLogger("vllm.capflow.worker")

_DIRECTORY = re.compile(r"hub-(\d+)")
_LOOK_S = 0.01


class Outlets:
    """The links of one worker, one per hub, and the thread that feeds them; all start with the constructor.

    ring: the memory that holds rows until they are sent.
    text_of: returns the text of a token id; None without a tokenizer.
    reports: returns the troubles and the counts of a hub's controllers, by the hub's index; called on any thread.
    determinism: returns whether the engine's ranks steer alike; called on any thread.
    cpu: returns the processor time of capflow in this process; called on any thread.
    widths: the width classes of the rows; without them, all are of the stream's width.
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
        reports: Callable[[int], tuple[tuple[str, ...], dict[str, ControllerCounts]]] = lambda _: ((), {}),
        determinism: Callable[[], Determinism | None] = lambda: None,
        cpu: Callable[[], Mapping[str, CpuTime]] = dict,
        widths: Sequence[Width] = (),
    ) -> None:
        self._settings = settings
        self._reports = reports
        self._determinism = determinism
        self._cpu = cpu
        self._ring = ring
        # They send the frames that former workers left on disk.
        self.former: list[FormerLink] = []
        # Frames are numbered per hub. Boot ids are per hub too, so that the frames of a spool that is given to another
        # hub differ from that hub's own.
        boots = [uuid.uuid4().hex for _ in settings.hubs]
        self.links = tuple(
            self._link(number, hub, Hello("worker", settings.engine, boot, rank, info))
            for number, (hub, boot) in enumerate(zip(settings.hubs, boots, strict=True))
        )
        ways = list(map(Way, self.links, boots))
        if settings.outbound.policy == "spill":
            _log_foreign_spools(Path(settings.outbound.spool_dir), len(settings.hubs))
        self._sender = Sender(
            ways, engine=settings.engine, rank=rank, info=info, sites=sites, text_of=text_of, widths=widths
        )
        for link in (*self.former, *self.links):
            link.start()
        self._sender.start()

    @property
    def ever_connected(self) -> bool:
        """Whether any hub was ever connected or is expected."""
        return any(link.found for link in self.links)

    def expect(self, hub: int) -> None:
        """Keep the rows for a hub that the scheduler found, also if no link of this worker has found it yet."""
        self.links[hub].expect()

    @property
    def patient(self) -> bool:
        """Whether to wait for room. After a wait that brought no room it is False until a hub is connected again."""
        return any(link.patient for link in self.links)

    def give_up(self) -> str:
        """Record that there was no room; return the reason under which the rows are counted as lost."""
        for link in self.links:
            link.give_up()
        return "queue_full" if any(link.connected for link in self.links) else "hub_gone"

    def put(self, step: Computed) -> None:
        """Take a step to send; never waits."""
        self._sender.put(step)

    def flush(self) -> None:
        """Wait until the hubs have acknowledged the steps put so far, for as long as `close` does."""
        sent, hung = self._sender.mark(), list[WorkerLink]()
        for link in self._hung(
            lambda: not (sent.is_set() and all(each.drained for each in self.links if each not in hung))
        ):
            hung.append(link)
            logger.error("the hub at %s acknowledges nothing; nobody waits for it", link.address)

    def close(self) -> None:
        """Send the queued steps for at most `limits.DRAIN_S_MAX` seconds, then close the links.

        The worker stops waiting for a hub that acknowledges nothing for `limits.HANG_S_MAX` seconds.
        """
        _leave(self.former)
        closing = threading.Thread(
            target=self._sender.close, args=(self._drain_s,), name="capflow-closing", daemon=True
        )
        closing.start()
        for link in self._hung(closing.is_alive):
            logger.error("the hub at %s acknowledges nothing; the engine ends without it", link.address)
            _leave([link])
        closing.join(limits.GIVE_UP_S)

    @property
    def _drain_s(self) -> float:
        return limits.DRAIN_S_MAX if any(link.connected for link in self.links) else limits.LINGER_S

    def _hung(self, busy: Callable[[], bool]) -> Iterator[WorkerLink]:
        """Wait while the worker is busy with its links, and yield each whose hub acknowledges nothing meanwhile.

        It ends when all of them did, and when the time for sending is over.
        """
        deadline = time.monotonic() + self._drain_s
        # Acknowledgements, and when they were new.
        progress = {link: (link.acked, time.monotonic()) for link in self.links}
        while progress and busy() and (now := time.monotonic()) < deadline:
            time.sleep(_LOOK_S)
            for link, (acked, since) in list(progress.items()):
                if link.drained or link.acked != acked:
                    progress[link] = (link.acked, now)
                elif now - since > limits.HANG_S_MAX:
                    del progress[link]
                    yield link

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
        troubles, controllers = self._reports(number)
        lent, lent_max = self._ring.bytes_lent, self._ring.bytes_max
        return Staged(lent, lent_max, dropped, troubles, controllers, self._determinism(), self._cpu())


def _leave(links: Sequence[FormerLink | WorkerLink]) -> None:
    """Close links without draining them, in parallel."""
    closing = [threading.Thread(target=link.close, args=(0.0,), daemon=True) for link in links]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def _directory(root: Path, number: int) -> Path:
    """Return the directory of a hub's outboxes."""
    return root if number == 0 else root / f"hub-{number}"


def _log_foreign_spools(root: Path, hubs: int) -> None:
    """Log the spools of hubs that this engine does not have; they are left untouched."""
    for path in sorted(root.glob("hub-*")):
        match = _DIRECTORY.fullmatch(path.name)
        if match is not None and int(match[1]) >= hubs and any(path.iterdir()):
            message = "spool %s is for hub %s; this engine has %d hubs, numbered from 0, and leaves it untouched"
            logger.error(message, path, match[1], hubs)
