"""The shards of a data set, also those being written: which captures are in them, and their rows.

Invariant: a capture is seen once its commit is written. Damage hides the captures that it touches, and no others.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from capflow.capture.dtypes import DTYPES
from capflow.capture.site import site_named
from capflow.errors import CapflowError, UsageError, explain
from capflow.files import open_regular
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.capture import RequestCapture, Rows, concatenated, damaged
from capflow_consumers.dataset.shards import seal
from capflow_consumers.dataset.shards.quantization import dequantised
from capflow_consumers.dataset.shards.seal import Entry
from capflow_consumers.dataset.shards.stream import (
    HEAD,
    Kind,
    StoredBatch,
    batches,
    common_width,
    decode,
    hashes_of,
    opened,
    rows_of,
)

_format_decoder = msgspec.msgpack.Decoder(seal.IndexFormat)
_index_decoder = msgspec.msgpack.Decoder(seal.Index)


LastRows = dict[tuple[str, int], npt.NDArray[Any]]
"""The rows of the batch that was decompressed last, by its shard and its end; the next site mostly lies in it too."""


class Shard:
    """A mapped shard.

    path: the path of its file.
    last: shared by all shards of a set.
    entries: its captures.
    damage: the errors of parts that cannot be read; captures that the index lists are not among them.
    sealed: whether it is a whole Parquet file.
    begin, end: where the first batch begins, and, in a shard that is not sealed, where the last commit ends.
    located, index: of a sealed shard; None where they are damaged.
    """

    def __init__(self, path: PurePath, last: LastRows | None = None) -> None:
        self.path = path
        self._last: LastRows = {} if last is None else last
        self.entries: list[Entry] = []
        self.damage: list[CapflowError] = []
        self.sealed = False
        self.end = 0
        self.begin = 0
        self.located: seal.Located | None = None
        self.index: seal.Index | None = None

    def open(self) -> None:
        """Map the file and read its index; scan the stream where the index is missing or damaged.

        Raises CapflowError when no capture can be read, and OSError when the file is gone.
        """
        self.map()
        self.located = seal.locate(self.file)
        self.sealed = self.located is not None
        try:
            if self.located is not None:
                self._read_index(*self.located.index_at)
                return
            if not self.path.parent.name.startswith(layout.PARTIAL_PREFIX):
                raise damaged(self.path, "no index at its end", "a whole shard")
        except UsageError:
            raise
        except CapflowError as e:
            self.damage.append(e)
        self.scan()

    def map(self) -> None:
        """Map the file; raises CapflowError when it is no shard, and OSError."""
        fd = open_regular(Path(self.path))
        try:
            size = os.fstat(fd).st_size
            self.file = pa.py_buffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b"")
        finally:
            os.close(fd)
        try:
            self.kind, self.schema, self.begin = opened(self.file)
        except ValueError as e:
            error = damaged(self.path, str(e), "a shard")
            kind = _kind_within(self.file)
            if kind is None:
                raise error from e
            self.kind, self.schema, self.begin = kind, kind.schema(), len(HEAD)
            self.damage.append(error)

    def capture(self, entry: Entry) -> ShardCapture:
        """Return a capture; raises CapflowError when it is damaged."""
        try:
            sidecar = _sidecar(self.batch(entry.batches[-1]))
        except ValueError as e:
            raise damaged(self.path, f"{e} at byte {entry.batches[-1]}", f"the sidecar of {entry.request}") from e
        return ShardCapture(self, entry, sidecar)

    def batch(self, begin: int) -> StoredBatch:
        """Return the batch that begins at a place; raises ValueError when none does."""
        return decode(self.file, begin, self.kind, self.schema)

    def part(self, batch: StoredBatch, low: int, high: int) -> npt.NDArray[Any]:
        """Return rows `low..high` of a batch `[n, row_bytes]`; raises ValueError when they cannot be decompressed."""
        return self.rows(batch)[low:high]

    def rows(self, batch: StoredBatch) -> npt.NDArray[Any]:
        """Return a batch's rows `[n, row_bytes]`; raises ValueError when they cannot be decompressed."""
        if batch.rows is not None:
            return batch.rows
        key = (self.path.name, batch.end)
        rows = self._last.get(key)
        if rows is None:
            self._last.clear()  # before the next batch takes memory
            rows = self._last[key] = rows_of(batch, self.kind)
        return rows

    def verify(self) -> None:
        """Check all bytes but the rows of captures, which each capture checks itself.

        Raises CapflowError for the first damage.
        """
        if self.damage:
            raise self.damage[0]
        if self.index is None or self.located is None:
            return
        _, footer = self.located
        blocks = self._blocks(self.located.index_at[0], self.index.rows)
        for (begin, block), digest in zip(blocks, self.index.blocks, strict=True):
            if xxhash.xxh3_64_intdigest(block) != digest:
                raise damaged(self.path, f"a wrong checksum of bytes {begin}..{begin + len(block)}", "what was written")
        if xxhash.xxh3_64_intdigest(self.file.slice(*footer[:2])) != footer[2]:
            raise damaged(self.path, "a wrong checksum of the footer", "that of the bytes that were written")

    def _blocks(self, end: int, rows: list[tuple[int, int]]) -> Iterator[tuple[int, Any]]:
        """Yield the bytes before `end` that are no rows, in blocks, each with its place."""
        return seal.blocks_of(self.file, end, rows)

    def _read_index(self, begin: int, length: int, digest: int) -> None:
        text = self.file.slice(begin, length)
        if xxhash.xxh3_64_intdigest(text) != digest:
            raise damaged(self.path, "a wrong checksum of the index", "that of the bytes that were written")
        try:
            number = _format_decoder.decode(text).format
            if number != seal.FORMAT:
                do = "read it with the capflow that wrote it, or a newer one"
                raise UsageError(explain(f"{self.path} format", got=number, expected=str(seal.FORMAT), do=do))
            self.index = _index_decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise damaged(self.path, str(e), "an index") from e
        self.entries = self.index.requests

    def scan(self) -> None:
        """Find the captures in the stream, without the index. `damage` gets an error for each that is not whole."""
        self.end = self.begin
        self.entries = []
        # Of the request that is not committed yet: where its batches begin, its rows, and its damage.
        begins: list[int] = []
        rows = 0
        holes: list[CapflowError] = []
        for place, batch in batches(self.file, self.kind, self.schema, self.begin):
            if batch is None:
                holes.append(damaged(self.path, f"no batch at byte {place}", "one of a request"))
                begins, rows = [], 0
                continue
            begins.append(place)
            if batch.sidecar is None:
                rows += len(batch.positions)
                continue
            try:
                sidecar = _sidecar(batch, rows)
                self.entries.append(Entry(sidecar.request, sidecar.engine, begins))
            except ValueError as e:
                holes.append(damaged(self.path, f"{e} at byte {place}", "a request"))
            self.damage += holes
            self.end = batch.end
            begins, rows, holes = [], 0, []


class ShardCapture(RequestCapture):
    """A request in a shard."""

    def __init__(self, shard: Shard, entry: Entry, sidecar: layout.Sidecar) -> None:
        super().__init__(shard.path, sidecar)
        self.entry = entry
        self._shard = shard
        self._batches: list[StoredBatch] | None = None

    def in_batches(self, site: tuple[int, str] | str) -> Iterator[Rows]:
        """Yield a site's rows batch by batch, mapped or decompressed one after another.

        Raises as `capture[site]` does.
        """
        entry = self._entries.get(site_named(site, self._entries))
        yield from (self[site],) if entry is None else self._parts(entry)

    def positions(self, site: tuple[int, str] | str) -> npt.NDArray[np.int64]:
        """Return the positions `[n]` of a site's rows, without decompressing; raises as `capture[site]` does."""
        entry = self._entries.get(site_named(site, self._entries))
        if entry is None:
            return super().positions(site)
        every = np.concatenate([np.zeros(0, np.int64), *(batch.positions for batch in self._decoded())])
        return every[entry.offset : entry.offset + entry.rows]

    def _rows(self, entry: layout.SiteFile) -> Rows:
        parts = list(self._parts(entry))
        return _read_only(concatenated(parts))

    def _parts(self, entry: layout.SiteFile) -> Iterator[Rows]:
        shape = entry.row_shape(self.sidecar.hidden_size)
        width = math.prod(shape)
        batches = self._decoded()
        ends = np.cumsum([len(batch.positions) for batch in batches]).tolist()
        first, last = entry.offset, entry.offset + entry.rows
        if last > (ends[-1] if ends else 0) or first == last:
            got, expected = f"{ends[-1] if ends else 0} rows of {self.id}", f"{self.sidecar.rows}, as its sidecar says"
            raise damaged(self.path, got, expected)
        for batch, end in zip(batches, ends, strict=True):
            begin = end - len(batch.positions)
            low, high = max(first - begin, 0), min(last, end) - begin
            if low < high:
                if batch.width != width:
                    got = f"rows of {batch.width} numbers at {entry.site} of {self.id}"
                    raise damaged(self.path, got, f"{width}, as its sidecar says")
                rows = self._numbers(batch, low, high)
                positions = batch.positions[low:high].astype(np.int64)
                yield _read_only(Rows(rows, positions, batch.token_ids[low:high], shape))

    def verify_rows(self) -> None:
        """Compare every row with its hash, and each site's columns with the sidecar's checksum."""
        batches = self._decoded()
        for number, batch in enumerate(batches):
            hashes = np.empty(len(batch.hashes), np.uint64)
            hashes_of(self._bytes(batch, 0, len(hashes)), hashes)
            if (bad := np.flatnonzero(hashes != batch.hashes)).size:
                got = f"a wrong checksum of row {bad[0]} of batch {number} of {self.id}"
                raise damaged(self.path, got, "that of the row that was written")
        columns = [np.concatenate(arrays) for arrays in zip(*map(_columns, batches), strict=True)]
        for entry in self.sidecar.sites:
            part = slice(entry.offset, entry.offset + entry.rows)
            if site_digest(*(column[part] for column in columns)) != entry.xxh3_64:
                raise damaged(self.path, f"a wrong checksum of {entry.site} of {self.id}", entry.xxh3_64)

    def _numbers(self, batch: StoredBatch, low: int, high: int) -> npt.NDArray[Any]:
        """Return rows `low..high` of a batch `[n, width]`, float32 where they are rounded."""
        dtype, rows = self._shard.kind.dtype, self._bytes(batch, low, high)
        if batch.scales is not None:
            return dequantised(rows, batch.scales[low:high], dtype)
        return rows.view(DTYPES[dtype]).reshape(high - low, batch.width)

    def _bytes(self, batch: StoredBatch, low: int, high: int) -> npt.NDArray[np.uint8]:
        try:
            return self._shard.part(batch, low, high)
        except ValueError as e:
            raise damaged(self.path, str(e), f"rows of {self.id}") from e

    def _decoded(self) -> list[StoredBatch]:
        shard = self._shard
        if self._batches is None:
            try:
                self._batches = [shard.batch(begin) for begin in self.entry.batches[:-1]]
            except ValueError as e:
                raise damaged(self.path, str(e), f"the rows of {self.id}") from e
        return self._batches


def site_digest(*columns: npt.NDArray[Any]) -> str:
    """Return the xxh3 of a site's columns in a shard, all but the rows themselves.

    columns: positions and token ids, hashed as int32; the rows' hashes, as uint64; of rounded rows their scales, as
        float32.
    """
    dtypes = np.int32, np.int32, np.uint64, np.float32
    parts = [np.asarray(column, dtype).tobytes() for column, dtype in zip(columns, dtypes, strict=False)]
    return xxhash.xxh3_64_hexdigest(b"".join(parts))


def _columns(batch: StoredBatch) -> tuple[npt.NDArray[Any], ...]:
    """Return the columns of a batch that `site_digest` takes."""
    return batch[:3] if batch.scales is None else (*batch[:3], batch.scales)


def _read_only(rows: Rows) -> Rows:
    for array in rows:
        array.flags.writeable = False
    return rows


def _kind_within(file: Any) -> Kind | None:
    """Infer the kind of rows from surviving sidecars when the stream's head is damaged; None when there are none."""
    for _, sidecar in layout.sidecars_within(file):
        dtypes = (entry.quantization or entry.dtype for entry in sidecar.sites)
        dtype = next(filter(None, dtypes), sidecar.dtype)
        widths = {math.prod(entry.row_shape(sidecar.hidden_size)) for entry in sidecar.sites}
        width = common_width(widths or {sidecar.hidden_size or 1})
        for compressed in (False, True):
            kind = Kind(dtype, width, compressed)
            if any(batch is not None for _, batch in batches(file, kind, kind.schema(), len(HEAD))):
                return kind
    return None


def _sidecar(batch: StoredBatch, rows: int | None = None) -> layout.Sidecar:
    """Return the sidecar of a commit.

    rows: how many rows came before it, where that is known.

    Raises ValueError when the batch has no sidecar, or the sidecar has another number of rows.
    """
    if batch.sidecar is None:
        raise ValueError("no sidecar")
    sidecar = layout.read_sidecar(batch.sidecar)
    if rows not in {None, sidecar.rows}:
        raise ValueError(f"{rows} rows of {sidecar.request!r} before its sidecar, which says {sidecar.rows},")
    return sidecar
