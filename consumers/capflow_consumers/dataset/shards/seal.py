"""Sealing: making a Parquet file of a shard's stream.

Row groups point into the stream. Behind the stream come the other columns, the index and the footer:

    stream, its end                 as `capflow_consumers.dataset.shards.stream` describes it
    vectors                         of the small batches, those of one width copied together into larger row groups
    the other columns               of each row group: who, where, and the rows' hashes
    index                           the requests, and the hashes of all bytes before it that are no rows, as msgpack
    locator                         where the index lies, and the hashes of index and footer
    footer                          Parquet's

Invariant: sealing does not change the stream, so an interrupted seal is done again from the stream. Every byte before
the index has a hash: a request's row has its own, in its batch; the index has those of the bytes between the rows.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

import capflow
from capflow import limits
from capflow.capture.site import HOOKS
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.capture import steered_at
from capflow_consumers.dataset.disk import write
from capflow_consumers.dataset.shards import parquet
from capflow_consumers.dataset.shards.stream import END, Kind, StoredBatch, chunk_of, decode, opened, rows_of

FORMAT = 2
BLOCK_BYTES = 4 * limits.MIB
# The largest size of the rows in one row group that is made of small batches.
GATHERED_BYTES_MAX = 64 * limits.MIB

PHASES = "prompt", "generated"

_LOCATOR = struct.Struct("<8s5Q")
_MAGIC = b"capflow1"


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One capture.

    request: the request's id.
    engine: the engine's id.
    batches: where its batches begin, that of the commit last.
    """

    request: str
    engine: str
    batches: list[int]


class IndexFormat(msgspec.Struct, frozen=True, array_like=True):
    """The first field of an index, in every format."""

    format: int


class Index(msgspec.Struct, frozen=True, array_like=True):
    """The index of a shard.

    rows: the begin and length of the ranges of rows, which have hashes of their own.
    blocks: the xxh3 of each of `blocks_of`.
    """

    format: int
    requests: list[Entry]
    rows: list[tuple[int, int]]
    blocks: list[int]


class Located(NamedTuple):
    """Where a shard's index and footer lie, each as begin, length and xxh3."""

    index_at: tuple[int, int, int]
    footer_at: tuple[int, int, int]


class _Piece(NamedTuple):
    """A batch of a request.

    first: how many rows of the request are in earlier batches.
    """

    sidecar: layout.Sidecar
    first: int
    batch: StoredBatch


class _Grouped(NamedTuple):
    """What was written of the row groups.

    rows: the ranges of rows in the stream.
    tip: the end of the file.
    shapes: every shape of a row at each site where it is not `[hidden_size]`.
    """

    groups: list[parquet.RowGroup]
    rows: list[tuple[int, int]]
    tip: int
    kind: Kind
    shapes: dict[str, set[tuple[int, ...]]]


def seal(path: Path, end: int, entries: Sequence[Entry]) -> int:
    """Make a Parquet file of a stream that ends at `end`; return the length of the file. Raises OSError."""
    with path.open("r+b") as file:
        fd = file.fileno()
        os.ftruncate(fd, end)
        with mmap.mmap(fd, end, access=mmap.ACCESS_READ) as whole:
            groups, rows, tip, kind, shapes = _grouped(fd, pa.py_buffer(whole), write(fd, [END], end), entries)
        with mmap.mmap(fd, tip, access=mmap.ACCESS_READ) as whole:
            blocks = [xxhash.xxh3_64_intdigest(block) for _, block in blocks_of(whole, tip, rows)]
        index = msgspec.msgpack.encode(Index(FORMAT, list(entries), rows, blocks))
        columns = parquet.schema(kind.dtype, kind.width, kind.about() | _about(shapes))
        footer = parquet.footer(columns, groups, f"capflow {capflow.__version__}")
        locator = _LOCATOR.pack(
            _MAGIC,
            tip,
            len(index),
            xxhash.xxh3_64_intdigest(index),
            xxhash.xxh3_64_intdigest(footer),
            xxhash.xxh3_64_intdigest(struct.pack("<2Q", tip, len(index))),
        )
        return write(fd, [index, locator, footer], tip)


def locate(file: Any) -> Located | None:
    """Return where index and footer of a mapped file lie; None when the file is no sealed shard."""
    size = file.size
    tail = bytes(file.slice(size - 8)) if size > 8 + _LOCATOR.size else b""
    footer = size - 8 - int.from_bytes(tail[:4], "little")
    if tail[4:] != parquet.MAGIC or footer < _LOCATOR.size:
        return None
    magic, begin, length, index, about, own = _LOCATOR.unpack(bytes(file.slice(footer - _LOCATOR.size, _LOCATOR.size)))
    if magic != _MAGIC or own != xxhash.xxh3_64_intdigest(struct.pack("<2Q", begin, length)):
        return None
    if begin + length + _LOCATOR.size != footer:
        return None
    return Located((begin, length, index), (footer, size - footer, about))


def blocks_of(file: Any, end: int, rows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a file before `end` that are no rows, in blocks, each with its place."""
    view = memoryview(file)
    for begin, stop in ranges_of(end, rows):
        yield begin, view[begin:stop]


def ranges_of(end: int, rows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield where each of `blocks_of` begins and ends."""
    ends = [0, *(begin + length for begin, length in rows)]
    for first, last in zip(ends, [*(begin for begin, _ in rows), end], strict=True):
        for begin in range(first, last, BLOCK_BYTES):
            yield begin, min(last, begin + BLOCK_BYTES)


def _about(shapes: dict[str, set[tuple[int, ...]]]) -> dict[str, str]:
    """Return the metadata `capflow.shapes`: the shape of a row at each site that has one of its own, and one only."""
    plain = {site: list(next(iter(of_site))) for site, of_site in sorted(shapes.items()) if len(of_site) == 1}
    return {"capflow.shapes": json.dumps(plain)} if plain else {}


def _grouped(fd: int, file: Any, tip: int, entries: Sequence[Entry]) -> _Grouped:
    """Write the columns of the row groups after the stream."""
    kind, schema, _ = opened(file)
    groups: list[parquet.RowGroup] = []
    # By width: the batches that are copied together, and their bytes.
    small: dict[int, tuple[list[_Piece], int]] = {}
    rows: list[tuple[int, int]] = []
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for piece in _pieces(file, kind, schema, entries):
        if piece.batch.rows is not None:
            rows.append((piece.batch.rows.ctypes.data - file.address, piece.batch.rows.nbytes))
        if piece.sidecar.format == layout.FORMAT_SHAPED and not piece.first:
            for each in piece.sidecar.sites:
                if each.shape:
                    shapes.setdefault(str(each.site), set()).add(each.shape)
        chunk = chunk_of(piece.batch, kind)
        if chunk is not None:
            tip = _add(fd, tip, groups, [piece], chunk)
            continue
        width = piece.batch.width
        nbytes = len(piece.batch.positions) * kind.bytes_of(width)
        pieces, held = small.get(width, ([], 0))
        if pieces and held + nbytes > GATHERED_BYTES_MAX:
            tip = _gather(fd, tip, groups, pieces, kind)
            pieces, held = [], 0
        pieces.append(piece)
        small[width] = pieces, held + nbytes
    for pieces, _ in small.values():
        tip = _gather(fd, tip, groups, pieces, kind)
    return _Grouped(groups, sorted(rows), tip, kind, shapes)


def _pieces(file: Any, kind: Kind, schema: pa.Schema, entries: Sequence[Entry]) -> Iterator[_Piece]:
    for entry in entries:
        commit = decode(file, entry.batches[-1], kind, schema)
        sidecar = layout.read_sidecar(commit.sidecar or b"")
        first = 0
        for begin in entry.batches[:-1]:
            batch = decode(file, begin, kind, schema)
            yield _Piece(sidecar, first, batch)
            first += len(batch.positions)


def _gather(fd: int, tip: int, groups: list[parquet.RowGroup], pieces: list[_Piece], kind: Kind) -> int:
    values = b"".join(rows_of(piece.batch, kind).tobytes() for piece in pieces)
    count, width = sum(len(piece.batch.positions) for piece in pieces), pieces[0].batch.width
    pages = parquet.vector_pages(kind.dtype, width, count, values, compressed=False)
    chunk = parquet.vector_chunk(kind.dtype, tip, pages.nbytes, count * width, pages, compressed=False)
    return _add(fd, write(fd, pages.parts, tip), groups, pieces, chunk)


def _add(fd: int, tip: int, groups: list[parquet.RowGroup], pieces: list[_Piece], vectors: parquet.ColumnChunk) -> int:
    """Write the other columns of a row group, and add it to `groups`; return the end of the file."""
    chunks = []
    written = []
    for pages, chunk in _columns(pieces):
        chunks.append(chunk._replace(begin=tip))
        written.append(pages)
        tip += len(pages)
    write(fd, written, chunks[0].begin)
    rows = sum(len(piece.batch.positions) for piece in pieces)
    groups.append(parquet.RowGroup(rows, [*chunks, vectors]))
    return tip


def _columns(pieces: list[_Piece]) -> Iterator[tuple[bytes, parquet.ColumnChunk]]:
    """Yield the pages of each column before the vectors, in the schema's order."""
    counts = [len(piece.batch.positions) for piece in pieces]
    sites = [site for piece in pieces for site in _sites(piece)]
    positions = _joined([piece.batch.positions for piece in pieces])
    yield _texts([piece.sidecar.request for piece in pieces], counts)
    yield parquet.numbers(np.repeat(np.array([piece.sidecar.capture or 1 for piece in pieces], np.int32), counts))
    yield _texts([piece.sidecar.model for piece in pieces], counts)
    yield _texts([piece.sidecar.tag for piece in pieces], counts)
    yield parquet.texts(PHASES, _phases(positions, pieces, counts))
    layers = np.array([entry.layer for entry, _ in sites], np.int32)
    yield parquet.numbers(np.repeat(layers, [count for _, count in sites]))
    yield parquet.texts(HOOKS, _merged((HOOKS.index(entry.hook), count) for entry, count in sites))
    yield parquet.numbers(positions)
    yield parquet.numbers(_joined([piece.batch.token_ids for piece in pieces]))
    yield parquet.flags(np.concatenate([_steered(piece) for piece in pieces]))
    yield parquet.numbers(_joined([piece.batch.hashes for piece in pieces]))
    scales = [piece.batch.scales for piece in pieces if piece.batch.scales is not None]
    if scales:
        yield parquet.numbers(_joined(scales))


def _steered(piece: _Piece) -> npt.NDArray[np.bool_]:
    """Return whether each row's position was steered; False where the engine did not say it."""
    steered = steered_at(piece.sidecar, piece.batch.positions)
    return np.zeros(len(piece.batch.positions), np.bool_) if steered is None else steered


def _texts(words: list[str], counts: list[int]) -> tuple[bytes, parquet.ColumnChunk]:
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    runs = ((numbers[word], count) for word, count in zip(words, counts, strict=True))
    return parquet.texts(list(numbers), _merged(runs))


def _merged(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield runs `(index, count)`, with neighbours of the same index joined."""
    for index, same in itertools.groupby(runs, key=itemgetter(0)):
        yield index, sum(count for _, count in same)


def _phases(positions: npt.NDArray[np.int32], pieces: list[_Piece], counts: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of rows of one phase as `(index in PHASES, count)`."""
    prompts = np.repeat([piece.sidecar.prompt_length for piece in pieces], counts)
    generated = positions >= prompts
    starts = [0, *(np.flatnonzero(generated[1:] != generated[:-1]) + 1).tolist(), len(generated)]
    for start, stop in itertools.pairwise(starts):
        yield int(generated[start]), stop - start


def _sites(piece: _Piece) -> Iterator[tuple[layout.SiteFile, int]]:
    """Yield the sites of a piece's rows, in order, each with its number of rows in the piece."""
    begin, end = piece.first, piece.first + len(piece.batch.positions)
    first = 0
    for entry in piece.sidecar.sites:
        count = min(end, first + entry.rows) - max(begin, first)
        if count > 0:
            yield entry, count
        first += entry.rows


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
