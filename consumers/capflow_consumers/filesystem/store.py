"""Where the filesystem consumer puts requests, in directories of their own or in shards; and which captures exist."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import CapflowError, explain
from capflow.files import read_regular
from capflow.text.engine_name import name_of
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.capture import Damage
from capflow_consumers.dataset.names import slug, split
from capflow_consumers.dataset.shards.reader import ShardSet
from capflow_consumers.filesystem.files import RequestFiles
from capflow_consumers.filesystem.shards import ShardRows, ShardWriter
from capflow_consumers.filesystem.workdir import OnCollision, WorkDir

logger = logging.getLogger("capflow.consumer")

Captures = list[tuple[Path, layout.Sidecar]]


class Written(NamedTuple):
    """A request that is written, but not part of the data set yet.

    path: the shard that will hold it; None for a directory of its own.
    """

    files: RequestFiles
    sidecar: layout.Sidecar
    on_collision: OnCollision
    path: Path | None = None


class Store:
    """A directory for each request, between `open` and `close`.

    files: the class of a request's files.
    workers: threads that write files in parallel; None for none.

    One thread may call `files` and `captures` while another calls the other methods.
    """

    def __init__(self, work: WorkDir, files: type[RequestFiles], workers: Executor | None) -> None:
        self.work = work
        self._files = files
        self._workers = workers
        self._sealed = ShardSet(work.root, sealed_only=True)
        # Where requests lie that have their names, by the path of their files, until the root is synced.
        self._named: dict[Path, Path] = {}

    def open(self) -> None:
        """Make the root, and clean up after dead writers; raises OSError."""
        self.work.open()
        self._sealed.refresh()
        for damage in self._sealed.damage:
            logger.warning("%s; the hub goes on without it", damage.error)

    def files(self, dtype: str, hidden_size: int, dtypes: Mapping[Site, str]) -> RequestFiles:
        """Return the files that take a request's rows."""
        work = self.work
        return self._files(work.new(), dtype, hidden_size, dtypes, mode=work.mode, workers=self._workers)

    def captures(self, engine: str, request: str) -> Captures:
        """Return the captures of an engine's request, as paths and sidecars."""
        return [capture for capture in self._captures(request) if capture[1].engine == engine]

    def number(self, engine: str, request: str, on_collision: OnCollision) -> int | None:  # noqa: ARG002  for shards
        """Return which capture of its id a request's next one is; None where the directory's name will say it.

        Raises CapflowError when there may be no next one.
        """
        return None

    def put(self, files: RequestFiles, sidecar: layout.Sidecar, text: bytes, on_collision: OnCollision) -> Written:
        """Write the sidecar of a request whose rows are written; raises OSError.

        text: the sidecar as JSON.
        """
        files.write_sidecar(text)
        return Written(files, sidecar, on_collision)

    def publish(self, group: Sequence[Written]) -> list[Path | OSError | CapflowError]:
        """Make requests part of the data set, and with `fsync` sync them to disk.

        Return of each its path, or why it is not part of the data set yet.
        """
        new = [written for written in group if written.files.path not in self._named]
        failed: dict[Path, OSError | CapflowError] = {}
        try:
            if self.work.fsync and new:
                disk.sync_trees([written.files.path for written in new])
        except OSError as e:
            failed = {written.files.path: e for written in new}
            new = []
        for written in new:
            outcome = self._rename(written)
            if isinstance(outcome, Path):
                self._named[written.files.path] = outcome
            else:
                failed[written.files.path] = outcome
        try:
            if self.work.fsync:
                disk.sync(self.work.root)
        except OSError as e:
            return [failed.get(written.files.path, e) for written in group]
        return [failed.get(path) or self._named.pop(path) for path in (written.files.path for written in group)]

    def is_named(self, files: RequestFiles) -> bool:
        """Return whether a request has its name, but may not be on the disk yet."""
        return files.path in self._named

    def _rename(self, written: Written) -> Path | OSError | CapflowError:
        try:
            sidecar = written.sidecar
            return self.work.publish(written.files.path, slug(sidecar.request), sidecar.engine, written.on_collision)
        except (OSError, CapflowError) as e:
            return e

    def close(self) -> None:
        """Remove unfinished requests."""
        self.work.close()

    def _captures(self, request: str) -> Captures:
        captures: Captures = []
        for path in self.work.published(slug(request)):
            try:
                sidecar = layout.read_sidecar(read_regular(path / layout.SIDECAR_NAME, limits.SIDECAR_BYTES_MAX))
            except (OSError, ValueError):
                continue  # not a request
            if sidecar.request == request:
                captures.append((path, sidecar))
        for capture in self._sealed.find(request):
            if isinstance(capture, Damage):
                logger.warning("a damaged capture of %s is ignored: %s", request, capture.error)
            else:
                captures.append((capture.path, capture.sidecar))
        return captures


class ShardStore(Store):
    """Shards of many requests."""

    def __init__(self, work: WorkDir, *, compressed: bool, shard_bytes: int, sync_requests: bool) -> None:
        super().__init__(work, ShardRows, None)
        # Held while a shard moves from the open to the sealed ones, and while both are searched.
        self._lock = threading.Lock()
        self._compressed = compressed
        self._shard_bytes = shard_bytes
        self._sync_requests = sync_requests

    def open(self) -> None:
        """Make the root, and clean up after dead writers; raises OSError."""
        super().open()
        self._writer = ShardWriter(
            self.work.root,
            self.work.path,
            compressed=self._compressed,
            bytes_max=self._shard_bytes,
            sync=self._sync_requests,
            sync_seals=self.work.fsync,
            mode=self.work.mode,
        )

    def files(self, dtype: str, hidden_size: int, dtypes: Mapping[Site, str]) -> RequestFiles:
        """Return the files that take a request's rows."""
        return ShardRows(self.work.new(), dtype, hidden_size, dtypes, shards=self._writer)

    def number(self, engine: str, request: str, on_collision: OnCollision) -> int | None:
        """Return which capture of its id a request's next one is; raises CapflowError when there may be none."""
        captures = self._captures(request)
        taken = [sidecar.capture or split(path.name)[1] for path, sidecar in captures]
        has_one = any(name_of(sidecar.engine) == name_of(engine) for _, sidecar in captures)
        if has_one and on_collision == "error":
            do = "set on_collision to suffix, or use another root"
            raise CapflowError(explain(f"{self.work.root} has a capture of {request} already", do=do))
        return max(taken, default=0) + 1

    def put(self, files: RequestFiles, sidecar: layout.Sidecar, text: bytes, on_collision: OnCollision) -> Written:
        """Write the sidecar of a request behind its rows; raises OSError.

        text: the sidecar as JSON.
        """
        assert isinstance(files, ShardRows)
        return Written(files, sidecar, on_collision, files.commit(sidecar, text))

    def publish(self, group: Sequence[Written]) -> list[Path | OSError | CapflowError]:
        """Make requests part of their shards; return of each the shard's path, or why it failed."""
        failed = self._writer.settle()
        with self._lock:
            if self._writer.seal():
                self._find_sealed()
        paths = [written.path for written in group if written.path is not None]
        return [failed.get(path, path) for path in paths]

    def close(self) -> None:
        """Seal the open shards; leave those that cannot be sealed to the next writer. Raises as `ShardWriter.close`."""
        keep = True
        try:
            keep = not self._writer.close()
        finally:
            self.work.close(keep=keep)

    def _find_sealed(self) -> None:
        """Look for shards that were sealed. A failure is logged only: their captures exist all the same."""
        try:
            self._sealed.refresh()
        except OSError as e:
            logger.error("the shards of %s cannot be listed: %s", self.work.root, e.strerror or e)

    def _captures(self, request: str) -> Captures:
        with self._lock:
            return super()._captures(request) + list(self._writer.captures(request))
