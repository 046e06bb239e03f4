"""One request's files while they are written, in a hidden directory: layout `per_file`, and what comes early with any.

Rows may come in several parts: each is appended behind the last, and `write` puts what follows the rows, and the header. `prepare` has computed
by then what takes time, so that this can be on another thread.
No file is open between calls, so that any number of requests can be under way.
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

import numpy as np
import numpy.typing as npt
import xxhash

from capflow.capture.dtypes import DTYPES
from capflow.capture.site import Site
from capflow.files import FILE_MODE, create_private, make_directory
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.disk import write
from capflow_consumers.dataset.rows import Piece, TokenLog
from capflow_consumers.dataset.running import About, tell

Runs = list[tuple[int, int]]
"""`(start, stop)` of the positions written, in the order of the rows."""


class SiteRows(NamedTuple):
    """All rows of a site: parts `[k, row_bytes]` one after another, positions `[n]` int64, token_ids `[n]` int32."""

    site: Site
    parts: list[npt.NDArray[np.uint8]]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]


class _File(NamedTuple):
    """A site's file as it will be.

    early_bytes: of rows in it already, behind the header.
    """

    entry: layout.SiteFile
    header: bytes
    body: list[Any]
    early_bytes: int


class RequestFiles:
    """The files of one request in `path`, which is made when the first is; workers, where there are some, write them beside each other.

    dtype: that of the rows as they are captured.
    dtypes: of the rows of a site as they come here, where it is another.
    mode: of the files.
    """

    kept_as: ClassVar[layout.Layout] = "per_file"

    def __init__(
        self,
        path: Path,
        dtype: str,
        hidden_size: int,
        dtypes: Mapping[Site, str],
        *,
        fsync: bool,
        mode: int = FILE_MODE,
        workers: Executor | None = None,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.dtypes = dtypes
        self.fsync = fsync
        self.mode = mode
        self.workers = workers
        # What those are told who read while rows are appended; None tells nobody.
        self.about: About | None = None
        self.runs: dict[Site, Runs] = {}
        # Whether rows were written before the end.
        self.early = False
        # Counted by who converts the rows.
        self.rows_overflowed: Counter[Site] = Counter()
        # Until `release`.
        self._prepared: list[_File] = []
        # Rows that are in files, and that nobody was told of.
        self._untold: dict[Site, list[Piece]] = {}

    def append(self, pieces: dict[Site, list[Piece]], tokens: TokenLog) -> None:
        """Write rows behind those already in the files, and tell of them; raises OSError, and then what is not written is left in `pieces`."""
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
                self._untold.setdefault(site, []).extend(parts)
        if self.about is not None and self._untold:
            tell(self.path, self.about, self._untold, tokens, self.mode)
            self._untold = {}

    def prepare(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]) -> None:
        """Take the last rows, the tokens of all, and how many rows each site was promised; raises OSError, having taken nothing."""
        runs = {site: list(spans) for site, spans in self.runs.items()}
        try:
            self._prepare(pieces, tokens, expected)
        except BaseException:
            self.runs = runs
            self.release()
            raise

    def undo(self) -> None:
        """Make what was written of it nothing, where it would be in the way when it is written again."""

    def release(self) -> None:
        """Let go of what was prepared: it is written."""
        self._prepared = []

    def _prepare(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]) -> None:
        for before, found in self._all(pieces, tokens):
            site, body = found.site, [*found.parts, found.positions, found.token_ids]
            name = layout.file_name(site)
            rows, dtype, row_bytes = self.rows(site), self.dtype_of(site), self.row_bytes(site)
            header = layout.header(site, dtype, rows, self.hidden_size, row_bytes)
            early = [np.memmap(self.path / name, np.uint8, "r", len(header), before * row_bytes)] if before else []
            digest = digest_of([header, *early, *body])
            size = len(header) + layout.part_bytes(rows, row_bytes)
            overflowed = self.rows_overflowed[site]
            entry = layout.SiteFile(*site, name, rows, expected.get(site), size, digest, dtype, overflowed)
            self._prepared.append(_File(entry, header, body, before * row_bytes))

    def write(self) -> list[layout.SiteFile]:
        """Write the last rows, the positions, token ids and headers; return what is in the files. Raises OSError."""
        make_directory(self.path, self.mode, parents=False)
        prepared = self._prepared
        list(map(self._write_file, prepared) if self.workers is None else self.workers.map(self._write_file, prepared))
        return [file.entry for file in prepared]

    def write_sidecar(self, sidecar: bytes) -> None:
        """Write the sidecar; raises OSError."""
        make_directory(self.path, self.mode, parents=False)
        (self.path / layout.RUNNING_NAME).unlink(missing_ok=True)
        fd = create_private(self.path / layout.SIDECAR_NAME, os.O_WRONLY | os.O_TRUNC, self.mode)
        try:
            write(fd, [sidecar], 0)
        finally:
            os.close(fd)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _all(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog) -> Iterator[tuple[int, SiteRows]]:
        """Yield of each site how many rows are in its file, and its other rows with the positions and tokens of all."""
        tails: dict[tuple[tuple[int, int], ...], tuple[Any, Any]] = {}  # sites mostly share their positions
        for site in sorted({*self.runs, *pieces}):
            parts = pieces.get(site, ())
            before = self.rows(site)
            self._extend(site, parts)
            key = tuple(self.runs[site])
            if key not in tails:
                tails[key] = _positions(key), np.concatenate([tokens.ids(*run) for run in key])
            yield before, SiteRows(site, [part.rows for part in parts], *tails[key])

    def _gathered(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog) -> Iterator[SiteRows]:
        """Yield the rows of each site, those that were written early mapped."""
        for before, rows in self._all(pieces, tokens):
            if before:
                shape = (before, self.row_bytes(rows.site))
                early = np.memmap(self.path / layout.file_name(rows.site), np.uint8, "r", layout.HEADER_BYTES, shape)
                rows.parts.insert(0, early)
            yield rows

    def dtype_of(self, site: Site) -> str:
        """Return the dtype of a site's rows in its file."""
        return self.dtypes.get(site, self.dtype)

    def row_bytes(self, site: Site) -> int:
        """Return how long a row of a site is in its file."""
        return self.hidden_size * DTYPES[self.dtype_of(site)].itemsize

    def rows(self, site: Site) -> int:
        """Return how many rows of a site are written."""
        return sum(stop - start for start, stop in self.runs.get(site, ()))

    def _write_file(self, file: _File) -> None:
        fd = create_private(self.path / file.entry.file, os.O_WRONLY, self.mode)
        try:
            if file.early_bytes:
                write(fd, file.body, len(file.header) + file.early_bytes)
                write(fd, [file.header], 0)
            else:
                write(fd, [file.header, *file.body], 0)
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
    """Return the xxh3 of parts one after another, as the sidecar says it."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _positions(runs: Sequence[tuple[int, int]]) -> Any:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in runs])


class PackedFile(RequestFiles):
    """A request whose rows come into one file when it is over; those that come early wait in files of their sites."""

    kept_as: ClassVar[layout.Layout] = "packed"
    # Of the file, from `prepare` to `write`, as are these.
    _parts: list[Any]
    _entries: list[layout.SiteFile]

    def release(self) -> None:
        """Let go of what was prepared: it is written."""
        self._parts = []

    def _prepare(self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]) -> None:
        sites = list(self._gathered(pieces, tokens))
        shapes = [(s.site, self.dtype_of(s.site), len(s.positions), self.row_bytes(s.site)) for s in sites]
        header, begins = layout.packed_header(shapes, self.hidden_size)
        bodies = [[*found.parts, found.positions, found.token_ids] for found in sites]
        self._parts = [header, *itertools.chain.from_iterable(bodies)]
        self._entries = [
            layout.SiteFile(
                *site,
                layout.PACKED_NAME,
                rows,
                expected.get(site),
                layout.part_bytes(rows, row_bytes),
                digest_of(body),
                dtype,
                self.rows_overflowed[site],
                begin,
            )
            for (site, dtype, rows, row_bytes), begin, body in zip(shapes, begins, bodies, strict=True)
        ]

    def write(self) -> list[layout.SiteFile]:
        """Write the file; return what is in it. Raises OSError."""
        make_directory(self.path, self.mode, parents=False)
        fd = create_private(self.path / layout.PACKED_NAME, os.O_WRONLY, self.mode)
        try:
            write(fd, self._parts, 0)
        finally:
            os.close(fd)
        if self.early:
            for entry in self._entries:
                (self.path / layout.file_name(entry.site)).unlink(missing_ok=True)
        return self._entries
