"""One request's files while they are written, in a directory that nobody else looks into.

Rows may come in several parts: each is appended behind the last, and `finish` writes what follows the rows, and the header.
No file is open between calls, so that any number of requests can be under way.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from capflow.frame import DTYPES
from capflow.site import Site
from capflow_consumers import layout
from capflow_consumers.rowbuffer import Piece
from capflow_consumers.tokenlog import TokenLog

_PARTS_PER_CALL_MAX = 1024  # IOV_MAX of Linux

Runs = list[tuple[int, int]]
"""`(start, stop)` of the positions written, in the order of the rows."""


class RequestFiles:
    """The files of one request in `path`, which is made when the first is.

    dtype: that of the rows as they are captured; dtypes: of the rows of a site as they come here, where it is another.
    """

    def __init__(self, path: Path, dtype: str, hidden_size: int, dtypes: Mapping[Site, str], *, fsync: bool) -> None:
        self.path = path
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.dtypes = dtypes
        self.fsync = fsync
        self.runs: dict[Site, Runs] = {}
        self.rows_overflowed: Counter[Site] = Counter()  # counted by who converts the rows

    def append(self, pieces: Mapping[Site, Sequence[Piece]]) -> None:
        """Write rows behind those already in the files; raises OSError."""
        self.path.mkdir(exist_ok=True)
        for site, parts in pieces.items():
            offset = layout.HEADER_BYTES + self.rows(site) * self.row_bytes(site)
            fd = os.open(self.path / layout.file_name(site), os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                _write(fd, [part.rows for part in parts], offset)
            finally:
                os.close(fd)
            self._extend(site, parts)

    def finish(
        self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]
    ) -> list[layout.SiteFile]:
        """Write the last rows, the positions, token ids and headers; return what is in the files. Raises OSError."""
        self.path.mkdir(exist_ok=True)
        tails: dict[tuple[tuple[int, int], ...], list[Any]] = {}  # sites mostly share their positions
        entries = []
        for site in sorted({*self.runs, *pieces}):
            parts = pieces.get(site, ())
            before = self.rows(site)
            self._extend(site, parts)
            key = tuple(self.runs[site])
            if key not in tails:
                tails[key] = [_positions(key), np.concatenate([tokens.ids(*run) for run in key])]
            body = [*(part.rows for part in parts), *tails[key]]
            entries.append(self._finish_file(site, body, before, expected.get(site)))
        return entries

    def write_sidecar(self, sidecar: bytes) -> None:
        """Write the sidecar and make the directory's entries last; raises OSError."""
        self.path.mkdir(exist_ok=True)
        fd = os.open(self.path / layout.SIDECAR_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write(fd, [sidecar], 0)
            if self.fsync:
                sync_files(fd, [self.path / layout.file_name(site) for site in self.runs])
        finally:
            os.close(fd)
        if self.fsync:
            sync_directory(self.path)

    def dtype_of(self, site: Site) -> str:
        """Return the dtype of a site's rows in its file."""
        return self.dtypes.get(site, self.dtype)

    def row_bytes(self, site: Site) -> int:
        """Return how long a row of a site is in its file."""
        return self.hidden_size * DTYPES[self.dtype_of(site)].itemsize

    def rows(self, site: Site) -> int:
        """Return how many rows of a site are written."""
        return sum(stop - start for start, stop in self.runs.get(site, ()))

    def _finish_file(self, site: Site, body: list[Any], before: int, expected: int | None) -> layout.SiteFile:
        name = layout.file_name(site)
        rows, dtype, row_bytes = self.rows(site), self.dtype_of(site), self.row_bytes(site)
        header = layout.header(site, dtype, rows, self.hidden_size, row_bytes)
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if before:
                end = _write(fd, body, layout.HEADER_BYTES + before * row_bytes)
                _write(fd, [header], 0)
                with mmap.mmap(fd, end, access=mmap.ACCESS_READ) as whole:
                    digest = xxhash.xxh3_64_hexdigest(whole)
            else:
                end = _write(fd, [header, *body], 0)
                hasher = xxhash.xxh3_64(header)
                for part in body:
                    hasher.update(part)
                digest = hasher.hexdigest()
        finally:
            os.close(fd)
        overflowed = self.rows_overflowed[site]
        return layout.SiteFile(site.layer, site.hook, name, rows, expected, end, digest, dtype, overflowed)

    def _extend(self, site: Site, parts: Sequence[Piece]) -> None:
        runs = self.runs.setdefault(site, [])
        for start, stop in itertools.chain.from_iterable(part.spans for part in parts):
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))


def sync_files(fd: int, others: Sequence[Path]) -> None:
    """Get an open file and others of its file system onto the disk; raises OSError.

    One `syncfs` does it where it reports errors (Linux 5.8): a journal commit for each of many files took 5 to 8 times
    as long. It waits for what others wrote to the same file system, too.
    """
    if _syncfs is not None:
        if _syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed")
        return
    os.fsync(fd)
    for path in others:
        other = os.open(path, os.O_RDONLY)
        try:
            os.fsync(other)
        finally:
            os.close(other)


def _find_syncfs() -> Any:
    if sys.platform != "linux" or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 8):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_syncfs = _find_syncfs()


def sync_directory(path: Path) -> None:
    """Make the entries of a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _positions(runs: Sequence[tuple[int, int]]) -> Any:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in runs])


def _write(fd: int, parts: Sequence[Any], offset: int) -> int:
    """Write the parts one after another from `offset` on; return where they end."""
    views = [memoryview(part).cast("B") for part in parts]
    index = 0
    while index < len(views):
        written = os.pwritev(fd, views[index : index + _PARTS_PER_CALL_MAX], offset)
        offset += written
        while index < len(views) and written >= len(views[index]):
            written -= len(views[index])
            index += 1
        if written:
            views[index] = views[index][written:]
    return offset
