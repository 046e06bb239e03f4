"""The board: everything that the pages show. The consumer's thread writes it, the server's thread reads it.

Invariant: the board has at most `requests_max` records, each with at most `tokens_max` tokens, and its version grows
with every change. A full board drops the oldest finished request, preferably one that no page shows. If all requests
are running, new ones are counted but not kept.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from capflow.capture.frame import Chunk, FrameHeader
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import Scorer
from capflow_dashboard import limits
from capflow_dashboard.rates import RateSeries
from capflow_dashboard.record import LIVE, RequestRecord
from capflow_dashboard.series import Measures, Values


@dataclass
class PageState:
    """What one page has received and shows. The server's thread keeps one for each page.

    selected: the key of the request that the page shows; 0 for none.
    version: the board's version when it last received changes.
    second: the last second of the rates that it has.
    detail: the key and the base of the tokens that it has.
    keys: the keys of the requests that it has.
    """

    selected: int = 0
    version: int = -1
    second: int = -1
    detail: tuple[int, int] = (0, -1)
    keys: frozenset[int] = frozenset()


@dataclass
class _Engine:
    measures: Measures
    tokens_max: int
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
        self.requests_max = requests_max
        self.tokens_max = tokens_max
        self._wall = wall
        # Guards the fields below. Held for copies, never while computing or sending.
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
        # Dropped rows by reason.
        self._dropped: Counter[str] = Counter()
        # Tokens, rows, bytes.
        self._totals = [0, 0, 0]
        self._rates = RateSeries(clock)
        # How many pages show a request, by key.
        self._viewers: Counter[int] = Counter()

    # Called on the consumer's thread.

    def greet(self, engine: str, model: ModelInfo, sites: Sequence[Site], probes: Sequence[Scorer]) -> list[str]:
        """Add an engine, or continue one that has reconnected.

        sites: the sites whose norms are shown.

        Return an error for each probe that does not fit the model.
        """
        measures = Measures(model, sites, probes)
        with self._lock:
            before = self._engines.get(engine)
        if before is not None and before.measures.is_like(measures):
            measures = before.measures
        bytes_each = self.requests_max * max(1, len(measures)) * 4
        room = max(limits.TOKENS_MIN, limits.VALUES_BYTES_MAX // bytes_each)
        with self._lock:
            self._engines[engine] = _Engine(measures, min(self.tokens_max, room))
            self._engines_version = self._next()
            self._gone.discard(engine)
        return measures.problems

    def forget(self, engine: str) -> None:
        """Note that an engine has disconnected. It is shown as long as one of its requests is."""
        with self._lock:
            shown = {record.engine for record in self._records.values()}
            self._gone.add(engine)
            for name in self._gone - shown:
                self._engines.pop(name, None)
            self._gone &= shown
            self._engines_version = self._next()

    def count(self, header: FrameHeader) -> None:
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
            self._counts_version = self._next()

    def put(self, engine: str, chunk: Chunk) -> None:
        """Add the rows of one request."""
        with self._lock:
            measures = self._engines[engine].measures
        indices, values = measures.of(chunk.sites, chunk.rows)
        with self._lock:
            record = self._record(engine, chunk)
            if record is not None and record.measures is measures:
                record.put(self._next(), chunk.start, chunk.token_ids, chunk.texts, indices, values)

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
            if record is not None:
                record.end(self._version, done.status, done.prompt_length, lost)

    # Called on the server's thread.

    def look(self, page: PageState, key: int) -> None:
        """Note that a page shows another request; 0 for none."""
        with self._lock:
            self._viewers[page.selected] -= 1
            page.selected = key
            self._viewers[key] += 1
            # Removes the keys without viewers.
            self._viewers += Counter()

    def leave(self, page: PageState) -> None:
        """Note that a page was closed."""
        self.look(page, 0)

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
            if self._version > page.version:
                self._add_changes(page, head)
                values = self._add_detail(page, head)
                page.version = self._version
            elif page.detail[0] != page.selected:
                values = self._add_detail(page, head)
        return (head, values) if head else None

    # Called with the lock held.

    def _add_changes(self, page: PageState, head: dict[str, Any]) -> None:
        if self._engines_version > page.version:
            head["engines"] = [_engine_fields(name, engine) for name, engine in self._engines.items()]
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
        changed = [record.summary() for record in self._records.values() if record.version > page.version]
        if changed:
            head["requests"] = changed
        gone = sorted(page.keys - self._records.keys())
        if gone:
            head["gone"] = gone
        page.keys = frozenset(self._records)

    def _add_detail(self, page: PageState, head: dict[str, Any]) -> Values | None:
        record = self._records.get(page.selected)
        if record is None:
            return None
        fresh = page.detail != (record.key, record.base)
        columns = record.since(-1 if fresh else page.version)
        if columns is None:
            return None
        page.detail = (record.key, record.base)
        detail, values = columns
        head["detail"] = detail | {"fresh": fresh}
        if fresh:
            head["detail"]["series"] = [series.fields() for series in record.measures.series]
        return values

    def _next(self) -> int:
        self._version += 1
        return self._version

    def _record(self, engine: str, chunk: Chunk) -> RequestRecord | None:
        """Return the record of a chunk's request, created if missing; None when the board is full."""
        name = (engine, chunk.request.id)
        record = self._open.get(name)
        if record is not None or name in self._not_kept:
            return record
        if len(self._records) >= self.requests_max and not self._make_room():
            self._not_kept.add(name)
            return None
        self._key += 1
        owner = self._engines[engine]
        record = RequestRecord(
            self._key,
            engine,
            chunk.request.id,
            owner.measures,
            prompt_length=chunk.request.prompt_length,
            base=chunk.start,
            tokens_max=owner.tokens_max,
            started_s=self._wall(),
        )
        self._records[record.key] = self._open[name] = record
        return record

    def _make_room(self) -> bool:
        finished = [key for key, record in self._records.items() if record.status != LIVE]
        if finished:
            del self._records[next((key for key in finished if not self._viewers[key]), finished[0])]
        return bool(finished)


def _engine_fields(name: str, engine: _Engine) -> dict[str, Any]:
    model = engine.measures.model
    return {
        "name": name,
        "model": model.name,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "dtype": model.dtype,
        "sites": engine.measures.norms_count,
        "problems": engine.measures.problems,
    }
