"""Where the filesystem consumer puts requests, in directories of their own or in shards; and which captures exist."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow.files import read_regular
from capflow.plugins.consumer import Backlog
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.capture import Damage
from capflow_consumers.dataset.names import slug
from capflow_consumers.dataset.shards.index import ShardSet
from capflow_consumers.filesystem.files import RequestFiles
from capflow_consumers.filesystem.workdir import OnCollision, WorkDir

logger = logging.getLogger("capflow.consumer")

Captures = list[tuple[PurePath, layout.Sidecar]]


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
        # Requests that were renamed since the root was last synced: the path in the root, by the path of their files.
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
        options: dict[str, Any] = {"mode": work.mode, "workers": self._workers, "fsync": work.fsync}
        return self._files(work.new(), dtype, hidden_size, dtypes, **options)

    def captures(self, engine: str, request: str) -> Captures:
        """Return the captures of an engine's request, as paths and sidecars."""
        return [capture for capture in self._captures(request) if capture[1].engine == engine]

    def prepare(self, engine: str, request: str) -> None:
        """Fetch what `captures` needs. Raises RetryError where that cannot be had now."""

    def place(self, path: PurePath) -> dict[str, Any]:
        """Return where a request is, for its result."""
        return {"path": str(path)}

    @property
    def backlog(self) -> Backlog | None:
        """What waits to be taken elsewhere; None for a store that takes nothing elsewhere."""
        return None

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
                disk.sync_trees([written.files.path for written in new], self.work.lock)
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
