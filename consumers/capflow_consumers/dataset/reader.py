"""Reading a captured data set: `capflow.open(path)`, in any layout.

It needs neither torch nor vLLM. Rows are memory-mapped: opening a request reads its sidecar, and indexing a site reads
only where its rows lie.
Opening checks the checksums of sidecars and shard indexes; only `verify` checks those of rows.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.site import site_named
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require
from capflow.files import open_regular, read_regular
from capflow.text.brief import brief
from capflow.text.engine_name import is_of, name_of
from capflow.text.tabular import Tabular
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.capture import (
    Damage,
    JoinedCapture,
    RequestCapture,
    Rows,
    Shaped,
    concatenated,
    damaged,
    joined,
)
from capflow_consumers.dataset.disk import mapped
from capflow_consumers.dataset.names import Numbered, slug, split
from capflow_consumers.dataset.objects.address import ObjectRoot, is_url, parse
from capflow_consumers.dataset.running import RunningCapture, running
from capflow_consumers.dataset.shards.index import ShardSet
from capflow_consumers.dataset.tables import arrow_of, dataset_html

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Damage", "Dataset", "JoinedCapture", "RequestCapture", "RowBatch", "Rows", "RunningCapture", "open_dataset"]

logger = logging.getLogger("capflow.data")

_READ_BYTES = 1 << 22

assert DTYPES["bfloat16"] == ml_dtypes.bfloat16


class _BatchColumns(NamedTuple):
    rows: npt.NDArray[Any]
    requests: list[str]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]


class RowBatch(Shaped, _BatchColumns):
    """Rows of one site: a tuple of four.

    rows: `[n, width]`.
    requests: the request id of each row.
    positions: `[n]` int64.
    token_ids: `[n]` int32.
    """

    def __repr__(self) -> str:
        return brief(self)


class DirectoryCapture(RequestCapture):
    """A request with a directory of its own."""

    path: Path

    @cached_property
    def _packed_header(self) -> tuple[bytes, int]:
        """The header of a packed request's file, and the length of the file."""
        parts = [self._part(entry) for entry in self.sidecar.sites]
        header, begins = layout.packed_header(parts)
        if begins != [entry.offset for entry in self.sidecar.sites]:
            raise damaged(self.path / layout.SIDECAR_NAME, "sites at other offsets", "one after another")
        return header, len(header) + sum(part.nbytes for part in parts)

    def _rows(self, entry: layout.SiteFile) -> Rows:
        file = self.path / entry.file
        begin = self._begin(entry)
        part = self._part(entry)
        self._check_header(file, entry)
        whole = mapped(file)
        ends = np.cumsum([begin, part.rows * part.row_bytes, part.rows * 8, part.rows * 4])
        rows, positions, token_ids = (whole[start:end] for start, end in itertools.pairwise(ends))
        values = rows.view(DTYPES[part.dtype]).reshape(part.rows, math.prod(part.shape))
        return Rows(values, positions.view(np.int64), token_ids.view(np.int32), part.shape)

    def verify_rows(self) -> None:
        """Compare every file with its checksum; raise CapflowError naming the first that is damaged."""
        for entry in self.sidecar.sites:
            file = self.path / entry.file
            packed = self.sidecar.layout == "packed"
            if packed:
                self._check_header(file, entry)
            elif entry.offset:
                got = f"an offset of {entry.offset} in {file.name}"
                raise damaged(self.path / layout.SIDECAR_NAME, got, "0")
            digest = xxhash.xxh3_64()
            left = entry.bytes if packed else -1
            try:
                with os.fdopen(open_regular(file), "rb") as stream:
                    stream.seek(entry.offset)
                    while part := stream.read(min(left, _READ_BYTES) if packed else _READ_BYTES):
                        digest.update(part)
                        left -= len(part)
            except OSError as e:
                raise damaged(file, e.strerror or str(e), "the file") from e
            if digest.hexdigest() != entry.xxh3_64:
                raise damaged(file, f"checksum {digest.hexdigest()}", entry.xxh3_64)

    def _begin(self, entry: layout.SiteFile) -> int:
        return entry.offset if self.sidecar.layout == "packed" else layout.HEADER_BYTES

    def _part(self, entry: layout.SiteFile) -> layout.SitePart:
        sidecar = self.sidecar
        shape = entry.row_shape(sidecar.hidden_size)
        return layout.SitePart(entry.site, entry.dtype or sidecar.dtype, entry.rows, shape)

    def _check_header(self, file: Path, entry: layout.SiteFile) -> None:
        expected, length = self._header(entry)
        try:
            with os.fdopen(open_regular(file), "rb") as stream:
                header = stream.read(len(expected))
            size = file.stat().st_size
        except OSError as e:
            raise damaged(file, e.strerror or str(e), "the file") from e
        if header != expected or size != length:
            raise damaged(file, f"{size} bytes or another header", f"{length} bytes and the header of its sidecar")

    def _header(self, entry: layout.SiteFile) -> tuple[bytes, int]:
        """Return the header of a site's file, and the length of the file."""
        if self.sidecar.layout == "packed":
            return self._packed_header
        part = self._part(entry)
        header = layout.header(part)
        return header, len(header) + part.nbytes


class Dataset(Tabular):
    """A root directory or a place in an object store; `ds.requests()` lists its requests, `ds[request_id]` opens one.

    Requests that end while the data set is open are seen, also those in shards that are not sealed yet. An id may be
    captured several times (`on_collision=suffix`); then it stands for the last capture, and `captures` returns all.
    `ds[engine, request_id]` is the request of one engine. The id alone is refused where several engines have it.
    Captures that hold parts of one request are read as one.
    Methods that read several captures skip damaged ones and log a warning. `damaged` lists all damage.
    """

    def __init__(self, path: PurePath, shards: ShardSet | None = None) -> None:
        self.path = path
        # What `open_dataset` takes for this data set.
        self.source = str(path)
        self._shards = ShardSet(path) if shards is None else shards
        # None in an object store, where there are only shards.
        self._directories = Numbered(Path(path)) if shards is None else None
        # Errors that were logged.
        self._warned: set[str] = set()
        self._look()

    def requests(self) -> list[str]:
        """Return each request id once: those of directories, in the order of these names, then those of shards."""
        opened = [_open_or_damage(path) for path in self._look()]
        directories = [capture.id for capture in opened if isinstance(capture, RequestCapture)]
        for capture in (*self._shards.damage, *opened):
            self._warn(capture)
        return list(dict.fromkeys(itertools.chain(directories, self._shards.ids())))

    def damaged(self) -> list[str]:
        """Return the errors of what cannot be read: sidecars, and shards or parts of them.

        Rows are not read; `verify` does that.
        """
        return [str(each.error) for each in self.walk() if isinstance(each, Damage)]

    def captures(self, request_id: str, *, engine: str = "", look: bool = True) -> list[RequestCapture]:
        """Return every capture of an id, first to last. Captures that are parts of one request are not joined.

        engine: an engine's name or id, for its captures only; every engine's where it is empty.
        look: whether to look first for captures that came since the last look; the time it takes grows with the number
            of entries of the root.

        Raises CapflowError when one of them is damaged.
        """
        if look:
            self._look()
        return [capture for capture in self._captures(request_id) if is_of(capture.engine, engine)]

    def running(self) -> list[RunningCapture]:
        """Return the running requests that have rows in files; see the option `tail_s`."""
        return list(running(Path(self.path))) if self._directories is not None else []

    @property
    def nbytes(self) -> int:
        """The bytes that the data set takes in its directory or its object store."""
        return self._shards.nbytes if self._directories is None else sum(_sizes(Path(self.path)))

    def batches(self, site: tuple[int, str] | str, rows_max: int) -> Iterator[RowBatch]:
        """Yield the rows of all requests at a site in batches of `rows_max`, request after request.

        The last batch may have fewer rows. A batch from within one request is a view of the file.
        """
        if rows_max < 1:
            raise UsageError(explain("rows_max", got=rows_max, expected="1 or more"))
        wanted = site_named(site)
        parts: list[tuple[str, Rows]] = []
        held = 0
        for capture in self:
            if wanted not in capture:
                continue
            for part in capture.in_batches(wanted):
                rows = part
                while len(rows.rows) + held >= rows_max:
                    taken = rows_max - held
                    yield _batch([*parts, (capture.id, rows.part(0, taken))])
                    rows, parts, held = rows.part(taken, len(rows.rows)), [], 0
                if len(rows.rows):
                    parts.append((capture.id, rows))
                    held += len(rows.rows)
        if parts:
            yield _batch(parts)

    def __iter__(self) -> Iterator[RequestCapture]:
        """Yield every capture that is not damaged."""
        for capture in self.walk():
            if isinstance(capture, RequestCapture):
                yield capture
            self._warn(capture)

    def walk(self) -> Iterator[RequestCapture | Damage]:
        """Yield every capture, and a `Damage` in the place of one that cannot be read."""
        directories = self._look()
        yield from self._shards.damage
        seen: set[str] = set()
        for _, paths in itertools.groupby(directories, lambda path: split(path.name)[0]):
            captures: dict[str, list[RequestCapture]] = {}
            for path in paths:
                capture = _open_or_damage(path)
                if isinstance(capture, Damage):
                    yield capture
                else:
                    captures.setdefault(capture.id, []).append(capture)
            for request_id, of_id in captures.items():
                yield from self._joined(of_id, None if request_id in seen else request_id)
                seen.add(request_id)
        for request_id in dict.fromkeys(self._shards.ids()):
            if request_id not in seen:
                yield from self._joined([], request_id)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<data set {str(self.path)!r}: {len(self)} captures>"

    def _repr_html_(self) -> str:
        return dataset_html(self, repr(self))

    def to_arrow(self) -> pa.Table:
        """Return a table with a line for each row of every capture that is not damaged, in memory.

        Columns: `request`, `layer`, `hook`, `position`, `token_id`, and `row`, a list of float32. `to_pandas` and
        `to_polars` give the same. `batches` reads a data set that is larger than the memory.
        """
        return arrow_of(self)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, str) for part in key):
            return key[1] in self and bool(self.captures(key[1], engine=key[0], look=False))
        if not isinstance(key, str):
            return False
        if self._paths(key) or key in self._shards:
            return True
        self._look()
        return bool(self._paths(key)) or key in self._shards

    def __getitem__(self, key: str | tuple[str, str]) -> RequestCapture:
        """Return the capture of a request, by its id, or by `(engine, id)` with the engine's name or id.

        Raises UsageError when there is none, or several engines have the id alone; and CapflowError when it is damaged.
        """
        engine, request_id = key if isinstance(key, tuple) else ("", key)
        if key not in self:
            do = "requests() lists the ids; a request appears when it has ended"
            if self._shards.damage:
                do += f", and {self._shards.damage[0].path} is damaged"
            raise UsageError(explain(f"{self.path}: no such request", got=key, do=do))
        captures = joined(self.captures(request_id, engine=engine, look=False))
        if len(names := dict.fromkeys(name_of(capture.engine) for capture in captures)) > 1:
            expected = f"dataset[ENGINE, {request_id!r}] with one of {', '.join(names)}"
            raise UsageError(explain(f"{self.path}: request {request_id} of several engines", expected=expected))
        return captures[-1]

    def verify(self) -> None:
        """Read and check every file of every request; raise CapflowError naming the first that is damaged."""
        for capture in self.walk():
            if isinstance(capture, Damage):
                raise capture.error
            capture.verify()
        for damage in self.verify_shards():
            raise damage.error

    def verify_shards(self) -> Iterator[Damage]:
        """Check the parts of each shard that belong to no capture; yield the damage."""
        return self._shards.verify()

    def _captures(self, request_id: str) -> list[RequestCapture]:
        captures: list[RequestCapture] = [_open_request(path) for path in self._paths(request_id)]
        for capture in self._shards.find(request_id):
            if isinstance(capture, Damage):
                raise capture.error
            captures.append(capture)
        return captures

    def _joined(self, captures: list[RequestCapture], in_shards: str | None) -> Iterator[RequestCapture | Damage]:
        """Yield the captures of an id, with parts of one request joined.

        captures: those with directories.
        in_shards: the id whose captures in shards follow; None for none.
        """
        for capture in self._shards.find(in_shards) if in_shards is not None else ():
            if isinstance(capture, Damage):
                yield capture
            else:
                captures.append(capture)
        yield from joined(captures)

    def _look(self) -> Iterator[Path]:
        """Look for new captures; return the directories of requests, by name and number."""
        self._shards.refresh()
        return filter(_has_sidecar, self._directories.look() if self._directories is not None else ())

    def _paths(self, request_id: str) -> list[Path]:
        if self._directories is None:
            return []
        return list(filter(_has_sidecar, self._directories.of(slug(request_id))))

    def _warn(self, capture: RequestCapture | Damage) -> None:
        """Log damage, once."""
        if isinstance(capture, Damage) and str(capture.error) not in self._warned:
            self._warned.add(str(capture.error))
            logger.warning("%s; it is left out", capture.error)


def open_dataset(path: str | PurePath) -> Dataset:
    """Open the data set that the filesystem consumer wrote to `path`, a directory or `s3://BUCKET/PREFIX`.

    Raises UsageError when there is no such directory, or it is no data set; and RetryError when an object store cannot
    be reached. Damage raises no error here: see `Dataset.damaged`.
    """
    if is_url(path):
        return _open_objects(parse(path, "data set"))
    root = Path(path).absolute()
    if not root.is_dir():
        got = "a file" if root.exists() else "nothing"
        raise UsageError(explain(f"{root}", got=got, expected="the root directory of a captured data set"))
    if (root / layout.SIDECAR_NAME).is_file():
        do = f"open {root.parent} and index it with the request's id"
        raise UsageError(explain(f"{root}", got="one request's directory", expected="the root above it", do=do))
    if (root / ".lock").is_file() or any(root.glob(layout.SHARD_PATTERN)) or any(root.glob(f"*/{layout.SIDECAR_NAME}")):
        return Dataset(root)
    expected = f"directories with a {layout.SIDECAR_NAME}, or shards, as the filesystem consumer writes"
    raise UsageError(explain(f"{root} is not a captured data set", expected=expected))


def _open_objects(root: ObjectRoot) -> Dataset:
    require("files", str(root))
    from capflow_consumers.dataset.objects.shards import ObjectShards
    from capflow_consumers.dataset.objects.store import Objects

    objects = Objects(root)
    if not objects.is_dataset():
        expected = "shards, as filesystem:layout=sharded writes"
        do = "rows that a hub still holds are in its staging directory; see the option staging"
        raise UsageError(explain(f"{root} is not a captured data set", expected=expected, do=do))
    dataset = Dataset(root.path, ObjectShards(objects))
    dataset.source = str(root)
    return dataset


def _sizes(directory: Path) -> Iterator[int]:
    """Yield the sizes of the files below a directory; files that are removed meanwhile are skipped."""
    try:
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                yield from _sizes(path)
            else:
                yield path.lstat().st_size
    except OSError:
        return


def _has_sidecar(path: Path) -> bool:
    return (path / layout.SIDECAR_NAME).is_file()


def _open_request(path: Path) -> RequestCapture:
    file = path / layout.SIDECAR_NAME
    try:
        sidecar = layout.read_sidecar(read_regular(file, limits.SIDECAR_BYTES_MAX))
    except OSError as e:
        raise damaged(file, e.strerror or str(e), "a sidecar") from e
    except UsageError as e:
        raise UsageError(f"{file} {e}") from e
    except ValueError as e:
        raise damaged(file, str(e), "a sidecar as it was written") from e
    packed = sidecar.layout == "packed"
    names = (layout.PACKED_NAME if packed else layout.file_name(entry.site) for entry in sidecar.sites)
    if any(entry.file != name for entry, name in zip(sidecar.sites, names, strict=True)):
        raise damaged(file, "a file name that is not the site's", "names like post_block.000.safetensors")
    return DirectoryCapture(path, sidecar)


def _open_or_damage(path: Path) -> RequestCapture | Damage:
    try:
        return _open_request(path)
    except CapflowError as e:
        return Damage(path, e, of_capture=True)


def _batch(parts: list[tuple[str, Rows]]) -> RowBatch:
    requests = [request for request, rows in parts for _ in range(len(rows.rows))]
    whole = concatenated([rows for _, rows in parts])
    batch = RowBatch(whole.rows, requests, whole.positions, whole.token_ids)
    batch.row_shape = whole.row_shape
    return batch
