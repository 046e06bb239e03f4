"""Agreement: whether the ranks of an engine steer alike, decided beside the steps.

Every rank puts the log of its checksums into the key-value store through which the ranks found each other. The first
rank reads the logs of the others, compares and reports; so does the rank that returns the outputs, which tells the
scheduler of a difference. A thread does all this, every `limits.CHECKSUM_STEPS` steps and at least every
`limits.CHECKSUM_S` seconds while there are steps.

To abort requests, the rank that returns the outputs asks the others for the sums of each request in the first step that
differs. If they no longer have them, or if no request differs by itself, no request is named.

Invariant: no step waits for this, and nothing here ends an engine. A rank that is silent is not compared.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from capflow import limits
from capflow.capture.frame import Rank
from capflow.divergence import ON_DIVERGENCE_DEFAULT
from capflow.protocol.message import Determinism
from capflow_engine.ranks.checksums import Checksums, Difference, StepLog, compared
from capflow_engine.scheduler.orders import Divergence

logger = logging.getLogger("vllm.capflow.worker")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepLog)
_sums_decoder = msgspec.msgpack.Decoder(dict[str, int] | None)

# How often a rank looks for the sums that it asked for.
_ASKING_S = 0.05


_REACTIONS = {"warn": "", "freeze": "; the engine was frozen for it", "abort": "; requests were aborted for it"}


class KeyValueStore(Protocol):
    """A key-value store that all ranks of an engine share."""

    def set(self, key: str, value: bytes) -> object:
        """Put a value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether the keys have values, without waiting."""

    def get(self, key: str) -> bytes:
        """Return a value."""


class Agreement:
    """One rank's part of the comparison, from `start` to `close`.

    stages, ranks: how many pipeline stages the engine has, and tensor-parallel ranks in each.
    store: None for an engine of one rank, which agrees with itself.
    reaction: what the engine does if ranks differ, as `Settings.on_divergence`.
    divergence: what the scheduler is to know, until `take`.
    """

    def __init__(
        self,
        checksums: Checksums,
        rank: Rank,
        *,
        stages: int,
        ranks: int,
        store: Callable[[], KeyValueStore] | None,
        reaction: str = ON_DIVERGENCE_DEFAULT,
    ) -> None:
        self._checksums = checksums
        self._rank = rank
        self._all = list(itertools.product(range(stages), range(ranks)))
        self._make_store = store
        self._difference: Difference | None = None
        self._reaction = reaction
        self._answers = (rank.pp, rank.tp) == (stages - 1, 0)
        self._compares = self._answers or (rank.pp, rank.tp) == (0, 0)
        # When this rank asked for the sums of requests, on the monotonic clock; and whether it was asked.
        self._asked_s: float | None = None
        self._was_asked = False
        self.divergence: Divergence | None = None
        self._seen: tuple[str, ...] = ()
        # The last compared step.
        self._step = 0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._published = 0
        self._thread = threading.Thread(target=self._run, name="capflow-agreement", daemon=True)

    def start(self) -> None:
        """Start the thread, if there is another rank."""
        if self._make_store is not None:
            self._thread.start()

    def compare(self) -> None:
        """Compare the sums of all ranks soon; called every `limits.CHECKSUM_STEPS` steps; never waits."""
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(limits.GIVE_UP_S)

    @property
    def result(self) -> Determinism:
        """What the first rank knows now."""
        checksums, difference = self._checksums, self._difference
        if self._make_store is None:
            return Determinism(True, checksums.folds, checksums.last, None, (self._name(0, 0),))
        if difference is None:
            return Determinism(True, checksums.folds, self._step, None, self._seen)
        return Determinism(False, checksums.folds, self._step, difference.step, self._seen, difference.ranks)

    @property
    def trouble(self) -> str | None:
        """What is wrong, for people; None if ranks agree."""
        difference = self._difference
        if difference is None:
            return None
        ranks = ", ".join(difference.ranks)
        trouble = f"ranks steer differently since step {difference.step}: {ranks} (stage.rank) differ from the others"
        return trouble + _REACTIONS[self._reaction]

    def take(self) -> Divergence | None:
        """Return what the scheduler is to know of a difference, once; only in the rank that returns the outputs."""
        divergence, self.divergence = self.divergence, None
        return divergence

    # The thread.

    def _run(self) -> None:
        try:
            assert self._make_store is not None
            store = self._make_store()
        except Exception:
            logger.exception("the checksums of ranks are not compared")
            return
        while not self._closing.is_set():
            self._wake.wait(limits.CHECKSUM_S if self._asked_s is None else _ASKING_S)
            self._wake.clear()
            try:
                self._turn(store)
            except Exception as e:  # noqa: BLE001  the store ends with the engine
                if not self._closing.is_set():
                    logger.warning("the checksums of ranks cannot be compared any more: %s: %s", type(e).__name__, e)
                return

    def _turn(self, store: KeyValueStore) -> None:
        log = self._checksums.log()
        if log.last > self._published:
            self._published = log.last
            store.set(self._key(self._rank.pp, self._rank.tp), _encoder.encode(log))
        if self._difference is None and self._compares:
            self._compare(store, log)
        if self._reaction == "abort":
            self._answer(store)
            if self._asked_s is not None:
                self._name_requests(store)

    def _compare(self, store: KeyValueStore, own: StepLog) -> None:
        logs: dict[tuple[int, int], StepLog] = {}
        for stage, rank in self._all:
            key = self._key(stage, rank)
            if (stage, rank) == (self._rank.pp, self._rank.tp):
                logs[stage, rank] = own
            elif store.check([key]):
                logs[stage, rank] = _decoder.decode(bytes(store.get(key)))
        # Stages whose first rank is silent have nobody to be compared with.
        logs = {place: log for place, log in logs.items() if (place[0], 0) in logs}
        self._step, difference = compared(logs)
        self._seen = tuple(self._name(*place) for place in logs)
        if difference is not None:
            self._difference = difference
            logger.error("%s", self.trouble)
            if self._answers and self._reaction == "freeze":
                self.divergence = Divergence(*difference)
            elif self._answers and self._reaction == "abort":
                store.set(self._asking, difference.step.to_bytes(8, "little"))
                self._asked_s = time.monotonic()

    def _answer(self, store: KeyValueStore) -> None:
        """Put the sums of requests into the store, if the rank that returns the outputs asks for them."""
        if not self._was_asked and store.check([self._asking]):
            self._was_asked = True
            step = int.from_bytes(bytes(store.get(self._asking)), "little")
            sums = self._checksums.requests(step)
            store.set(self._key(self._rank.pp, self._rank.tp) + "/requests", _encoder.encode(sums))

    def _name_requests(self, store: KeyValueStore) -> None:
        """Take the answers to what this rank asked; a rank that stays silent leaves all requests in doubt."""
        assert self._difference is not None
        assert self._asked_s is not None
        keys = {place: self._key(*place) + "/requests" for place in self._all}
        if store.check(list(keys.values())):
            sums = {place: _sums_decoder.decode(bytes(store.get(key))) for place, key in keys.items()}
            self.divergence = Divergence(*self._difference, differing_requests(sums))
        elif time.monotonic() - self._asked_s > limits.CHECKSUM_ANSWERS_S:
            self.divergence = Divergence(*self._difference)
        else:
            return
        self._asked_s = None

    @property
    def _asking(self) -> str:
        return f"capflow/checksums/{self._rank.dp}/asking"

    def _key(self, stage: int, rank: int) -> str:
        return f"capflow/checksums/{self._rank.dp}/{self._name(stage, rank)}"

    @staticmethod
    def _name(stage: int, rank: int) -> str:
        return f"{stage}.{rank}"


def differing_requests(sums: Mapping[tuple[int, int], Mapping[str, int] | None]) -> tuple[str, ...]:
    """Return the requests whose sums differ between the ranks of a stage, by vLLM's id; none if a rank has no sums.

    sums: of each request, by pipeline stage and tensor-parallel rank.
    """
    differing: set[str] = set()
    for (stage, _), mine in sums.items():
        origin = sums[stage, 0]
        if mine is None or origin is None:
            return ()
        differing |= {key for key in mine.keys() | origin.keys() if mine.get(key) != origin.get(key)}
    return tuple(sorted(differing))
