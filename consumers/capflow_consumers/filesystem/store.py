"""Where the filesystem consumer puts requests: directories of their own, or shards; and what lies there already."""

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

Found = list[tuple[Path, layout.Sidecar]]


class Written(NamedTuple):
    """A request that is written and not part of the data set yet.

    path: where a shard will have it.
    """

    files: RequestFiles
    sidecar: layout.Sidecar
    on_collision: OnCollision
    path: Path | None = None


class Store:
    """A directory for each request, between `open` and `close`.

    workers: threads for what can be done beside each other, None for none.

    One thread may call `files` and `captures`, another what else there is.
    """

    def __init__(self, work: WorkDir, files: type[RequestFiles], workers: Executor | None) -> None:
        self.work = work
        self._files = files
        self._workers = workers
        self._sealed = ShardSet(work.root, sealed_only=True)
        # Requests that have their names; until the root is on the disk.
        self._named: dict[Path, Path] = {}

    def open(self) -> None:
        """Make the root, and put in order what dead writers left; raises OSError."""
        self.work.open()
        self._sealed.refresh()
        for found in self._sealed.damage:
            logger.warning("%s; the hub goes on without it", found.error)

    def files(self, dtype: str, hidden_size: int, dtypes: Mapping[Site, str]) -> RequestFiles:
        """Return what takes the rows of a request."""
        work = self.work
        return self._files(
            work.new(), dtype, hidden_size, dtypes, fsync=work.fsync, mode=work.mode, workers=self._workers
        )

    def captures(self, engine: str, request: str) -> Found:
        """Return where captures of an engine's request lie, and their sidecars."""
        return [found for found in self._captures(request) if found[1].engine == engine]

    def number(self, engine: str, request: str, on_collision: OnCollision) -> int | None:  # noqa: ARG002  shards have other names
        """Return which capture of its id the next one of a request is, where that is known; raises CapflowError when there may be none."""
        return None

    def put(self, files: RequestFiles, sidecar: layout.Sidecar, text: bytes, on_collision: OnCollision) -> Written:
        """Write the sidecar of a request, as JSON in `text`, whose rows are written; raises OSError."""
        files.write_sidecar(text)
        return Written(files, sidecar, on_collision)

    def publish(self, group: Sequence[Written]) -> list[Path | OSError | CapflowError]:
        """Make requests part of the data set, which `fsync` has on the disk then; return of each where it is, or why it is not yet."""
        new = [written for written in group if written.files.path not in self._named]
        failed: dict[Path, OSError | CapflowError] = {}
        try:
            if self.work.fsync and new:
                disk.sync_trees([written.files.path for written in new])
        except OSError as e:
            failed = {written.files.path: e for written in new}
            new = []
        for written in new:
            found = self._rename(written)
            if isinstance(found, Path):
                self._named[written.files.path] = found
            else:
                failed[written.files.path] = found
        try:
            if self.work.fsync:
                disk.sync(self.work.root)
        except OSError as e:
            return [failed.get(written.files.path, e) for written in group]
        return [failed.get(path) or self._named.pop(path) for path in (written.files.path for written in group)]

    def is_named(self, files: RequestFiles) -> bool:
        """Return whether a request has its name, and nobody knows whether that is on the disk."""
        return files.path in self._named

    def _rename(self, written: Written) -> Path | OSError | CapflowError:
        try:
            sidecar = written.sidecar
            return self.work.publish(written.files.path, slug(sidecar.request), sidecar.engine, written.on_collision)
        except (OSError, CapflowError) as e:
            return e

    def close(self) -> None:
        """Remove what is unfinished."""
        self.work.close()

    def _captures(self, request: str) -> Found:
        captures: Found = []
        for path in self.work.published(slug(request)):
            try:
                sidecar = layout.read_sidecar(read_regular(path / layout.SIDECAR_NAME, limits.SIDECAR_BYTES_MAX))
            except (OSError, ValueError):
                continue  # not one of ours
            if sidecar.request == request:
                captures.append((path, sidecar))
        for capture in self._sealed.find(request):
            if isinstance(capture, Damage):
                logger.warning("a capture of %s is not looked at: %s", request, capture.error)
            else:
                captures.append((capture.path, capture.sidecar))
        return captures


class ShardStore(Store):
    """Shards of many requests."""

    def __init__(self, work: WorkDir, *, compressed: bool, shard_bytes: int, sync_requests: bool) -> None:
        super().__init__(work, ShardRows, None)
        # Held while a shard goes from the open to the sealed ones, and while these are searched.
        self._lock = threading.Lock()
        self._compressed = compressed
        self._shard_bytes = shard_bytes
        self._sync_requests = sync_requests

    def open(self) -> None:
        """Make the root, and put in order what dead writers left; raises OSError."""
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
        """Return what takes the rows of a request."""
        return ShardRows(self.work.new(), dtype, hidden_size, dtypes, fsync=self.work.fsync, shards=self._writer)

    def number(self, engine: str, request: str, on_collision: OnCollision) -> int | None:
        """Return which capture of its id the next one of a request is; raises CapflowError when there may be none."""
        found = self._captures(request)
        taken = [sidecar.capture or split(path.name)[1] for path, sidecar in found]
        mine = any(name_of(sidecar.engine) == name_of(engine) for _, sidecar in found)
        if mine and on_collision == "error":
            do = "set on_collision to suffix, or use another root"
            raise CapflowError(explain(f"{self.work.root} has a capture of {request} already", do=do))
        return max(taken, default=0) + 1

    def put(self, files: RequestFiles, sidecar: layout.Sidecar, text: bytes, on_collision: OnCollision) -> Written:
        """Write the sidecar of a request, as JSON in `text`, behind its rows; raises OSError."""
        assert isinstance(files, ShardRows)
        return Written(files, sidecar, on_collision, files.commit(sidecar, text))

    def publish(self, group: Sequence[Written]) -> list[Path | OSError | CapflowError]:
        """Make requests part of their shards; return of each where it will be, or why it will not."""
        failed = self._writer.settle()
        with self._lock:
            if self._writer.seal():
                self._find_sealed()
        found: list[Path | OSError | CapflowError] = []
        for written in group:
            assert written.path is not None
            found.append(failed.get(written.path, written.path))
        return found

    def close(self) -> None:
        """Seal what is open; what cannot be now is left to the next writer. Raises CapflowError as `ShardWriter.close` does."""
        keep = True
        try:
            keep = not self._writer.close()
        finally:
            self.work.close(keep=keep)

    def _find_sealed(self) -> None:
        """Look for shards that were sealed; what they hold is there, whether or not they can be looked at now."""
        try:
            self._sealed.refresh()
        except OSError as e:
            logger.error("the shards of %s cannot be listed: %s", self.work.root, e.strerror or e)

    def _captures(self, request: str) -> Found:
        with self._lock:
            return super()._captures(request) + list(self._writer.captures(request))
