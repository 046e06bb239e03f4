"""Rows that identify themselves, cheap enough to make and check at thousands of frames a second.

The row of a request's position at a site is a window into one pool of random numbers. Request, position and site decide
its offset, and their hash is in its first two numbers. So a row that is misplaced, repeated or taken from another
request differs in every byte. All numbers are finite, and the first is exact in float32, so that a probe which reads
only this number can score it.
"""

from __future__ import annotations

import zlib

import numpy as np

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site

HIDDEN = 4096
SITES = (Site(0, "post_block"), Site(1, "post_block"))
BESIDE_HIDDEN = 1024  # of the engine beside
ROW_BYTES = HIDDEN * 4

_POOL = np.random.default_rng(7).standard_normal(1 << 18, dtype=np.float32)


def model_of(hidden: int) -> ModelInfo:
    """Return the model of an engine of this width."""
    return ModelInfo("chaos", len(SITES), hidden, "float32", SITES)


def seed_of(request: str) -> int:
    """Return what a request's rows are made of."""
    return zlib.crc32(request.encode())


def hashes(seed: int, site: int, start: int, stop: int) -> np.ndarray:
    """Return a hash, 64 bits, of each position of a request at site number `site`."""
    mixed = np.arange(start, stop, dtype=np.uint64) + np.uint64((seed << 24) ^ (site << 20))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def rows_of(seed: int, site: int, start: int, stop: int, hidden: int = HIDDEN) -> np.ndarray:
    """Return the rows of positions `start..stop` of a request, `[stop - start, hidden]` float32."""
    mixed = hashes(seed, site, start, stop)
    rows = np.empty((stop - start, hidden), np.float32)
    write_rows(rows, mixed)
    return rows


def write_rows(rows: np.ndarray, mixed: np.ndarray) -> None:
    """Write the rows that belong to these hashes."""
    for row, value in zip(rows, mixed.tolist(), strict=True):
        begin = value % (len(_POOL) - HIDDEN)
        row[:] = _POOL[begin : begin + len(row)]
        row[0] = value >> 40
        row[1] = value >> 8 & 0xFFFFFF


def scores_of(seed: int, site: int, start: int, stop: int) -> np.ndarray:
    """Return the first number of each of these rows."""
    return (hashes(seed, site, start, stop) >> np.uint64(40)).astype(np.float32)


def token_of(seed: int, position: int) -> int:
    """Return the token id of a request's position."""
    return (seed + position) % 50_000
