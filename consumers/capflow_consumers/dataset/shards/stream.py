"""The stream of a shard: an Arrow stream after the eight bytes with which Parquet begins. Sealing keeps it as it is.

    PAR1 0000                     Parquet's magic, filled up
    schema                        Arrow's, with `capflow.dtype`, `capflow.hidden_size` and `capflow.compression`
    batch … batch, commit         a request: its rows in the order of its sites, then one batch with the sidecar
    batch … batch, commit         the next one

A batch has for each row `position`, `token_id`, `xxh3` (of the row's bytes) and its `vector`. In the first row, `page`
holds the bytes that Parquet needs before the vectors, which follow it in the file. Where `page` is empty, sealing
copies the vectors into a page. With compression, `page` holds a whole compressed page, and there are no vectors.
A page begins with four 32-bit numbers that say where its parts are: see `page_of`. A commit has one row, of position
-1; its `sidecar` holds the JSON of a `layout.Sidecar`.

In a stream whose rows have several widths, `capflow.hidden_size` is 0, and a column `width` says of each row how many
numbers it has. All rows of a batch have one width. There is no `vector`: without compression, the vectors are the end
of `page`. Arrow would put the ends of lists between a page and its vectors.

Where `capflow.dtype` is int8 or float8_e4m3, `vector` has the bits of codes, and a column `scale` the factor of each
row, float32: see `capflow_consumers.dataset.shards.quantization`.

Invariant: everything up to the end of a commit is whole, unless the disk damaged it. Bytes after the last commit
belong to no request. A message begins at a multiple of 8 bytes and with a mark, so that a reader finds the next message
after a damaged one.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from capflow import limits
from capflow_consumers.dataset.shards import parquet
from capflow_consumers.dataset.shards.quantization import CODES, NUMBERS

HEAD = parquet.MAGIC + bytes(4)
END = b"\xff\xff\xff\xff\0\0\0\0"
"""The end mark of an Arrow stream."""

# Of each dtype: the Arrow type of a number in the stream.
_VECTOR_TYPES = {
    "bfloat16": pa.uint16(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "int8": pa.int8(),
    "float8_e4m3": pa.uint8(),
}
_PAGE_HEAD = struct.Struct("<4I")
# The mark that begins an Arrow message. The length of its metadata follows.
_CONTINUATION = 0xFFFFFFFF
_METADATA_BYTES_MAX = 1 << 16
# Places that are searched for a message in one numpy operation.
_SEARCHED_AT_ONCE = 1 << 20


class Kind(NamedTuple):
    """The kind of a shard's rows.

    dtype: of the stored numbers, by name.
    width: the width of a row; 0 where rows have several widths.
    compressed: whether rows are compressed with zstd.
    """

    dtype: str
    width: int
    compressed: bool

    def bytes_of(self, width: int) -> int:
        """Return the length of a row of a width, bytes."""
        return width * NUMBERS[self.dtype].itemsize

    @property
    def quantised(self) -> bool:
        """Whether rows are codes, each row with a scale."""
        return self.dtype in CODES

    @property
    def vectors_in_page(self) -> bool:
        """Whether vectors are the end of `page`, which then is the last column."""
        return not (self.width or self.compressed)

    @property
    def commit_width(self) -> int:
        """The width of the one row of a commit."""
        return self.width or 1

    def schema(self) -> pa.Schema:
        """Return the schema of the stream."""
        columns = [
            ("position", pa.int32()),
            ("token_id", pa.int32()),
            ("xxh3", pa.uint64()),
            ("sidecar", pa.binary()),
            ("page", pa.binary()),
        ]
        if not self.width:
            columns.insert(3 if self.vectors_in_page else 5, ("width", pa.int32()))
        elif not self.compressed:
            columns.append(("vector", self.vector_type))
        if self.quantised:
            columns.insert(3, ("scale", pa.float32()))
        return pa.schema([pa.field(*column, nullable=False) for column in columns], metadata=self.about())

    @property
    def vector_type(self) -> Any:
        """The Arrow type of a row of `width` numbers in the stream."""
        return parquet.vector_type(_VECTOR_TYPES[self.dtype], self.width)

    def about(self) -> dict[str, str]:
        """Return the metadata of the schemas."""
        compression = "zstd" if self.compressed else "none"
        return {
            "capflow.dtype": self.dtype,
            "capflow.hidden_size": str(self.width),
            "capflow.compression": compression,
        }

    @classmethod
    def of(cls, schema: pa.Schema) -> Kind:
        """Return the kind that a stream's schema describes; raises ValueError when the schema is not a shard's."""
        about = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        try:
            kind = cls(
                about["capflow.dtype"], int(about["capflow.hidden_size"]), about["capflow.compression"] == "zstd"
            )
        except KeyError as e:
            raise ValueError(f"no {e} in the schema") from e
        if kind.dtype not in NUMBERS:
            raise ValueError(f"rows of the unknown dtype {kind.dtype}")
        if kind.width < 0:
            raise ValueError(f"rows of the width {kind.width}")
        return kind


def common_width(widths: Collection[int]) -> int:
    """Return the width of a shard that takes rows of these widths: 0 where there are several."""
    return next(iter(widths)) if len(widths) == 1 else 0


class StoredBatch(NamedTuple):
    """A batch of `n` rows in a file.

    positions, token_ids: `[n]` int32.
    hashes: `[n]` uint64, the xxh3 of each row.
    rows: `[n, row_bytes]` uint8; None where they are compressed.
    page: the content of `page` before the vectors.
    page_begin: where that begins in the file.
    sidecar: of a commit; None for a batch of rows.
    end: where the next batch begins.
    width: how many numbers a row has.
    scales: `[n]` float32 of rounded rows; None of others.
    """

    positions: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint8] | None
    page: npt.NDArray[np.uint8]
    page_begin: int
    sidecar: bytes | None
    end: int
    width: int
    scales: npt.NDArray[np.float32] | None


class Encoder:
    """Encodes the messages of one stream."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._schema = kind.schema()
        self._sink = _Parts()
        # Stands for pages and vectors where Arrow wants a buffer; never read or written.
        self._blank = np.empty(0, np.uint8)
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._sink, "w"), self._schema)
        nothing = np.zeros(0, np.uint8)
        # The writer puts the schema before its first batch; `head` returns it instead.
        self.batch(nothing.view(np.int32), nothing.view(np.int32), nothing.view(np.uint64), ())

    def head(self) -> bytes:
        """Return the bytes with which a file begins: `HEAD` and the schema."""
        return HEAD + bytes(self._schema.serialize())

    def batch(
        self,
        positions: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        hashes: npt.NDArray[np.uint64],
        page: Sequence[Any],
        sidecar: bytes = b"",
        width: int = 1,
        scales: npt.NDArray[np.float32] | None = None,
    ) -> list[Any]:
        """Return the parts of a batch before its vectors.

        page: the parts of the content of `page`.
        width: how many numbers a row has, in a stream of several widths.
        scales: `[n]` of rounded rows; None for a commit, and for rows that are not rounded.

        The caller writes the vectors after them, padded with zeros to a multiple of 8 bytes. The parts are views of
        the arrays: what is written into the arrays before the parts are used is in them.
        """
        count, inside = len(positions), self.kind.vectors_in_page
        page_bytes = sum(map(len, page))
        nbytes = count * self.kind.bytes_of(self.kind.width or width)
        if len(self._blank) < page_bytes + nbytes:
            self._blank = np.empty(page_bytes + nbytes, np.uint8)
        # Arrow asks for the page and the vectors in one buffer each; only their places and lengths are used.
        pages = self._blank[: page_bytes + (nbytes if inside else 0)]
        vectors = self._blank[page_bytes : page_bytes + nbytes]
        columns = {
            "position": pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(positions)]),
            "token_id": pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(token_ids)]),
            "xxh3": pa.Array.from_buffers(pa.uint64(), count, [None, pa.py_buffer(hashes)]),
            "sidecar": _in_first(np.frombuffer(sidecar, np.uint8), count),
            "page": _in_first(pages, count),
        }
        if not self.kind.width:
            columns["width"] = pa.array(np.full(count, width, np.int32))
        elif not self.kind.compressed:
            columns["vector"] = self._vectors(vectors, count)
        if self.kind.quantised:
            factors = np.zeros(count, np.float32) if scales is None else scales
            columns["scale"] = pa.Array.from_buffers(pa.float32(), count, [None, pa.py_buffer(factors)])
        arrays = [columns[name] for name in self._schema.names]
        self._sink.parts = []
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        parts: list[Any] = []
        for part in self._sink.parts:
            address = getattr(part, "address", 0) if len(part) else 0
            if page_bytes and address == pages.ctypes.data:
                parts += page
                if inside:
                    break
            elif address == vectors.ctypes.data:
                break
            else:
                parts.append(part)
        return parts

    def _vectors(self, values: npt.NDArray[np.uint8], count: int) -> Any:
        kind = self.kind.vector_type
        flat = pa.Array.from_buffers(kind.value_type, count * self.kind.width, [None, pa.py_buffer(values)])
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)


class _Parts:
    """A file for Arrow to write to; it keeps the buffers that it is given, without copying them."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def write(self, part: Any) -> int:
        self.parts.append(part)
        return len(part)


def decode(file: Any, begin: int, kind: Kind, schema: pa.Schema) -> StoredBatch:
    """Return the batch that begins at a place of a mapped file, without reading its rows.

    Raises ValueError when no whole batch begins there.
    """
    try:
        reader = pa.BufferReader(file.slice(begin))
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
        batch.validate()
        end = begin + reader.tell()
    except (pa.ArrowException, EOFError, OSError, IndexError) as e:
        raise ValueError(str(e)) from e
    count = len(batch)
    if count == 0:
        raise ValueError("an empty batch")
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
    last = max(buffer.address + buffer.size for buffer in buffers) - file.address
    if last + -last % 8 != end:
        raise ValueError(f"a batch that ends at byte {last} in a message that ends at {end}")
    positions, token_ids, hashes = (_values(batch.column(i), dtype) for i, dtype in enumerate(_DTYPES))
    sidecar, page = _first(batch.column("sidecar")), _first(batch.column("page"))
    commit = len(sidecar) or positions[0] < 0
    width = kind.width or int(_values(batch.column("width"), np.dtype(np.int32))[0])
    if not 0 < width <= limits.HIDDEN_SIZE_MAX:
        raise ValueError(f"rows of the width {width}")
    row_bytes = kind.bytes_of(width)
    rows = None
    if kind.vectors_in_page:
        before = len(page) - count * row_bytes
        if before < 0:
            raise ValueError(f"{len(page)} bytes of {count} rows of the width {width}")
        page, rows = page[:before], page[before:]
    elif not kind.compressed:
        rows = _values(batch.column("vector"), np.dtype(np.uint8))[: count * row_bytes]
    return StoredBatch(
        positions[:count],
        token_ids[:count],
        hashes[:count],
        None if rows is None else rows.reshape(count, row_bytes),
        page,
        page.ctypes.data - file.address,
        sidecar.tobytes() if commit else None,
        end,
        width,
        _values(batch.column("scale"), np.dtype(np.float32))[:count] if kind.quantised else None,
    )


def batches(file: Any, kind: Kind, schema: pa.Schema, begin: int) -> Iterator[tuple[int, StoredBatch | None]]:
    """Yield the whole batches from a place on, each with the place where it begins.

    None stands for bytes before a batch that are no batch.
    """
    last = begin  # where the last whole batch begins
    while begin < file.size and bytes(file.slice(begin, min(len(END), file.size - begin))) != END:
        try:
            batch = decode(file, begin, kind, schema)
        except ValueError:
            following = _next(file, last + 8, kind, schema)
            if following is None:
                return
            yield begin, None
            begin, batch = following
        yield begin, batch
        last, begin = begin, batch.end


def _next(file: Any, begin: int, kind: Kind, schema: pa.Schema) -> tuple[int, StoredBatch] | None:
    """Return the first whole batch at or after a place, with its place; None when there is none."""
    if file.size < begin + 8:
        return None
    words = np.frombuffer(file, np.uint32, (file.size - begin) // 8 * 2, begin).reshape(-1, 2)
    for first in range(0, len(words), _SEARCHED_AT_ONCE):
        marks, lengths = words[first : first + _SEARCHED_AT_ONCE].T
        places = np.flatnonzero((marks == _CONTINUATION) & (lengths > 0) & (lengths <= _METADATA_BYTES_MAX))
        for place in (begin + 8 * (first + places)).tolist():
            with contextlib.suppress(ValueError):
                return place, decode(file, place, kind, schema)
    return None


def opened(file: Any) -> tuple[Kind, pa.Schema, int]:
    """Return the kind of a mapped file, its stream's schema, and where its first batch begins.

    Raises ValueError when the file is no shard.
    """
    if file.size < len(HEAD) or bytes(file.slice(0, len(HEAD))) != HEAD:
        raise ValueError("other first bytes than a shard has")
    reader = pa.BufferReader(file.slice(len(HEAD)))
    try:
        schema = pa.ipc.read_schema(reader)
    except (pa.ArrowException, EOFError, OSError) as e:
        raise ValueError(str(e)) from e
    kind = Kind.of(schema)
    if not schema.equals(kind.schema(), check_metadata=True):
        raise ValueError("another schema than its metadata describes")
    return kind, schema, len(HEAD) + reader.tell()


def page_of(pages: parquet.VectorPages, room: int | None = None) -> list[bytes]:
    """Return the parts of the content of a batch's `page`: four numbers, zeros, and the pages, together `room` long.

    The numbers are: where the pages begin; in the pages, where the data page and its body begin; the body's length
    without compression.
    """
    begin = _PAGE_HEAD.size if room is None else room - pages.nbytes
    head = _PAGE_HEAD.pack(begin, pages.data_page, pages.body, pages.plain_body)
    return [head.ljust(begin, b"\0"), *pages.parts]


def page_room(kind: Kind, width: int, count: int) -> int:
    """Return the largest length of the page before rows, rounded up to 8, so that the rows follow it directly."""
    longest = parquet.vector_head_bytes_max(kind.dtype, width, count, count * kind.bytes_of(width))
    return (_PAGE_HEAD.size + longest + 7) // 8 * 8


def chunk_of(batch: StoredBatch, kind: Kind) -> parquet.ColumnChunk | None:
    """Return the chunk of a batch's vectors; None where they do not lie in pages."""
    if not len(batch.page):
        return None
    begin, *places = _PAGE_HEAD.unpack(batch.page[: _PAGE_HEAD.size].tobytes())
    values = len(batch.positions) * batch.width
    length = len(batch.page) - begin + (0 if kind.compressed else kind.bytes_of(values))
    pages = parquet.VectorPages((), *places)
    place = batch.page_begin + begin
    return parquet.vector_chunk(kind.dtype, place, length, values, pages, compressed=kind.compressed)


def rows_of(batch: StoredBatch, kind: Kind) -> npt.NDArray[Any]:
    """Return a batch's rows `[n, row_bytes]`, mapped or decompressed. Raises ValueError when they are damaged."""
    if batch.rows is not None:
        return batch.rows
    count = len(batch.positions)
    if not len(batch.page):  # a commit's
        return np.zeros((count, kind.bytes_of(batch.width)), np.uint8)
    try:
        begin, _, body, plain_body = _PAGE_HEAD.unpack(batch.page[: _PAGE_HEAD.size].tobytes())
        return parquet.page_rows(kind.dtype, batch.width, count, batch.page[begin + body :], plain_body)
    except MemoryError:  # pyarrow's is an ArrowException too, but the page is not at fault
        raise
    except (pa.ArrowException, OSError, struct.error) as e:
        raise ValueError(str(e)) from e


def hashes_of(rows: npt.NDArray[np.uint8], into: npt.NDArray[np.uint64]) -> None:
    """Write the xxh3 of each row `[n, row_bytes]` into `into`, `[n]`."""
    into[:] = np.fromiter(map(xxhash.xxh3_64_intdigest, np.ascontiguousarray(rows)), np.uint64, len(rows))


_DTYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.int32), np.dtype(np.int32), np.dtype(np.uint64))


def _in_first(value: npt.NDArray[np.uint8], count: int) -> Any:
    """Return a binary column whose first row holds a value; the other rows are empty."""
    ends = np.full(count + 1, len(value), np.int32)
    ends[0] = 0
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(value)])


def _first(column: Any) -> npt.NDArray[np.uint8]:
    _, ends, values = column.buffers()
    length = int(np.frombuffer(ends, np.int32, 2)[1])
    return np.frombuffer(values, np.uint8)[:length] if values is not None and length else np.zeros(0, np.uint8)


def _values(column: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(column.buffers()[-1], dtype)
