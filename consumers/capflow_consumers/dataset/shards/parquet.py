"""Parquet whose vectors lie in the file as they lie in memory.

Its pages and footers are made here, because libraries copy vectors value by value.

Invariant: a page of vectors ends in its rows, `[n, size]` in C order. So a writer that has written those bytes for
another reason (the message of an Arrow stream, in `capflow_consumers.dataset.shards.file`) makes them a page by writing
`vector_head` before them.

float32 and float16 are PLAIN. bfloat16 is stored as uint16, for which Parquet has INT32 only, of four bytes. A
dictionary of all 65,536 numbers in order makes each number its own index, and packed indices of 16 bits are the rows
themselves. int8 and float8_e4m3 have a dictionary of 256 numbers in the order of their bits, and indices of 8 bits. So
float8_e4m3, which Parquet does not have, is FLOAT for every reader. Each page has its CRC32.
https://parquet.apache.org/docs/file-format/ is the format.

Why this is not `pyarrow.parquet.ParquetWriter`, fed from the Arrow stream at the seal: that writer copies every row and
has no column of 16 bits. Measured against it on two cores, with requests of 3.7 and 59 MB of bfloat16, medians of five
turns in alternation:

* A hub writes 3.9 to 13 times as fast.
* 1.05 to 1.11 bytes go to the disk for each byte of rows, instead of 3.0.
* A sealed file is half as large.
* The memory of the process peaks at 221 MB instead of 854 MB.
* For the rows of 3.7 MB, that writer alone takes 11 ms of processor time, and 2.3 ms for opaque binary. Pages and seal
  take 0.6 ms here.

Rows as opaque binary, which no reader takes for numbers, still cost 1.8 to 2.8 times the time and 2.0 bytes. The CRC32
is isal's: zlib's costs a quarter of the speed where the disk is not waited for.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal import isal_zlib

from capflow_consumers.dataset.shards.quantization import CODES, numbers_of
from capflow_consumers.dataset.shards.thrift import BINARY, BYTE, I32, I64, LIST, STRUCT, TRUE, struct, varint

MAGIC = b"PAR1"

_BOOLEAN = 0
_INT32, _INT64, _FLOAT, _BYTE_ARRAY, _FIXED = 1, 2, 4, 6, 7
_PLAIN, _RLE, _RLE_DICTIONARY = 0, 3, 8
_REQUIRED, _REPEATED = 0, 2
_UTF8, _LIST, _UINT16, _UINT64, _INT8 = 0, 3, 12, 14, 15
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_ZSTD = 6
_NUMBERS = 1 << 16
# The longest text in the statistics, bytes.
_BOUND_LENGTH_MAX = 256
# Bytes of rows from which bfloat16 has the dictionary, which takes a quarter of that.
_DICTIONARY_WORTH_BYTES = 1 << 20

_VECTOR_TYPES = {
    "bfloat16": pa.uint16(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "int8": pa.int8(),
    "float8_e4m3": pa.float32(),
}

INDEX_BITS = {"bfloat16": 16, "int8": 8, "float8_e4m3": 8}
"""Of each dtype that has a dictionary: the bits of an index, which are those of the number."""


def _integer(bits: int, *, signed: bool) -> bytes:
    return struct((10, STRUCT, struct((1, BYTE, bits), (2, TRUE, signed))))


# Of each Arrow type: Parquet's physical type and its length, the converted type, and the logical type.
_LEAVES: dict[Any, tuple[int, int | None, int | None, bytes | None]] = {
    pa.string(): (_BYTE_ARRAY, None, _UTF8, struct((1, STRUCT, struct()))),
    pa.bool_(): (_BOOLEAN, None, None, None),
    pa.int32(): (_INT32, None, None, None),
    pa.int8(): (_INT32, None, _INT8, _integer(8, signed=True)),
    pa.uint16(): (_INT32, None, _UINT16, _integer(16, signed=False)),
    pa.uint64(): (_INT64, None, _UINT64, _integer(64, signed=False)),
    pa.float16(): (_FIXED, 2, None, struct((15, STRUCT, struct()))),
    pa.float32(): (_FLOAT, None, None, None),
}


class ColumnChunk(NamedTuple):
    """A column of one row group.

    begin: where its pages begin, in the file or in the bytes that hold them.
    nbytes: the length of the pages.
    data_page: where the data page begins, from `begin`; 0 where there is no dictionary before it.
    values: how many values there are.
    plain_bytes: the length of the pages without compression.
    lowest, highest: the bounds of the values, encoded; None where unknown.
    """

    begin: int
    nbytes: int
    data_page: int
    values: int
    plain_bytes: int
    compressed: bool = False
    lowest: bytes | None = None
    highest: bytes | None = None


class VectorPages(NamedTuple):
    """Pages of vectors, or the part of them before the rows.

    parts: their bytes, one after another.
    data_page: where the data page begins; 0 where there is no dictionary before it.
    body: where the data page's body begins, after its header.
    plain_body: the length of the body without compression.
    """

    parts: tuple[bytes, ...]
    data_page: int
    body: int
    plain_body: int

    @property
    def nbytes(self) -> int:
        """The length of the parts together."""
        return sum(map(len, self.parts))


class RowGroup(NamedTuple):
    """The columns of a row group.

    rows: how many rows there are.
    chunks: in the order of the columns, the vectors last.
    """

    rows: int
    chunks: list[ColumnChunk]


def schema(kind: str, size: int, about: dict[str, str]) -> pa.Schema:
    """Return the columns as an Arrow schema.

    kind: `bfloat16`, `float16`, `float32`, `int8` or `float8_e4m3`; the last two have a scale for each row.
    size: the length of a vector; 0 where vectors have several lengths.
    about: the metadata of the schema.
    """
    columns = [
        ("request", pa.string()),
        ("capture", pa.int32()),
        ("model", pa.string()),
        ("tag", pa.string()),
        ("phase", pa.string()),
        ("layer", pa.int32()),
        ("hook", pa.string()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("steered", pa.bool_()),
        ("xxh3", pa.uint64()),
        *([("scale", pa.float32())] if kind in CODES else []),
        ("vector", vector_type(_VECTOR_TYPES[kind], size)),
    ]
    return pa.schema([pa.field(*column, nullable=False) for column in columns], metadata=about)


def vector_type(number: Any, size: int) -> Any:
    """Return the Arrow type of a vector of numbers of a type; that of a list where `size` is 0."""
    return pa.list_(pa.field("element", number, nullable=False), size or -1)


def numbers(values: npt.NDArray[Any]) -> tuple[bytes, ColumnChunk]:
    """Return the page of a column of int32, uint64 or float32, and its chunk, which begins at 0."""
    page = _data_page(values.tobytes(), len(values), _PLAIN)
    signed = values.dtype.kind == "i"
    lowest, highest = (values.min().tobytes(), values.max().tobytes()) if signed else (None, None)
    return page, ColumnChunk(0, len(page), 0, len(values), len(page), lowest=lowest, highest=highest)


def flags(values: npt.NDArray[np.bool_]) -> tuple[bytes, ColumnChunk]:
    """Return the page of a column of booleans, and its chunk, which begins at 0."""
    page = _data_page(np.packbits(values, bitorder="little").tobytes(), len(values), _PLAIN)
    return page, ColumnChunk(0, len(page), 0, len(values), len(page))


def texts(words: Sequence[str], runs: Iterable[tuple[int, int]]) -> tuple[bytes, ColumnChunk]:
    """Return the pages of a column of texts, and their chunk, which begins at 0.

    words: the different texts.
    runs: `(index, count)` of the words, in the order of the rows.
    """
    encoded = [word.encode("utf-8", "replace") for word in words]
    width = max(1, (len(words) - 1).bit_length())
    index_bytes = (width + 7) // 8
    values = 0
    body = bytearray([width])
    for index, count in runs:
        body += varint(count << 1) + index.to_bytes(index_bytes, "little")
        values += count
    head = _dictionary_page(b"".join(len(word).to_bytes(4, "little") + word for word in encoded), len(words))
    pages = head + _data_page(bytes(body), values, _RLE_DICTIONARY)
    lowest, highest = (min(encoded), max(encoded)) if max(map(len, encoded)) <= _BOUND_LENGTH_MAX else (None, None)
    return pages, ColumnChunk(0, len(pages), len(head), values, len(pages), lowest=lowest, highest=highest)


def vector_head(kind: str, size: int, rows: int, crc: int, nbytes: int) -> VectorPages:
    """Return the bytes that make rows `[rows, size]` pages when they stand before them.

    crc: the CRC32 of `vector_levels` and the rows after them.
    nbytes: the length of the rows.
    """
    dictionary = _numbers_page(kind, compressed=False) if kind in INDEX_BITS else b""
    header, levels = _vector_header(kind, size, rows, crc, nbytes), vector_levels(kind, size, rows)
    body = len(dictionary) + len(header)
    return VectorPages((dictionary, header, levels), len(dictionary), body, len(levels) + nbytes)


def vector_head_bytes_max(kind: str, size: int, rows: int, nbytes: int) -> int:
    """Return the largest length of `vector_head` over all values of the CRC32."""
    dictionary = len(_numbers_page(kind, compressed=False)) if kind in INDEX_BITS else 0
    crc = 1 << 31  # the CRC32 with the longest encoding
    return dictionary + len(_vector_header(kind, size, rows, crc, nbytes)) + len(vector_levels(kind, size, rows))


def vector_pages(kind: str, size: int, rows: int, values: bytes, *, compressed: bool) -> VectorPages:
    """Return rows `[rows, size]` as pages.

    Few rows of bfloat16, and rows whose numbers are no multiple of 8, go without the dictionary, in 32 bits a number.
    """
    wide = kind == "bfloat16" and (len(values) < _DICTIONARY_WORTH_BYTES or rows * size % 8)
    if wide:
        values = np.frombuffer(values, np.uint16).astype(np.int32).tobytes()
    elif kind in CODES:
        values += _padding(rows * size)
    plain = vector_levels("float32" if wide else kind, size, rows) + values
    page = pa.compress(plain, "zstd", asbytes=True) if compressed else plain
    dictionary = _numbers_page(kind, compressed=compressed) if kind in INDEX_BITS and not wide else b""
    encoding = _RLE_DICTIONARY if dictionary else _PLAIN
    header = _page_header(_DATA_PAGE, len(plain), len(page), isal_zlib.crc32(page), rows * size, encoding)
    return VectorPages((dictionary, header, page), len(dictionary), len(dictionary) + len(header), len(plain))


def page_rows(kind: str, size: int, rows: int, page: Any, plain_bytes: int) -> npt.NDArray[np.uint8]:
    """Decompress the body of a compressed data page; return its rows `[rows, row_bytes]` uint8.

    plain_bytes: the length of the body without compression.

    Raises ValueError when that length fits no such rows.
    """
    plain = np.frombuffer(pa.decompress(page, plain_bytes, "zstd"), np.uint8)
    if kind in CODES:
        begin, count = len(vector_levels(kind, size, rows)), rows * size
        if begin + count + len(_padding(count)) != plain_bytes:
            raise ValueError(plain_bytes)
        return plain[begin : begin + count].reshape(rows, size)
    # `wide` first: without it, bfloat16 comes only in multiples of 8 numbers.
    for wide in (True, False):
        levels = len(vector_levels("float32" if wide else kind, size, rows))
        item = 4 if wide else _VECTOR_TYPES[kind].bit_width // 8
        if levels + rows * size * item == plain_bytes and (kind == "bfloat16" or not wide):
            values = plain[levels:]
            narrow = values.view(np.int32).astype(np.uint16).view(np.uint8) if wide else values
            return narrow.reshape(rows, -1)
    raise ValueError(plain_bytes)


@functools.lru_cache(maxsize=64)
def vector_levels(kind: str, size: int, rows: int) -> bytes:
    """Return the levels at the start of a page's body: they say that each row is a list of `size` numbers."""
    count = rows * size
    row = varint(1 << 1) + b"\0" + (varint((size - 1) << 1) + b"\1" if size > 1 else b"")
    start = b""
    if kind in INDEX_BITS:
        assert kind in CODES or count % 8 == 0
        start = bytes([INDEX_BITS[kind]]) + varint((count + 7) // 8 << 1 | 1)
    return _counted(row * rows) + _counted(varint(count << 1) + b"\1") + start


def footer(columns: pa.Schema, groups: Sequence[RowGroup], created_by: str) -> bytes:
    """Return the end of a file, from the metadata to the last byte.

    columns: as in `schema`.
    created_by: the name and version of the writer.
    """
    leaves = [_path(field) for field in columns]
    elements = [struct((4, BINARY, b"schema"), (5, I32, len(columns)))]
    for field in columns:
        elements += _elements(field)
    about = {
        **{key.decode(): value.decode() for key, value in (columns.metadata or {}).items()},
        "ARROW:schema": base64.b64encode(columns.serialize()).decode(),
    }
    values = (field.type.value_type if _is_vector(field) else field.type for field in columns)
    types = [_LEAVES[value][0] for value in values]
    order = struct((1, STRUCT, struct()))
    metadata = struct(
        (1, I32, 2),
        (2, LIST, (STRUCT, elements)),
        (3, I64, sum(group.rows for group in groups)),
        (4, LIST, (STRUCT, [_row_group(group, types, leaves) for group in groups])),
        (
            5,
            LIST,
            (STRUCT, [struct((1, BINARY, k.encode()), (2, BINARY, v.encode())) for k, v in about.items()]),
        ),
        (6, BINARY, created_by.encode()),
        (7, LIST, (STRUCT, [order] * len(columns))),
    )
    return metadata + len(metadata).to_bytes(4, "little") + MAGIC


def vector_chunk(
    kind: str, begin: int, length: int, values: int, pages: VectorPages, *, compressed: bool
) -> ColumnChunk:
    """Return the chunk of pages of vectors.

    kind: the dtype of the numbers.
    begin: where they lie in the file.
    length: the length of the pages and of the rows after them.
    values: how many numbers there are.
    pages: their parts.
    """
    dictionary = len(_numbers_page(kind, compressed=False)) if pages.data_page else 0
    plain_bytes = dictionary + pages.body - pages.data_page + pages.plain_body
    return ColumnChunk(begin, length, pages.data_page, values, plain_bytes, compressed)


def _row_group(group: RowGroup, types: list[int], leaves: list[tuple[bytes, ...]]) -> bytes:
    chunks = [_column_chunk(chunk, kind, path) for chunk, kind, path in zip(group.chunks, types, leaves, strict=True)]
    return struct(
        (1, LIST, (STRUCT, chunks)),
        (2, I64, sum(chunk.plain_bytes for chunk in group.chunks)),
        (3, I64, group.rows),
        (5, I64, group.chunks[0].begin),
        (6, I64, sum(chunk.nbytes for chunk in group.chunks)),
    )


def _column_chunk(chunk: ColumnChunk, kind: int, path: tuple[bytes, ...]) -> bytes:
    statistics = None
    if chunk.lowest is not None:
        statistics = struct((3, I64, 0), (5, BINARY, chunk.highest), (6, BINARY, chunk.lowest))
    metadata = struct(
        (5, I64, chunk.values),
        (6, I64, chunk.plain_bytes),
        (7, I64, chunk.nbytes),
        (9, I64, chunk.begin + chunk.data_page),
        (11, I64, chunk.begin if chunk.data_page else None),
        (12, STRUCT, statistics),
        head=_column_head(kind, path, dictionary=chunk.data_page > 0, compressed=chunk.compressed),
        before=4,
    )
    return struct((2, I64, 0), (3, STRUCT, metadata))


@functools.lru_cache(maxsize=64)
def _column_head(kind: int, path: tuple[bytes, ...], *, dictionary: bool, compressed: bool) -> bytes:
    """Return the first four fields of a chunk's metadata, encoded; they are the same in every row group."""
    fields = struct(
        (1, I32, kind),
        (2, LIST, (I32, [_PLAIN, _RLE, _RLE_DICTIONARY] if dictionary else [_PLAIN, _RLE])),
        (3, LIST, (BINARY, path)),
        (4, I32, _ZSTD if compressed else 0),
    )
    return fields[:-1]  # without the end mark


def _path(field: pa.Field) -> tuple[bytes, ...]:
    name = field.name.encode()
    return (name, b"list", b"element") if _is_vector(field) else (name,)


def _is_vector(field: pa.Field) -> bool:
    return bool(pa.types.is_fixed_size_list(field.type) or pa.types.is_list(field.type))


def _elements(field: pa.Field) -> list[bytes]:
    """Return the schema elements of a column."""
    name, kind = field.name.encode(), field.type
    if not _is_vector(field):
        return [_leaf(name, kind)]
    list_type = struct((3, STRUCT, struct()))
    return [
        struct((3, I32, _REQUIRED), (4, BINARY, name), (5, I32, 1), (6, I32, _LIST), (10, STRUCT, list_type)),
        struct((3, I32, _REPEATED), (4, BINARY, b"list"), (5, I32, 1)),
        _leaf(b"element", kind.value_type),
    ]


def _leaf(name: bytes, kind: Any) -> bytes:
    physical, length, converted, logical = _LEAVES[kind]
    return struct(
        (1, I32, physical),
        (2, I32, length),
        (3, I32, _REQUIRED),
        (4, BINARY, name),
        (6, I32, converted),
        (10, STRUCT, logical),
    )


def _data_page(body: bytes, values: int, encoding: int) -> bytes:
    return _page_header(_DATA_PAGE, len(body), len(body), isal_zlib.crc32(body), values, encoding) + body


def _dictionary_page(body: bytes, values: int, plain_bytes: int | None = None) -> bytes:
    length = len(body) if plain_bytes is None else plain_bytes
    return _page_header(_DICTIONARY_PAGE, length, len(body), isal_zlib.crc32(body), values, _PLAIN) + body


@functools.cache
def _numbers_page(kind: str, *, compressed: bool) -> bytes:
    """Return the page of the dictionary in which the bits of each number are its index."""
    if kind == "bfloat16":
        values: npt.NDArray[Any] = np.arange(_NUMBERS, dtype=np.int32)
    else:
        values = numbers_of(kind).astype(np.int32 if kind == "int8" else np.float32)
    body = values.tobytes()
    page = pa.compress(body, "zstd", asbytes=True) if compressed else body
    return _dictionary_page(page, len(values), len(body))


def _padding(count: int) -> bytes:
    """Return the zeros that fill `count` indices of one byte up to a multiple of 8."""
    return bytes(-count % 8)


def _vector_header(kind: str, size: int, rows: int, crc: int, nbytes: int) -> bytes:
    length = len(vector_levels(kind, size, rows)) + nbytes
    encoding = _RLE_DICTIONARY if kind in INDEX_BITS else _PLAIN
    return _page_header(_DATA_PAGE, length, length, crc, rows * size, encoding)


def _page_header(kind: int, plain_bytes: int, nbytes: int, crc: int, values: int, encoding: int) -> bytes:
    """Return the header of a page.

    crc: of the page's bytes as they are stored.
    """
    signed = crc - (1 << 32) if crc >> 31 else crc
    return struct(
        (1, I32, kind),
        (2, I32, plain_bytes),
        (3, I32, nbytes),
        (4, I32, signed),
        (5 if kind == _DATA_PAGE else 7, STRUCT, _page_kind(kind, values, encoding)),
    )


@functools.lru_cache(maxsize=64)
def _page_kind(kind: int, values: int, encoding: int) -> bytes:
    """Return the part of a page's header about its values, which is mostly the same in a row group's columns."""
    if kind == _DATA_PAGE:
        return struct((1, I32, values), (2, I32, encoding), (3, I32, _RLE), (4, I32, _RLE))
    return struct((1, I32, values), (2, I32, encoding))


def _counted(levels: bytes) -> bytes:
    return len(levels).to_bytes(4, "little") + levels
