"""A shard while it is written: one file that only grows, of which a request is a part when its commit is written.

What always holds: nothing before `end` is written again, unless it could not be got onto the disk; a failed or unfinished request is cut off.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from capflow import limits
from capflow.files import FILE_MODE, create_private
from capflow_consumers.dataset.disk import write
from capflow_consumers.dataset.shards import parquet
from capflow_consumers.dataset.shards.stream import Encoder, Kind, hashes_of, page_of, page_room

BATCH_BYTES_MAX = 64 * limits.MIB  # of rows, unless one has more
COMPRESSED_BATCH_BYTES_MAX = 8 * limits.MIB  # where who wants one row has all of them decompressed
IN_PLACE_BYTES_MIN = 2 * limits.MIB  # of rows of a batch that is its own row group; smaller ones are copied together
_COPY_BYTES = 8 * limits.MIB  # read at once

Bytes = Any
"""An array of uint8."""


class EncodedBatch(NamedTuple):
    """A batch of `n` rows to be written: parts `[k, row_bytes]` one after another, positions and token_ids `[n]` int32, hashes `[n]` uint64.

    page: what Parquet wants before the rows, or in place of them; empty where sealing copies these.
    """

    rows: list[Bytes]
    positions: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.uint64]
    page: npt.NDArray[np.uint8]


def batches_of(
    kind: Kind, sites: Sequence[Sequence[Bytes]], positions: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]
) -> Iterator[EncodedBatch]:
    """Yield rows, of each site parts `[k, row_bytes]` one after another, as batches with all that has to be computed of them.

    A batch has whole sites, or a part of one that is larger than a batch.
    """
    done = 0
    bytes_max = COMPRESSED_BATCH_BYTES_MAX if kind.compressed else BATCH_BYTES_MAX
    for rows in _batched(sites, max(1, bytes_max // kind.row_bytes)):
        count = sum(len(part) for part in rows)
        mine = slice(done, done + count)
        hashes, crc = _checksums(kind, rows, count)
        yield EncodedBatch(rows, positions[mine], token_ids[mine], hashes, _page(kind, rows, count, crc))
        done += count


class ShardFile:
    """A shard at `path`, made by `create` with the mode `mode`; end: where the last request's commit ends."""

    def __init__(self, path: Path, kind: Kind, mode: int = FILE_MODE) -> None:
        self.path = path
        self.mode = mode
        self.kind = kind
        self.end = 0
        # Id, engine, where its batches begin, the commit's last.
        self.requests: list[tuple[str, str, list[int]]] = []
        self._encoder = Encoder(kind)
        self._fd = -1
        # Where the next batch begins.
        self._tip = 0
        # `end`, and how many requests there were, when it was last settled.
        self._safe = (0, 0)
        # Of the request that is being written.
        self._batches: list[int] = []
        # A commit's row, and its hash.
        self._nothing = np.zeros((1, kind.row_bytes), np.uint8), np.zeros(1, np.uint64)
        hashes_of(*self._nothing)

    def create(self) -> None:
        """Make the file; raises OSError."""
        self._fd = create_private(self.path, os.O_RDWR | os.O_EXCL, self.mode)
        self.end = self._tip = write(self._fd, [self._encoder.head()], 0)
        self._safe = (self.end, 0)

    def put(self, batch: EncodedBatch) -> None:
        """Write a batch behind what there is; raises OSError."""
        parts = self._encoder.batch(batch.positions, batch.token_ids, batch.hashes, batch.page)
        nbytes = 0 if self.kind.compressed else len(batch.positions) * self.kind.row_bytes
        rows = [] if self.kind.compressed else [*batch.rows, bytes(-nbytes % 8)]
        self._batches.append(self._tip)
        self._tip = write(self._fd, [*parts, *rows], self._tip)

    def commit(self, request: str, engine: str, sidecar: bytes) -> None:
        """Make what was put since the last commit a request; raises OSError."""
        row, hashes = self._nothing
        nowhere = np.full(1, -1, np.int32)
        parts = self._encoder.batch(nowhere, nowhere, hashes, row[0, :0], sidecar)
        rest = [] if self.kind.compressed else [row, bytes(-row.nbytes % 8)]
        self._batches.append(self._tip)
        self._tip = write(self._fd, [*parts, *rest], self._tip)
        self.requests.append((request, engine, self._batches))
        self._batches = []
        self.end = self._tip

    def settle(self, *, sync: bool) -> None:
        """Have the requests that were committed stay, on the disk with `sync`; raises OSError, also as `check` does."""
        if sync:
            os.fdatasync(self._fd)
        self.check()
        self._safe = (self.end, len(self.requests))

    @property
    def unsettled(self) -> list[tuple[str, str, list[int]]]:
        """The requests that were committed since it was last settled."""
        return self.requests[self._safe[1] :]

    def take_back(self) -> None:
        """Take away the requests that were committed since it was last settled; raises OSError."""
        self.end, count = self._safe
        del self.requests[count:]
        self.cut()

    def check(self) -> None:
        """Raise OSError when `path` is not the file's name any more: rows that are written to it would be lost."""
        if not self.is_named():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def is_named(self) -> bool:
        """Return whether `path` is the file's name: nobody has removed, moved or replaced it. Raises OSError."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def may_be_named(self) -> bool:
        """As `is_named`, and True where that cannot be found out."""
        try:
            return self.is_named()
        except OSError:
            return True

    def copy(self, path: Path) -> None:
        """Write what was committed to a new file at `path`; raises OSError."""
        fd = create_private(path, os.O_RDWR | os.O_EXCL, self.mode)
        try:
            offset = 0
            while offset < self.end:
                part = os.pread(self._fd, min(_COPY_BYTES, self.end - offset), offset)
                if not part:
                    raise OSError(errno.EIO, f"it ends at byte {offset} of {self.end}", str(self.path))
                offset = write(fd, [part], offset)
        finally:
            os.close(fd)

    def cut(self) -> None:
        """Take away what was put since the last commit; raises OSError."""
        self._tip, self._batches = self.end, []
        os.ftruncate(self._fd, self.end)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _batched(sites: Sequence[Sequence[Bytes]], rows_max: int) -> Iterator[list[Bytes]]:
    """Yield the parts, in order, as batches of no more than `rows_max` rows, cut where a site ends or within one that is larger."""
    batch: list[Bytes] = []
    room = rows_max
    for parts in sites:
        count = sum(map(len, parts))
        if batch and (count > room or count > rows_max):
            yield batch
            batch, room = [], rows_max
        for whole in parts:
            part = whole
            while len(part) > room:
                yield [*batch, part[:room]]
                batch, part, room = [], part[room:], rows_max
            batch.append(part)
            room -= len(part)
        if count > rows_max:
            yield batch
            batch, room = [], rows_max
    if batch:
        yield batch


def _checksums(kind: Kind, rows: list[Bytes], count: int) -> tuple[npt.NDArray[np.uint64], int]:
    """Return the xxh3 of each row, and the CRC32 of the page of those that lie in the file as they are."""
    hashes = np.empty(count, np.uint64)
    levels = parquet.vector_levels(kind.dtype, kind.hidden_size, count) if _in_place(kind, count) else b""
    crc = isal_zlib.crc32(levels)
    done = 0
    for part in rows:
        hashes_of(part, hashes[done : done + len(part)])
        done += len(part)
        crc = isal_zlib.crc32(part, crc) if levels else 0
    return hashes, crc


def _page(kind: Kind, rows: list[Bytes], count: int, crc: int) -> npt.NDArray[np.uint8]:
    if kind.compressed:
        return page_of(parquet.vector_pages(kind.dtype, kind.hidden_size, count, b"".join(rows), compressed=True))
    if not _in_place(kind, count):
        return np.zeros(0, np.uint8)
    nbytes = count * kind.row_bytes
    head = parquet.vector_head(kind.dtype, kind.hidden_size, count, crc, nbytes)
    return page_of(head, page_room(kind, count, nbytes))


def _in_place(kind: Kind, count: int) -> bool:
    """Whether rows lie in the file as a page."""
    whole = kind.dtype != "bfloat16" or count * kind.hidden_size % 8 == 0
    return not kind.compressed and whole and count * kind.row_bytes >= IN_PLACE_BYTES_MIN
