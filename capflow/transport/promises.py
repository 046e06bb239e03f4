"""The promises: a file that names the requests of which a worker has taken rows for its hub.

Frames in memory are lost when a worker is killed. This file, beside the worker's spool, survives: it has a record for
each frame that was taken, and the number of the last frame that the hub acknowledged. From it the next process ends the
requests of the ended worker, each with its number of rows, so that the hub counts the rows that never came.

The file begins with `_HEAD`: a magic word and the number of the last frame that the hub has. Records follow. Each is
`_RECORD`, the length and the xxh3 of the body, and the body, the msgpack of a `_Record`. Torn or damaged bytes at the
end are ignored. The file is rewritten without acknowledged frames after it has doubled, and grown by
`limits.PROMISES_BYTES_MIN` at least.

It costs a step nothing: the thread that makes frames writes it, and only while there are frames. It is not synced: it
survives a kill of the worker, but perhaps not a power failure.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from capflow import limits
from capflow.capture.frame import Finished, FrameHeader, rows_of
from capflow.capture.spec import Capture
from capflow.files import create_private

logger = logging.getLogger("capflow.link")

NAME = "promises"

_MAGIC = b"CAPFLOWP"
_HEAD = struct.Struct("<8sQ")
_ACKED_AT = len(_MAGIC)
_RECORD = struct.Struct("<IQ")


class Running(msgspec.Struct, frozen=True, array_like=True):
    """An open request.

    computed_length: how many of its tokens are computed, by its frames.
    rows: how many of its rows were taken so far.
    capture: the request's own spec; only in its first record.
    """

    id: str
    incarnation: str
    prompt_length: int
    computed_length: int
    rows: int
    capture: Capture | None = None

    def lost(self) -> Finished:
        """Return the end of the request for a worker that ended."""
        return Finished(
            id=self.id,
            status="error",
            prompt_length=self.prompt_length,
            computed_length=self.computed_length,
            rows=self.rows,
            capture=self.capture,
            incarnation=self.incarnation,
        )


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """A frame that was taken: its requests, each with the rows so far, and the requests that it ends."""

    seq: int
    running: list[Running] = []
    finished: tuple[Finished, ...] = ()


class Broken(NamedTuple):
    """The promises of an ended worker that the hub had not acknowledged.

    ends: the ends of requests by the number of their frame, in order.
    running: the requests without an end.
    seq: the number of the last frame that was taken.
    """

    ends: list[tuple[int, tuple[Finished, ...]]]
    running: list[Running]
    seq: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)


class Promises:
    """Writes the file of one worker between `open` and `close`. One thread adds frames, another acknowledges them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        # Set from `open` to `close` or an error of the disk.
        self._fd = -1
        # Guards the fields below.
        self._lock = threading.Lock()
        self._acked = 0
        # The length of the file.
        self._size = 0
        # The length of the file after it was last rewritten.
        self._rewritten_size = 0
        # The number of the last frame that was taken.
        self._seq = 0
        # The open requests by id and incarnation, without their specs.
        self._running: dict[tuple[str, str], Running] = {}

    def open(self) -> None:
        """Make the file; raises OSError."""
        self._fd = create_private(self.path, os.O_RDWR | os.O_TRUNC)
        os.pwrite(self._fd, _HEAD.pack(_MAGIC, 0), 0)
        self._size = self._rewritten_size = _HEAD.size

    def add(self, seq: int, header: FrameHeader) -> None:
        """Add a frame that is taken. After an error of the disk, which is logged, no further frame is added."""
        if self._fd < 0 or not (header.requests or header.finished):
            return
        with self._lock:
            self._seq = seq
            encoded = _framed(self._record(seq, header))
            try:
                self._size += _write(self._fd, encoded, self._size)
                if self._size - self._rewritten_size > max(limits.PROMISES_BYTES_MIN, self._rewritten_size):
                    self._rewrite()
            except OSError as e:
                self._give_up(e)

    def acknowledge(self, seq: int) -> None:
        """Record that the hub has every frame up to `seq`."""
        if seq <= self._acked:
            return
        with self._lock:
            self._acked = seq
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.pwrite(self._fd, seq.to_bytes(8, "little"), _ACKED_AT)

    @property
    def broken(self) -> bool:
        """Whether a kill now would lose frames that the hub has not acknowledged."""
        return self._seq > self._acked

    def close(self) -> None:
        """Close the file; it stays on the disk."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _record(self, seq: int, header: FrameHeader) -> _Record:
        rows = rows_of(header)
        running = []
        for part in header.requests:
            key = part.id, part.incarnation
            had = self._running.get(key)
            now = Running(
                part.id,
                part.incarnation,
                part.prompt_length,
                part.start + len(part.token_ids),
                rows[part.id] + (had.rows if had is not None else 0),
            )
            self._running[key] = now
            running.append(now if had is not None else msgspec.structs.replace(now, capture=part.capture))
        for finished in header.finished:
            self._running.pop((finished.id, finished.incarnation), None)
        return _Record(seq, running, header.finished)

    def _rewrite(self) -> None:
        """Replace the file by one with the open requests and the frames that are not acknowledged. Raises OSError."""
        running: dict[tuple[str, str], Running] = {}
        left = []
        for record in _records(os.pread(self._fd, self._size, 0)):
            if record.seq <= self._acked:
                _settle(running, record)
            else:
                left.append(_framed(record))
        settled = _framed(_Record(self._acked, list(running.values())))
        content = b"".join([_HEAD.pack(_MAGIC, self._acked), settled, *left])
        new = self.path.with_suffix(".new")
        fd = create_private(new, os.O_RDWR | os.O_TRUNC)
        try:
            _write(fd, content, 0)
            new.replace(self.path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._size, self._rewritten_size = fd, len(content), len(content)

    def _give_up(self, e: OSError) -> None:
        text = (
            "the promises of this worker are no longer stored in %s: %s; after a kill rows may be lost without a report"
        )
        logger.error(text, self.path, e.strerror or e, extra={"event": "promises_failed", "path": str(self.path)})
        os.close(self._fd)
        self._fd = -1


def read(directory: Path) -> Broken:
    """Return the promises of an ended worker in a directory; empty if there is no readable file."""
    try:
        fd = os.open(directory / NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            content = file.read(limits.PROMISES_READ_BYTES_MAX)
    except OSError:
        return Broken([], [], 0)
    if len(content) < _HEAD.size or not content.startswith(_MAGIC):
        return Broken([], [], 0)
    _, acked = _HEAD.unpack_from(content)
    running: dict[tuple[str, str], Running] = {}
    ends: list[tuple[int, tuple[Finished, ...]]] = []
    seq = acked
    for record in _records(content):
        seq = max(seq, record.seq)
        _settle(running, record)
        if record.finished and record.seq > acked:
            ends.append((record.seq, record.finished))
    return Broken(ends, list(running.values()), seq)


def _write(fd: int, content: bytes, at: int) -> int:
    """Write all of `content` at an offset; return its length.

    Raises OSError, also after a partial write: records after it could not be read.
    """
    if os.pwrite(fd, content, at) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return len(content)


def _framed(record: _Record) -> bytes:
    """Return a record with its length and hash, as in the file."""
    body = _encoder.encode(record)
    return _RECORD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _records(content: bytes) -> Iterable[_Record]:
    """Yield the records up to the first that is not whole."""
    begin = _HEAD.size
    while begin + _RECORD.size <= len(content):
        length, digest = _RECORD.unpack_from(content, begin)
        begin += _RECORD.size
        body = content[begin : begin + length]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            return
        try:
            yield _decoder.decode(body)
        except msgspec.MsgspecError:
            return
        begin += length


def _settle(running: dict[tuple[str, str], Running], record: _Record) -> None:
    """Update the open requests by a record."""
    for now in record.running:
        had = running.get((now.id, now.incarnation))
        capture = now.capture if had is None else had.capture
        running[now.id, now.incarnation] = msgspec.structs.replace(now, capture=capture)
    for finished in record.finished:
        running.pop((finished.id, finished.incarnation), None)
