"""Where the filesystem consumer puts requests: directories of their own, or shards; and what lies there already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path

from capflow.errors import CapflowError, explain
from capflow.site import Site
from capflow_consumers import layout
from capflow_consumers.requestfiles import RequestFiles
from capflow_consumers.shardset import ShardSet
from capflow_consumers.shardwriter import ShardRows, ShardWriter
from capflow_consumers.slug import slug
from capflow_consumers.workdir import OnCollision, WorkDir

Found = Iterator[tuple[Path, layout.Sidecar]]


class Store:
    """A directory for each request, between `open` and `close`. workers: threads for what can be done beside each other, None for none."""

    def __init__(self, work: WorkDir, files: type[RequestFiles], workers: Executor | None) -> None:
        self.work = work
        self._files = files
        self._workers = workers
        self._sealed = ShardSet(work.root, sealed_only=True)

    def open(self) -> None:
        """Make the root, and put in order what dead writers left; raises OSError and CapflowError."""
        self.work.open()
        self._sealed.refresh()

    def files(self, dtype: str, hidden_size: int, dtypes: Mapping[Site, str]) -> RequestFiles:
        """Return what takes the rows of a request."""
        return self._files(self.work.new(), dtype, hidden_size, dtypes, fsync=self.work.fsync, workers=self._workers)

    def captures(self, engine: str, request: str) -> Found:
        """Yield where captures of an engine's request lie, and their sidecars."""
        yield from (found for found in self._captures(request) if found[1].engine == engine)

    def number(self, request: str, on_collision: OnCollision) -> int | None:  # noqa: ARG002  shards have other names
        """Return which capture of its id the next one of a request is, where that is known; raises CapflowError when there may be none."""
        return None

    def publish(self, files: RequestFiles, sidecar: layout.Sidecar, text: bytes, on_collision: OnCollision) -> Path:
        """Make a finished request part of the data set; return where it is. Raises OSError and CapflowError."""
        files.write_sidecar(text)
        return self.work.publish(files.path, slug(sidecar.request), on_collision)

    def close(self) -> None:
        """Remove what is unfinished."""
        self.work.close()

    def _captures(self, request: str) -> Found:
        for path in self.work.published(slug(request)):
            try:
                sidecar = layout.read_sidecar((path / layout.SIDECAR_NAME).read_bytes())
            except (OSError, ValueError):
                continue  # not one of ours
            if sidecar.request == request:
                yield path, sidecar
        for capture in self._sealed.find(request):
            yield capture.path, capture.sidecar


class ShardStore(Store):
    """Shards of many requests."""

    def __init__(
        self, work: WorkDir, workers: Executor | None, *, compressed: bool, shard_bytes: int, sync_requests: bool
    ) -> None:
        super().__init__(work, ShardRows, workers)
        self._executor = workers
        self._compressed = compressed
        self._shard_bytes = shard_bytes
        self._sync_requests = sync_requests

    def open(self) -> None:
        """Make the root, and put in order what dead writers left; raises OSError and CapflowError."""
        super().open()
        self._writer = ShardWriter(
            self.work.root,
            self.work.path,
            compressed=self._compressed,
            bytes_max=self._shard_bytes,
            sync=self._sync_requests,
            sync_seals=self.work.fsync,
            workers=self._executor,
        )

    def files(self, dtype: str, hidden_size: int, dtypes: Mapping[Site, str]) -> RequestFiles:
        """Return what takes the rows of a request."""
        return ShardRows(self.work.new(), dtype, hidden_size, dtypes, fsync=self.work.fsync, shards=self._writer)

    def number(self, request: str, on_collision: OnCollision) -> int | None:
        """Return which capture of its id the next one of a request is; raises CapflowError when there may be none."""
        number = 1 + sum(1 for _ in self._captures(request))
        if number > 1 and on_collision == "error":
            do = "set on_collision to suffix, or use another root"
            raise CapflowError(explain(f"{self.work.root} has a capture of {request} already", do=do))
        return number

    def publish(self, files: RequestFiles, sidecar: layout.Sidecar, text: bytes, on_collision: OnCollision) -> Path:  # noqa: ARG002
        """Make a finished request part of its shard; return the name that this will have. Raises OSError."""
        assert isinstance(files, ShardRows)
        sealed = self._writer.seals
        path = files.commit(sidecar, text)
        if self._writer.seals != sealed:
            self._sealed.refresh()
        return path

    def close(self) -> None:
        """Seal what is open; what cannot be now is left to the next writer."""
        self.work.close(keep=not self._writer.close())

    def _captures(self, request: str) -> Found:
        yield from super()._captures(request)
        yield from self._writer.captures(request)
