"""The store of the layout `sharded` in an object store: shards are sealed in a local directory, and then uploaded.

    STAGING/.partial-…/shard~N-….parquet   a shard that is written
    STAGING/shard~N-….parquet              a sealed one, until it is uploaded
    s3://BUCKET/PREFIX/shard~N-….parquet   an uploaded one

Invariants:

* A request is on the local disk when it has its result, and in the bucket when its shard is uploaded.
* A captured request is found in each moment: in a shard that is written, one that waits, or one in the bucket.
* The name of a shard has 64 random bits. So several hubs may write to one root, and none writes over a shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any

from capflow.buffers.newest import keep_newest
from capflow.errors import CapflowError
from capflow.plugins.consumer import Backlog
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.objects.shards import ObjectShards, uploaded
from capflow_consumers.dataset.objects.store import Objects, StoreError
from capflow_consumers.filesystem.shard_store import ShardStore
from capflow_consumers.filesystem.store import Captures, Written
from capflow_consumers.filesystem.uploads import Uploads
from capflow_consumers.filesystem.workdir import OnCollision, WorkDir

logger = logging.getLogger("capflow.consumer")

_NAME_BYTES = 8
_SIDECARS_MAX = 256


class ObjectShardStore(ShardStore):
    """Shards of many requests, which are uploaded.

    work: below the staging directory.
    waiting_bytes_max: how many bytes of sealed shards may wait for their upload.
    left_s, working: as in `Context`.
    """

    def __init__(
        self,
        work: WorkDir,
        objects: Objects,
        *,
        waiting_bytes_max: int,
        left_s: Callable[[], float | None],
        working: Callable[[], None],
        **options: Any,
    ) -> None:
        self._objects = objects
        self._there = ObjectShards(objects)
        super().__init__(work, **options, name_bytes=_NAME_BYTES, names=self._there.names)
        self._uploads = Uploads(work.root, objects.root, self._take_uploaded, waiting_bytes_max)
        # Those of captures in the bucket that were read, by shard and place.
        self._sidecars: dict[tuple[str, int], layout.Sidecar] = {}
        self._left_s = left_s
        self._working = working

    def open(self) -> None:
        """Check that the store takes objects, read which captures it has, and begin to upload what waits.

        Raises StoreError and OSError.
        """
        self._objects.mark()
        self._there.refresh()
        super().open()
        self._uploads.open()

    @property
    def backlog(self) -> Backlog:
        """What waits to be uploaded."""
        return self._uploads.backlog

    def prepare(self, engine: str, request: str) -> None:
        """Read the sidecars of captures of a request that are in the bucket. Raises StoreError."""
        self.captures(engine, request)

    def number(self, engine: str, request: str, on_collision: OnCollision) -> int | None:
        """Return as `ShardStore` does; raises RetryError while too much waits to be uploaded."""
        self._uploads.check_room()
        return super().number(engine, request, on_collision)

    def publish(self, group: Sequence[Written]) -> list[Path | OSError | CapflowError]:
        """Make requests part of their shards; have those uploaded that are sealed."""
        seals = self._writer.seals
        outcomes = super().publish(group)
        if self._writer.seals > seals:
            self._uploads.wake()
        return outcomes

    def place(self, path: PurePath) -> dict[str, Any]:
        """Return where a shard is: in the bucket, or in the local directory until it is uploaded."""
        there = path.name in self._there.names()
        place = {"path": str(self._objects.root.path / path.name), "stored": "bucket" if there else "local"}
        return place if there else {**place, "local": str(self.work.root)}

    def close(self) -> None:
        """Seal the open shards and upload them, as long as the hub waits.

        Raises CapflowError when shards are left, and as `ShardStore` does.
        """
        try:
            super().close()
        finally:
            self._uploads.close(self._left_s, self._working)

    def _take_uploaded(self, name: str) -> None:
        """Read a shard from the bucket from now on, and remove its local file."""
        with self._lock:
            self._move(name)
            path = self.work.root / name
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                logger.error("%s is uploaded and cannot be removed: %s", path, e.strerror or e)
            super()._find_sealed()

    def _find_sealed(self) -> None:
        # A shard that is gone was uploaded, and removed by another hub with this directory.
        for name in list(self._sealed.names()):
            if not (self.work.root / name).exists():
                self._move(name)
        super()._find_sealed()

    def _move(self, name: str) -> None:
        local = self._sealed.get(name)
        if local is not None and name not in self._there.names():
            self._there.add(uploaded(local, self._objects))

    def _captures(self, request: str) -> Captures:
        with self._lock:
            captures = self._local_captures(request)
            local = {path.name for path, _ in captures}
            entries = [each for each in self._there.entries_of(request) if each[0].path.name not in local]
        for shard, entry in entries:
            key = shard.path.name, entry.batches[-1]
            if key not in self._sidecars:
                try:
                    self._sidecars[key] = shard.capture(entry).sidecar
                except StoreError:
                    raise
                except CapflowError as e:
                    logger.warning("a damaged capture of %s is ignored: %s", request, e)
                    continue
                keep_newest(self._sidecars, _SIDECARS_MAX)
            captures.append((shard.path, self._sidecars[key]))
        return captures
