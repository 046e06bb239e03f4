"""One request's files while they are written, in a hidden directory: layout `per_file`, and early rows of any layout.

Rows may come in several parts; each is appended after the last one. `write` adds the last part, the data after
the rows, and the header. The slow computations are in `prepare`, so that `write` can be on another thread.
No file is open between calls, so any number of requests can be under way.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.model import ModelInfo, width_of
from capflow.capture.site import Site
from capflow.files import FILE_MODE, create_private, make_directory
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.disk import Ahead, write
from capflow_consumers.dataset.rows import Piece, TokenLog
from capflow_consumers.dataset.running import About, tell

_AHEAD_BYTES_MIN = limits.MIB

Runs = list[tuple[int, int]]
"""`(start, stop)` of positions, in the order of the rows."""


class SiteRows(NamedTuple):
    """All rows of a site.

    early: how many rows are in the site's file already; `parts[0]` maps them.
    parts: `[k, row_bytes]` uint8, one after another.
    positions: `[n]` int64.
    token_ids: `[n]` int32.
    """

    site: Site
    early: int
    parts: list[npt.NDArray[np.uint8]]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]


class _File(NamedTuple):
    """A site's file, ready to be written.

    early_bytes: the length of the rows that the file has already, after the header.
    """

    entry: layout.SiteFile
    header: bytes
    body: list[Any]
    early_bytes: int


class RequestFiles:
    """The files of one request.

    path: their directory, which is made with the first file.
    dtype: of the rows as they are captured.
    dtypes: of the rows as they come here, for sites that have another one.
    mode: of the files.
    workers: threads that write the files in parallel; None for the caller's only.
    fsync: whether the files are synced to disk after `write`.
    """

    kept_as: ClassVar[layout.Layout] = "per_file"

    def __init__(
        self,
        path: Path,
        dtype: str,
        hidden_size: int,
        dtypes: Mapping[Site, str],
        *,
        mode: int = FILE_MODE,
        workers: Executor | None = None,
        fsync: bool = False,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.dtypes = dtypes
        # The shapes of a row at sites where it is not `[hidden_size]`; `FiledRequest.add` notes them.
        self.shapes: dict[Site, tuple[int, ...]] = {}
        # The model of the rows; None if it is unknown.
        self.model: ModelInfo | None = None
        self.mode = mode
        self.workers = workers
        self.fsync = fsync
        # Written for readers of the running request; None when there are to be none.
        self.about: About | None = None
        self.runs: dict[Site, Runs] = {}
        # Whether rows were written before the end.
        self.early = False
        # Whether rows that were to be rounded are stored exactly, because one of them cannot be; set by `prepare`.
        self.exact = False
        # Counted by `FiledRequest.add`.
        self.rows_overflowed: Counter[Site] = Counter()
        # The prepared files, from `prepare` to `release`.
        self._prepared: list[_File] = []
        # Rows in files that `running.jsonl` does not list yet.
        self._unlisted: dict[Site, list[Piece]] = {}

    def append(self, pieces: dict[Site, list[Piece]], tokens: TokenLog) -> None:
        """Append rows to the files, and list them in `running.jsonl`.

        Raises OSError; then `pieces` keeps the rows that were not written.
        """
        make_directory(self.path, self.mode, parents=False)
        self.early = True
        for site, parts in list(pieces.items()):
            offset = layout.HEADER_BYTES + self.rows(site) * self.row_bytes(site)
            fd = create_private(self.path / layout.file_name(site), os.O_WRONLY, self.mode)
            try:
                write(fd, [part.rows for part in parts], offset)
            finally:
                os.close(fd)
            self._extend(site, parts)
            del pieces[site]
            if self.about is not None:
                self._unlisted.setdefault(site, []).extend(parts)
        if self.about is not None and self._unlisted:
            tell(self.path, self.about, self._unlisted, tokens, self.mode, self.shapes)
            self._unlisted = {}

    def prepare(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]) -> None:
        """Take the last rows, and compute what `write` needs.

        tokens: of all rows.
        expected: how many rows each site was promised.

        Raises OSError, having taken nothing.
        """
        runs = {site: list(spans) for site, spans in self.runs.items()}
        try:
            self._prepare(pieces, tokens, expected)
        except BaseException:
            self.runs = runs
            self.release()
            raise

    def undo(self) -> None:
        """Undo a failed write where it would be in the way of the next one."""

    def release(self) -> None:
        """Drop what `prepare` computed: it is written."""
        self._prepared = []

    def _prepare(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]) -> None:
        for site, early, parts, *tail in self._all(pieces, tokens):
            part = self.part(site)
            header = layout.header(part)
            digest = digest_of([header, *parts, *tail])
            size = len(header) + part.nbytes
            entry = self._entry(part, layout.file_name(site), expected.get(site), size, digest)
            self._prepared.append(_File(entry, header, [*parts[bool(early) :], *tail], early * part.row_bytes))

    def _entry(
        self,
        part: layout.SitePart,
        file: str,
        expected: int | None,
        nbytes: int,
        digest: str,
        offset: int = 0,
    ) -> layout.SiteFile:
        """Return a site's entry in the sidecar. The arguments are its fields."""
        site = part.site
        overflowed, shape = self.rows_overflowed[site], self.shapes.get(site, msgspec.UNSET)
        attention = self.model.attention_of(site.layer) if self.model is not None and site.hook == "q" else None
        router = self.model.router_of(site.layer) if self.model is not None and site.hook == "router" else None
        forms = (attention or msgspec.UNSET, router or msgspec.UNSET)
        about: tuple[Any, ...] = (part.dtype, overflowed, offset, shape, *forms)
        return layout.SiteFile(*site, file, part.rows, expected, nbytes, digest, *about)

    def write(self) -> list[layout.SiteFile]:
        """Write the last rows, positions, token ids and headers; return the entries of the files. Raises OSError."""
        make_directory(self.path, self.mode, parents=False)
        prepared = self._prepared
        list(map(self._write_file, prepared) if self.workers is None else self.workers.map(self._write_file, prepared))
        return [file.entry for file in prepared]

    def write_sidecar(self, sidecar: bytes) -> None:
        """Write the sidecar after `write`; raises OSError."""
        if self.early:
            (self.path / layout.RUNNING_NAME).unlink(missing_ok=True)
        fd = create_private(f"{self.path}/{layout.SIDECAR_NAME}", os.O_WRONLY | os.O_TRUNC, self.mode)
        try:
            write(fd, [sidecar], 0)
        finally:
            os.close(fd)

    def discard(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _all(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog) -> Iterator[SiteRows]:
        """Take the last rows; yield all rows of each site."""
        # Positions and token ids by runs, which sites mostly share.
        tails: dict[tuple[tuple[int, int], ...], tuple[Any, Any]] = {}
        for site in sorted({*self.runs, *pieces}):
            early = self.rows(site)
            parts: list[Any] = []
            if early:
                shape = (early, self.row_bytes(site))
                parts = [np.memmap(self.path / layout.file_name(site), np.uint8, "r", layout.HEADER_BYTES, shape)]
            last = pieces.get(site, ())
            parts += [piece.rows for piece in last]
            self._extend(site, last)
            key = tuple(self.runs[site])
            if key not in tails:
                tails[key] = _positions(key), np.concatenate([tokens.ids(*run) for run in key])
            yield SiteRows(site, early, parts, *tails[key])

    def dtype_of(self, site: Site) -> str:
        """Return the dtype of a site's rows in its file."""
        return self.dtypes.get(site, self.dtype)

    def part(self, site: Site) -> layout.SitePart:
        """Return what a site's tensors are, with the rows that were taken."""
        shape = self.shapes.get(site) or (self.hidden_size,)
        return layout.SitePart(site, self.dtype_of(site), self.rows(site), shape)

    def row_bytes(self, site: Site) -> int:
        """Return the length of a site's row in its file, bytes."""
        return width_of(self.shapes.get(site, ()), self.hidden_size) * DTYPES[self.dtype_of(site)].itemsize

    def rows(self, site: Site) -> int:
        """Return how many rows of a site were taken."""
        return sum(stop - start for start, stop in self.runs.get(site, ()))

    def _ahead(self) -> Ahead | None:
        return Ahead(_AHEAD_BYTES_MIN) if self.fsync else None

    def _write_file(self, file: _File) -> None:
        fd = create_private(f"{self.path}/{file.entry.file}", os.O_WRONLY, self.mode)
        try:
            if file.early_bytes:
                write(fd, file.body, len(file.header) + file.early_bytes, self._ahead())
                write(fd, [file.header], 0)
            else:
                write(fd, [file.header, *file.body], 0, self._ahead())
        finally:
            os.close(fd)

    def _extend(self, site: Site, parts: Sequence[Piece]) -> None:
        runs = self.runs.setdefault(site, [])
        for start, stop in itertools.chain.from_iterable(part.spans for part in parts):
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))


def digest_of(parts: Sequence[Any]) -> str:
    """Return the xxh3 of parts one after another, as it stands in the sidecar."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _positions(runs: Sequence[tuple[int, int]]) -> Any:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in runs])


class PackedFile(RequestFiles):
    """A request whose rows go into one file when it ends; early rows wait in files of their sites."""

    kept_as: ClassVar[layout.Layout] = "packed"
    # From `prepare` on; `release` empties it.
    _parts: list[Any]
    _entries: list[layout.SiteFile]

    def release(self) -> None:
        """Drop what `prepare` computed: it is written."""
        self._parts = []

    def _prepare(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]) -> None:
        sites = list(self._all(pieces, tokens))
        parts = [self.part(rows.site) for rows in sites]
        header, begins = layout.packed_header(parts)
        bodies = [[*rows.parts, rows.positions, rows.token_ids] for rows in sites]
        self._parts = [header, *itertools.chain.from_iterable(bodies)]
        self._entries = [
            self._entry(part, layout.PACKED_NAME, expected.get(part.site), part.nbytes, digest_of(body), begin)
            for part, begin, body in zip(parts, begins, bodies, strict=True)
        ]

    def write(self) -> list[layout.SiteFile]:
        """Write the file; return its entries, one for each site. Raises OSError."""
        make_directory(self.path, self.mode, parents=False)
        fd = create_private(self.path / layout.PACKED_NAME, os.O_WRONLY, self.mode)
        try:
            write(fd, self._parts, 0, self._ahead())
        finally:
            os.close(fd)
        if self.early:
            for entry in self._entries:
                (self.path / layout.file_name(entry.site)).unlink(missing_ok=True)
        return self._entries
