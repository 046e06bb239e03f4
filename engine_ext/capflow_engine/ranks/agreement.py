"""Agreement: whether the ranks of an engine steer alike, decided beside the steps.

Every rank puts the log of its checksums into the key-value store through which the ranks found each other. The first
rank reads the logs of the others and compares. A thread does both, every `limits.CHECKSUM_STEPS` steps and at least
every `limits.CHECKSUM_S` seconds while there are steps.

Invariant: no step waits for this, and nothing here ends an engine. A rank that is silent is not compared.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from capflow import limits
from capflow.capture.frame import Rank
from capflow.protocol.message import Determinism
from capflow_engine.ranks.checksums import Checksums, Difference, StepLog, compared

logger = logging.getLogger("vllm.capflow.worker")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepLog)


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
    """

    def __init__(
        self, checksums: Checksums, rank: Rank, *, stages: int, ranks: int, store: Callable[[], KeyValueStore] | None
    ) -> None:
        self._checksums = checksums
        self._rank = rank
        self._all = list(itertools.product(range(stages), range(ranks)))
        self._make_store = store
        self._difference: Difference | None = None
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

    def stepped(self, step: int) -> None:
        """Note that a step was folded; never waits."""
        if step % limits.CHECKSUM_STEPS == 0:
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
        return f"ranks steer differently since step {difference.step}: {ranks} (stage.rank) differ from the others"

    # The thread.

    def _run(self) -> None:
        try:
            assert self._make_store is not None
            store = self._make_store()
        except Exception:
            logger.exception("the checksums of ranks are not compared")
            return
        while not self._closing.is_set():
            self._wake.wait(limits.CHECKSUM_S)
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
        if self._difference is None and (self._rank.pp, self._rank.tp) == (0, 0):
            self._compare(store, log)

    def _compare(self, store: KeyValueStore, own: StepLog) -> None:
        logs = {(0, 0): own}
        for stage, rank in self._all[1:]:
            key = self._key(stage, rank)
            if store.check([key]):
                logs[stage, rank] = _decoder.decode(bytes(store.get(key)))
        # Stages whose first rank is silent have nobody to be compared with.
        logs = {place: log for place, log in logs.items() if (place[0], 0) in logs}
        self._step, difference = compared(logs)
        self._seen = tuple(self._name(*place) for place in logs)
        if difference is not None:
            self._difference = difference
            logger.error("%s", self.trouble)

    def _key(self, stage: int, rank: int) -> str:
        return f"capflow/checksums/{self._rank.dp}/{self._name(stage, rank)}"

    @staticmethod
    def _name(stage: int, rank: int) -> str:
        return f"{stage}.{rank}"
