"""Layout `packed`: all rows of a request in one safetensors file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from capflow import private
from capflow.site import Site
from capflow_consumers import layout
from capflow_consumers.disk import write
from capflow_consumers.requestfiles import RequestFiles, digest_of
from capflow_consumers.rowbuffer import Piece
from capflow_consumers.tokenlog import TokenLog


class PackedFile(RequestFiles):
    """A request whose rows come into one file when it is over; those that come early wait in files of their sites."""

    kept_as: ClassVar[layout.Layout] = "packed"
    _parts: list[Any]  # of the file, from `prepare` to `write`, as are these
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
        private.make_directory(self.path, self.mode, parents=False)
        fd = private.create(self.path / layout.PACKED_NAME, os.O_WRONLY, self.mode)
        try:
            write(fd, self._parts, 0)
        finally:
            os.close(fd)
        if self.early:
            for entry in self._entries:
                (self.path / layout.file_name(entry.site)).unlink(missing_ok=True)
        return self._entries
