"""The shards of a data set in an object store: read by ranges, only where a capture's rows lie.

Opening a shard reads its end, where its index is. A capture's sidecar, the columns beside its rows, and the rows are
read when they are asked for, and not kept.

Invariant: a shard in the store is sealed. A failure of the store is raised, and is never taken for damage.
"""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from capflow.errors import CapflowError
from capflow_consumers.dataset.capture import Damage, damaged
from capflow_consumers.dataset.objects.store import Objects, StoreError
from capflow_consumers.dataset.shards import seal
from capflow_consumers.dataset.shards.index import ShardSet
from capflow_consumers.dataset.shards.reader import LastRows, Shard
from capflow_consumers.dataset.shards.stream import StoredBatch, decode, opened

# Enough for the schema of every stream.
_HEAD_BYTES = 64 * 1024
# What is read of a commit whose end is not known.
_COMMIT_BYTES = 64 * 1024
_OPENED_AT_ONCE = 16


class ObjectShard(Shard):
    """A shard in the store."""

    def __init__(self, objects: Objects, name: str, size: int, last: LastRows | None = None) -> None:
        super().__init__(objects.root.path / name, last)
        self.file: Any = objects.open(name, size)
        # Where batches begin, in order.
        self._begins: list[int] = []

    def open(self) -> None:
        """Read the index. Raises CapflowError when it cannot be read, and StoreError."""
        self.located = seal.locate(self.file)
        self.sealed = True
        if self.located is None:
            raise damaged(self.path, "no index at its end", "a whole shard")
        self._read_index(*self.located.index_at)
        self._begins = sorted(begin for entry in self.entries for begin in entry.batches)
        try:
            head = self.file.slice(0, min(_HEAD_BYTES, self.file.size))
            self.kind, self.schema, self.begin = opened(head)
        except ValueError as e:
            raise damaged(self.path, str(e), "a shard") from e

    def take(self, local: Shard) -> bool:
        """Take the index of the file that was uploaded; return whether it has one."""
        if local.index is None:
            return False
        self.sealed = True
        self.located, self.index, self.entries = local.located, local.index, local.entries
        self.kind, self.schema, self.begin = local.kind, local.schema, local.begin
        self._begins = sorted(begin for entry in self.entries for begin in entry.batches)
        return True

    def batch(self, begin: int) -> StoredBatch:
        """Read what lies beside the rows of a batch; with compression, the whole batch."""
        assert self.index is not None
        assert self.located is not None
        number = bisect_right(self._begins, begin)
        rows = self._rows_between(begin, self._begins[number]) if number < len(self._begins) else None
        if rows is not None:
            return self._decoded(begin, rows[0] - begin, self._begins[number] - begin)
        end = self._begins[number] if number < len(self._begins) else self.located.index_at[0]
        length = _COMMIT_BYTES if number == len(self._begins) else end - begin
        while length < end - begin:
            with contextlib.suppress(ValueError):
                return self._decoded(begin, length, length)
            length *= 4
        return self._decoded(begin, end - begin, end - begin)

    def part(self, batch: StoredBatch, low: int, high: int) -> npt.NDArray[Any]:
        """Return rows `low..high` of a batch `[n, row_bytes]`; raises ValueError when they cannot be decompressed."""
        if self.kind.compressed:
            return super().part(batch, low, high)
        assert self.index is not None
        begin = self.index.rows[bisect_left(self.index.rows, (batch.end,)) - 1][0]
        row_bytes = self.kind.bytes_of(batch.width)
        data = self.file.slice(begin + low * row_bytes, (high - low) * row_bytes)
        return np.frombuffer(data, np.uint8).reshape(high - low, row_bytes)

    def _blocks(self, end: int, rows: list[tuple[int, int]]) -> Iterator[tuple[int, Any]]:
        for begin, stop in seal.ranges_of(end, rows):
            yield begin, self.file.slice(begin, stop - begin)

    def _rows_between(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return the range of rows that lie in the file between two places; None where there are none."""
        assert self.index is not None
        number = bisect_left(self.index.rows, (begin,))
        rows = self.index.rows[number] if number < len(self.index.rows) else (end, 0)
        return rows if rows[0] < end else None

    def _decoded(self, begin: int, length: int, whole: int) -> StoredBatch:
        """Decode a batch of `whole` bytes of which the first `length` are read. Raises ValueError as `decode` does."""
        # The pages of the rows are never touched, and take no memory.
        memory = mmap.mmap(-1, whole)
        memory[:length] = memoryview(self.file.slice(begin, length))
        batch = decode(pa.py_buffer(memory), 0, self.kind, self.schema)
        rows = None if length < whole or self.kind.compressed else batch.rows
        return batch._replace(rows=rows, page_begin=batch.page_begin + begin, end=batch.end + begin)


class ObjectShards(ShardSet):
    """The shards of a root in the store."""

    def __init__(self, objects: Objects) -> None:
        super().__init__(objects.root.path, sealed_only=True)
        self.objects = objects
        # By name.
        self.sizes: dict[str, int] = {}

    def refresh(self) -> None:
        """Look for new shards, and read their indexes. Raises StoreError."""
        self.sizes = self.objects.sizes()
        self._keep(self.sizes)
        new = [name for name in self.sizes if name not in self._shards]
        if not new:
            return
        with ThreadPoolExecutor(_OPENED_AT_ONCE, "capflow-objects") as readers:
            for name, shard in zip(new, readers.map(self._read, new), strict=True):
                if isinstance(shard, Damage):
                    self._unread[name] = shard
                else:
                    self.add(shard)

    def add(self, shard: Shard) -> None:
        """Add a shard that was uploaded."""
        self._shards[shard.path.name] = shard
        self._by_id = None

    def _read(self, name: str) -> ObjectShard | Damage:
        shard = ObjectShard(self.objects, name, self.sizes[name], self._last)
        try:
            shard.open()
        except StoreError:
            raise
        except CapflowError as e:
            return Damage(shard.path, e, of_capture=False)
        return shard


def uploaded(local: Shard, objects: Objects) -> ObjectShard:
    """Return a shard as the store has it. Raises StoreError if the store must be asked, because an index is damaged."""
    shard = ObjectShard(objects, local.path.name, local.file.size)
    if not shard.take(local):
        shard.open()
    return shard
