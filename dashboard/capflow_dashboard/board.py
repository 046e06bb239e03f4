"""The board: everything that pages show. The consumer's thread writes it, the server's thread reads it.

What always holds: at most `requests_max` records are kept, each with at most `tokens_max` tokens. A full board
forgets the oldest request that is over, sparing those that someone looks at; when every one is still running, new
requests are counted but not kept. `version` grows with every change.
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
class Seen:
    """What one page has, and what it wants to see; the server's thread keeps one for each.

    selected: the key of the request that the page shows, 0 for none.
    """

    selected: int = 0
    version: int = -1
    # The last one of the rates.
    second: int = -1
    # The key and base of the tokens that it has.
    detail: tuple[int, int] = (0, -1)
    keys: frozenset[int] = frozenset()


@dataclass
class _Engine:
    measures: Measures
    tokens_max: int
    # The last step counted, by data-parallel replica.
    step_last: dict[int, int] = field(default_factory=dict)


class Board:
    """Holds records and counts.

    clock: monotonic seconds.
    wall: seconds since 1970.
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
        # Over all below; held for copies, never for computing or sending.
        self._lock = threading.Lock()
        self._version = 0
        self._counts_version = 0
        self._engines: dict[str, _Engine] = {}
        self._engines_version = -1
        # Of `_engines`, those that are gone and have records.
        self._gone: set[str] = set()
        # By key, oldest first.
        self._records: dict[int, RequestRecord] = {}
        # Of `_records`, those that run, by engine and request.
        self._open: dict[tuple[str, str], RequestRecord] = {}
        # Requests that run and are not kept, until they are over.
        self._turned_away: set[tuple[str, str]] = set()
        self._key = 0
        self._done = 0
        # Rows, by reason.
        self._dropped: Counter[str] = Counter()
        # Tokens, rows, bytes.
        self._totals = [0, 0, 0]
        self._rates = RateSeries(clock)
        # Keys that pages show.
        self._looked_at: Counter[int] = Counter()

    # The consumer's thread.

    def greet(self, engine: str, model: ModelInfo, sites: Sequence[Site], probes: Sequence[Scorer]) -> list[str]:
        """An engine connected, or came back with its requests; return what of the probes does not fit its model."""
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
        """An engine is gone; it is shown as long as a request of it is."""
        with self._lock:
            shown = {record.engine for record in self._records.values()}
            self._gone.add(engine)
            for name in self._gone - shown:
                self._engines.pop(name, None)
            self._gone &= shown
            self._engines_version = self._next()

    def count(self, header: FrameHeader) -> None:
        """Count a frame into totals and rates, a step that several pipeline stages tell of once."""
        rows = sum(len(block.sites) * block.rows for block in header.blocks)
        with self._lock:
            engine = self._engines[header.engine]
            tokens = 0
            if header.step > engine.step_last.get(header.rank.dp, -1):
                engine.step_last[header.rank.dp] = header.step
                tokens = header.step_tokens
            came = (tokens, rows, header.payload_bytes)
            self._totals = [total + new for total, new in zip(self._totals, came, strict=True)]
            self._rates.add(*came)
            self._counts_version = self._next()

    def put(self, engine: str, chunk: Chunk) -> None:
        """Note one request's new rows."""
        with self._lock:
            measures = self._engines[engine].measures
        indices, values = measures.of(chunk.sites, chunk.rows)
        with self._lock:
            record = self._record(engine, chunk)
            if record is not None and record.measures is measures:
                record.put(self._next(), chunk.start, chunk.token_ids, chunk.texts, indices, values)

    def finish(self, done: RequestDone) -> None:
        """A request is over."""
        with self._lock:
            self._turned_away.discard((done.engine, done.request))
            self._done += 1
            lost = sum(dropped.rows for dropped in done.dropped)
            for dropped in done.dropped:
                self._dropped[dropped.reason] += dropped.rows
            record = self._open.pop((done.engine, done.request), None)
            self._counts_version = self._next()
            if record is not None:
                record.end(self._version, done.status, done.prompt_length, lost)

    # The server's thread.

    def look(self, seen: Seen, key: int) -> None:
        """A page shows another request now; 0 for none."""
        with self._lock:
            self._looked_at[seen.selected] -= 1
            seen.selected = key
            self._looked_at[key] += 1
            self._looked_at += Counter()  # keeps what is above 0

    def leave(self, seen: Seen) -> None:
        """A page is gone."""
        self.look(seen, 0)

    def news(self, seen: Seen) -> tuple[dict[str, Any], Values | None] | None:
        """Return what a page has not seen, and note that it has; None when there is nothing.

        The values are those of `detail`: float32, `[series, count]` of its request.
        """
        with self._lock:
            told: dict[str, Any] = {}
            values = None
            rates = self._rates.since(seen.second)
            if rates is not None:
                told["rates"] = rates
                seen.second = rates["last"]
            if self._version > seen.version:
                self._tell_changes(seen, told)
                values = self._tell_detail(seen, told)
                seen.version = self._version
            elif seen.detail[0] != seen.selected:
                values = self._tell_detail(seen, told)
        return (told, values) if told else None

    def _tell_changes(self, seen: Seen, told: dict[str, Any]) -> None:
        if self._engines_version > seen.version:
            told["engines"] = [_engine_told(name, engine) for name, engine in self._engines.items()]
        if self._counts_version > seen.version or seen.version < 0:
            tokens, rows, nbytes = self._totals
            told["counts"] = {
                "open": len(self._open) + len(self._turned_away),
                "done": self._done,
                "not_kept": len(self._turned_away),
                "dropped": dict(self._dropped),
                "tokens": tokens,
                "rows": rows,
                "bytes": nbytes,
            }
        changed = [record.summary() for record in self._records.values() if record.version > seen.version]
        if changed:
            told["requests"] = changed
        gone = sorted(seen.keys - self._records.keys())
        if gone:
            told["gone"] = gone
        seen.keys = frozenset(self._records)

    def _tell_detail(self, seen: Seen, told: dict[str, Any]) -> Values | None:
        record = self._records.get(seen.selected)
        if record is None:
            return None
        fresh = seen.detail != (record.key, record.base)
        found = record.since(-1 if fresh else seen.version)
        if found is None:
            return None
        seen.detail = (record.key, record.base)
        detail, values = found
        told["detail"] = detail | {"fresh": fresh}
        if fresh:
            told["detail"]["series"] = [series.told() for series in record.measures.series]
        return values

    # Under the lock.

    def _next(self) -> int:
        self._version += 1
        return self._version

    def _record(self, engine: str, chunk: Chunk) -> RequestRecord | None:
        """Return the record of a chunk's request, a new one if need be; None when the board is full."""
        which = (engine, chunk.request.id)
        record = self._open.get(which)
        if record is not None or which in self._turned_away:
            return record
        if len(self._records) >= self.requests_max and not self._make_room():
            self._turned_away.add(which)
            return None
        self._key += 1
        known = self._engines[engine]
        record = RequestRecord(
            self._key,
            engine,
            chunk.request.id,
            known.measures,
            prompt_length=chunk.request.prompt_length,
            base=chunk.start,
            tokens_max=known.tokens_max,
            started_s=self._wall(),
        )
        self._records[record.key] = self._open[which] = record
        return record

    def _make_room(self) -> bool:
        over = [key for key, record in self._records.items() if record.status != LIVE]
        if over:
            del self._records[next((key for key in over if not self._looked_at[key]), over[0])]
        return bool(over)


def _engine_told(name: str, engine: _Engine) -> dict[str, Any]:
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
