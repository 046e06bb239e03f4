"""A shard while it is written: one file that only grows, of which a request is a part when its commit is written.

What always holds: nothing before `end` is written again, and a failed or unfinished request is cut off.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow_consumers import parquet
from capflow_consumers.disk import write
from capflow_consumers.shardstream import Encoder, Kind, hashes_of, page_of, page_room

BATCH_BYTES_MAX = 64 * limits.MIB  # of rows, unless one has more
IN_PLACE_BYTES_MIN = 2 * limits.MIB  # of rows of a batch that is its own row group; smaller ones are copied together

Bytes = Any
"""An array of uint8."""


class ShardFile:
    """A shard at `path`, made by `create`; end: where the last request's commit ends. workers: threads, one of which writes while this one hashes."""

    def __init__(self, path: Path, kind: Kind, workers: Executor | None) -> None:
        self.path = path
        self.kind = kind
        self.end = 0
        self.requests: list[tuple[str, str, list[int]]] = []  # id, engine, where its batches begin, the commit's last
        self._encoder = Encoder(kind)
        self._workers = workers
        self._fd = -1
        self._tip = 0  # where the next batch begins
        self._batches: list[int] = []  # of the request that is being written

    def create(self) -> None:
        """Make the file; raises OSError."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self.end = self._tip = write(self._fd, [self._encoder.head()], 0)

    def put(self, parts: Sequence[Bytes], positions: npt.NDArray[Any], token_ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Write rows, parts `[k, row_bytes]` one after another, behind what there is; return the rows' hashes. Raises OSError."""
        hashes = np.empty(len(positions), np.uint64)
        done = 0
        for batch in _batched(parts, self.kind.row_bytes):
            count = sum(len(part) for part in batch)
            mine = slice(done, done + count)
            self._put(batch, np.asarray(positions[mine], np.int32), np.asarray(token_ids[mine], np.int32), hashes[mine])
            done += count
        return hashes

    def commit(self, request: str, engine: str, sidecar: bytes, *, sync: bool) -> None:
        """Make what was put since the last commit a request, on the disk with `sync`; raises OSError."""
        nowhere = np.full(1, -1, np.int32)
        row = np.zeros((1, self.kind.row_bytes), np.uint8)
        hashes = np.zeros(1, np.uint64)
        hashes_of(row, hashes)
        parts = self._encoder.batch(nowhere, nowhere, hashes, row[0, :0], sidecar)
        rest = [] if self.kind.compressed else [row, bytes(-row.nbytes % 8)]
        self._batches.append(self._tip)
        self._tip = write(self._fd, [*parts, *rest], self._tip)
        if sync:
            os.fdatasync(self._fd)
        self.check()
        self.requests.append((request, engine, self._batches))
        self._batches = []
        self.end = self._tip

    def check(self) -> None:
        """Raise OSError when the file has no name any more: what is in it would be lost."""
        if os.fstat(self._fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def cut(self) -> None:
        """Take away what was put since the last commit, and a commit that is not known to be on the disk; raises OSError."""
        self._tip, self._batches = self.end, []
        os.ftruncate(self._fd, self.end)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, rows: list[Bytes], positions: Any, token_ids: Any, hashes: Any) -> None:
        kind = self.kind
        count = len(positions)
        nbytes = count * kind.row_bytes
        if kind.compressed:
            parts = self._compressed(rows, positions, token_ids, hashes)
            self._batches.append(self._tip)
            end = write(self._fd, parts, self._tip)
        else:
            in_place = nbytes >= IN_PLACE_BYTES_MIN and (kind.dtype != "bfloat16" or count * kind.hidden_size % 8 == 0)
            page = np.zeros(page_room(kind, count, nbytes) if in_place else 0, np.uint8)
            parts = self._encoder.batch(positions, token_ids, hashes, page)
            begin = self._tip + sum(len(part) for part in parts)
            self._batches.append(self._tip)
            writing = self._submit(write, self._fd, [*rows, bytes(-nbytes % 8)], begin)
            _hash(rows, hashes)
            if in_place:  # here, and not on another thread, which would wait for the interpreter's lock at each part
                head = parquet.vector_head(kind.dtype, kind.hidden_size, count, _crc(kind, count, rows), nbytes)
                page[:] = page_of(head, len(page))
            end = writing.result()
            write(self._fd, parts, self._tip)
        self._tip = end

    def _submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Return what a call will give, made by a worker where there is one."""
        if self._workers is not None:
            return self._workers.submit(call, *args)
        made: Future[Any] = Future()
        try:
            made.set_result(call(*args))
        except OSError as e:
            made.set_exception(e)
        return made

    def _compressed(self, rows: list[Bytes], positions: Any, token_ids: Any, hashes: Any) -> list[Any]:
        kind = self.kind
        values = b"".join(rows)
        hashing = self._submit(_hash, rows, hashes)
        pages = parquet.vector_pages(kind.dtype, kind.hidden_size, len(positions), values, compressed=True)
        hashing.result()
        return self._encoder.batch(positions, token_ids, hashes, page_of(pages))


def _batched(parts: Sequence[Bytes], row_bytes: int) -> Iterator[list[Bytes]]:
    """Yield the parts, in order, as batches of no more than `BATCH_BYTES_MAX`."""
    rows_max = max(1, BATCH_BYTES_MAX // row_bytes)
    batch: list[Bytes] = []
    room = rows_max
    for whole in parts:
        part = whole
        while len(part) > room:
            yield [*batch, part[:room]]
            batch, part, room = [], part[room:], rows_max
        batch.append(part)
        room -= len(part)
    if batch:
        yield batch


def _crc(kind: Kind, count: int, rows: list[Bytes]) -> int:
    crc = zlib.crc32(parquet.vector_levels(kind.dtype, kind.hidden_size, count))
    for part in rows:
        crc = zlib.crc32(part, crc)
    return crc


def _hash(rows: list[Bytes], hashes: npt.NDArray[Any]) -> None:
    done = 0
    for part in rows:
        hashes_of(part, hashes[done : done + len(part)])
        done += len(part)
