"""Layout `sharded`: one writer's requests go into shards, one shard after another.

    ROOT/.partial-…/shard~N-….parquet    a shard that is written, an Arrow stream
    ROOT/shard~N-….parquet               a sealed one, a Parquet file
    ROOT/.restored-…/                    a copy of a shard that was removed or moved while it was written

Invariant: a shard under the root is a whole Parquet file. A shard whose writer died holds every committed request, and
the next writer seals it.
"""

from __future__ import annotations

import logging
import re
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import DTYPES
from capflow.capture.model import width_of
from capflow.capture.site import Site
from capflow.errors import CapflowError, explain
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.rows import Piece, TokenLog
from capflow_consumers.dataset.shards.file import EncodedBatch, ShardFile, batches_of
from capflow_consumers.dataset.shards.quantization import Quantised, quantised
from capflow_consumers.dataset.shards.reader import site_digest
from capflow_consumers.dataset.shards.recovery import publish
from capflow_consumers.dataset.shards.stream import Kind, common_width
from capflow_consumers.filesystem.files import RequestFiles, SiteRows

logger = logging.getLogger("capflow.consumer")

RESTORED_PREFIX = ".restored-"

_NUMBER = re.compile(r"shard~(\d+)-")


class ShardWriter:
    """The open shards of one writer, one for each kind of rows.

    root: where sealed shards go.
    directory: the writer's hidden one.
    compressed: whether rows are compressed.
    quantization: what rows are rounded to; None to store them as they come.
    bytes_max: the size from which a shard is sealed.
    sync: whether requests are synced to disk.
    sync_seals: whether sealed shards are.
    mode: of the files.
    name_bytes: the random bytes in the name of a shard.
    names: returns the names of shards in other places than the root; numbers go on from the highest.
    """

    def __init__(
        self,
        root: Path,
        directory: Path,
        *,
        compressed: bool,
        quantization: layout.Quantization | None,
        bytes_max: int,
        sync: bool,
        sync_seals: bool,
        mode: int,
        name_bytes: int,
        names: Callable[[], Iterable[str]],
    ) -> None:
        self.root = root
        self.directory = directory
        self.compressed = compressed
        self.quantization = quantization
        self.bytes_max = bytes_max
        self.sync = sync
        self.sync_seals = sync_seals
        self.mode = mode
        self.name_bytes = name_bytes
        self._other_names = names
        # The captures in shards that are not sealed, by request id.
        self._held: dict[str, list[tuple[ShardFile, layout.Sidecar]]] = {}
        self._open: dict[Kind, ShardFile] = {}
        # The number of shards that were sealed.
        self.seals = 0
        # Shards that take no more rows and are to be sealed.
        self._unsealed: list[ShardFile] = []

    def shard(self, kind: Kind) -> ShardFile:
        """Return the shard that takes rows of a kind; raises OSError."""
        shard = self._open.get(kind)
        if shard is None:
            numbers = (int(match[1]) for name in self._names() if (match := _NUMBER.match(name)))
            number = 1 + max(numbers, default=0)
            path = self.directory / f"shard~{number:06d}-{secrets.token_hex(self.name_bytes)}.parquet"
            shard = ShardFile(path, kind, self.mode, sync=self.sync)
            shard.create()
            if self.sync:
                disk.sync(self.directory)
                disk.sync(self.root)
            self._open[kind] = shard
        return shard

    def commit(self, shard: ShardFile, sidecar: layout.Sidecar, text: bytes) -> Path:
        """Make the batches that were put a request; return the path that its shard will have once it is sealed.

        text: the sidecar as JSON.

        Raises OSError.
        """
        shard.commit(sidecar.request, sidecar.engine, text)
        self._held.setdefault(sidecar.request, []).append((shard, sidecar))
        if shard.end >= self.bytes_max:
            self._give_up(shard)
        return self.root / shard.path.name

    def settle(self) -> dict[Path, OSError]:
        """Keep the committed requests, on the disk if `sync`.

        Return the shards where that failed; their requests since they were last settled are lost.
        """
        failed = {}
        for shard in [*self._open.values(), *self._unsealed]:
            if shard.unsettled:
                try:
                    shard.settle()
                except OSError as e:
                    failed[self.root / shard.path.name] = e
                    self._take_back(shard)
        return failed

    def seal(self) -> bool:
        """Seal the shards that are large enough; return whether any was sealed."""
        before = self.seals
        self._seal_all()
        return self.seals > before

    def captures(self, request: str) -> Iterator[tuple[Path, layout.Sidecar]]:
        """Yield the captures of a request in shards that are not sealed, with the paths that these will have."""
        for shard, sidecar in self._held.get(request, ()):
            yield self.root / shard.path.name, sidecar

    def cut(self, shard: ShardFile) -> None:
        """Remove batches that are not committed; if that fails, the shard takes no more rows."""
        try:
            shard.cut()
            shard.check()
        except OSError:
            self._give_up(shard)

    def close(self) -> bool:
        """Seal the open shards; return whether the next writer has nothing to seal.

        Raises CapflowError when a shard was removed or moved and its rows could not be put back.
        """
        for shard in list(self._open.values()):
            self._give_up(shard)
        self._seal_all()
        lost = [shard for shard in self._unsealed if shard.requests and not shard.may_be_named()]
        for shard in self._unsealed:
            shard.close()
        if lost:
            requests = sum(len(shard.requests) for shard in lost)
            got = f"{requests} requests in {', '.join(shard.path.name for shard in lost)}"
            problem = "shards that were removed or moved while they were written and cannot be put back"
            raise CapflowError(explain(problem, got=got, do="the log says why"))
        return not self._unsealed

    def _take_back(self, shard: ShardFile) -> None:
        for entry in shard.unsettled:
            self._drop(entry.request, shard)
        try:
            shard.take_back()
        except OSError:
            self._give_up(shard)

    def _drop(self, request: str, shard: ShardFile) -> None:
        self._held[request] = [held for held in self._held.get(request, ()) if held[0] is not shard]
        if not self._held[request]:
            del self._held[request]

    def _give_up(self, shard: ShardFile) -> None:
        if self._open.get(shard.kind) is shard:
            del self._open[shard.kind]
            self._unsealed.append(shard)

    def _seal_all(self) -> None:
        for shard in list(self._unsealed):
            try:
                self._publish(shard)
            except (OSError, ValueError, BufferError) as e:  # BufferError: damaged bytes are still mapped
                why = e.strerror if isinstance(e, OSError) and e.strerror else e
                text = "%s cannot be sealed: %s; it is tried again, also by the next hub, while the file exists"
                logger.error(text, shard.path, why)
                continue
            shard.close()
            self._unsealed.remove(shard)
            self.seals += 1
            for entry in shard.requests:
                self._drop(entry.request, shard)

    def _publish(self, shard: ShardFile) -> None:
        """Seal a shard and move it to the root. Raises as `publish` does.

        A shard that somebody removed or moved is copied first, from its open descriptor.
        """
        if shard.is_named():
            publish(shard.path, shard.end, shard.requests, self.root, sync=self.sync_seals)
        elif shard.requests:
            text = "%s was removed or moved while it was written; its %d requests are put back"
            logger.error(text, shard.path, len(shard.requests))
            with tempfile.TemporaryDirectory(prefix=RESTORED_PREFIX, dir=self.root) as directory:
                path = Path(directory) / shard.path.name
                shard.copy(path)
                publish(path, shard.end, shard.requests, self.root, sync=self.sync_seals)

    def _names(self) -> Iterator[str]:
        for directory in (self.root, self.directory):
            yield from (path.name for path in directory.glob(layout.SHARD_PATTERN))
        yield from self._other_names()


class _Stored(NamedTuple):
    """The rows of a request as a shard stores them.

    dtype: of the stored numbers.
    parts: of each site, parts `[k, row_bytes]` uint8, one after another.
    scales: `[n]` float32 of all rows in the same order; None where they are not rounded.
    """

    dtype: str
    parts: list[list[Any]]
    scales: npt.NDArray[np.float32] | None


class ShardRows(RequestFiles):
    """A request whose rows go into a shard when it ends; early rows wait in files of their sites."""

    kept_as: ClassVar[layout.Layout] = "sharded"
    # From `prepare` on; `release` empties the batches.
    _kind: Kind
    _batches: list[EncodedBatch]
    _entries: list[layout.SiteFile]

    def __init__(
        self,
        path: Path,
        dtype: str,
        hidden_size: int,
        dtypes: Mapping[Site, str],
        *,
        shards: ShardWriter,
    ) -> None:
        super().__init__(path, dtype, hidden_size, dtypes, mode=shards.mode)
        # The shard that has rows of it which are not committed.
        self.shard: ShardFile | None = None
        self._shards = shards

    def _prepare(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]) -> None:
        sites = list(self._all(pieces, tokens))
        widths = {rows.site: width_of(self.shapes.get(rows.site, ()), self.hidden_size) for rows in sites}
        width = common_width(set(widths.values()) or {self.hidden_size or 1})
        # Rows of one width together, so that they come in few batches.
        sites.sort(key=lambda rows: (widths[rows.site], rows.site))
        dtype, parts, scales = self._rounded(sites) or self._exact(sites)
        self._kind = kind = Kind(dtype, width, self._shards.compressed)
        positions = np.concatenate([np.zeros(0, np.int32), *(rows.positions for rows in sites)]).astype(np.int32)
        token_ids = np.concatenate([np.zeros(0, np.int32), *(rows.token_ids for rows in sites)])
        self._batches = list(batches_of(kind, parts, positions, token_ids, scales))
        hashes = np.concatenate([np.zeros(0, np.uint64), *(batch.hashes for batch in self._batches)])
        columns = [positions, token_ids, hashes, *([] if scales is None else [scales])]
        quantization = msgspec.UNSET if scales is None else self._shards.quantization
        row_dtype = dtype if scales is None else "float32"
        self._entries = []
        begin = 0
        for rows in sites:
            end = begin + len(rows.positions)
            digest = site_digest(*(column[begin:end] for column in columns))
            part = self.part(rows.site)._replace(dtype=row_dtype)
            size = part.rows * (kind.bytes_of(widths[rows.site]) + (0 if scales is None else scales.itemsize))
            entry = self._entry(part, "", expected.get(part.site), size, digest, begin)
            self._entries.append(msgspec.structs.replace(entry, quantization=quantization))
            begin = end

    def write(self) -> list[layout.SiteFile]:
        """Put the rows into a shard; return the entries of the sites. Raises OSError."""
        shard = self.shard = self._shards.shard(self._kind)
        for batch in self._batches:
            shard.put(batch)
        return [msgspec.structs.replace(entry, file=shard.path.name) for entry in self._entries]

    def release(self) -> None:
        """Drop what `prepare` computed: it is written."""
        self._batches = []

    def discard(self) -> None:
        """Remove the rows, from the shard too."""
        super().discard()
        self.undo()

    def undo(self) -> None:
        """Remove the rows that are not committed from the shard."""
        if self.shard is not None:
            self._shards.cut(self.shard)
            self.shard = None

    def commit(self, sidecar: layout.Sidecar, text: bytes) -> Path:
        """Make the rows that were put a request; return the path that the shard will have once it is sealed.

        text: the sidecar as JSON.

        Raises OSError.
        """
        assert self.shard is not None
        path = self._shards.commit(self.shard, sidecar, text)
        self.shard = None
        super().discard()
        return path

    def _rounded(self, sites: Sequence[SiteRows]) -> _Stored | None:
        """Return the rows rounded; None where they are not to be, or where one of them cannot be."""
        quantization = self._shards.quantization
        if quantization is None:
            return None
        parts: list[list[Any]] = []
        scales = [np.zeros(0, np.float32)]
        for rows in sites:
            dtype = DTYPES[self.dtype_of(rows.site)]
            rounded: list[Quantised] = []
            for part in rows.parts:
                if (of_part := quantised(part.view(dtype), quantization)) is None:
                    self.exact = True
                    return None
                rounded.append(of_part)
            parts.append([of_part.codes for of_part in rounded])
            scales += [of_part.scales for of_part in rounded]
        return _Stored(quantization, parts, np.concatenate(scales))

    def _exact(self, sites: Sequence[SiteRows]) -> _Stored:
        """Return the rows in one dtype that holds every number."""
        dtypes = {self.dtype_of(rows.site) for rows in sites} or {self.dtype}
        # Beside rounded rows, which are read as float32, that dtype too.
        dtype = dtypes.pop() if len(dtypes) == 1 and self._shards.quantization is None else "float32"
        return _Stored(dtype, [self._as(dtype, rows) for rows in sites], None)

    def _as(self, dtype: str, rows: SiteRows) -> list[Any]:
        """Return a site's rows as bytes of a dtype."""
        stored = self.dtype_of(rows.site)
        if stored == dtype:
            return rows.parts
        return [part.view(DTYPES[stored]).astype(DTYPES[dtype]).view(np.uint8) for part in rows.parts]
