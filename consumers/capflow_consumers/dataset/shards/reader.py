"""The shards of a data set: which captures are in them, also in those that are still written, and their rows.

What always holds: a capture is seen when its commit is written, and not before. Damage hides what it is in, and nothing else.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from capflow.capture.dtypes import DTYPES
from capflow.errors import CapflowError, UsageError, explain
from capflow.files import open_regular
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.capture import Damage, RequestCapture, Rows, damaged, site_of
from capflow_consumers.dataset.disk import found_in
from capflow_consumers.dataset.shards import seal
from capflow_consumers.dataset.shards.seal import Entry
from capflow_consumers.dataset.shards.stream import HEAD, Kind, StoredBatch, batches, decode, hashes_of, opened, rows_of

PATTERN = "shard~*.parquet"

_format_decoder = msgspec.msgpack.Decoder(seal.IndexFormat)
_index_decoder = msgspec.msgpack.Decoder(seal.Index)


class LastRows:
    """The batch that was decompressed last: the next site that is asked for mostly lies in it, too."""

    def __init__(self) -> None:
        # Its shard and where it ends, and its rows.
        self.found: tuple[tuple[str, int], npt.NDArray[Any]] | None = None


class Shard:
    """A mapped shard; entries: its captures. sealed: whether it is a whole Parquet file; end: where its last commit ends, where it is not.

    damage: what of it cannot be read, captures that the index names apart.

    last: of all shards of a set.
    """

    def __init__(self, path: Path, last: LastRows | None = None) -> None:
        self.path = path
        self._last = last or LastRows()
        self.entries: list[Entry] = []
        self.damage: list[CapflowError] = []
        self.sealed = False
        self.end = 0
        self._begin = 0
        self._located: seal.Located | None = None
        self._index: seal.Index | None = None

    def open(self) -> None:
        """Map the file and read its index, or its stream where it has none that is right.

        Raises CapflowError when no capture can be read, and OSError when the file is gone.
        """
        self.map()
        self._located = seal.locate(self.file)
        self.sealed = self._located is not None
        try:
            if self._located is not None:
                self._read_index(*self._located.index_at)
                return
            if not self.path.parent.name.startswith(layout.PARTIAL_PREFIX):
                raise damaged(self.path, "no index where it should end", "a whole shard")
        except UsageError:
            raise
        except CapflowError as e:
            self.damage.append(e)
        self.scan()

    def map(self) -> None:
        """Map the file; raises CapflowError when it is no shard's, and OSError."""
        fd = open_regular(self.path)
        try:
            size = os.fstat(fd).st_size
            self.file = pa.py_buffer(mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b"")
        finally:
            os.close(fd)
        try:
            self.kind, self.schema, self._begin = opened(self.file)
        except ValueError as e:
            error = damaged(self.path, str(e), "a shard")
            kind = _kind_within(self.file)
            if kind is None:
                raise error from e
            self.kind, self.schema, self._begin = kind, kind.schema(), len(HEAD)
            self.damage.append(error)

    def capture(self, entry: Entry) -> ShardCapture:
        """Return a capture; raises CapflowError when what is there is not what was written."""
        try:
            sidecar = _sidecar(decode(self.file, entry.batches[-1], self.kind, self.schema))
        except ValueError as e:
            raise damaged(self.path, f"{e} at byte {entry.batches[-1]}", f"the sidecar of {entry.request}") from e
        return ShardCapture(self, entry, sidecar)

    def rows(self, batch: StoredBatch) -> npt.NDArray[Any]:
        """Return a batch's rows `[n, row_bytes]`; raises ValueError when they cannot be decompressed."""
        if batch.rows is not None:
            return batch.rows
        key = (self.path.name, batch.end)
        found = self._last.found
        if found is None or found[0] != key:
            self._last.found = found = None  # before the next one takes memory
            self._last.found = found = (key, rows_of(batch, self.kind))
        return found[1]

    def verify(self) -> None:
        """Check all but the rows of captures, which each checks itself; raise CapflowError when a bit of it is not what was written."""
        if self.damage:
            raise self.damage[0]
        if self._index is None or self._located is None:
            return
        _, footer = self._located
        blocks = seal.blocks_of(self.file, self._located.index_at[0], self._index.rows)
        for (begin, block), digest in zip(blocks, self._index.blocks, strict=True):
            if xxhash.xxh3_64_intdigest(block) != digest:
                raise damaged(self.path, f"another checksum of bytes {begin}..{begin + len(block)}", "what was written")
        if xxhash.xxh3_64_intdigest(self.file.slice(*footer[:2])) != footer[2]:
            raise damaged(self.path, "another checksum of the footer", "what was written")

    def _read_index(self, begin: int, length: int, digest: int) -> None:
        text = self.file.slice(begin, length)
        if xxhash.xxh3_64_intdigest(text) != digest:
            raise damaged(self.path, "another checksum of the index", "what was written")
        try:
            known = _format_decoder.decode(text).format
            if known != seal.FORMAT:
                do = "read it with the capflow that wrote it, or a newer one"
                raise UsageError(explain(f"{self.path} format", got=known, expected=str(seal.FORMAT), do=do))
            self._index = _index_decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise damaged(self.path, str(e), "an index") from e
        self.entries = self._index.requests

    def scan(self) -> None:
        """Find the captures in the stream, whatever the index says; one that is not whole is left out, and `damage` tells of it."""
        self.end = self._begin
        self.entries = []
        mine: list[int] = []
        rows = 0
        holes: list[CapflowError] = []  # since the last commit
        for place, batch in batches(self.file, self.kind, self.schema, self._begin):
            if batch is None:
                holes.append(damaged(self.path, f"no batch at byte {place}", "one of a request"))
                mine, rows = [], 0
                continue
            mine.append(place)
            if batch.sidecar is None:
                rows += len(batch.positions)
                continue
            try:
                sidecar = _sidecar(batch, rows)
                self.entries.append(Entry(sidecar.request, sidecar.engine, mine))
            except ValueError as e:
                holes.append(damaged(self.path, f"{e} at byte {place}", "a request"))
            self.damage += holes
            self.end = batch.end
            mine, rows, holes = [], 0, []


class ShardCapture(RequestCapture):
    """A request in a shard."""

    def __init__(self, shard: Shard, entry: Entry, sidecar: layout.Sidecar) -> None:
        super().__init__(shard.path, sidecar)
        self.entry = entry
        self._shard = shard
        self._batches: list[StoredBatch] | None = None

    def in_batches(self, site: tuple[int, str] | str) -> Iterator[Rows]:
        """Yield a site's rows batch by batch, mapped, or decompressed one batch after another; raises as `capture[site]` does."""
        entry = self._entries.get(site_of(site))
        yield from (self[site],) if entry is None else self._parts(entry)

    def positions(self, site: tuple[int, str] | str) -> npt.NDArray[np.int64]:
        """Return the positions `[n]` of a site's rows, without decompressing these; raises as `capture[site]` does."""
        entry = self._entries.get(site_of(site))
        if entry is None:
            return super().positions(site)
        every = np.concatenate([np.zeros(0, np.int64), *(batch.positions for batch in self._decoded())])
        return every[entry.offset : entry.offset + entry.rows]

    def _rows(self, entry: layout.SiteFile) -> Rows:
        found = list(self._parts(entry))
        if len(found) == 1:
            return found[0]
        return _read_only(Rows(*(np.concatenate(arrays) for arrays in zip(*found, strict=True))))

    def _parts(self, entry: layout.SiteFile) -> Iterator[Rows]:
        kind = self._shard.kind
        batches = self._decoded()
        ends = np.cumsum([len(batch.positions) for batch in batches]).tolist()
        first, last = entry.offset, entry.offset + entry.rows
        if last > (ends[-1] if ends else 0) or first == last:
            raise damaged(
                self.path, f"{ends[-1] if ends else 0} rows of {self.id}", f"{self.sidecar.rows} as its sidecar says"
            )
        for batch, end in zip(batches, ends, strict=True):
            begin = end - len(batch.positions)
            low, high = max(first - begin, 0), min(last, end) - begin
            if low < high:
                rows = self._bytes(batch)[low:high].view(DTYPES[kind.dtype]).reshape(high - low, kind.hidden_size)
                positions = batch.positions[low:high].astype(np.int64)
                yield _read_only(Rows(rows, positions, batch.token_ids[low:high]))

    def verify_rows(self) -> None:
        """Compare every row with its hash, and every site's positions, tokens and hashes with the sidecar's."""
        batches = self._decoded()
        for number, batch in enumerate(batches):
            hashes = np.empty(len(batch.hashes), np.uint64)
            hashes_of(self._bytes(batch), hashes)
            if (bad := np.flatnonzero(hashes != batch.hashes)).size:
                what = f"another checksum of row {bad[0]} of batch {number} of {self.id}"
                raise damaged(self.path, what, "the row that was written")
        columns = [np.concatenate(arrays) for arrays in zip(*(b[:3] for b in batches), strict=True)] if batches else []
        for entry in self.sidecar.sites:
            part = slice(entry.offset, entry.offset + entry.rows)
            if site_digest(*(column[part] for column in columns)) != entry.xxh3_64:
                raise damaged(self.path, f"another checksum of {entry.site} of {self.id}", entry.xxh3_64)

    def _bytes(self, batch: StoredBatch) -> npt.NDArray[np.uint8]:
        try:
            return self._shard.rows(batch)
        except ValueError as e:
            raise damaged(self.path, str(e), f"rows of {self.id}") from e

    def _decoded(self) -> list[StoredBatch]:
        shard = self._shard
        if self._batches is None:
            try:
                self._batches = [
                    decode(shard.file, begin, shard.kind, shard.schema) for begin in self.entry.batches[:-1]
                ]
            except ValueError as e:
                raise damaged(self.path, str(e), f"the rows of {self.id}") from e
        return self._batches


class ShardSet:
    """The shards under a root; `refresh` finds those that came. Captures come in the order in which their shards were begun.

    What is damaged is no error here but a `Damage` in its place.
    """

    def __init__(self, root: Path, *, sealed_only: bool = False) -> None:
        self.root = root
        self.sealed_only = sealed_only
        self._shards: dict[str, Shard] = {}
        self._last = LastRows()
        # Shards of which nothing can be read.
        self._unread: dict[str, Damage] = {}
        self._found: dict[str, list[tuple[Shard, Entry]]] | None = None

    def refresh(self) -> None:
        """Look for shards that are new, sealed since, or have grown; raises OSError when the root cannot be listed."""
        writers = () if self.sealed_only else self.root.glob(f"{layout.PARTIAL_PREFIX}*")
        paths = {path.name: path for writer in writers for path in found_in(writer, PATTERN)}
        paths |= {path.name: path for path in self.root.glob(PATTERN)}
        if self._shards.keys() - paths.keys():
            self._shards = {name: shard for name, shard in self._shards.items() if name in paths}
            self._found = None
        self._unread = {}
        for name, path in paths.items():
            known = self._shards.get(name)
            if known is None or not known.sealed or known.path != path:
                self._open(name, path, known)

    def find(self, request_id: str) -> Iterator[ShardCapture | Damage]:
        """Yield the captures of an id in the shards that are known."""
        for shard, entry in self._entries_of(request_id):
            try:
                yield shard.capture(entry)
            except CapflowError as e:
                yield Damage(shard.path, e, of_capture=True)

    def __contains__(self, request_id: str) -> bool:
        return bool(self._entries_of(request_id))

    def ids(self) -> Iterator[str]:
        """Yield the id of each capture."""
        for _, entry in self._entries():
            yield entry.request

    @property
    def damage(self) -> list[Damage]:
        """What of the shards cannot be read, captures that an index names apart."""
        found = [
            Damage(shard.path, error, of_capture=False) for shard in self._shards.values() for error in shard.damage
        ]
        return [*self._unread.values(), *found]

    def verify(self) -> Iterator[Damage]:
        """Check every shard as a whole; yield the first that is wrong with each, and what is of none that can be read."""
        yield from self._unread.values()
        for shard in self._shards.values():
            try:
                shard.verify()
            except CapflowError as e:
                yield Damage(shard.path, e, of_capture=False)

    def _entries_of(self, request_id: str) -> Sequence[tuple[Shard, Entry]]:
        if self._found is None:
            self._found = {}
            for shard, entry in self._entries():
                self._found.setdefault(entry.request, []).append((shard, entry))
        return self._found.get(request_id, ())

    def _entries(self) -> Iterator[tuple[Shard, Entry]]:
        for name in sorted(self._shards):
            yield from zip(itertools.repeat(self._shards[name]), self._shards[name].entries)

    def _open(self, name: str, path: Path, known: Shard | None) -> None:
        shard = Shard(path, self._last)
        try:
            if known is not None and known.path == path and known.file.size == path.stat().st_size:
                return
            shard.open()
        except CapflowError as e:
            if path.parent == self.root:  # else it has just been begun, and holds nothing yet
                self._unread[name] = Damage(path, e, of_capture=False)
            return
        except FileNotFoundError:  # sealed meanwhile, and elsewhere
            sealed = self.root / name
            if path != sealed and sealed.exists():
                self._open(name, sealed, known)
            return
        except OSError as e:
            self._unread[name] = Damage(path, damaged(path, e.strerror or str(e), "a shard"), of_capture=False)
            return
        self._shards[name] = shard
        self._found = None


def site_digest(positions: npt.NDArray[Any], token_ids: npt.NDArray[Any], hashes: npt.NDArray[Any]) -> str:
    """Return the xxh3 of what a shard has of a site beside its rows: positions and token ids int32, the rows' hashes uint64."""
    columns = (positions, np.int32), (token_ids, np.int32), (hashes, np.uint64)
    return xxhash.xxh3_64_hexdigest(b"".join([np.asarray(column, dtype).tobytes() for column, dtype in columns]))


def _read_only(rows: Rows) -> Rows:
    for array in rows:
        array.flags.writeable = False
    return rows


def _kind_within(file: Any) -> Kind | None:
    """Return what the rows of a stream are whose head is damaged, by what is left of it; None when nothing says so."""
    for _, sidecar in layout.sidecars_within(file):
        dtype = next((entry.dtype for entry in sidecar.sites if entry.dtype), sidecar.dtype)
        for compressed in (False, True):
            kind = Kind(dtype, sidecar.hidden_size or 1, compressed)
            if any(batch is not None for _, batch in batches(file, kind, kind.schema(), len(HEAD))):
                return kind
    return None


def _sidecar(batch: StoredBatch, rows: int | None = None) -> layout.Sidecar:
    """Return the sidecar of a commit; raises ValueError where there is none, or other than `rows` rows came before it."""
    if batch.sidecar is None:
        raise ValueError("no sidecar")
    sidecar = layout.read_sidecar(batch.sidecar)
    if rows not in {None, sidecar.rows}:
        raise ValueError(f"{rows} rows of {sidecar.request!r} before its sidecar, which says {sidecar.rows},")
    return sidecar
