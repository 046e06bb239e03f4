"""A shard while it is written: one file that only grows. A request is part of it once its commit is written.

Invariant: bytes before `end` are never written again, except after a failed sync. A failed or unfinished request is cut
off.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from capflow import limits
from capflow.files import FILE_MODE, create_private
from capflow_consumers.dataset.disk import Ahead, write
from capflow_consumers.dataset.shards import parquet
from capflow_consumers.dataset.shards.seal import Entry
from capflow_consumers.dataset.shards.stream import Encoder, Kind, hashes_of, page_of, page_room

# The rows of a batch take at most so many bytes, unless a single row is larger.
BATCH_BYTES_MAX = 64 * limits.MIB
# The bound is smaller for compressed rows, because reading one row decompresses its whole batch.
COMPRESSED_BATCH_BYTES_MAX = 8 * limits.MIB
# A batch of at least so many bytes of rows is its own row group; the seal copies smaller ones together.
IN_PLACE_BYTES_MIN = 2 * limits.MIB
# The bound is smaller for rounded rows, whose dictionary takes 1 KiB instead of 256. The other columns take some 2 KiB.
ROUNDED_IN_PLACE_BYTES_MIN = 256 * limits.KIB
_COPY_BYTES = 8 * limits.MIB
# Several requests together, because a shard is synced with many.
_AHEAD_BYTES_MIN = 16 * limits.MIB

Bytes = Any
"""An array of uint8."""


class EncodedBatch(NamedTuple):
    """A batch of `n` rows, ready to be written.

    rows: parts `[k, row_bytes]` uint8, one after another.
    positions, token_ids: `[n]` int32.
    hashes: `[n]` uint64, the xxh3 of each row.
    page: the parts of the bytes that make the rows a Parquet page: the page's head, or a whole compressed page. Empty
        where the seal copies the rows.
    width: how many numbers a row has.
    scales: `[n]` float32 of rounded rows; None of others.
    """

    rows: list[Bytes]
    positions: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.uint64]
    page: Sequence[Any]
    width: int
    scales: npt.NDArray[np.float32] | None


def batches_of(
    kind: Kind,
    sites: Sequence[Sequence[Bytes]],
    positions: npt.NDArray[np.int32],
    token_ids: npt.NDArray[np.int32],
    scales: npt.NDArray[np.float32] | None,
) -> Iterator[EncodedBatch]:
    """Divide the rows of a request into batches; yield each with its hashes and its page.

    sites: of each site, parts `[k, row_bytes]` one after another.
    positions, token_ids: `[n]` of all rows, in the same order.
    scales: the same of rounded rows; None of others.

    A batch has whole sites of one width, or a part of one site that is larger than a batch.
    """
    done = 0
    bytes_max = COMPRESSED_BATCH_BYTES_MAX if kind.compressed else BATCH_BYTES_MAX
    if kind.quantised:  # a reader makes a float32 of each byte
        bytes_max //= 4
    for row_bytes, alike in itertools.groupby(sites, key=lambda parts: int(parts[0].shape[1])):
        width = row_bytes // kind.bytes_of(1)
        for rows in _batched(list(alike), max(1, bytes_max // row_bytes)):
            count = sum(len(part) for part in rows)
            span = slice(done, done + count)
            hashes, crc = _checksums(kind, width, rows, count)
            page = _page(kind, width, rows, count, crc)
            factors = None if scales is None else scales[span]
            yield EncodedBatch(rows, positions[span], token_ids[span], hashes, page, width, factors)
            done += count


class ShardFile:
    """A shard at `path`, which `create` makes.

    mode: the mode of the file.
    sync: whether `settle` gets requests onto the disk.
    end: where the commit of the last request ends, bytes.
    """

    def __init__(self, path: Path, kind: Kind, mode: int = FILE_MODE, *, sync: bool = False) -> None:
        self.path = path
        self.mode = mode
        self.sync = sync
        self.kind = kind
        self.end = 0
        self.requests: list[Entry] = []
        self._encoder = Encoder(kind)
        self._ahead = Ahead(_AHEAD_BYTES_MIN) if sync else None
        self._fd = -1
        # Where the next batch begins.
        self._tip = 0
        # `end` and the number of requests when the shard was last settled.
        self._safe = (0, 0)
        # Where the batches of the request being written begin.
        self._batches: list[int] = []
        # The row of a commit, and its hash.
        self._nothing = np.zeros((1, kind.bytes_of(kind.commit_width)), np.uint8), np.zeros(1, np.uint64)
        hashes_of(*self._nothing)

    def create(self) -> None:
        """Make the file; raises OSError."""
        self._fd = create_private(self.path, os.O_RDWR | os.O_EXCL, self.mode)
        self.end = self._tip = write(self._fd, [self._encoder.head()], 0)
        self._safe = (self.end, 0)

    def put(self, batch: EncodedBatch) -> None:
        """Append a batch; raises OSError."""
        columns = batch.positions, batch.token_ids, batch.hashes
        parts = self._encoder.batch(*columns, batch.page, width=batch.width, scales=batch.scales)
        nbytes = 0 if self.kind.compressed else len(batch.positions) * self.kind.bytes_of(batch.width)
        rows = [] if self.kind.compressed else [*batch.rows, bytes(-nbytes % 8)]
        self._batches.append(self._tip)
        self._tip = write(self._fd, [*parts, *rows], self._tip, self._ahead)

    def commit(self, request: str, engine: str, sidecar: bytes) -> None:
        """Append the commit that makes the batches since the last commit a request; raises OSError."""
        row, hashes = self._nothing
        nowhere = np.full(1, -1, np.int32)
        parts = self._encoder.batch(nowhere, nowhere, hashes, (), sidecar, self.kind.commit_width)
        rest = [] if self.kind.compressed else [row, bytes(-row.nbytes % 8)]
        self._batches.append(self._tip)
        self._tip = write(self._fd, [*parts, *rest], self._tip)
        self.requests.append(Entry(request, engine, self._batches))
        self._batches = []
        self.end = self._tip

    def settle(self) -> None:
        """Keep the requests that were committed; with `sync`, get them onto the disk first.

        Raises OSError, also when `path` is no longer the file's name.
        """
        if self.sync:
            os.fdatasync(self._fd)
        self.check()
        self._safe = (self.end, len(self.requests))

    @property
    def unsettled(self) -> list[Entry]:
        """The requests that were committed since the shard was last settled."""
        return self.requests[self._safe[1] :]

    def take_back(self) -> None:
        """Remove the requests that were committed since the shard was last settled; raises OSError."""
        self.end, count = self._safe
        del self.requests[count:]
        self.cut()

    def check(self) -> None:
        """Raise OSError when `path` is no longer the file's name: rows written to the file would be lost."""
        if not self.is_named():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def is_named(self) -> bool:
        """Return whether `path` is still the file's name, and not removed, moved or replaced. Raises OSError."""
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def may_be_named(self) -> bool:
        """Return whether `path` may be the file's name: True where `is_named` fails."""
        try:
            return self.is_named()
        except OSError:
            return True

    def copy(self, path: Path) -> None:
        """Copy everything up to the last commit to a new file at `path`; raises OSError."""
        fd = create_private(path, os.O_RDWR | os.O_EXCL, self.mode)
        try:
            offset = 0
            while offset < self.end:
                part = os.pread(self._fd, min(_COPY_BYTES, self.end - offset), offset)
                if not part:
                    raise OSError(errno.EIO, f"the file ends at byte {offset} of {self.end}", str(self.path))
                offset = write(fd, [part], offset)
        finally:
            os.close(fd)

    def cut(self) -> None:
        """Remove everything after the last commit; raises OSError."""
        self._tip, self._batches = self.end, []
        os.ftruncate(self._fd, self.end)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _batched(sites: Sequence[Sequence[Bytes]], rows_max: int) -> Iterator[list[Bytes]]:
    """Yield parts as batches of at most `rows_max` rows, cut between sites, or within a site that is larger."""
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


def _checksums(kind: Kind, width: int, rows: list[Bytes], count: int) -> tuple[npt.NDArray[np.uint64], int]:
    """Return the xxh3 of each row, and the CRC32 of the page of rows that lie in the file as a page."""
    hashes = np.empty(count, np.uint64)
    levels = parquet.vector_levels(kind.dtype, width, count) if _in_place(kind, width, count) else b""
    crc = isal_zlib.crc32(levels)
    done = 0
    for part in rows:
        hashes_of(part, hashes[done : done + len(part)])
        done += len(part)
        crc = isal_zlib.crc32(part, crc) if levels else 0
    return hashes, crc


def _page(kind: Kind, width: int, rows: list[Bytes], count: int, crc: int) -> Sequence[Any]:
    if kind.compressed:
        return page_of(parquet.vector_pages(kind.dtype, width, count, b"".join(rows), compressed=True))
    if not _in_place(kind, width, count):
        return ()
    head = parquet.vector_head(kind.dtype, width, count, crc, count * kind.bytes_of(width))
    return page_of(head, page_room(kind, width, count))


def _in_place(kind: Kind, width: int, count: int) -> bool:
    """Return whether the rows of a batch lie in the file as a page."""
    whole = kind.dtype not in parquet.INDEX_BITS or count * width % 8 == 0
    least = ROUNDED_IN_PLACE_BYTES_MIN if kind.quantised else IN_PLACE_BYTES_MIN
    return not kind.compressed and whole and count * kind.bytes_of(width) >= least
