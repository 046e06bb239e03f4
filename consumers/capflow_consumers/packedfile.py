"""Layout `packed`: all rows of a request in one safetensors file."""

from __future__ import annotations

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
        fd = os.open(self.path / layout.PACKED_NAME, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            end = write(fd, [header], 0)
            entries = []
            for found, begin in zip(sites, begins, strict=True):
                assert begin == end
                body = [*found.parts, found.positions, found.token_ids]
                hashing = self.workers.submit(_digest, body) if self.workers is not None else None
                end = write(fd, body, end)
                digest = hashing.result() if hashing is not None else _digest(body)
                entries.append(
                    layout.SiteFile(
                        *found.site,
                        layout.PACKED_NAME,
                        len(found.positions),
                        expected.get(found.site),
                        end - begin,
                        digest,
                        self.dtype_of(found.site),
                        self.rows_overflowed[found.site],
                        begin,
                    )
                )
        finally:
            os.close(fd)
        for site in self.runs:
            (self.path / layout.file_name(site)).unlink(missing_ok=True)
        return entries

    def _files(self) -> list[Path]:
        return [self.path / layout.PACKED_NAME]


def _digest(parts: Sequence[object]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)  # type: ignore[arg-type]
    return digest.hexdigest()
