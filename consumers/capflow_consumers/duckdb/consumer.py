"""The duckdb consumer: stores the score of every token on your probes in one DuckDB file.

`capflow_consumers.duckdb.schema` documents the tables; `capflow.probes.probe` and `capflow.probes.kinds` document the
probe files:

    capflow run --consumer duckdb:path=scores.duckdb,probes=happy.safetensors+sad.safetensors

`saes` records the most active features of every token on sparse autoencoders, in the place of the rows:

    capflow run --consumer duckdb:path=scores.duckdb,saes=gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82

`lens` records the tokens that each layer would predict after every token:

    capflow run --consumer duckdb:path=scores.duckdb,lens=logit,lens_layers=5+11-17

It captures the sites of these for every request. Without any of them it captures nothing itself: it records the tokens
of the requests that ask for a capture of their own. `site=post_block:0` records the tokens of every request, at the
cost of capturing that site.

Rows are scored as they come. They wait in memory until there are `batch_rows` of them, `flush_s` seconds have passed,
or a request ends; then one transaction writes them. A result of `ok` means that the request's rows are committed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import shlex
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.policy import WhenFull
from capflow.capture.frame import Block, Frame, FrameHeader, Rank
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone, Status
from capflow.capture.site import HOOK_DEFAULT, Site, layers_by_hook
from capflow.capture.spec import CaptureSpec, Layers
from capflow.errors import CapflowError, FatalError, RetryError, UsageError, explain
from capflow.plugins.consumer import Consumer, Context, hookimpl
from capflow.probes.kinds import load_probes
from capflow.probes.probe import Scorer
from capflow.saes.named import load_saes
from capflow.saes.sae import Sae, check_k
from capflow.steering.action import Answered
from capflow_consumers.duckdb.request import Feed, ScoredRequest, Stretches
from capflow_consumers.duckdb.scoring import TopFeatures
from capflow_consumers.duckdb.stacking import stacked
from capflow_consumers.framelog import FrameLog

if TYPE_CHECKING:
    import pyarrow as pa

    from capflow_consumers.duckdb.database import Adopted, Database, Stored
    from capflow_consumers.duckdb.lens import LiveLens
    from capflow_consumers.duckdb.pending import PendingRows
    from capflow_consumers.duckdb.port import SqlPort

logger = logging.getLogger("capflow.consumer")

_id_of, _start_of, _ids_of, _incarnation_of = map(attrgetter, ("id", "start", "token_ids", "incarnation"))

# Vectors that wait in memory; more are written at once.
_VECTOR_BYTES_MAX = 64 * limits.MIB
# Requests whose events may wait for a capture.
_EARLY_MAX = 4096


class DuckdbConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer duckdb:`.

    path: the database file; created if missing.
    probes: probe files.
    saes: autoencoders whose features to record, each `PATH`, `PATH@SITE` or `NAME=PATH@SITE`.
    top_features: how many features of each token to record, the most active ones.
    lens: a lens file, as `capflow lens` writes it, or `logit`: what each layer would predict is recorded.
    lens_layers: the layers that it reads.
    lens_tokens: how many tokens to record at each layer, the most likely ones.
    other_weights: whether the lens may be of other weights of the same sizes.
    site: one more site to capture for every request.
    vectors: whether to write the captured rows too.
    positions: which tokens to score.
    batch_rows: rows that may wait in memory; more are written.
    flush_s: seconds that a row may wait in memory.
    memory_bytes_max: memory that DuckDB itself may use.
    """

    path: str
    probes: list[str] = []
    saes: list[str] = []
    top_features: int = 32
    lens: str = ""
    lens_layers: list[int | str] | str = "all"
    lens_tokens: int = 5
    other_weights: bool = False
    site: str = ""
    vectors: bool = False
    positions: str = "all"
    batch_rows: int = 50_000
    flush_s: float = 1.0
    memory_bytes_max: int = 512 * limits.MIB


class DuckdbConsumer(Consumer):
    """Scores rows with probes; stores tokens and scores."""

    name: ClassVar[str] = "duckdb"
    extra: ClassVar[str] = "duckdb"
    Config: ClassVar[type[msgspec.Struct]] = DuckdbConfig
    policy: ClassVar[str] = WhenFull.SPILL

    def __init__(self, config: DuckdbConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config)
        self.config: DuckdbConfig = config
        self._clock = clock
        self._path = Path(config.path).absolute()
        self._database: Database | None = None
        # Open as long as the database.
        self._port: SqlPort | None = None
        self._context: Context | None = None
        self._models: dict[str, ModelInfo] = {}
        # Why the rows of an engine cannot be scored, by engine.
        self._unfit: dict[str, str] = {}
        self._requests: dict[tuple[str, str], ScoredRequest] = {}
        # Captures that the file already had when it was opened, by engine and request, until their request continues.
        self._stored: dict[str, dict[str, list[Stored]]] = {}
        # Requests with events that came before their first row, by engine, id and incarnation; the newest.
        self._early: dict[tuple[str, str, str], None] = {}
        # The feeds, each by its engine, boot, rank, rows and scores.
        self._feeds: dict[tuple[str, str, Rank, int, int], Feed] = {}
        self._captures = 0
        # Rows that wait for the next transaction; set by `open`.
        self._pending: PendingRows
        self._pending_since = 0.0

    @cached_property
    def _probes(self) -> list[Scorer]:
        return load_probes(self.config.probes, f"consumers.{self.instance}.probes")

    @cached_property
    def _saes(self) -> dict[str, Sae]:
        return load_saes(self.config.saes, f"consumers.{self.instance}.saes")

    @cached_property
    def _lens(self) -> LiveLens | None:
        if not self.config.lens:
            return None
        from capflow_consumers.duckdb.lens import LiveLens

        config, where = self.config, f"consumers.{self.instance}"
        layers, k = config.lens_layers, config.lens_tokens
        return LiveLens(config.lens, layers, k, other_weights=config.other_weights, where=where)

    @cached_property
    def _features(self) -> dict[Site, list[TopFeatures]]:
        """The autoencoders by the site that they read."""
        sites: dict[Site, list[TopFeatures]] = {}
        for name, sae in self._saes.items():
            sites.setdefault(sae.site, []).append(TopFeatures(name, sae, self.config.top_features))
        return sites

    @cached_property
    def _by_site(self) -> dict[Site, list[Scorer]]:
        """Probes by site. Linear probes of one pool form one matrix. The site of the option may have no probes."""
        sites: dict[Site, list[Scorer]] = {Site.parse(self.config.site): []} if self.config.site else {}
        for probe in self._probes:
            sites.setdefault(probe.site, []).append(probe)
        for site in self._features:
            sites.setdefault(site, [])
        return {site: stacked(probes) for site, probes in sites.items()}

    def spec(self) -> CaptureSpec | None:
        """Return a spec of the sites of the probes, the autoencoders, the lens and the option; None without any.

        Raises UsageError for files that cannot be used.
        """
        layers = layers_by_hook(sorted(self._by_site))
        hooks: dict[str, Layers] = {hook: [*numbers] for hook, numbers in layers.items()}
        if self._lens is not None:
            hooks[HOOK_DEFAULT] = self._lens.layers_with(layers.get(HOOK_DEFAULT, []))
        if not hooks:
            return None
        return CaptureSpec.parse(
            {"hooks": hooks, "positions": self.config.positions}, where=f"consumers.{self.instance}"
        )

    def look(self) -> tuple[str, str]:
        """Return the database file, and a command that prints where the probes fired, else the lens's tokens."""
        sql = "FROM fired LIMIT 20" if self.config.probes else "FROM requests"
        if self.config.lens and not self.config.probes:
            sql = "FROM lens_tokens LIMIT 20"
        return self.config.path, f"capflow query '{sql}' --path {shlex.quote(self.config.path)}"

    def check(self) -> None:
        """Raise UsageError for options out of range and a path that cannot be a file."""
        check_k(self.config.top_features, f"consumers.{self.instance}.top_features")
        for field, low in (("batch_rows", 1), ("flush_s", 0), ("memory_bytes_max", 64 * limits.MIB)):
            value = getattr(self.config, field)
            if not value >= low:
                raise UsageError(explain(f"consumers.{self.instance}.{field}", got=value, expected=f"{low} or more"))
        if self._path.is_dir() or not self._path.parent.is_dir():
            expected = "a file in a directory that exists"
            raise UsageError(explain(f"consumers.{self.instance}.path", got=str(self._path), expected=expected))

    def claim(self) -> tuple[str, str]:
        """Return the database file."""
        return "path", str(self._path.resolve())

    def open(self, context: Context) -> None:
        """Open the file and record the probes. The hub delivers again the rows that were pending before this `open`."""
        from capflow_consumers.duckdb.database import Database
        from capflow_consumers.duckdb.port import SqlPort

        self._context = context
        self._pending = self._made_pending()
        self._requests, self._stored, self._feeds = {}, {}, {}
        where = f"consumers.{self.instance}.path"
        database = Database.open(self._path, memory_bytes_max=self.config.memory_bytes_max, where=where)
        try:
            for probe in self._probes:
                database.add_probe(probe)
            for name, sae in self._saes.items():
                database.add_sae(name, sae)
        except Exception:
            database.close()
            raise
        try:
            port = SqlPort(self._path, database.query)
            port.open()
            self._port = port
        except CapflowError as e:
            logger.warning("consumer %s: its database cannot be queried while it runs: %s", self.instance, e)
        self._captures = database.last_capture
        self._early = dict.fromkeys(database.early(_EARLY_MAX))
        self._database = database

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Raise UsageError unless probes, saes and lens fit the model; frames of an unfit engine are refused."""
        self._models[engine] = model
        self._unfit.pop(engine, None)
        try:
            for probe in self._probes:
                probe.check(model.sites, model.width_of(probe.site))
            for sae in self._saes.values():
                sae.check_reads(model)
            if self._lens is not None:
                assert self._database is not None
                self._lens.fit(model, self._database.check_lens)
        except UsageError as e:
            self._unfit[engine] = str(e)
            raise

    def on_engine_gone(self, engine: str) -> None:
        """Forget the engine's model."""
        self._models.pop(engine, None)
        self._unfit.pop(engine, None)
        for key in [key for key in self._feeds if key[0] == engine]:
            del self._feeds[key]

    def on_frame(self, frame: Frame) -> None:
        """Keep the tokens, and the rows to be scored.

        Raises RetryError, having kept nothing, while the batch is full and cannot be written; FatalError when part of
        the frame was kept.
        """
        header = frame.header
        if header.engine in self._unfit:
            raise UsageError(self._unfit[header.engine])
        if self._full:
            self._flush({})
        if not self._pending.count:
            self._pending_since = self._clock()
        try:
            self._take(frame)
        except Exception as e:
            self._abandon(f"{type(e).__name__}: {e}")
            do = "the hub reopens the file and delivers the rows again"
            raise FatalError(explain("part of a frame was taken", got=f"{type(e).__name__}: {e}", do=do)) from e
        if self._full:
            # The next call tries again before it keeps its frame.
            with contextlib.suppress(RetryError):
                self._flush({})

    def _take(self, frame: Frame) -> None:
        header, pending, wants = frame.header, self._pending, frame.wants
        if wants is None and (stretches := self._run(header)) is not None:
            pending.add_frame(stretches, frame)
            return
        worker = (header.boot, header.rank)
        # The frame's requests by id, and whether the file already has their rows.
        owners: dict[str, tuple[ScoredRequest, bool]] = {}
        for rows in header.requests:
            if wants is None or wants(rows):
                request = self._request(header, rows.id)
                request.incarnation = rows.incarnation
                stored = not request.take(worker, header)
                owners[rows.id] = request, stored
                pending.add_tokens(request, rows, stored=stored)
        if (
            wants is None
            and all(_tiled(block) for block in header.blocks)
            and not any(map(itemgetter(1), owners.values()))
        ):
            mine = [owners[rows.id][0] for rows in header.requests]
            for block, values in frame.blocks():
                pending.add_block(mine, block, values)
        else:
            for chunk in frame.chunks():
                request, stored = owners[chunk.request.id]
                pending.add_rows(request, chunk, stored=stored)

    def _run(self, header: FrameHeader) -> Stretches | None:
        """Add a frame to the runs of its requests; return None, without effect, if it is not all new and in order."""
        feed, requests, seq = self._feed(header), header.requests, header.seq
        starts = list(map(_start_of, requests))
        lengths = list(map(len, map(_ids_of, requests)))
        ends = list(map(operator.add, starts, lengths))
        rows_at = itertools.accumulate(lengths, initial=0)
        spans = tuple(zip(range(len(requests)), starts, lengths, rows_at, strict=False))
        total = sum(lengths)
        if not requests or any(block.spans != spans or block.rows != total for block in header.blocks):
            return None
        before, owners = seq - 1, list(map(feed.running.get, map(_id_of, requests)))
        places = zip(owners, starts, ends, map(_incarnation_of, requests), strict=True)
        for number, (owner, start, end, incarnation) in enumerate(places):
            if owner is not None and owner.seq == before and owner.end == start and owner.incarnation == incarnation:
                owner.seq, owner.end = seq, end
                continue
            request = owners[number] = self._request(header, requests[number].id)
            if not request.begin(feed, seq, start, end):
                for one, its_start in zip(owners[:number], starts, strict=False):
                    assert one is not None
                    one.seq, one.end = before, its_start
                return None
            request.incarnation = incarnation
        return Stretches(cast("list[ScoredRequest]", owners), starts, lengths)

    def _feed(self, header: FrameHeader) -> Feed:
        """Return the feed of a frame."""
        sites = [site for block in header.blocks for site in block.sites]
        rows, scores = len(sites), self._pending.scores_of(sites)
        key = (header.engine, header.boot, header.rank, rows, scores)
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = Feed((header.boot, header.rank), rows, scores)
        return feed

    @property
    def _full(self) -> bool:
        return self._pending.count >= self.config.batch_rows or self._pending.nbytes >= _VECTOR_BYTES_MAX

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Commit all pending rows and the request's row of `requests`. Raises RetryError while this is not possible."""
        import pyarrow as pa

        from capflow_consumers.duckdb.database import Adopted

        now_ns = time.time_ns()
        key = (done.engine, done.request)
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = self._new(*key, now_ns)
        request.leave()
        payload = {"path": str(self._path), "tokens": request.tokens, "scores": request.scores}
        # Delivered again, after a kill.
        if request.status is not None:
            del self._requests[key]
            self._count("requests_again")
            return CaptureResult(cast("Status", request.status), None, payload)
        problems = done.problems
        # The file has not been reopened since the error.
        if request.error is not None:
            problems.append(request.error)
        if request.rows != done.rows:
            problems.append(explain("rows seen", got=request.rows, expected=f"{done.rows} as delivered"))
        status: Status = "ok" if not problems else "partial_error" if request.rows and not request.error else "error"
        model = self._models.get(done.engine)
        versions = [weights.version for weights in done.weights] or None
        line = {
            "capture": [request.capture],
            "engine": [done.engine],
            "request_id": [done.request],
            "model": [model.name if model else None],
            "prompt_length": [done.prompt_length],
            "computed_length": [done.computed_length],
            "status": [done.status],
            "rows": [request.rows],
            "started_at": [_time(request.started_ns)],
            "finished_at": [_time(now_ns)],
            "capture_status": [status],
            "tag": pa.array([done.tag or None], pa.string()),
            "adapter": pa.array([done.adapter or None], pa.string()),
            "weights": pa.array([versions], pa.list_(pa.int64())),
            "weights_label": pa.array([done.weights[-1].label or None if done.weights else None], pa.string()),
        }
        incarnation = next((finished.incarnation for finished in done.finished), request.incarnation)
        early = (*key, incarnation)
        adopted = Adopted(request.capture, *early) if early in self._early else None
        self._flush({"requests": pa.table(line)}, adopted)
        self._early.pop(early, None)
        del self._requests[key]
        return CaptureResult(status, "; ".join(problems) or None, payload)

    def on_action(self, answered: Answered) -> None:
        """Commit an event, once. The end of its request numbers the capture of an event that came before the rows."""
        import pyarrow as pa

        key, incarnation = (answered.engine, answered.request), answered.incarnation
        request = self._requests.get(key)
        if request is not None and incarnation and request.incarnation not in ("", incarnation):
            request = None
        if request is None and incarnation:
            self._early[*key, incarnation] = None
            keep_newest(self._early, _EARLY_MAX)
        line = {
            "capture": pa.array([request.capture if request is not None else None], pa.int64()),
            "engine": [answered.engine],
            "request_id": [answered.request],
            "id": [answered.id],
            "answered_at": [_time(answered.time_ns)],
            "kind": [answered.kind],
            "sites": pa.array([[str(site) for site in answered.sites]], pa.list_(pa.string())),
            "asked_by": [answered.asked_by],
            "outcome": [answered.outcome],
            "step": pa.array([answered.step], pa.int64()),
            "reason": pa.array([answered.reason or None], pa.string()),
            "position": pa.array([answered.position], pa.int64()),
            "score": pa.array([answered.score], pa.float64()),
            "threshold": pa.array([answered.threshold], pa.float64()),
            "label": pa.array([answered.label or None], pa.string()),
            "incarnation": pa.array([answered.incarnation or None], pa.string()),
            "target": pa.array([answered.target or None], pa.string()),
            "scale": pa.array([answered.scale], pa.float64()),
        }
        assert self._database is not None
        self._database.append({"actions": pa.table(line)})

    def on_idle(self) -> None:
        """Write the pending rows once they have waited for `flush_s`."""
        if self._pending.count and self._clock() - self._pending_since >= self.config.flush_s:
            self._flush({})

    def close(self) -> None:
        """Write the pending rows and close the file. Raises CapflowError when some rows cannot be written."""
        if self._database is None:
            return
        try:
            if self._pending.count:
                self._flush({})
        finally:
            if self._port is not None:
                self._port.close()
            database, self._database = self._database, None
            database.close()

    def _request(self, header: FrameHeader, request_id: str) -> ScoredRequest:
        key = (header.engine, request_id)
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = self._resumed(header, request_id) or self._new(*key, header.time_ns)
        return request

    def _new(self, engine: str, request_id: str, started_ns: int) -> ScoredRequest:
        self._captures += 1
        return ScoredRequest(self._captures, engine, request_id, started_ns)

    def _resumed(self, header: FrameHeader, request_id: str) -> ScoredRequest | None:
        """Return the frame's request if the file had rows of it when it was opened, else None."""
        assert self._database is not None
        engine = header.engine
        if engine in self._database.engines and engine not in self._stored:
            self._stored[engine] = self._database.stored(engine)
        captures = self._stored.get(engine, {}).get(request_id, [])
        stored = next((capture for capture in captures if capture.continues(header)), None)
        if stored is None:
            return None
        captures.remove(stored)
        request = ScoredRequest(stored.capture, engine, request_id, header.time_ns)
        request.stored, request.status, request.positions = stored.frames, stored.status, stored.positions
        request.tokens = sum(last + 1 - first for first, last in stored.positions)
        return request

    def _count(self, name: str) -> None:
        if self._context is not None:
            self._context.count(name)

    def _flush(self, tables: dict[str, pa.Table], adopted: Adopted | None = None) -> None:
        """Write the pending rows and more tables in one transaction.

        adopted: the request whose events get a capture.

        Raises RetryError when nothing was written and all rows are still pending; FatalError when the file must be
        reopened.
        """
        assert self._database is not None
        pending, requests = self._pending.tables()
        if self._lens is not None and self._lens.record is not None:
            tables = {**self._database.lens_table(self._lens.record), **tables}
        try:
            self._database.append({**pending, **tables}, adopted)
        except RetryError:
            self._count("flush_errors")
            raise
        except FatalError as e:
            self._abandon(str(e))
            raise
        self._pending.clear()
        for request in requests:
            request.commit()

    def _made_pending(self) -> PendingRows:
        """Return an empty batch."""
        from capflow_consumers.duckdb.pending import PendingRows

        assert self._context is not None
        lens = None
        if self._lens is not None:
            from capflow_consumers.duckdb.lens import LensRows

            lens = LensRows(self._lens, self._context.working)
        return PendingRows(self._by_site, self._features, vectors=self.config.vectors, lens=lens)

    def _abandon(self, error: str) -> None:
        """Drop the pending rows.

        Whether the file has them is unknown: the next `open` reads that, and the hub delivers the missing ones again.
        """
        self._pending = self._made_pending()
        for request in self._requests.values():
            request.leave()
            if request.pending:
                request.pending = FrameLog()
                request.error = request.error or error


def _tiled(block: Block) -> bool:
    """Return whether the spans cover the rows of a block in order and without gaps."""
    end = 0
    for _, _, length, row in block.spans:
        if row != end:
            return False
        end += length
    return end == block.rows


def _time(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).replace(tzinfo=None)


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Return the duckdb consumer."""
    return [DuckdbConsumer]
