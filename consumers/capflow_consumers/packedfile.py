"""Layout `packed`: all rows of a request in one safetensors file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import xxhash

from capflow.site import Site
from capflow_consumers import layout
from capflow_consumers.disk import write
from capflow_consumers.requestfiles import RequestFiles
from capflow_consumers.rowbuffer import Piece
from capflow_consumers.tokenlog import TokenLog


class PackedFile(RequestFiles):
    """A request whose rows come into one file when it is over; those that come early wait in files of their sites."""

    kept_as: ClassVar[layout.Layout] = "packed"

    def finish(
        self, pieces: Mapping[Site, Sequence[Piece]], tokens: TokenLog, expected: Mapping[Site, int]
    ) -> list[layout.SiteFile]:
        """Write the file; return what is in it. Raises OSError."""
        self.path.mkdir(exist_ok=True)
        sites = list(self._gathered(pieces, tokens))
        shapes = [(s.site, self.dtype_of(s.site), len(s.positions), self.row_bytes(s.site)) for s in sites]
        header, begins = layout.packed_header(shapes, self.hidden_size)
        bodies = [[*found.parts, found.positions, found.token_ids] for found in sites]
        fd = os.open(self.path / layout.PACKED_NAME, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            write(fd, [header, *itertools.chain.from_iterable(bodies)], 0)
        finally:
            os.close(fd)
        if self.early:
            for found in sites:
                (self.path / layout.file_name(found.site)).unlink(missing_ok=True)
        return [
            layout.SiteFile(
                *site,
                layout.PACKED_NAME,
                rows,
                expected.get(site),
                layout.part_bytes(rows, row_bytes),
                _digest(body),
                dtype,
                self.rows_overflowed[site],
                begin,
            )
            for (site, dtype, rows, row_bytes), begin, body in zip(shapes, begins, bodies, strict=True)
        ]

    def _files(self) -> list[Path]:
        return [self.path / layout.PACKED_NAME]


def _digest(parts: Sequence[object]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)  # type: ignore[arg-type]
    return digest.hexdigest()
