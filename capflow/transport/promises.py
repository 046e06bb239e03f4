"""The promises: which requests a worker has taken rows of for its hub, in a file where a later process finds it.

Frames that wait in memory go with a worker that is killed. What is left of them is this file, beside the worker's spool: a line that
the kernel keeps for each frame that was taken, and how far the hub has acknowledged them. By it the next process ends the requests of a
worker that is gone, each with the number of its rows, so that a hub knows which of them never came.

The file begins with `_HEAD`: a magic word and the number of the last frame that the hub has. Records follow, each behind `_RECORD`, the
length and the xxh3 of the msgpack of a `_Record`. What is torn or damaged at the end is left out. The file is written anew, without what the hub
has, when as many bytes were added as it had then, and `limits.PROMISES_BYTES_MIN` at least.

It costs the step nothing, being written on the thread that makes frames, and nothing while no frames are made. It is not synced: a kill
of the worker leaves it whole, a power cut may not.
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
    """A request that is not over.

    computed_length: tokens of it that were computed as far as frames say.
    rows: taken of it so far.
    capture: what it asked for itself; given once.
    """

    id: str
    incarnation: str
    prompt_length: int
    computed_length: int
    rows: int
    capture: Capture | None = None

    def lost(self) -> Finished:
        """Return its end, its worker being gone."""
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
    """A frame that was taken: the requests it has rows of, each with its rows so far, and the ends of others."""

    seq: int
    running: list[Running] = []
    finished: tuple[Finished, ...] = ()


class Broken(NamedTuple):
    """What a worker that is gone had promised and the hub had not acknowledged.

    ends: the ends of requests, by the number of their frame, in order.
    running: the requests that had no end.
    seq: the last frame that was taken.
    """

    ends: list[tuple[int, tuple[Finished, ...]]]
    running: list[Running]
    seq: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)


class Promises:
    """One worker's file, from `open` to `close`. One thread adds frames, another acknowledges them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        # From `open` to `close`, or to an error of the disk.
        self._fd = -1
        # Guards all that follows.
        self._lock = threading.Lock()
        self._acked = 0
        # Of the file.
        self._size = 0
        # How large it was when it was last written anew.
        self._written_anew = 0
        # Of the last frame that was taken.
        self._seq = 0
        # As of all that was taken, without captures.
        self._running: dict[tuple[str, str], Running] = {}

    def open(self) -> None:
        """Make the file; raises OSError."""
        self._fd = create_private(self.path, os.O_RDWR | os.O_TRUNC)
        os.pwrite(self._fd, _HEAD.pack(_MAGIC, 0), 0)
        self._size = self._written_anew = _HEAD.size

    def add(self, seq: int, header: FrameHeader) -> None:
        """Note a frame that is taken; what the disk refuses is logged once, and no promise is noted from there on."""
        if self._fd < 0 or not (header.requests or header.finished):
            return
        with self._lock:
            self._seq = seq
            encoded = _framed(self._record(seq, header))
            try:
                self._size += _write(self._fd, encoded, self._size)
                if self._size - self._written_anew > max(limits.PROMISES_BYTES_MIN, self._written_anew):
                    self._write_anew()
            except OSError as e:
                self._give_up(e)

    def acknowledge(self, seq: int) -> None:
        """Note that the hub has every frame up to here."""
        if seq <= self._acked:
            return
        with self._lock:
            self._acked = seq
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.pwrite(self._fd, seq.to_bytes(8, "little"), _ACKED_AT)

    @property
    def broken(self) -> bool:
        """Whether a kill at this moment would lose frames that the hub has not acknowledged."""
        return self._seq > self._acked

    def close(self) -> None:
        """Close the file, and leave it."""
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

    def _write_anew(self) -> None:
        """Write what is not acknowledged, and the requests that run, into a new file in the place of this one; raises OSError."""
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
        self._fd, self._size, self._written_anew = fd, len(content), len(content)

    def _give_up(self, e: OSError) -> None:
        text = "what this worker promises is not noted any more in %s: %s; a kill of it may lose rows without a word"
        logger.error(text, self.path, e.strerror or e, extra={"event": "promises_failed", "path": str(self.path)})
        os.close(self._fd)
        self._fd = -1


def read(directory: Path) -> Broken:
    """Return what a worker that is gone left in a directory; nothing where there is no such file, or none that can be read."""
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
    """Write all of it; return its length. Raises OSError, also when the disk took a part: what followed could not be read."""
    if os.pwrite(fd, content, at) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return len(content)


def _framed(record: _Record) -> bytes:
    """Return a record as it lies in the file."""
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
    """Note what a record says of the requests that run."""
    for now in record.running:
        had = running.get((now.id, now.incarnation))
        capture = now.capture if had is None else had.capture
        running[now.id, now.incarnation] = msgspec.structs.replace(now, capture=capture)
    for finished in record.finished:
        running.pop((finished.id, finished.incarnation), None)
