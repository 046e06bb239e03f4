"""The board: everything that the pages show. The thread of the channel writes it, the server's thread reads it.

Invariant: the board has at most `requests_max` records, which take at most `limits.BOARD_BYTES_MAX`, and its version
grows with every change. A full board drops the oldest finished request, preferably one that no page shows. If all
requests are running, new ones are counted but not kept, and running ones drop their oldest tokens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import Block, Frame, FrameHeader, RequestRows, mask_of
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.errors import explain
from capflow.probes.probe import Scorer
from capflow.steering.action import Answered
from capflow_dashboard import limits
from capflow_dashboard.board.record import LIVE, RecordCopy, RequestRecord
from capflow_dashboard.board.series import Measures, Values
from capflow_dashboard.steering import Target
from capflow_dashboard.views.alerts.book import AlertBook
from capflow_dashboard.views.population import Population
from capflow_dashboard.views.rates import RateSeries


@dataclass
class PageState:
    """What one page has received and shows. The server's thread keeps one for each page.

    selected: the key of the request that the page shows; 0 for none.
    probe: the probe whose sparklines it shows.
    window: the keys of the requests whose sparklines it shows.
    health: whether it shows the hub's counters.
    version: the board's version when it last received changes.
    second: the last second of the rates that it has.
    detail: the key and the base of the tokens that it has.
    baseline: whether it has the baseline of these.
    event: the board's version of the last event that it has of this request.
    sent: the summary of each request that it has, with the version of its record.
    listed_s: when it last got what changed in the list.
    sparks: the sparklines that it has, each with the version of its record.
    drops: how many records had been dropped when it last got the list.
    status_s: the time of the hub's counters that it has.
    population: the engine whose population it shows, of its probe; empty for none.
    population_s: when it last got that.
    other: what it has of the request that it compares with, in the fields of one request; None for no such request.
    stores: whether it has asked where rows are stored.
    """

    selected: int = 0
    probe: str = ""
    window: tuple[int, ...] = ()
    health: bool = False
    version: int = -1
    second: int = -1
    detail: tuple[int, int] = (0, -1)
    baseline: bool = False
    event: int = -1
    sent: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    listed_s: float = -np.inf
    sparks: dict[int, tuple[int, list[float | None]]] = field(default_factory=dict)
    drops: int = 0
    status_s: float = -np.inf
    population: str = ""
    population_s: float = -np.inf
    other: PageState | None = None
    stores: bool = False


class RecordOwner(NamedTuple):
    """Whose rows a record shows.

    sites: the sites whose norms are shown.
    """

    engine: str
    request: str
    incarnation: str
    model: ModelInfo
    sites: tuple[Site, ...]


class PromptCopy(NamedTuple):
    """The prompt of a request.

    ids: `[prompt_length]`.
    """

    engine: str
    request: str
    model: str
    ids: list[int]


@dataclass
class _Engine:
    measures: Measures
    population: Population
    # The last counted step, by data-parallel replica.
    step_last: dict[int, int] = field(default_factory=dict)


class Board:
    """The records of requests, and the counts.

    requests_max: how many records are kept.
    tokens_max: how many tokens of each, the latest ones.
    clock: returns monotonic seconds.
    wall: returns seconds since 1970.
    """

    def __init__(
        self,
        requests_max: int,
        tokens_max: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        # What is shown: `live` and a hub's address, or `stored` and a name.
        self.source = ("live", "")
        # Whether each request has the positive label, by its id; set before the first engine comes.
        self.labels: Mapping[str, bool] = {}
        # What counts for the rules of alerts; set before the first engine comes, as `labels` is.
        self.alerts = AlertBook(())
        self.requests_max = requests_max
        self.tokens_max = tokens_max
        self._clock = clock
        self._wall = wall
        # Guards the fields below. Held for copies, never while norms and scores are computed or while sending.
        self._lock = threading.Lock()
        self._version = 0
        self._counts_version = 0
        self._engines: dict[str, _Engine] = {}
        self._engines_version = -1
        # Engines that have disconnected and still have records.
        self._gone: set[str] = set()
        # All records by key, oldest first.
        self._records: dict[int, RequestRecord] = {}
        # Records of running requests, by engine and request.
        self._open: dict[tuple[str, str], RequestRecord] = {}
        # Running requests without a record.
        self._not_kept: set[tuple[str, str]] = set()
        self._key = 0
        self._done = 0
        # The memory of all records.
        self._bytes = 0
        # How many records were dropped.
        self._drops = 0
        # Dropped rows by reason.
        self._dropped: Counter[str] = Counter()
        # Tokens, rows, bytes.
        self._totals = [0, 0, 0]
        self._rates = RateSeries(clock)
        # How many pages show a request, by key.
        self._viewers: Counter[int] = Counter()
        # The age of the newest rows when they came; None before the first and for rows without a time.
        self._lag_s: float | None = None
        # When the hub last said that it is alive, less the time for which it had been silent then.
        self._heard_at = clock()
        # The hub's counters, and when they came.
        self._status: dict[str, Any] | None = None
        self._status_at = -np.inf

    # Called on the thread of the channel.

    def greet(self, engine: str, model: ModelInfo, sites: Sequence[Site], probes: Sequence[Scorer]) -> list[str]:
        """Add an engine, or continue one that has reconnected.

        sites: the sites whose norms are shown.

        Return an error for each probe that does not fit the model.
        """
        measures = Measures(model, sites, probes)
        with self._lock:
            before = self._engines.get(engine)
            first = measures.norms_count
            same = before is not None and before.measures.is_like(measures)
            self.alerts.greet(engine, measures.series[first:], first, same=same)
            if before is not None and same:
                measures, population = before.measures, before.population
            else:
                population = Population(measures.series[first:], first, self.labels, self._clock)
            self._engines[engine] = _Engine(measures, population)
            self._engines_version = self._next()
            self._gone.discard(engine)
        return measures.problems

    def forget(self, engine: str) -> None:
        """Note that an engine has disconnected. It is shown as gone for as long as one of its requests is shown."""
        with self._lock:
            self._gone.add(engine)
            self.alerts.leave(engine)
            self._forget_engines()
            self._engines_version = self._next()

    def take(self, frame: Frame) -> None:
        """Count a frame, compute its norms and scores, and add them to the records. The rows are not kept."""
        header = frame.header
        self._count(header)
        with self._lock:
            measures = self._engines[header.engine].measures
            population = self._engines[header.engine].population
        parts = [(block, *measures.of(block.sites, rows)) for block, rows in frame.blocks()]
        steered = [_steered(request) for request in header.requests]
        # Data sets have no times.
        time_s = header.time_ns / 1e9 if header.time_ns else None
        with self._lock:
            version = self._next()
            for block, indices, values in parts:
                counted = _of_requests(block, values)
                if measures.baseline.add(indices, counted):
                    self._engines_version = version
                population.add(indices, counted)
                self.alerts.take(header, block, indices, values)
                for number, start, length, row in block.spans:
                    request = header.requests[number]
                    record = self._record(header.engine, request, start, time_s)
                    if record is None or record.measures is not measures:
                        continue
                    record.last_s = time_s
                    at = start - request.start
                    mask = steered[number]
                    record.put(
                        version,
                        start,
                        request.token_ids[at : at + length],
                        request.texts[at : at + length],
                        indices,
                        values[:, row : row + length],
                        None if mask is None else mask[at : at + length],
                    )

    def finish(self, done: RequestDone) -> None:
        """Mark a request as finished."""
        with self._lock:
            self._not_kept.discard((done.engine, done.request))
            self._done += 1
            lost = sum(dropped.rows for dropped in done.dropped)
            for dropped in done.dropped:
                self._dropped[dropped.reason] += dropped.rows
            record = self._open.pop((done.engine, done.request), None)
            self._counts_version = self._next()
            incarnation, scores = "", list[float | None]()
            if record is not None:
                record.end(self._version, done.status, done.prompt_length, lost)
                engine = self._engines.get(done.engine)
                if engine is not None and engine.measures is record.measures:
                    incarnation, scores = record.incarnation, record.pooled()
                    engine.population.finish(record.id, scores)
            self.alerts.finish(done, incarnation, scores)

    def note(self, answered: Answered) -> None:
        """Add an event of a request's steering to its record."""
        with self._lock:
            record = self._open.get((answered.engine, answered.request))
            if record is not None:
                record.note(self._next(), answered)

    def hear(self, silent_s: float, status: dict[str, Any] | None) -> None:
        """Note that the hub is alive.

        silent_s: for how long nothing had come from it.
        status: its counters, if they were asked for.
        """
        with self._lock:
            self._heard_at = self._clock() - silent_s
            if status is not None:
                self._status, self._status_at = status, self._clock()

    # Called on any thread.

    def find(self, key: int) -> Target | None:
        """Return a running request by its key; None if it is over or unknown."""
        with self._lock:
            record = self._records.get(key)
            return None if record is None or record.status != LIVE else _target(record)

    def running(self) -> list[Target]:
        """Return all running requests."""
        with self._lock:
            return [_target(record) for record in self._open.values()]

    def summaries(self) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
        """Return the fields of all requests, newest first, and the names of each engine's probes."""
        with self._lock:
            records = list(self._records.values())[::-1]
            probes = {record.engine: record.measures.probe_names for record in records[::-1]}
        # One at a time, so that the thread of the channel never waits for them all.
        return [self._summary(record) for record in records], probes

    def copy_of(self, key: int) -> RecordCopy | None:
        """Return the tokens of a request; None if it is not kept."""
        with self._lock:
            record = self._records.get(key)
            return None if record is None else record.copy()

    def prompt_of(self, key: int) -> PromptCopy | str:
        """Return the prompt of a request, or why there is none."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return explain("request", got="one that is not kept", expected="one of the list")
            ids = record.prompt_ids()
            if ids is None:
                got = f"a prompt of {record.prompt_length} tokens, not all of which came to the dashboard"
                return explain("request", got=got, expected="a whole prompt", do="capture with positions=all")
            return PromptCopy(record.engine, record.id, record.measures.model.name, ids)

    # Called on the server's thread.

    def look(
        self,
        page: PageState,
        key: int,
        window: Sequence[int] = (),
        probe: str = "",
        *,
        health: bool = False,
        other: int = 0,
        population: str = "",
    ) -> None:
        """Note what a page shows: one or two requests (0 for none), rows of the list, a probe, the hub's counters."""
        with self._lock:
            if probe != page.probe:
                page.sparks = {}
            if (population, probe) != (page.population, page.probe):
                page.population_s = -np.inf
            page.window, page.probe, page.health, page.population = tuple(window), probe, health, population
            self._viewers[page.selected] -= 1
            page.selected = key
            self._viewers[key] += 1
            before = 0 if page.other is None else page.other.selected
            self._viewers[before] -= 1
            self._viewers[other] += 1
            if other != before:
                page.other = PageState(selected=other) if other else None
            # Removes the keys without viewers.
            self._viewers += Counter()

    def leave(self, page: PageState) -> None:
        """Note that a page was closed."""
        self.look(page, 0)

    def owner(self, key: int) -> RecordOwner | None:
        """Return whose rows a record shows; None if there is no such record."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return None
            measures = record.measures
            sites = tuple(series.site for series in measures.series[: measures.norms_count])
            return RecordOwner(record.engine, record.id, record.incarnation, measures.model, sites)

    def norms_at(self, key: int, position: int) -> dict[Site, float]:
        """Return the norm at each site of a token that is shown; empty if it is not kept."""
        with self._lock:
            record = self._records.get(key)
            return {} if record is None else record.norms_at(position)

    @property
    def status(self) -> dict[str, Any] | None:
        """The hub's latest counters; None before the first."""
        return self._status

    def heartbeat(self) -> dict[str, Any]:
        """Return whether the hub is alive and how old the newest rows were when they came."""
        with self._lock:
            silent_s = max(0.0, self._clock() - self._heard_at)
            return {
                "t": round(self._wall(), 3),
                "state": "stale" if silent_s > limits.SILENCE_S else "live",
                "silent_s": round(silent_s, 1),
                "lag_s": None if self._lag_s is None else round(self._lag_s, 2),
                "skipped_rows": self._dropped["skipped"] + self._dropped["not_tapped"],
            }

    def news(self, page: PageState) -> tuple[dict[str, Any], Values | None] | None:
        """Return what a page has not received yet, and note that it has; None if there is nothing.

        The result is the head and the values of `capflow_dashboard.wire`: float32 `[series, count]`, or None.
        """
        with self._lock:
            head: dict[str, Any] = {}
            values = None
            rates = self._rates.since(page.second)
            if rates is not None:
                head["rates"] = rates
                page.second = rates["last"]
            if page.health and self._status_at > page.status_s:
                head["health"] = {"status": self._status}
                page.status_s = self._status_at
            self._add_population(page, head)
            self._add_list(page, head)
            if self._version > page.version:
                if page.detail[0] != page.selected:
                    # Changes of the tokens that it has are not sent, so it gets them all when it shows them again.
                    page.detail = PageState.detail
                self._add_counts(page, head)
                values = self._add_detail(page, head)
                page.version = self._version
            elif page.detail[0] != page.selected:
                values = self._add_detail(page, head)
            if page.other is not None and self._version > page.other.version:
                values = self._add_other(page.other, head, values)
        return (head, values) if head else None

    def _summary(self, record: RequestRecord) -> dict[str, Any]:
        with self._lock:
            return record.summary()

    # Called with the lock held.

    def _add_counts(self, page: PageState, head: dict[str, Any]) -> None:
        if self._engines_version > page.version:
            head["engines"] = [self._engine_fields(name, engine) for name, engine in self._engines.items()]
        if self._counts_version > page.version or page.version < 0:
            tokens, rows, nbytes = self._totals
            head["counts"] = {
                "open": len(self._open) + len(self._not_kept),
                "done": self._done,
                "not_kept": len(self._not_kept),
                "dropped": dict(self._dropped),
                "tokens": tokens,
                "rows": rows,
                "bytes": nbytes,
            }

    def _add_list(self, page: PageState, head: dict[str, Any]) -> None:
        """Add what changed in the list of requests, `limits.LISTS_PER_S_MAX` times a second; new requests at once."""
        now = self._clock()
        due = now - page.listed_s >= 1 / limits.LISTS_PER_S_MAX
        if page.drops != self._drops:
            page.drops = self._drops
            if gone := [key for key in page.sent if key not in self._records]:
                head["gone"] = gone
            for key in gone:
                del page.sent[key]
                page.sparks.pop(key, None)
        changed: list[RequestRecord] = []
        for record in reversed(self._records.values()):
            version, _ = page.sent.get(record.key, (-1, None))
            if version >= 0 and not due and len(page.sent) + len(changed) == len(self._records):
                break
            if version < 0 or (due and record.version > version):
                changed.append(record)
                if len(changed) == limits.REQUESTS_PER_UPDATE:
                    break
        if requests := [fields for record in changed if (fields := _changed(page.sent, record))]:
            head["requests"] = requests
        if due:
            page.listed_s = now
            self._add_sparks(page, head)

    def _add_population(self, page: PageState, head: dict[str, Any]) -> None:
        """Add the population that the page shows, `limits.POPULATIONS_PER_S_MAX` times a second."""
        engine = self._engines.get(page.population)
        if engine is None or self._clock() - page.population_s < 1 / limits.POPULATIONS_PER_S_MAX:
            return
        page.population_s = self._clock()
        fields = engine.population.fields(page.probe)
        if fields is not None:
            head["population"] = {"engine": page.population, **fields}

    def _add_sparks(self, page: PageState, head: dict[str, Any]) -> None:
        sparks = {}
        for key in page.window if page.probe else ():
            record = self._records.get(key)
            version, before = page.sparks.get(key, (-1, None))
            if record is None or record.version <= version:
                continue
            spark = record.spark(page.probe)
            page.sparks[key] = record.version, spark
            if spark != before:
                sparks[str(key)] = spark
        if sparks:
            head["sparks"] = sparks

    def _add_detail(self, page: PageState, head: dict[str, Any]) -> Values | None:
        record = self._records.get(page.selected)
        if record is None:
            return None
        fresh = page.detail != (record.key, record.base)
        if fresh:
            page.event, page.baseline = -1, False
        columns = record.since(-1 if fresh else page.version)
        baseline = record.measures.baseline.fields
        events = [(version, event) for version, event in record.events if version > page.event]
        if columns is None and not fresh and (baseline is None or page.baseline) and not events:
            return None
        if columns is None:
            if not record.count and not events:
                return None
            empty = np.empty((len(record.measures), 0), np.float32)
            columns = ({"key": record.key, "base": record.base, "first": 0, "count": 0, "ids": [], "texts": []}, empty)
            columns[0]["steered"] = ()
        page.detail = (record.key, record.base)
        detail, values = columns
        detail["fresh"] = fresh
        if fresh:
            detail["series"] = [series.fields() for series in record.measures.series]
        if fresh or (baseline is not None and not page.baseline):
            detail["baseline"] = baseline
            page.baseline = baseline is not None
        if fresh or events:
            detail["events"] = [_event_fields(event) for _, event in events]
            page.event = events[-1][0] if events else page.event
        head["detail"] = detail
        return values

    def _add_other(self, other: PageState, head: dict[str, Any], values: Values | None) -> Values | None:
        """Add the tokens of a second request; return all numbers, those of `values` first."""
        part: dict[str, Any] = {}
        numbers = self._add_detail(other, part)
        other.version = self._version
        if numbers is None:
            return values
        head["other"] = part["detail"] | {"at": 0 if values is None else values.size}
        return numbers if values is None else np.concatenate([values.ravel(), numbers.ravel()])

    def _count(self, header: FrameHeader) -> None:
        """Count a frame in totals and rates. The tokens of a step that several pipeline stages send count once."""
        rows = sum(len(block.sites) * block.rows for block in header.blocks)
        with self._lock:
            engine = self._engines[header.engine]
            tokens = 0
            if header.step > engine.step_last.get(header.rank.dp, -1):
                engine.step_last[header.rank.dp] = header.step
                tokens = header.step_tokens
            amounts = (tokens, rows, header.payload_bytes)
            self._totals = [total + amount for total, amount in zip(self._totals, amounts, strict=True)]
            self._rates.add(*amounts)
            if header.time_ns:
                self._lag_s = max(0.0, self._wall() - header.time_ns / 1e9)
            self._counts_version = self._next()

    def _next(self) -> int:
        self._version += 1
        return self._version

    def _record(self, engine: str, request: RequestRows, start: int, time_s: float | None) -> RequestRecord | None:
        """Return the record of a request, created if missing; None when the board is full."""
        name = (engine, request.id)
        record = self._open.get(name)
        if record is not None or name in self._not_kept:
            return record
        owner = self._engines[engine]
        record = RequestRecord(
            self._key + 1,
            engine,
            request.id,
            owner.measures,
            prompt_length=request.prompt_length,
            base=start,
            tokens_max=self.tokens_max,
            started_s=time_s,
            incarnation=request.incarnation,
            grow=self._grow,
        )
        full = len(self._records) >= self.requests_max and not self._drop_oldest()
        if full or not self._grow(record.nbytes):
            self._not_kept.add(name)
            return None
        self._key += 1
        self._records[record.key] = self._open[name] = record
        return record

    def _grow(self, nbytes: int) -> bool:
        """Take memory for a record; drop finished requests for it. Return whether there is room."""
        while self._bytes + nbytes > limits.BOARD_BYTES_MAX:
            if not self._drop_oldest():
                return False
        self._bytes += nbytes
        return True

    def _drop_oldest(self) -> bool:
        """Drop the oldest finished request, preferably one that no page shows; return whether there was one."""
        shown = None
        for key, record in self._records.items():
            if record.status == LIVE:
                continue
            if not self._viewers[key]:
                self._drop(key)
                return True
            shown = key if shown is None else shown
        if shown is not None:
            self._drop(shown)
        return shown is not None

    def _drop(self, key: int) -> None:
        self._bytes -= self._records.pop(key).nbytes
        self._drops += 1
        if self._gone:
            self._forget_engines()

    def _forget_engines(self) -> None:
        """Forget engines that are gone and have no request any more."""
        shown = {record.engine for record in self._records.values()}
        for name in self._gone - shown:
            self._engines.pop(name, None)
            self._engines_version = self._next()
        self._gone &= shown

    def _engine_fields(self, name: str, engine: _Engine) -> dict[str, Any]:
        measures = engine.measures
        return {
            "name": name,
            "model": measures.model.name,
            "num_layers": measures.model.num_layers,
            "hidden_size": measures.model.hidden_size,
            "dtype": measures.model.dtype,
            "gone": name in self._gone,
            "sites": [str(series.site) for series in measures.series[: measures.norms_count]],
            "probes": [
                {
                    "name": series.probe,
                    "site": str(series.site),
                    "threshold": series.threshold,
                    "pool": series.pool,
                }
                for series in measures.series[measures.norms_count :]
            ],
            "problems": measures.problems,
        }


def _target(record: RequestRecord) -> Target:
    return Target(record.key, record.engine, record.id, record.incarnation)


def _of_requests(block: Block, values: Values) -> Values:
    """Return the values of the rows that belong to a request: those of rejected drafts belong to none."""
    if sum(span.length for span in block.spans) == block.rows:
        return values
    mask = np.zeros(block.rows, np.bool_)
    for span in block.spans:
        mask[span.row : span.row + span.length] = True
    return values[:, mask]


def _steered(request: RequestRows) -> npt.NDArray[np.bool_] | None:
    """Return whether each position of a request's part of a step was steered; None if none was or this is unknown."""
    if not request.steered:
        return None
    return mask_of(request.steered, request.start, request.start + len(request.token_ids))


def _changed(sent: dict[int, tuple[int, dict[str, Any]]], record: RequestRecord) -> dict[str, Any] | None:
    """Return the key and the changed fields of a request, and note that they are sent; None if nothing changed."""
    _, before = sent.get(record.key, (-1, None))
    summary = record.summary()
    sent[record.key] = record.version, summary
    if before is None:
        return summary
    fields = {name: value for name, value in summary.items() if name == "key" or before[name] != value}
    return fields if len(fields) > 1 else None


def _event_fields(event: Answered) -> dict[str, Any]:
    return {
        "id": event.id,
        "kind": event.kind,
        "by": event.asked_by,
        "sites": [str(site) for site in event.sites],
        "step": event.step,
        "position": event.position,
        "time_s": event.time_ns / 1e9,
        "label": event.label,
        "scale": event.scale,
        "score": event.score,
        "threshold": event.threshold,
        "target": event.target,
        "outcome": event.outcome,
        "reason": event.reason,
    }
