"""A model of the source of a store's frames: an inbox in memory, a lane, kills, and a disk that refuses writes.

`Lane.run` gives a script to a store, in an order chosen by a seed. After a kill the store gets unfinished work again,
from the first record of the oldest unfinished request, as from an inbox.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from capflow.capture.frame import Frame, Rank
from capflow.capture.model import ModelInfo
from capflow.capture.positions import Positions
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.site import Site
from capflow.capture.spec import Want
from capflow.errors import kind_of
from tests.kit.frames import make_finished, make_frame

Place = tuple[str, str, Site, int]
"""A row: engine, request, site, position."""

SITES = (Site(0, "post_block"), Site(1, "post_block"))
MODELS = {
    "narrow": ModelInfo("narrow-model", 2, 8, "float32", SITES),
    "wide": ModelInfo("wide-model", 2, 12, "bfloat16", SITES, stages=2),
}
"""Two engines of different widths and dtypes, one of two pipeline stages with a site each."""


class Store(Protocol):
    """What a test says of a store."""

    def open(self) -> Any:
        """Return a consumer that was opened."""

    def reopen(self, consumer: Any) -> None:
        """Close a consumer and open it again."""

    def kill(self, consumer: Any) -> None:
        """End a consumer as SIGKILL does."""

    def refuse(self, *, refusing: bool) -> None:
        """Have the disk refuse writes from now on, or take them."""


class Rows(NamedTuple):
    """A frame; numbers: of the requests that it has rows of."""

    frame: Frame
    numbers: dict[str, int]


class End(NamedTuple):
    """The end of a request."""

    number: int
    engine: str
    request: str
    prompt_length: int
    computed_length: int


def script(chance: random.Random, requests: int) -> tuple[list[Rows | End], dict[int, Counter[Place]]]:
    """Return records, and the rows of each request by its number; ids come again when they are free."""
    records: list[Rows | End] = []
    expected: dict[int, Counter[Place]] = {}
    running: dict[str, dict[str, End]] = {engine: {} for engine in MODELS}
    computed: Counter[int] = Counter()
    seqs: Counter[str] = Counter()
    boot = f"{chance.randrange(1 << 30):x}"
    while len(expected) < requests or any(running.values()):
        engine = chance.choice(sorted(MODELS))
        mine = running[engine]
        if len(expected) < requests and len(mine) < 3 and chance.random() < 0.6:
            number, name = len(expected), chance.choice([name for name in "abcd" if name not in mine])
            mine[name] = End(number, engine, name, chance.randint(1, 6), chance.randint(1, 12))
            expected[number] = Counter()
        if mine:
            step = {name: mine[name] for name in chance.sample(sorted(mine), chance.randint(1, len(mine)))}
            records += _frames(chance, engine, boot, step, computed, seqs, expected)
            for name, end in step.items():
                if computed[end.number] == end.computed_length:
                    records.append(mine.pop(name))
    return records, expected


def _frames(
    chance: random.Random,
    engine: str,
    boot: str,
    step: dict[str, End],
    computed: Counter[int],
    seqs: Counter[str],
    expected: dict[int, Counter[Place]],
) -> list[Rows]:
    """Return what the stages of an engine say of a step."""
    model = MODELS[engine]
    parts = []
    for name, end in step.items():
        first = computed[end.number]
        count = min(chance.randint(1, 4), end.computed_length - first)
        parts.append((name, end.prompt_length, first, count))
        computed[end.number] += count
        expected[end.number].update((engine, name, site, first + at) for site in SITES for at in range(count))
    over = [end for end in step.values() if computed[end.number] == end.computed_length]
    seqs[engine] += 1
    return [
        Rows(
            make_frame(
                parts, SITES[stage :: model.stages], hidden=model.hidden_size, dtype=model.dtype, seq=seqs[engine],
                engine=engine, boot=f"{boot}.{engine}.{stage}", rank=Rank(stage, 0, 0),
                finished=[make_finished(end.request, end.prompt_length, end.computed_length) for end in over],
            ),
            {name: end.number for name, end in step.items()},
        )
        for stage in range(model.stages)
    ]  # fmt: skip


class Lane:
    """A lane and its inbox, which give one store the records of a script."""

    def __init__(self, records: list[Rows | End], store: Store, chance: random.Random) -> None:
        self.records = records
        # The results by request, as far as the inbox has them.
        self.done: dict[int, CaptureResult] = {}
        self.refused = self.kills = self.fatal = 0
        self._store = store
        self._chance = chance
        # Rows by request, since the store was opened.
        self._delivered: Counter[int] = Counter()
        self._futures: dict[int, Future[CaptureResult]] = {}

    def run(self, *, failing: float = 0.2, deadly: float = 0.05) -> None:
        """Give every record, until every request is done.

        failing: how often the disk begins to refuse writes.
        deadly: how often the store is killed.
        """
        chance, store = self._chance, self._store
        consumer = self._opened(store.open())
        at = 0
        while at < len(self.records):
            if chance.random() < failing:
                store.refuse(refusing=chance.random() < 0.5)
            if chance.random() < deadly:
                store.refuse(refusing=False)
                self._settle()
                store.kill(consumer)
                self.kills += 1
                for number in list(self.done)[-chance.randint(1, 3) :]:
                    del self.done[number]  # the kill came before that was put down
                consumer, at = self._opened(store.open()), self._oldest()
                continue
            error = self._give(consumer, self.records[at])
            at += error is None
            if error is None and chance.random() < 0.3:
                error = _error_of(consumer.on_idle)
            if error is None:
                continue
            self.refused += 1
            assert kind_of(error) != "poison", error
            if kind_of(error) == "fatal":
                self.fatal += 1
                store.refuse(refusing=False)
                self._settle()
                store.reopen(consumer)
                self._opened(consumer)
                at = self._oldest()
            elif chance.random() < 0.5:
                store.refuse(refusing=False)
        store.refuse(refusing=False)
        self._settle()
        consumer.close()

    def _opened(self, consumer: Any) -> Any:
        for engine, model in MODELS.items():
            consumer.on_session(engine, model)
        self._delivered.clear()
        return consumer

    def _oldest(self) -> int:
        """Return the first record of a request that is not done."""
        for at, record in enumerate(self.records):
            numbers = record.numbers.values() if isinstance(record, Rows) else [record.number]
            if any(number not in self.done for number in numbers):
                return at
        return len(self.records)

    def _give(self, consumer: Any, record: Rows | End) -> BaseException | None:
        if isinstance(record, End):
            return None if record.number in self.done else _error_of(lambda: self._end(consumer, record))
        wanted = {name for name, number in record.numbers.items() if number not in self.done}
        if not wanted:
            return None
        frame = record.frame
        if len(wanted) < len(record.numbers):
            sites = dict.fromkeys(SITES, Want(Positions.ALL))
            frame = frame.narrowed(lambda part: sites if part.id in wanted else {})
        error = _error_of(lambda: consumer.on_frame(frame))
        if error is None:
            for chunk in frame.chunks():
                self._delivered[record.numbers[chunk.request.id]] += len(chunk.sites) * chunk.rows.shape[1]
        return error

    def _end(self, consumer: Any, end: End) -> None:
        rows = self._delivered[end.number]
        done = RequestDone(
            end.engine, end.request, "stop", end.prompt_length, end.computed_length, rows, rows, ()
        )  # fmt: skip
        result = consumer.on_request_done(done)
        if isinstance(result, Future):
            self._futures[end.number] = result
        else:
            self.done[end.number] = result

    def _settle(self) -> None:
        """Wait for the results that are to come; the disk works."""
        for number, future in self._futures.items():
            self.done[number] = future.result(60)
        self._futures.clear()


def check(results: dict[int, CaptureResult], expected: dict[int, Counter[Place]], stored: Counter[Place]) -> None:
    """Assert that a store has every row that it promised once, and no row twice."""
    promised: Counter[Place] = Counter()
    every: Counter[Place] = Counter()
    for number, rows in expected.items():
        every += rows
        if results[number].status == "ok":
            promised += rows
    assert not promised - stored, f"{(promised - stored).total()} rows of requests that are ok are missing"
    assert not stored - every, f"{(stored - every).total()} rows are there twice"


def _error_of(call: Any) -> BaseException | None:
    try:
        call()
    except Exception as e:  # noqa: BLE001  what it is decides what the lane does
        return e
    return None
