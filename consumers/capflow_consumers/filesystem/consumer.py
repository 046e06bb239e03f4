"""The filesystem consumer: each request's rows in files of its own or in shards with others; `capflow.open` reads them.

The formats are described in `capflow_consumers.dataset.layout` and `capflow_consumers.dataset.shards.stream`.

Rows are collected in memory. When their request ends, the thread of `writing` writes them while the next rows come.
Past `buffer_bytes_max`, the rows of the largest requests are moved to files early; with `tail_s`, those of all requests
are.

A request becomes part of the data set when all of it is on the disk. A reader of the root sees it whole or not at all,
also after a kill or a power cut. Its sidecar lists the frames that it was made of; so when a hub delivers those again
after a kill, the request is recognised.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shlex
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.buffers.policy import WhenFull
from capflow.buffers.spool import default_root
from capflow.capture.frame import Chunk, Frame, FrameHeader, RequestRows
from capflow.capture.model import ModelInfo
from capflow.capture.positions import Form
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.spec import CaptureSpec, StoredDtype, Wanted, join, read_layers
from capflow.errors import FatalError, RetryError, UsageError, explain, kind_of
from capflow.extras import require
from capflow.plugins.consumer import Backlog, Consumer, Context, hookimpl
from capflow.steering.action import Answered
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.layout import Quantization
from capflow_consumers.dataset.names import slug
from capflow_consumers.dataset.objects.address import OBJECT_BYTES_MAX, ObjectRoot, endpoint_in_use, is_url, parse
from capflow_consumers.dataset.running import About
from capflow_consumers.dataset.stored_dtype import name_of
from capflow_consumers.filesystem.files import PackedFile, RequestFiles
from capflow_consumers.filesystem.publisher import Over, Publisher, expected_of, result_of
from capflow_consumers.filesystem.request import EventLog, FiledRequest
from capflow_consumers.filesystem.store import Store, Written
from capflow_consumers.filesystem.workdir import OnCollision, WorkDir
from capflow_consumers.filesystem.writing import Endings


class FilesystemConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer filesystem:`.

    root: the directory of the data set, which is made when missing; or `s3://BUCKET/PREFIX`, with `sharded`.
    hooks, layers, positions, max_rows, dtype: what to capture of every request, as in `CaptureSpec`; max_rows 0 sets no
        bound.
    capture: `requests` to write only what requests ask for themselves.
    on_collision: what to do when the same engine has a capture of the same id.
    buffer_bytes_max: how many bytes of rows may wait in memory.
    layout: how rows lie under the root.
    fsync: when the disk is waited for. `true`: a request is on the disk when its result says `ok`. `seal`: a shard is
        on the disk once it is sealed. `false`: never; rows are with the kernel only.
    tail_s: with `per_file`, how often the rows of running requests are written, seconds; 0 is never.
    compression, shard_bytes: with `sharded`.
    quantization: with `sharded`, what each number is rounded to, with one scale for each row; see
        `capflow_consumers.dataset.shards.quantization`.
    threads: with `per_file`, the number of threads that write beside the consumer's own.
    staging: with a root in an object store, the local directory in which shards are written; by default below
        `$XDG_STATE_HOME/capflow/uploads`.
    staging_bytes_max: how many bytes of sealed shards may wait there for their upload.
    mode: of the files below the root; those who may read them may enter the directories that are made.
    """

    root: str
    hooks: list[str] = msgspec.field(default_factory=lambda: ["post_block"])
    layers: list[int | str] | str = "all"
    positions: Form = "all"
    max_rows: int = 0
    dtype: StoredDtype = "model"
    capture: Literal["all", "requests"] = "all"
    on_collision: OnCollision = "error"
    buffer_bytes_max: int = 256 * limits.MIB
    layout: layout.Layout = "packed"
    fsync: bool | Literal["seal"] = True
    tail_s: float = 1.0
    compression: Literal["none", "zstd"] = "none"
    quantization: Literal["none", Quantization] = "none"
    shard_bytes: int = 1024 * limits.MIB
    staging: str = ""
    staging_bytes_max: int = 16 * 1024 * limits.MIB
    threads: int = 0
    mode: Literal["0600", "0640", "0644", "0660", "0664"] = "0600"


_DEFAULTS = FilesystemConfig("")
# Requests without rows whose events are kept.
_EARLY_MAX = 4096
_LAYOUT_OF = {
    "compression": "sharded",
    "quantization": "sharded",
    "shard_bytes": "sharded",
    "tail_s": "per_file",
    "threads": "per_file",
}
_OBJECTS_ONLY = ("staging", "staging_bytes_max")
"""The options that only one layout uses."""


class _Open(NamedTuple):
    """The parts that exist from `open` to `close`."""

    workers: ThreadPoolExecutor | None
    store: Store
    publisher: Publisher
    endings: Endings[Over, Written]


class FilesystemConsumer(Consumer):
    """Writes each request into a directory of its own, or into a shard with others."""

    name: ClassVar[str] = "filesystem"
    Config: ClassVar[type[msgspec.Struct]] = FilesystemConfig
    policy: ClassVar[str] = WhenFull.SPILL

    def __init__(self, config: FilesystemConfig) -> None:
        super().__init__(config)
        self.config: FilesystemConfig = config
        # The root in an object store; None for a directory. Set by `check`, or by `open`.
        self._objects: ObjectRoot | None = None
        # The directory in which requests are written.
        self._root = Path(config.root).absolute()
        # Set from `open` to `close`.
        self._open: _Open | None = None
        # When rows of running requests were last written, on the monotonic clock.
        self._tailed_at = 0.0
        self._requests: dict[tuple[str, str], FiledRequest] = {}
        # Events of requests without rows so far, by engine, id and incarnation.
        self._early: dict[tuple[str, str, str], EventLog] = {}
        self._models: dict[str, ModelInfo] = {}
        # By engine: the wants of a request that asks for nothing itself.
        self._wants: dict[str, Wanted | None] = {}
        self._buffered_bytes = 0
        self._context: Context | None = None

    def spec(self) -> CaptureSpec | None:
        """Return the spec that the options describe; None with `capture=requests`."""
        if self.config.capture == "requests":
            return None
        config = self.config
        layers = read_layers(config.layers, f"consumers.{self.instance}.layers")
        value = {
            "hooks": dict.fromkeys(config.hooks, layers),
            "positions": config.positions,
            "max_rows": config.max_rows or None,
            "dtype": config.dtype,
        }
        return CaptureSpec.parse(value, where=f"consumers.{self.instance}")

    def look(self) -> tuple[str, str]:
        """Return the root, and a command that shows its content."""
        return self.config.root, f"capflow inspect {shlex.quote(self.config.root)}"

    def claim(self) -> tuple[str, str]:
        """Return the root."""
        return "root", str(self.config.root if is_url(self.config.root) else self._root.resolve())

    def backlog(self) -> Backlog | None:
        """Return what waits to be uploaded."""
        opened = self._open
        return opened.store.backlog if opened is not None else None

    def check(self) -> None:
        """Raise UsageError for options out of range and for a root that cannot be written."""
        config = self.config
        if is_url(config.root):
            self._locate()
        if config.layout == "sharded":
            require("files", f"consumers.{self.instance}.layout=sharded")
        bounds = {
            "buffer_bytes_max": 0,
            "tail_s": 0,
            "shard_bytes": limits.MIB,
            "threads": 0,
            "staging_bytes_max": limits.MIB,
        }
        for name, least in bounds.items():
            if not least <= getattr(config, name) < math.inf:
                raise self._refused(name, f"{least} or more", "remove it to use the default")
        if not config.root:
            raise self._refused("root", "the path of a directory")
        self._check_uses()
        if config.fsync == "seal" and config.layout != "sharded":
            do = "set layout=sharded, whose files are sealed"
            raise self._refused("fsync", f"true or false with {config.layout}", do)
        if config.on_collision == "overwrite" and config.layout == "sharded":
            do = "a shard only grows; the latest capture is the one that is read"
            raise self._refused("on_collision", "error or suffix with sharded", do)
        existing = next(path for path in (self._root, *self._root.parents) if os.path.lexists(path))
        if not existing.is_dir():
            raise self._bad_root(f"{existing}, which is not a directory")
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as e:
            raise self._bad_root(f"{existing}: {e.strerror}") from e

    def _check_uses(self) -> None:
        """Raise UsageError for options that the layout or the root does not use."""
        config = self.config
        for name in _OBJECTS_ONLY:
            if getattr(config, name) != getattr(_DEFAULTS, name) and self._objects is None:
                raise self._refused(
                    name, "none with a directory as root", "it is for root=s3://BUCKET/PREFIX; remove it"
                )
        if self._objects is not None and config.shard_bytes > OBJECT_BYTES_MAX:
            raise self._refused("shard_bytes", f"{OBJECT_BYTES_MAX} or less in an object store")
        for name, only in _LAYOUT_OF.items():
            default = getattr(_DEFAULTS, name)
            if getattr(config, name) != default and config.layout != only:
                raise self._refused(name, f"{default} with {config.layout}", f"set layout={only}, or remove it")
        if config.quantization != "none" and config.dtype != "model":
            do = "remove it; rounded rows are read as float32"
            raise self._refused("dtype", f"model with quantization={config.quantization}", do)

    def _locate(self) -> None:
        """Find the root in an object store, and the directory for what is not there yet. Raises UsageError."""
        config, where = self.config, f"consumers.{self.instance}.root"
        self._objects = parse(config.root, where)
        if config.layout != "sharded":
            do = "set layout=sharded; only whole shards are uploaded"
            got = f"{self._objects.path} with layout={config.layout}"
            raise UsageError(explain(where, got=got, expected="a directory with this layout", do=do))
        endpoint_in_use(self._objects)
        below = default_root().parent / "uploads" / slug(str(self._objects))
        self._root = Path(config.staging).absolute() if config.staging else below

    def _refused(self, option: str, expected: str, do: str = "") -> UsageError:
        got = getattr(self.config, option)
        return UsageError(explain(f"consumers.{self.instance}.{option}", got=got, expected=expected, do=do))

    def open(self, context: Context) -> None:
        """Make the root, and clean up after dead writers.

        Raises UsageError when the root cannot be made or written. Raises RetryError, without making a root, when the
        consumer was open before and its root is unreachable.
        """
        if is_url(self.config.root) and self._objects is None:
            self._locate()
        if self._context is not None and disk.is_away(self._root):
            raise RetryError(disk.refused(self._root, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))))
        again, self._context = self._context is not None, context
        config = self.config
        workers = ThreadPoolExecutor(config.threads, "capflow-filesystem") if config.threads else None
        work = WorkDir(self._root, fsync=bool(config.fsync), mode=int(config.mode, 8))
        if config.layout == "sharded":
            store: Store = self._shard_store(work, context)
        else:
            store = Store(work, PackedFile if config.layout == "packed" else RequestFiles, workers)
        try:
            store.open()
        except OSError as e:
            raise self._bad_root(f"{e.filename or self._root}: {e.strerror or e}") from e
        except RetryError as e:
            if again:
                raise
            raise UsageError(f"consumers.{self.instance}.root: {e}") from e
        publisher = Publisher(store, config.on_collision, lambda: self._count("requests_failed"))
        self._open = _Open(workers, store, publisher, Endings(publisher.write, publisher.publish))
        self._open.endings.open()

    def _shard_store(self, work: WorkDir, context: Context) -> Store:
        from capflow_consumers.filesystem.shard_store import ShardStore

        config = self.config
        options: dict[str, Any] = {
            "compressed": config.compression == "zstd",
            "quantization": None if config.quantization == "none" else config.quantization,
            "shard_bytes": config.shard_bytes,
            "sync_requests": config.fsync is True,
        }
        if self._objects is None:
            return ShardStore(work, **options)
        from capflow_consumers.dataset.objects.store import Objects
        from capflow_consumers.filesystem.object_store import ObjectShardStore

        return ObjectShardStore(
            work,
            Objects(self._objects),
            waiting_bytes_max=config.staging_bytes_max,
            left_s=context.left_s,
            working=context.working,
            **options,
        )

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Remember the model's name for the sidecars."""
        self._models[engine] = model
        self._wants.pop(engine, None)

    def on_engine_gone(self, engine: str) -> None:
        """Forget its model."""
        self._models.pop(engine, None)
        self._wants.pop(engine, None)

    def on_frame(self, frame: Frame) -> None:
        """Copy the rows into the buffers of their requests; past the bound, move the largest requests' rows to files.

        Raises RetryError, having taken nothing of the frame, while the disk takes nothing. Raises FatalError when
        memory or descriptors run out in the middle of the frame.
        """
        self._wait_for_disk()
        if self._buffered_bytes + self._parts.endings.nbytes > self.config.buffer_bytes_max:
            self._make_room()
        for rows in frame.header.requests:
            if (frame.header.engine, rows.id) not in self._requests:
                self._parts.endings.wait(rows.id)
                self._parts.store.prepare(frame.header.engine, rows.id)
        chunks = list(frame.chunks())
        try:
            self._take(frame, chunks)
        except Exception as e:
            if kind_of(e) != "retry":
                raise
            got, do = f"{type(e).__name__}: {e}", "the hub opens the consumer again and delivers the rows again"
            raise FatalError(explain("part of a frame was taken", got=got, do=do)) from e

    def _take(self, frame: Frame, chunks: list[Chunk]) -> None:
        """Copy the rows of a frame."""
        previous: RequestRows | None = None
        endings = self._parts.endings
        frame_bytes = frame.nbytes
        for chunk in chunks:
            if chunk.request is not previous:
                previous = chunk.request
                request = self._request(frame, previous)
                request.frames.add(frame.header)
                request.note_steered(previous.steered)
                if request.published is None:
                    request.tokens.add(previous.start, previous.token_ids, previous.texts)
            if request.error is None and request.published is None:
                try:
                    grown = request.add(chunk, frame_bytes if 2 * chunk.rows.nbytes > frame_bytes else None)
                except UsageError as e:
                    self._fail(request, str(e))
                    continue
                self._buffered_bytes += grown
                if self._buffered_bytes + endings.nbytes > self.config.buffer_bytes_max:
                    with contextlib.suppress(RetryError):  # the next call tries again, before it takes anything
                        self._make_room()

    def on_action(self, answered: Answered) -> None:
        """Keep an event for the sidecar of its request, whose rows may come later.

        An event is for one incarnation of an id. One that names none is for the request whose rows come now.
        """
        engine, request_id, incarnation = answered.engine, answered.request, answered.incarnation
        request = self._requests.get((engine, request_id))
        if request is not None and (not (incarnation and request.incarnation) or incarnation == request.incarnation):
            request.events.add(answered)
            return
        self._early.setdefault((engine, request_id, incarnation), EventLog()).add(answered)
        keep_newest(self._early, _EARLY_MAX)

    def on_request_done(self, done: RequestDone) -> CaptureResult | Future[CaptureResult]:
        """Begin to write the rest of a request; the result says what is in the data set.

        Raises RetryError while the disk takes nothing.
        """
        endings = self._parts.endings
        endings.make_room()
        key = done.engine, done.request
        request = self._requests.get(key)
        if request is None:
            endings.wait(done.request)
            request = self._requests[key] = self._empty(done.engine)
        request.incarnation = next((finished.incarnation for finished in done.finished), request.incarnation)
        if (early := self._early.pop((*key, request.incarnation), None)) is not None:
            request.events.join(early)
        if not request.appended:
            self._append(request)
        if request.published is None and request.error is None:
            expected = expected_of(request.wanted, done)
            counts = {site: sum(stop - start for start, stop in spans) for site, spans in expected.items()}
            pieces = request.buffer.pieces()
            try:
                request.files.prepare(pieces, request.tokens, counts)
            except OSError as e:
                self._fail_or_raise(request, e)
            if request.files.exact:
                self._count("requests_not_rounded")
        nbytes = request.buffer.nbytes
        request.buffer.clear()
        del self._requests[key]
        self._buffered_bytes -= nbytes
        if request.published is not None:
            self._count("requests_again")
            path, sidecar = request.published
            return result_of(self._parts.store.place(path), sidecar)
        if request.error is not None:
            self._count("requests_failed")
            return CaptureResult("error", request.error)
        return endings.put(Over(request, done, expected, self._model(done.engine)), done.request, nbytes)

    def close(self) -> None:
        """Finish the requests that ended, and drop the others: no part of a request is ever published."""
        opened, self._open = self._open, None
        self._early.clear()
        if opened is not None:
            opened.endings.close()
        if self._requests:
            self._count("requests_unfinished", len(self._requests))
            self._requests.clear()
            self._buffered_bytes = 0
        if opened is not None:
            try:
                opened.store.close()
            finally:
                if opened.workers is not None:
                    opened.workers.shutdown()

    def on_idle(self) -> None:
        """Write the rows of running requests to files for readers. Raises RetryError while the disk takes nothing."""
        self._wait_for_disk()
        now = time.monotonic()
        if self.config.layout == "per_file" and 0 < self.config.tail_s <= now - self._tailed_at:
            self._tailed_at = now
            for request in list(self._requests.values()):
                if request.buffer.nbytes or not request.appended:
                    self._append(request)

    def _wait_for_disk(self) -> None:
        """Raise RetryError while finished requests cannot be written."""
        if (trouble := self._parts.endings.trouble) is not None:
            raise RetryError(str(trouble)) from (trouble.__cause__ or trouble)

    def _request(self, frame: Frame, rows: RequestRows) -> FiledRequest:
        header = frame.header
        key = (header.engine, rows.id)
        request = self._requests.get(key)
        if request is None:
            self._parts.endings.wait(rows.id)
            wanted = frame.wants(rows) if frame.wants is not None else self._wanted(header.engine, rows)
            files = self._files(header.dtype, header.hidden_size, wanted)
            files.model = self._models.get(header.engine)
            request = FiledRequest(files, wanted, rows.incarnation)
            request.published = self._published(header, rows.id)
            request.files.about = self._about(header, rows, request.files) if self.config.layout == "per_file" else None
            self._requests[key] = request
        elif (request.files.dtype, request.files.hidden_size) != (header.dtype, header.hidden_size):
            got = f"{header.dtype} rows of {header.hidden_size}"
            expected = f"{request.files.dtype} of {request.files.hidden_size}, as the request's first"
            self._fail(request, explain("rows of another model", got=got, expected=expected))
        return request

    def _published(self, header: FrameHeader, request: str) -> tuple[PurePath, layout.Sidecar] | None:
        """Return the path and sidecar of a request that was made with this frame; None when there is none."""
        for path, sidecar in self._parts.store.captures(header.engine, request):
            ranges = [s for s in sidecar.sources if (s.boot, s.rank) == (header.boot, header.rank)]
            if ranges and min(s.first for s in ranges) <= header.seq <= max(s.last for s in ranges):
                return path, sidecar
        return None

    def _wanted(self, engine: str, rows: RequestRows) -> Wanted | None:
        """Return the wants of a request where its frame has none; None before the engine's model is known."""
        model = self._models.get(engine)
        if model is None:
            return None
        asked = None if rows.capture is None else rows.capture.of(self.instance)
        if asked is not None:
            return self._resolved(model, asked)
        if engine not in self._wants:
            self._wants[engine] = self._resolved(model)
        return self._wants[engine]

    def _resolved(self, model: ModelInfo, *asked: CaptureSpec) -> Wanted | None:
        """Return what this consumer and a request want of a model; None where the engine refuses it."""
        specs = [spec for spec in (self.spec(), *asked) if spec is not None]
        try:
            return join(spec.resolve(model.sites, num_layers=model.num_layers) for spec in specs)
        except UsageError:  # the number of rows is checked all the same
            return None

    def _empty(self, engine: str) -> FiledRequest:
        """Return a request that has no rows."""
        model = self._models.get(engine)
        dtype, hidden_size = (model.dtype, model.hidden_size) if model else ("float32", 0)
        return FiledRequest(self._files(dtype, hidden_size, None), None)

    def _files(self, dtype: str, hidden_size: int, wanted: Wanted | None) -> RequestFiles:
        dtypes = {site: name_of(want.dtype, dtype) for site, want in (wanted or {}).items()}
        return self._parts.store.files(dtype, hidden_size, dtypes)

    @property
    def _parts(self) -> _Open:
        assert self._open is not None, "not open"
        return self._open

    def _model(self, engine: str) -> str:
        """Return the name of an engine's model; empty when it is unknown."""
        model = self._models.get(engine)
        return model.name if model else ""

    def _about(self, header: FrameHeader, rows: RequestRows, files: RequestFiles) -> About:
        dtypes = {str(site): dtype for site, dtype in files.dtypes.items() if dtype != files.dtype}
        model = files.model
        forms: dict[str, Any] = {} if model is None else {"attention": model.attention, "router": model.router}
        name = self._model(header.engine)
        about = (rows.id, header.engine, name, header.dtype, header.hidden_size, rows.prompt_length, dtypes)
        return About(*about, **forms)

    def _make_room(self) -> None:
        """Wait for finished requests; where that is not enough, move rows of others to files."""
        bound = self.config.buffer_bytes_max
        endings = self._parts.endings
        while (under_way := endings.nbytes) and self._buffered_bytes + under_way > bound:
            endings.wait()
        if self._buffered_bytes > bound:
            self._write_out()

    def _write_out(self) -> None:
        """Move rows to files, largest requests first, until half of the bound is free."""
        self._count("buffer_overflows")
        for request in sorted(self._requests.values(), key=lambda request: request.buffer.nbytes, reverse=True):
            if self._buffered_bytes <= self.config.buffer_bytes_max // 2:
                return
            self._append(request)

    def _append(self, request: FiledRequest) -> None:
        """Move a request's rows to files. Raises RetryError while the disk takes none; the rest is kept."""
        if request.appended:
            request.appending_bytes = request.buffer.nbytes
            request.appending, request.appended = request.buffer.take(), False
        try:
            request.files.append(request.appending, request.tokens)
        except OSError as e:  # it concerns this request, not the one whose frame is being handled
            self._fail_or_raise(request, e)
        self._buffered_bytes -= request.appending_bytes
        request.appending, request.appended = {}, True

    def _fail_or_raise(self, request: FiledRequest, error: OSError) -> None:
        """Give up a request after an error of the file system.

        Raises RetryError or FatalError instead where the request may be written later.
        """
        judged = disk.judged(self._root, error)
        if judged is not error:
            raise judged from error
        self._fail(request, disk.refused(self._root, error))

    def _fail(self, request: FiledRequest, error: str) -> None:
        request.error = error
        self._buffered_bytes -= request.buffer.nbytes
        request.buffer.clear()
        request.files.discard()

    def _bad_root(self, got: str) -> UsageError:
        expected = "a directory that can be made and written"
        option = "root" if self._objects is None else "staging"
        return UsageError(explain(f"consumers.{self.instance}.{option}", got=got, expected=expected))

    def _count(self, name: str, amount: int = 1) -> None:
        if self._context is not None:
            self._context.count(name, amount)


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Bring the filesystem consumer."""
    return [FilesystemConsumer]
