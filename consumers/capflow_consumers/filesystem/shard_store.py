"""The store of the layout `sharded`: many requests in each file.

Invariant: a request is part of a shard as soon as it is committed, whether or not the shard is sealed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from capflow.capture.site import Site
from capflow.errors import CapflowError, explain
from capflow.text.engine_name import name_of
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.names import split
from capflow_consumers.filesystem.files import RequestFiles
from capflow_consumers.filesystem.shards import ShardRows, ShardWriter
from capflow_consumers.filesystem.store import Captures, Store, Written
from capflow_consumers.filesystem.workdir import OnCollision, WorkDir

logger = logging.getLogger("capflow.consumer")


class ShardStore(Store):
    """Shards of many requests.

    compressed, quantization, name_bytes, names: as in `ShardWriter`.
    """

    def __init__(
        self,
        work: WorkDir,
        *,
        compressed: bool,
        quantization: layout.Quantization | None,
        shard_bytes: int,
        sync_requests: bool,
        name_bytes: int = 3,
        names: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        super().__init__(work, ShardRows, None)
        # Held while a shard moves from the open to the sealed ones, and while both are searched.
        self._lock = threading.Lock()
        self._compressed = compressed
        self._quantization = quantization
        self._shard_bytes = shard_bytes
        self._sync_requests = sync_requests
        self._name_bytes = name_bytes
        self._names = names

    def open(self) -> None:
        """Make the root, and clean up after dead writers; raises OSError."""
        super().open()
        self._writer = ShardWriter(
            self.work.root,
            self.work.path,
            compressed=self._compressed,
            quantization=self._quantization,
            bytes_max=self._shard_bytes,
            sync=self._sync_requests,
            sync_seals=self.work.fsync,
            mode=self.work.mode,
            name_bytes=self._name_bytes,
            names=self._names,
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
        """Write the sidecar of a request after its rows; raises OSError.

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
            return self._local_captures(request)

    def _local_captures(self, request: str) -> Captures:
        """Return the captures of a request in shards of the root, sealed or not. The lock is held."""
        return super()._captures(request) + list(self._writer.captures(request))
